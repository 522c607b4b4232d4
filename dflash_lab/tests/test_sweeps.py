"""Sweeps: every cell once, resumed after any kill, in rotated order, failures kept apart."""

import errno
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import dflash_lab
from dflash_lab import lease, provenance, store, sweeps
from dflash_lab.config import PairSpec, SweepConfig
from dflash_lab.decoding import AcceptanceWarning, BlockSizeWarning
from dflash_lab.load import Pair
from dflash_lab.store import DiskFull, Run, TornLineWarning, open_run
from dflash_lab.sweeps import CellInUseWarning, ProgressLines, SweepProgress, status, sweep
from dflash_lab.tests import toys
from dflash_lab.tests.toys import (
    WRONG,
    ByteTokenizer,
    cut,
    noise,
    scripted_greedy,
    scripted_pair,
)

ROOT = Path(dflash_lab.__file__).parents[1]
TOKENS = ("prompt_ids", "new_ids", "text", "finish_reason")
CHOICES = ("start", "anchor", "drafted", "posterior", "accepted", "emitted", "cut")


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed process wrote is there without it; `test_store.py` looks that it is called."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    """Five short prompts in a file."""
    return write_prompts(tmp_path / "prompts.jsonl", [f"prompt {n}" for n in range(5)])


def write_prompts(path: Path, turns: Sequence[str | list[str]]) -> str:
    lines = [
        {"id": f"p{n}", "category": "toy", "turns": [turn] if isinstance(turn, str) else turn}
        for n, turn in enumerate(turns)
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    return str(path)


def small(prompts: str, **changes: Any) -> SweepConfig:
    """Three block sizes, one of them at a window too: four cells of five decodes."""
    settings: dict[str, Any] = {
        "block_sizes": (1, 4, 8),
        "draft_windows": (None, 16),
        "windowed_block_sizes": (8,),
        "prompts": prompts,
        "max_new_tokens": 13,
    }
    return SweepConfig(**(settings | changes))


def grid(run: Run) -> list[tuple[str, str, int, int | None]]:
    return [(cell.engine, cell.dtype, cell.block_size, cell.draft_window) for cell in run.cells]


def tokens(run: Run) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Everything in a run that must not depend on when and by whom it was decoded."""
    keys = ("cell", "prompt_id", "turn", "repeat")
    return (
        run.prompts().select([*keys, "task", *TOKENS]).to_pylist(),
        run.blocks().select([*keys, "index", "block_size", *CHOICES]).to_pylist(),
    )


def calm() -> Pair:
    return scripted_pair(noise(0.6))


# --- the grid -----------------------------------------------------------------------------------


def test_a_sweep_fills_one_cell_for_every_size_and_window(tmp_path, prompts):
    run = sweep(small(prompts), tmp_path / "run", pair=calm())
    assert grid(run) == [
        ("dflash_lab", "float32", 1, None),
        ("dflash_lab", "float32", 4, None),
        ("dflash_lab", "float32", 8, None),
        ("dflash_lab", "float32", 8, 16),
    ]
    assert not run.failed and not run.unfinished


def test_every_cell_holds_the_targets_own_text_for_every_prompt(tmp_path, prompts):
    pair = calm()
    run = sweep(small(prompts), tmp_path / "run", pair=pair)
    rows = run.prompts().to_pylist()
    assert Counter(row["cell"] for row in rows) == {cell.id: 5 for cell in run.cells}
    for row in rows:
        assert row["new_ids"] == list(scripted_greedy(pair, row["prompt_ids"], 13))
        assert pair.text(row["prompt_ids"]) == f"user: prompt {row['prompt_id'][1:]}\nassistant: "


def test_windows_reach_the_draft(tmp_path, prompts):
    run = sweep(small(prompts), tmp_path / "run", pair=calm())
    seen = run.select(block_size=8, draft_window=16).blocks()["draft_cache_tokens"].to_pylist()
    assert set(seen) == {16}
    free = run.select(block_size=8, draft_window=None).blocks()["draft_cache_tokens"].to_pylist()
    assert min(free) > 16


def test_plain_decoding_is_one_cell_whatever_the_windows_and_has_no_draft(tmp_path, prompts):
    config = small(prompts, block_sizes=(1, 4), windowed_block_sizes=None)
    run = sweep(config, tmp_path / "run", pair=calm())
    assert [row[2:] for row in grid(run)] == [(1, None), (4, None), (4, 16)]
    plain, drafting = run.cells[0].request, run.cells[1].request
    assert (plain["draft"], plain["draft_sha"]) == (None, None)
    assert (drafting["draft"], drafting["draft_sha"]) == ("scripted-draft", "d" * 64)


def test_sizes_that_are_lowered_to_one_are_one_cell_with_one_warning_each(tmp_path, prompts):
    config = small(
        prompts, block_sizes=(4, 8, 16, 32), draft_windows=(None, 8), windowed_block_sizes=None
    )
    with pytest.warns(BlockSizeWarning) as heard:
        run = sweep(config, tmp_path / "run", pair=scripted_pair(block_size=8))
    assert [re.findall(r"\d+", str(one.message))[:2] for one in heard] == [["16", "8"], ["32", "8"]]
    assert {one.filename for one in heard} == {__file__}
    assert [(c.block_size, c.draft_window, c.requested_block_sizes) for c in run.cells] == [
        (4, None, (4,)),
        (4, 8, (4,)),
        (8, None, (8, 16, 32)),
        (8, 8, (8, 16, 32)),
    ]
    assert len(run.prompts()) == 4 * 5


def test_a_size_beyond_the_trained_one_is_used_and_marked_where_insisted_on(tmp_path, prompts):
    config = small(prompts, block_sizes=(8, 16), draft_windows=(None,), beyond_trained=True)
    run = sweep(config, tmp_path / "run", pair=scripted_pair(block_size=8))
    assert [(c.block_size, c.request["beyond_trained"]) for c in run.cells] == [
        (8, False),
        (16, True),
    ]


def test_repeats_are_decoded_and_kept_apart(tmp_path, prompts):
    run = sweep(small(prompts, repeats=3), tmp_path / "run", pair=calm())
    counts = Counter((r["cell"], r["prompt_id"], r["repeat"]) for r in run.prompts().to_pylist())
    assert len(counts) == 4 * 5 * 3
    assert set(counts.values()) == {1}


def test_the_bundled_prompts_are_named_with_their_ids(tmp_path):
    run = sweep(small("mini", max_prompts=3), tmp_path / "run", pair=calm())
    assert run.cells[0].request["prompts"] | {"set_sha": ""} == {
        "source": "mini",
        "set_sha": "",
        "count": 3,
        "ids": ["math-01", "code-01", "chat-01"],
    }
    assert run.prompts()["task"].to_pylist()[:3] == ["math", "code", "chat"]


def test_later_turns_see_the_models_own_answers(tmp_path):
    source = write_prompts(tmp_path / "turns.jsonl", [["one", "two", "three"], "alone"])
    pair = calm()
    run = sweep(small(source, block_sizes=(4,)), tmp_path / "run", pair=pair)
    rows = [row for row in run.select(draft_window=None).prompts().to_pylist()]
    assert [(row["prompt_id"], row["turn"]) for row in rows] == [
        ("p0", 0),
        ("p0", 1),
        ("p0", 2),
        ("p1", 0),
    ]
    answers = [row["text"] for row in rows]
    asked = f"user: one\nassistant: {answers[0]}\nuser: two\nassistant: {answers[1]}\n"
    assert bytes(rows[2]["prompt_ids"]).decode() == f"{asked}user: three\nassistant: "


def test_a_prompt_that_does_not_fit_is_named_before_anything_is_decoded(tmp_path):
    source = write_prompts(tmp_path / "long.jsonl", ["short", "x" * 100])
    pair = scripted_pair(context_limit=100)
    with pytest.raises(ValueError, match=r"prompt 'p1': the prompt has \d+ tokens.*holds 100"):
        sweep(small(source), tmp_path / "run", pair=pair)
    assert not pair.models.sessions


def test_several_turns_without_a_chat_template_are_refused(tmp_path):
    source = write_prompts(tmp_path / "turns.jsonl", [["one", "two"]])
    with pytest.raises(ValueError, match="prompt 'p0' has 2 turns; chat=False takes one only"):
        sweep(small(source, chat=False), tmp_path / "run", pair=calm())


def test_without_the_chat_template_the_text_is_decoded_as_it_stands(tmp_path, prompts):
    run = sweep(small(prompts, chat=False), tmp_path / "run", pair=calm())
    assert bytes(run.prompts()["prompt_ids"][0].as_py()) == b"prompt 0"
    assert run.cells[0].request["thinking"] == "no template"


def test_a_dtype_other_than_that_of_the_pair_given_is_refused(tmp_path, prompts):
    with pytest.raises(ValueError, match=r"dtype is 'bfloat16', but the pair given .* float32"):
        sweep(small(prompts, dtype="bfloat16"), tmp_path / "run", pair=calm())


# --- what is asked for again --------------------------------------------------------------------


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_second_call_decodes_nothing_and_changes_no_file(tmp_path, prompts):
    pair = calm()
    first = sweep(small(prompts), tmp_path / "run", pair=pair)
    before, sessions = files(tmp_path / "run"), len(pair.models.sessions)
    again = sweep(small(prompts), tmp_path / "run", pair=pair)
    assert again == first
    assert files(tmp_path / "run") == before
    assert len(pair.models.sessions) == sessions


@pytest.mark.parametrize(
    "change",
    [
        {"max_new_tokens": 12},
        {"max_prompts": 4},
        {"repeats": 2},
        {"timing": "stages"},
        {"chat": False},
    ],
    ids=str,
)
def test_a_changed_setting_makes_other_cells_and_leaves_the_old_ones(tmp_path, prompts, change):
    sweep(small(prompts), tmp_path / "run", pair=calm())
    before = files(tmp_path / "run")
    run = sweep(small(prompts, **change), tmp_path / "run", pair=calm())
    assert len(run.cells) == 8
    assert before.items() <= files(tmp_path / "run").items()


def test_another_text_under_the_same_id_makes_other_cells(tmp_path, prompts):
    first = sweep(small(prompts), tmp_path / "run", pair=calm())
    write_prompts(Path(prompts), [f"another {n}" for n in range(5)])
    assert len(sweep(small(prompts), tmp_path / "run", pair=calm()).cells) == 2 * len(first.cells)


def test_a_larger_grid_decodes_only_what_is_new(tmp_path, prompts):
    pair = calm()
    sweep(small(prompts, warm_up=False), tmp_path / "run", pair=pair)
    before = len(pair.models.sessions)
    config = small(prompts, warm_up=False, block_sizes=(1, 2, 4, 8))
    run = sweep(config, tmp_path / "run", pair=pair)
    assert len(run.cells) == 5
    assert len(pair.models.sessions) - before == 5
    orders = run.prompts()["order"].to_pylist()
    assert sorted(orders) == list(range(25))
    assert min(run.select(block_size=2).prompts()["order"].to_pylist()) == 20


def test_ids_know_neither_host_nor_folder(tmp_path, prompts, monkeypatch):
    here = sweep(small(prompts), tmp_path / "run", pair=calm())
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    moved = Path(prompts).rename(elsewhere / "prompts.jsonl")
    for module in (lease, provenance):
        monkeypatch.setattr(module.platform, "node", lambda: "another-host")
    there = sweep(small(str(moved)), tmp_path / "other", pair=calm())
    assert [cell.id for cell in there.cells] == [cell.id for cell in here.cells]


def test_a_stored_run_names_no_host_and_no_folder(tmp_path, prompts, monkeypatch):
    monkeypatch.setattr("platform.node", lambda: "a-host-of-that-name")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "dflash-lab"), "sweep", f"--out={tmp_path}"])
    sweep(small(prompts), tmp_path / "run", pair=calm())
    for name, content in files(tmp_path / "run").items():
        assert str(tmp_path).encode() not in content, name
        assert b"a-host-of-that-name" not in content, name
    said = open_run(tmp_path / "run").cells[0].provenance
    assert said["argv"] == ["dflash-lab", "sweep", f"--out={tmp_path.name}"]


def test_provenance_tells_what_a_reader_needs_later(tmp_path, prompts):
    run = sweep(small(prompts), tmp_path / "run", pair=calm())
    said = run.cells[0].provenance
    assert said["versions"].keys() >= {"python", "dflash_lab", "torch", "transformers", "mlx"}
    assert said["versions"]["dflash_lab"] == dflash_lab.__version__
    assert said["hardware"]["class"] == run.cells[0].hardware
    assert said["hardware"]["cores"] >= 1
    assert said["config_sources"]["block_size"] == "block_size"
    assert said["fingerprint"]["template"] == "c" * 64
    assert said["sweep"]["block_sizes"] == [1, 4, 8]
    assert (said["processes"], said["warm_ups"]) == (1, 1)
    assert said["started_utc"] <= said["ended_utc"]
    assert said["ended_utc"].endswith("+00:00")


# --- order and warm-up --------------------------------------------------------------------------


def test_the_order_of_cells_is_rotated_from_prompt_to_prompt(tmp_path, prompts):
    run = sweep(small(prompts), tmp_path / "run", pair=calm())
    rows = sorted(run.prompts().to_pylist(), key=lambda row: row["order"])
    assert [row["order"] for row in rows] == list(range(20))
    rounds = [rows[place : place + 4] for place in range(0, 20, 4)]
    assert [{row["prompt_id"] for row in one} for one in rounds] == [{f"p{n}"} for n in range(5)]
    first = [row["cell"] for row in rounds[0]]
    for place, one in enumerate(rounds):
        assert [row["cell"] for row in one] == [*first[place % 4 :], *first[: place % 4]]


def test_the_first_cell_is_measured_again_last_of_all_and_is_no_cell(tmp_path, prompts):
    config, out = small(prompts, first_again=True), tmp_path / "run"
    pair = calm()
    run = sweep(config, out, pair=pair)
    assert len(run.cells) == 4
    again = run.check("first_again")
    assert again["cell"] == min(run.cells, key=lambda cell: cell.summary["first_order"]).id
    assert [row["prompt_id"] for row in again["prompts"]] == [f"p{n}" for n in range(5)]
    last = max(cell.summary["last_order"] for cell in run.cells)
    assert [row["order"] for row in again["prompts"]] == list(range(last + 1, last + 6))
    sessions = len(pair.models.sessions)
    sweep(config, out, pair=pair)
    assert len(pair.models.sessions) == sessions  # nothing was new, so nothing can have drifted


def test_every_shape_is_warmed_up_before_the_first_decode_that_counts(tmp_path, prompts):
    pair = calm()
    sweep(small(prompts, library_baseline=True), tmp_path / "run", pair=pair)
    shapes = [(one.draft_window, one.speculate) for one in pair.models.sessions]
    assert shapes[:4] == [(None, False), (None, True), (None, True), (16, True)]
    assert len(shapes) == 4 + 4 * 5
    assert len(pair.models.generated) == 1 + 5
    assert [one.calls.count("verify") for one in pair.models.sessions[:4]] == [2] * 4


def test_warm_ups_are_left_out_where_not_wanted(tmp_path, prompts):
    pair = calm()
    run = sweep(small(prompts, warm_up=False), tmp_path / "run", pair=pair)
    assert len(pair.models.sessions) == 4 * 5
    assert run.cells[0].provenance["warm_ups"] == 0


@pytest.fixture
def stub_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only the passes of a scripted pair move on, so that times are exact."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(toys, "spend", lambda seconds: now.append(now.pop() + seconds))


def test_two_arms_that_cost_the_same_measure_the_same(tmp_path, prompts, stub_clock):
    pair = scripted_pair(WRONG, verify_s=0.02)
    config = small(prompts, block_sizes=(1, 4), draft_windows=(None,), library_baseline=True)
    with pytest.warns(AcceptanceWarning, match="0 accepted in 60 blocks"):  # of the whole cell
        run = sweep(config, tmp_path / "run", pair=pair)
    for cell in run.cells:
        assert cell.summary["tokens_after_first"] == 5 * 12
        assert cell.summary["decode_s"] == pytest.approx(5 * 12 * 0.02)


def test_progress_lines_are_a_dozen_at_most_and_end_with_n_of_n(tmp_path, prompts):
    lines = []
    config = small(prompts, block_sizes=(1, 2, 4, 8))
    sweep(config, tmp_path / "run", ProgressLines(lines.append), pair=scripted_pair())
    assert len(lines) <= 12
    done, _, rest = lines[-1].partition(" of ")
    assert rest.startswith(f"{done} decodes")


@pytest.mark.parametrize("timing", ["stages", "whole"])
def test_stored_times_add_up_to_a_stopwatch_around_the_call(tmp_path, prompts, stub_clock, timing):
    pair = scripted_pair(cut(1), prefill_s=0.5, draft_s=0.01, verify_s=0.02)
    config = small(
        prompts,
        block_sizes=(4,),
        draft_windows=(None,),
        max_prompts=1,
        timing=timing,
        warm_up=False,
    )
    began = time.perf_counter()
    run = sweep(config, tmp_path / "run", pair=pair)
    outer = time.perf_counter() - began
    row, blocks = run.prompts().to_pylist()[0], run.blocks().to_pylist()
    assert len(blocks) == 6
    assert row["ttft_s"] == pytest.approx(0.5)
    assert row["decode_s"] == pytest.approx(6 * 0.03)
    assert row["ttft_s"] + row["decode_s"] == pytest.approx(row["total_s"])
    assert row["total_s"] == pytest.approx(outer)
    for block in blocks if timing == "stages" else ():
        stages = block["draft_s"], block["verify_s"], block["commit_s"]
        assert stages == pytest.approx((0.01, 0.02, 0.0))


# --- other arms ---------------------------------------------------------------------------------


@pytest.fixture
def other_dtypes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Loading a dtype gives a scripted pair of it; the list says which were loaded."""
    loaded: list[str] = []

    def load(spec: PairSpec, *_: Any) -> Pair:
        loaded.append(spec.dtype)
        return scripted_pair(noise(0.6), dtype=spec.dtype)

    monkeypatch.setattr(sweeps.pairs, "load_spec", load)
    return loaded


ARMS = {"block_sizes": (1, 4), "draft_windows": (None,), "library_baseline": True}


def test_plain_decoding_and_the_library_are_measured_in_every_dtype_asked_for(
    tmp_path, prompts, other_dtypes
):
    config = small(prompts, **ARMS, plain_dtypes=("bfloat16", "float32"))
    run = sweep(config, tmp_path / "run", pair=calm())
    assert grid(run) == [
        ("dflash_lab", "bfloat16", 1, None),
        ("dflash_lab", "float32", 1, None),
        ("dflash_lab", "float32", 4, None),
        ("transformers", "bfloat16", 1, None),
        ("transformers", "float32", 1, None),
    ]
    assert other_dtypes == ["bfloat16"]
    sweep(config, tmp_path / "run", pair=calm())
    assert other_dtypes == ["bfloat16"]


def test_a_pair_is_loaded_once_for_each_dtype_by_name(tmp_path, prompts, other_dtypes):
    config = small(prompts, **ARMS, dtype="bfloat16", plain_dtypes=("float32",))
    run = sweep(config, tmp_path / "run")
    assert other_dtypes == ["bfloat16", "float32"]
    assert {cell.dtype for cell in run.cells if cell.block_size == 4} == {"bfloat16"}


def test_the_arms_are_interleaved(tmp_path, prompts, other_dtypes):
    config = small(prompts, **ARMS, plain_dtypes=("bfloat16",))
    rows = sweep(config, tmp_path / "run", pair=calm()).prompts().to_pylist()
    for _, one in itertools.groupby(
        sorted(rows, key=lambda row: row["order"]), key=lambda row: row["prompt_id"]
    ):
        assert len({row["cell"] for row in one}) == 5


def test_the_librarys_generator_gives_times_and_tokens_and_no_blocks(tmp_path, prompts):
    pair = scripted_pair(prefill_s=0.003, verify_s=0.001)
    run = sweep(small(prompts, **ARMS), tmp_path / "run", pair=pair).select(engine="transformers")
    rows = run.prompts().to_pylist()
    assert len(rows) == 5
    for row in rows:
        assert row["new_ids"] == list(scripted_greedy(pair, row["prompt_ids"], 13))
        assert row["decode_s"] == row["total_s"] - row["ttft_s"] > 0
        assert (row["finish_reason"], row["text"]) == ("length", pair.text(row["new_ids"]))
    assert len(run.blocks()) == 0
    request = run.cells[0].request
    assert (request["rule"], request["draft"], request["draft_window"]) == (None, None, None)
    assert run.texts(run.cells[0].id)["pieces"]["p0|0|0"] == list(pair.pieces(rows[0]["new_ids"]))


def test_an_end_token_ends_both_arms_alike(tmp_path, prompts):
    free = calm()
    ids = free.encode("prompt 0").ids
    end = scripted_greedy(free, ids, 13)[3]
    pair = scripted_pair(noise(0.6), tokenizer=ByteTokenizer(eos_token_id=end))
    run = sweep(small(prompts, **ARMS), tmp_path / "run", pair=pair)
    rows = [row for row in run.prompts().to_pylist() if row["prompt_id"] == "p0"]
    assert {(row["finish_reason"], tuple(row["new_ids"])) for row in rows} == {
        ("stop", scripted_greedy(free, ids, 4))
    }


# --- failures -----------------------------------------------------------------------------------


def breaking(above: int, from_position: int = 0) -> Any:
    """A draft that runs out of memory at slots beyond `above`."""

    def script(position: int, slot: int) -> bool:
        if slot > above and position >= from_position:
            raise MemoryError("no room for the block")
        return noise(0.6)(position, slot)

    return script


def test_a_cell_that_raises_is_kept_with_its_reason_and_the_others_go_on(tmp_path, prompts):
    run = sweep(small(prompts), tmp_path / "run", pair=scripted_pair(breaking(above=5)))
    assert [cell.block_size for cell in run.cells] == [1, 4]
    assert [(c.request["block_size"], c.request["draft_window"]) for c in run.failed] == [
        (8, None),
        (8, 16),
    ]
    failed = run.failed[0]
    assert failed.error == "MemoryError: no room for the block"
    assert 'File "tests/test_sweeps.py"' in failed.traceback
    assert str(ROOT) not in failed.traceback
    assert not (failed.folder / "lease.json").exists()


def test_a_failed_cell_is_tried_again_and_goes_on_where_it_failed(tmp_path, prompts):
    source = write_prompts(Path(prompts), ["a", "b", "a much longer prompt than the others"])
    pair = scripted_pair(breaking(above=5, from_position=60))
    run = sweep(small(source, warm_up=False), tmp_path / "run", pair=pair)
    assert len(run.failed) == 2
    healthy = calm()
    run = sweep(small(source, warm_up=False), tmp_path / "run", pair=healthy)
    assert not run.failed and not run.unfinished
    assert tokens(run) == tokens(sweep(small(source), tmp_path / "undisturbed", pair=calm()))
    assert len(healthy.models.sessions) == 2
    assert not list((tmp_path / "run").rglob("failed.json"))


def test_a_dtype_that_cannot_be_loaded_fails_its_cells_alone(tmp_path, prompts, monkeypatch):
    def load(*_: Any) -> Pair:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(sweeps.pairs, "load_spec", load)
    run = sweep(small(prompts, plain_dtypes=("bfloat16",)), tmp_path / "run", pair=calm())
    assert len(run.cells) == 4
    assert [cell.error for cell in run.failed] == ["RuntimeError: out of memory"]


def test_a_useless_draft_is_told_once_a_cell_and_after_everything_is_stored(tmp_path, prompts):
    config = small(prompts, block_sizes=(4, 8), draft_windows=(None,), max_new_tokens=40)
    with pytest.warns(AcceptanceWarning, match="0 accepted in") as heard:
        run = sweep(config, tmp_path / "run", pair=scripted_pair(WRONG))
    assert [str(one.message).partition(":")[0] for one in heard] == [
        "block size 4, float32",
        "block size 8, float32",
    ]
    assert len(run.cells) == 2
    assert "0 accepted" in run.cells[0].summary["warnings"][0]


def test_that_warning_as_an_error_loses_nothing(tmp_path, prompts):
    config = small(prompts, block_sizes=(4,), draft_windows=(None,), max_new_tokens=40)
    with warnings.catch_warnings(), pytest.raises(AcceptanceWarning):
        warnings.simplefilter("error")
        sweep(config, tmp_path / "run", pair=scripted_pair(WRONG))
    assert len(open_run(tmp_path / "run").cells) == 1


# --- interruptions ------------------------------------------------------------------------------


class Stopper:
    """Says stop from the n-th question on."""

    def __init__(self, after: int):
        self.left = after

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize("after", [0, 1, 5, 30, 77])
def test_a_stopped_sweep_goes_on_where_it_was(tmp_path, prompts, after):
    config = small(prompts, warm_up=False)
    pair = calm()
    stopped = sweep(config, tmp_path / "run", pair=pair, should_stop=Stopper(after))
    before, sessions = kept(tmp_path / "run"), len(pair.models.sessions)
    assert before == sum(cell.done for cell in stopped.unfinished) < 20
    run = sweep(config, tmp_path / "run", pair=pair)
    assert len(pair.models.sessions) - sessions == 20 - before
    assert tokens(run) == tokens(sweep(config, tmp_path / "undisturbed", pair=calm()))
    assert not list((tmp_path / "run").rglob("lease.json"))


def test_a_conversation_goes_on_in_the_middle(tmp_path):
    source = write_prompts(tmp_path / "turns.jsonl", [["one", "two", "three"]])
    config = small(source, block_sizes=(4,), draft_windows=(None,), warm_up=False)
    whole = sweep(config, tmp_path / "undisturbed", pair=calm())
    blocks = len([b for b in whole.blocks().to_pylist() if b["turn"] == 0])
    stopped = sweep(config, tmp_path / "run", pair=calm(), should_stop=Stopper(blocks + 4))
    assert [cell.done for cell in stopped.unfinished] == [1]
    assert tokens(sweep(config, tmp_path / "run", pair=calm())) == tokens(whole)


def test_a_keyboard_interrupt_leaves_everything_resumable(tmp_path, prompts):
    def interrupt(at: SweepProgress) -> None:
        if at.done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(small(prompts), tmp_path / "run", interrupt, pair=calm())
    assert not list((tmp_path / "run").rglob("lease.json"))
    assert sum(cell.done for cell in open_run(tmp_path / "run").unfinished) == 7
    run = sweep(small(prompts), tmp_path / "run", pair=calm())
    assert tokens(run) == tokens(sweep(small(prompts), tmp_path / "undisturbed", pair=calm()))
    assert {cell.provenance["processes"] for cell in run.cells} == {2}


CHILD = """
import sys, time
from dflash_lab.config import SweepConfig
from dflash_lab.sweeps import sweep
from dflash_lab.tests.toys import noise, scripted_pair
config = SweepConfig(block_sizes=(1, 4, 8), draft_windows=(None, 16), windowed_block_sizes=(8,),
                     prompts=sys.argv[1], max_new_tokens=13)
def wait(at):
    time.sleep(60 if at.done == 19 else 0)  # never done before it is killed
sweep(config, sys.argv[2], wait, scripted_pair(noise(0.6), verify_s=0.001))
"""


def start(prompts: str, out: Path) -> subprocess.Popen[bytes]:
    """The small sweep in a process of its own."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, prompts, str(out)], env=os.environ | {"PYTHONPATH": paths}
    )


def lines_of(path: Path) -> list[bytes]:
    """No line where the file is not there, or has just gone."""
    try:
        return path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []


def kept(out: Path) -> int:
    """Decodes on the disk, whole lines of parts and finished cells; a torn line is none."""
    cells = [path for path in (out / "cells").glob("*") if path.is_dir()]
    parts = [path / "part.jsonl" for path in cells if not (path / "cell.json").exists()]
    whole = sum(
        line.startswith(b'{"decode"') and line.endswith(b"\n")
        for part in parts
        for line in lines_of(part)
    )
    return 5 * sum((path / "cell.json").exists() for path in cells) + whole


def kill_when(process: subprocess.Popen[bytes], out: Path, decodes: int) -> None:
    deadline = time.monotonic() + 60
    while kept(out) < decodes:
        assert process.poll() is None and time.monotonic() < deadline, "the sweep ended by itself"
        time.sleep(0.0005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("decodes", [0, 1, 6, 13, 17, 18, 19])
def test_a_killed_sweep_ends_with_the_cells_of_an_undisturbed_one(tmp_path, prompts, decodes):
    out = tmp_path / "run"
    kill_when(start(prompts, out), out, decodes)
    before = kept(out)
    pair = calm()
    config = small(prompts, warm_up=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TornLineWarning)  # the kill may have torn a line
        run = sweep(config, out, pair=pair)
    whole = sweep(config, tmp_path / "undisturbed", pair=calm())
    assert [cell.id for cell in run.cells] == [cell.id for cell in whole.cells]
    assert tokens(run) == tokens(whole)
    assert before <= 20 - len(pair.models.sessions) <= before + 1
    assert not run.unfinished and not run.failed
    leftovers = {path.name for path in (out / "cells").glob("*/*")}
    assert leftovers == {"cell.json", "prompts.parquet", "blocks.parquet", "texts.json"}


def test_a_kill_in_the_middle_of_a_line_costs_that_decode_alone(tmp_path, prompts):
    out, config = tmp_path / "run", small(prompts, warm_up=False)
    sweep(config, out, pair=calm(), should_stop=Stopper(60))
    part = next((out / "cells").glob("*/part.jsonl"))
    lines = part.read_bytes().splitlines(keepends=True)
    part.write_bytes(b"".join(lines[:-1]) + lines[-1][: len(lines[-1]) // 2])
    before, pair = kept(out), calm()
    with pytest.warns(TornLineWarning, match=part.parent.name):
        run = sweep(config, out, pair=pair)
    assert len(pair.models.sessions) == 20 - before
    assert tokens(run) == tokens(sweep(config, tmp_path / "undisturbed", pair=calm()))


@pytest.mark.parametrize("call", range(1, 6))
def test_a_kill_while_a_cell_is_finished_loses_nothing(tmp_path, prompts, monkeypatch, call):
    """Dies before the n-th file of the final ones is in its place: four a cell, cell.json last."""
    out, config, pair = tmp_path / "run", small(prompts, warm_up=False), calm()
    whole = sweep(config, tmp_path / "undisturbed", pair=calm())
    replaced = itertools.count(1 - len(whole.cells))  # the part files come first
    replace = os.replace

    class Killed(BaseException):
        pass

    def die(*paths: Any) -> None:
        if next(replaced) == call:
            raise Killed
        replace(*paths)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", die)
        with pytest.raises(Killed):
            sweep(config, out, pair=pair)
    run = sweep(config, out, pair=pair)
    assert len(pair.models.sessions) == 20
    assert tokens(run) == tokens(whole)


def test_a_kill_just_after_a_cell_was_finished_changes_nothing(tmp_path, prompts):
    out = tmp_path / "run"
    run = sweep(small(prompts), out, pair=calm())
    before = files(out)
    (run.cells[0].folder / "part.jsonl").write_text('{"cell": {}}\n{"dec')
    lend(run.cells[0].folder, os.getpid())
    assert sweep(small(prompts), out, pair=calm()) == run
    assert files(out) == before


def test_what_a_dead_process_left_half_written_is_removed(begun):
    config, out, folder = begun
    (folder / "blocks.parquet.tmp.123").write_bytes(b"PAR1")
    (folder / "failed.json").write_text("{}")
    run = sweep(config, out, pair=calm(), should_stop=lambda: True)
    assert not run.failed
    assert [path.name for path in folder.iterdir()] == ["part.jsonl"]


@pytest.mark.parametrize(
    ("after", "finished"),
    [(0, 0), (3, 0), (8, 0), (20, 0), (30, 0), (34, 0), (40, 1), (50, 2), (60, 3)],
)
def test_a_full_disk_is_one_clear_line_and_loses_no_finished_cell(
    tmp_path, prompts, monkeypatch, after, finished
):
    out, config = tmp_path / "run", small(prompts)
    fsync, calls = os.fsync, itertools.count()

    def full(handle: int) -> None:
        if next(calls) >= after:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DiskFull, match=r"no space left.*are kept.*same call again") as caught:
            sweep(config, out, pair=calm())
    assert "\n" not in str(caught.value)
    before = {cell.id: files(cell.folder) for cell in open_run(out).cells}
    assert len(before) == finished
    run = sweep(config, out, pair=calm())
    assert tokens(run) == tokens(sweep(config, tmp_path / "undisturbed", pair=calm()))
    assert {name: files(run.cell(name).folder) for name in before} == before


# --- two at once --------------------------------------------------------------------------------


def other_process() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def lend(folder: Path, pid: int, machine: str | None = None) -> Path:
    """A lease of another process on a cell."""
    owner = {"pid": pid, "machine": machine or lease.machine(), "token": "theirs"}
    (folder / "lease.json").write_text(json.dumps(owner))
    return folder / "lease.json"


@pytest.fixture
def begun(tmp_path: Path, prompts: str) -> tuple[SweepConfig, Path, Path]:
    """A sweep stopped early, its run folder, and the folder of its cell of block size 4."""
    config, out = small(prompts, warm_up=False), tmp_path / "run"
    run = sweep(config, out, pair=calm(), should_stop=Stopper(30))
    return config, out, run.select(block_size=4).unfinished[0].folder


def test_cells_of_a_living_process_are_left_to_it_and_the_rest_is_filled(begun):
    config, out, folder = begun
    process = other_process()
    try:
        lend(folder, process.pid)
        with pytest.warns(CellInUseWarning, match=r"filling 1 of these.*block size 4, float32"):
            run = sweep(config, out, pair=calm())
        assert [cell.block_size for cell in run.cells] == [1, 8, 8]
        assert [row["state"] for row in status(out)] == ["finished"] * 3 + ["running"]
    finally:
        process.kill()
        process.communicate()
    assert [row["state"] for row in status(out)] == ["finished"] * 3 + ["unfinished"]
    assert len(sweep(config, out, pair=calm()).cells) == 4


def test_two_sweeps_at_once_decode_nothing_twice(tmp_path, prompts):
    out, pair = tmp_path / "run", calm()
    child = start(prompts, out)
    try:
        while kept(out) < 1:
            assert child.poll() is None
            time.sleep(0.001)
        with pytest.warns(CellInUseWarning, match=r"filling [1-4] of these cells"):
            sweep(small(prompts, warm_up=False), out, pair=pair)
        assert not pair.models.sessions
    finally:
        child.kill()
        child.wait()
    sweep(small(prompts, warm_up=False), out, pair=pair)
    assert 0 < len(pair.models.sessions) <= 19


def test_a_lease_without_a_heartbeat_is_taken_over(begun):
    config, out, folder = begun
    path = lend(folder, 1, machine="another")
    with pytest.warns(CellInUseWarning):
        sweep(config, out, pair=calm())
    old = time.time() - lease.STALE_S - 1
    os.utime(path, (old, old))
    assert len(sweep(config, out, pair=calm()).cells) == 4


def test_a_lease_of_an_earlier_process_with_our_number_is_taken_over(begun):
    config, out, folder = begun
    lend(folder, os.getpid())
    assert len(sweep(config, out, pair=calm()).cells) == 4


def test_a_process_that_lost_its_lease_writes_no_more_to_that_cell(tmp_path, prompts):
    taken: list[Path] = []

    def steal(at: SweepProgress) -> None:
        if at.done == 6 and not taken:  # without the lost cell's decodes it comes to 6 again
            folder = min((tmp_path / "run").rglob("lease.json")).parent
            lend(folder, 1, machine="another")
            taken.append(folder)
            taken.append(store.read_part(folder).decodes)

    with pytest.warns(CellInUseWarning):
        run = sweep(small(prompts), tmp_path / "run", steal, pair=calm())
    folder, decodes = taken
    assert len(run.cells) == 3
    assert store.read_part(folder).decodes == decodes
    assert (folder / "lease.json").exists()


# --- progress and status ------------------------------------------------------------------------


def test_progress_counts_to_the_end_and_tells_the_time_left(tmp_path, prompts):
    heard: list[SweepProgress] = []
    sweep(small(prompts), tmp_path / "run", heard.append, pair=calm())
    done = [at.done for at in heard]
    assert done == sorted(done)
    assert {at.total for at in heard} == {20}
    assert heard[0] == SweepProgress(
        done=0, total=20, seconds_left=None, label="warm-up: block size 1, float32"
    )
    assert (heard[-1].done, heard[-1].seconds_left) == (20, 0.0)
    assert all(at.seconds_left > 0 for at in heard if 0 < at.done < 20)


def test_progress_counts_what_earlier_calls_did(tmp_path, prompts):
    sweep(small(prompts), tmp_path / "run", pair=calm(), should_stop=Stopper(60))
    before = kept(tmp_path / "run")
    heard: list[SweepProgress] = []
    sweep(small(prompts), tmp_path / "run", heard.append, pair=calm())
    assert 0 < before == heard[0].done
    assert heard[-1].done == heard[-1].total == 20


class Pace:
    """What `seconds_left` reads of a cell."""

    def __init__(self, missing: int, spent: int = 0, spent_s: float = 0.0):
        self.missing, self.spent, self.spent_s = missing, spent, spent_s


def test_time_left_goes_by_each_cells_own_pace():
    assert (
        sweeps.seconds_left([Pace(3, spent=2, spent_s=4.0), Pace(1, spent=2, spent_s=20.0)]) == 16
    )
    assert sweeps.seconds_left([Pace(3, spent=2, spent_s=4.0), Pace(2)]) == 3 * 2 + 2 * 2
    assert sweeps.seconds_left([Pace(3)]) is None
    assert sweeps.seconds_left([]) == 0


def test_status_tells_state_and_count_of_every_cell(tmp_path, prompts):
    pair = scripted_pair(breaking(above=5))
    sweep(small(prompts, warm_up=False), tmp_path / "run", pair=pair, should_stop=Stopper(40))
    rows = {(row["block_size"], row["draft_window"]): row for row in status(tmp_path / "run")}
    assert [rows[key]["state"] for key in ((1, None), (4, None), (8, None), (8, 16))] == [
        "unfinished",
        "unfinished",
        "failed",
        "failed",
    ]
    assert rows[1, None]["decodes"] == 5 > rows[1, None]["done"] > 0
    assert rows[8, None]["error"] == "MemoryError: no room for the block"
    sweep(small(prompts), tmp_path / "run", pair=calm())
    assert {(row["state"], row["done"], row["decodes"]) for row in status(tmp_path / "run")} == {
        ("finished", 5, 5)
    }


# --- a real pair --------------------------------------------------------------------------------


def test_a_real_toy_pair_gives_the_same_text_in_every_arm(tmp_path, prompts, qwen3_toy):
    spec = PairSpec(
        target=str(qwen3_toy.target), draft=str(qwen3_toy.draft), dtype="float32", device="cpu"
    )
    config = small(
        prompts,
        pair=spec,
        block_sizes=(1, 4, 8),
        draft_windows=(None, 4),
        windowed_block_sizes=(8,),
        library_baseline=True,
        max_prompts=2,
    )
    run = sweep(config, tmp_path / "run")
    assert not run.failed
    assert [row[0::2] for row in grid(run)] == [
        ("dflash_lab", 1),
        ("dflash_lab", 4),
        ("dflash_lab", 8),
        ("dflash_lab", 8),
        ("transformers", 1),
    ]
    texts: dict[str, set[tuple[int, ...]]] = {}
    for row in run.prompts().to_pylist():
        texts.setdefault(row["prompt_id"], set()).add(tuple(row["new_ids"]))
    assert {prompt: len(found) for prompt, found in texts.items()} == {"p0": 1, "p1": 1}
    request = run.cells[1].request
    assert (request["target"], request["draft"], request["pair"]) == ("target", "draft", None)
    assert request["thinking"] == "template default"
    windowed = run.select(draft_window=4).blocks()
    assert set(windowed["draft_cache_tokens"].to_pylist()) == {4}
    assert windowed["draft_s"].null_count == len(windowed)
    sweep(config, tmp_path / "run")
    assert str(tmp_path) not in (run.cells[0].folder / "cell.json").read_text()
