"""Cells on disk: strict, whole or absent, and refused by name where they cannot be read."""

import datetime as dt
import errno
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_lab import store
from dflash_lab.config import DecodeConfig
from dflash_lab.decoding import decode
from dflash_lab.store import (
    DamagedCell,
    DiskFull,
    NewerSchema,
    NotARun,
    Part,
    TornLineWarning,
    cell_id,
    decode_line,
    finish_cell,
    open_part,
    open_run,
    plain,
    read_part,
    to_json,
    write_atomic,
)
from dflash_lab.tests.toys import cut, scripted_greedy, scripted_pair

PROMPTS = ("first", "second", "third")
REQUEST = {
    "schema": 1,
    "engine": "dflash_lab",
    "dtype": "float32",
    "block_size": 4,
    "draft_window": None,
    "hardware": "2-core toy",
    "prompts": {"source": "toy", "count": 3, "ids": list(PROMPTS)},
}


def strict(text: str) -> object:
    """JSON as the standard has it: NaN and Infinity are errors."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def line(prompt: str, repeat: int = 0, order: int = 0, **settings: object) -> dict[str, object]:
    """One real decode of a scripted pair, as the part file keeps it."""
    pair = scripted_pair(cut(2))
    config = DecodeConfig(**({"block_size": 4, "max_new_tokens": 11} | settings))
    trace = decode(pair, prompt, config)
    keys = {"prompt_id": prompt, "turn": 0, "repeat": repeat, "task": "toy", "order": order}
    texts = {token: pair.text_so_far([token]) for token in trace.tokens}
    return decode_line(trace, keys, pair.pieces(trace.tokens), texts)


def begin(run: Path, prompts: tuple[str, ...] = PROMPTS, **changes: object) -> Part:
    """A cell that holds some decodes and is not finished."""
    request = REQUEST | changes
    folder = run / "cells" / cell_id(request)
    header = {
        "id": cell_id(request),
        "request": request,
        "requested_block_sizes": [request["block_size"]],
        "decodes": len(prompts),
    }
    part = open_part(folder, header)
    part.add_process({"versions": {"python": "3"}, "started_utc": "2026-01-01T00:00:00+00:00"})
    for order, prompt in enumerate(prompts):
        part.add_decode(line(prompt, order=order))
    return part


def finished(run: Path, **changes: object) -> Path:
    """The folder of a finished cell."""
    part = begin(run, **changes)
    finish_cell(part, PROMPTS, "2026-01-01T00:01:00+00:00")
    return part.folder


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


# --- JSON and ids -------------------------------------------------------------------------------


def test_json_is_strict_whatever_is_put_in():
    import torch

    value = {
        "nan": float("nan"),
        "inf": [float("inf"), -float("inf"), np.float32("nan"), np.float64("inf")],
        "int": np.int64(3),
        "float": np.float32(0.5),
        "bool": np.bool_(True),
        "array": np.array([[1, 2], [3, 4]]),
        "torch": torch.tensor(2.5),
        "path": Path("results") / "mine",
        "when": dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC),
        "set": frozenset({3, 1}),
        "text": "<script>\u2028\n\"'$x$",
        7: None,
    }
    assert strict(to_json(value)) == {
        "nan": None,
        "inf": [None, None, None, None],
        "int": 3,
        "float": 0.5,
        "bool": True,
        "array": [[1, 2], [3, 4]],
        "torch": 2.5,
        "path": "results/mine",
        "when": "2026-01-02T03:04:05+00:00",
        "set": [1, 3],
        "text": "<script>\u2028\n\"'$x$",
        "7": None,
    }


def test_plain_values_come_back_equal():
    value = {"a": [1, 2.5, None, True, "x"], "b": {"c": []}}
    assert json.loads(to_json(value)) == value == plain(plain(value))


def test_a_value_without_a_place_in_json_is_refused_by_its_type():
    with pytest.raises(TypeError, match="a object has no place in JSON"):
        to_json({"x": object()})


def test_two_keys_that_are_one_as_text_are_refused():
    with pytest.raises(ValueError, match="not different as text"):
        to_json({1: "a", "1": "b"})


def test_an_id_does_not_depend_on_the_order_of_keys():
    turned = dict(reversed(REQUEST.items()))
    turned["prompts"] = dict(reversed(REQUEST["prompts"].items()))
    assert list(turned) != list(REQUEST)
    assert cell_id(turned) == cell_id(REQUEST)


@pytest.mark.parametrize("key", REQUEST)
def test_every_setting_of_a_request_is_in_its_id(key):
    assert cell_id(REQUEST | {key: "another"}) != cell_id(REQUEST)


# --- writing ------------------------------------------------------------------------------------


def test_a_file_is_replaced_whole_and_nothing_is_left_beside_it(tmp_path):
    write_atomic(tmp_path / "x.json", "old")
    write_atomic(tmp_path / "x.json", b"new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x.json", "new")]


def test_what_is_written_is_on_the_disk_before_it_counts(tmp_path, monkeypatch):
    happened: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (happened.append("synced"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda *to: (happened.append("there"), replace(*to)))
    write_atomic(tmp_path / "x.json", "new")
    assert happened == ["synced", "there", "synced"]  # the file, then its folder
    part = begin(tmp_path, PROMPTS[:1])
    happened.clear()
    part.add_decode(line("second"))
    assert happened == ["synced"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_keeps_the_old_file_and_is_one_clear_line(tmp_path, monkeypatch, call):
    write_atomic(tmp_path / "x.json", "old")
    monkeypatch.setattr(os, call, full)
    with pytest.raises(DiskFull, match=r"no space left.*Finished cells.*same call again") as caught:
        write_atomic(tmp_path / "x.json", "new")
    assert caught.value.errno == errno.ENOSPC
    assert "\n" not in str(caught.value)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x.json", "old")]


def test_another_error_of_the_disk_is_not_called_a_full_one(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_atomic(tmp_path / "missing" / "x.json", "new")


def test_a_decode_that_finds_no_space_leaves_the_part_file_as_it_was(tmp_path, monkeypatch):
    part = begin(tmp_path, PROMPTS[:1])
    before = (part.folder / store.PART).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(DiskFull):
            part.add_decode(line("second"))
    assert (part.folder / store.PART).read_bytes() == before
    assert list(part.decodes) == [("first", 0, 0)]
    part.add_decode(line("second"))
    assert list(read_part(part.folder).decodes) == [("first", 0, 0), ("second", 0, 0)]


# --- part files ---------------------------------------------------------------------------------


def test_a_part_file_gives_back_what_was_added(tmp_path):
    part = begin(tmp_path)
    assert read_part(part.folder) == part


@pytest.mark.parametrize("kept", [1, 2, 40, -2, -1])
def test_a_torn_last_line_is_dropped_with_a_warning_and_the_next_one_is_whole(tmp_path, kept):
    part = begin(tmp_path)
    path = part.folder / store.PART
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:kept])
    with pytest.warns(TornLineWarning, match="torn; its prompt is decoded again"):
        resumed = read_part(part.folder)
    assert list(resumed.decodes) == [("first", 0, 0), ("second", 0, 0)]
    resumed.add_decode(line("third", order=2))
    assert read_part(part.folder).decodes.keys() == part.decodes.keys()


def test_what_stands_after_a_damaged_line_is_decoded_again(tmp_path):
    part = begin(tmp_path)
    path = part.folder / store.PART
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3][:20] + b"\n"
    path.write_bytes(b"".join(lines))
    with pytest.warns(TornLineWarning):
        assert list(read_part(part.folder).decodes) == [("first", 0, 0)]


def test_a_part_file_torn_in_its_first_line_is_begun_anew(tmp_path):
    part = begin(tmp_path)
    path = part.folder / store.PART
    path.write_bytes(path.read_bytes()[:30])
    with pytest.warns(TornLineWarning):
        anew = open_part(part.folder, part.cell)
    assert (anew.cell, anew.processes, anew.decodes) == (part.cell, [], {})
    assert read_part(part.folder) == anew


# --- cells --------------------------------------------------------------------------------------


def test_a_finished_cell_holds_its_decodes_and_no_part_file(tmp_path):
    folder = finished(tmp_path)
    run = open_run(tmp_path)
    assert {path.name for path in folder.iterdir()} == {
        "cell.json",
        "prompts.parquet",
        "blocks.parquet",
        "texts.json",
    }
    pair = scripted_pair()
    for row in run.prompts().to_pylist():
        ids = pair.encode(row["prompt_id"]).ids
        assert row["prompt_ids"] == list(ids)
        assert row["new_ids"] == list(scripted_greedy(pair, ids, 11))
    blocks = run.blocks().to_pylist()
    assert {(row["accepted"], len(row["drafted"]), len(row["posterior"])) for row in blocks} == {
        (2, 3, 4)
    }
    assert run.blocks().schema.equals(store.BLOCKS)
    assert run.prompts().schema.equals(store.PROMPTS)


def test_both_tables_carry_their_schema_number(tmp_path):
    folder = finished(tmp_path)
    for name in ("blocks.parquet", "prompts.parquet"):
        assert pq.read_schema(folder / name).metadata[b"dflash_lab.schema"] == b"1"


@pytest.mark.parametrize(("timing", "known"), [("whole", False), ("stages", True)])
def test_stage_seconds_are_null_in_mode_whole_alone(tmp_path, timing, known):
    part = begin(tmp_path, ())
    part.add_decode(line("first", timing=timing))
    finish_cell(part, PROMPTS, "2026-01-01T00:01:00+00:00")
    rows = open_run(tmp_path).blocks()
    for name in ("draft_s", "verify_s", "commit_s"):
        assert rows[name].null_count == (0 if known else len(rows))
    assert rows["total_s"].null_count == 0
    assert rows["draft_prob"].null_count == rows["target_prob"].null_count == len(rows)


def test_the_summary_is_made_of_the_sums_of_the_stored_rows(tmp_path):
    finished(tmp_path)
    run = open_run(tmp_path)
    blocks, prompts, summary = run.blocks(), run.prompts(), run.cells[0].summary
    tokens = [len(ids) for ids in prompts["new_ids"].to_pylist()]
    assert summary["prompts"] == summary["decodes"] == 3
    assert summary["tokens"] == sum(tokens)
    assert summary["tokens_after_first"] == sum(tokens) - 3 == summary["emitted"]
    assert summary["blocks"] == len(blocks)
    assert summary["cut_blocks"] == sum(blocks["cut"].to_pylist()) == 3
    assert summary["accepted"] == sum(blocks["accepted"].to_pylist())
    assert summary["accepted_uncut"] == summary["accepted"] - 3 * 2
    assert summary["drafted"] == 3 * len(blocks)
    assert summary["drafted_uncut"] == 3 * (len(blocks) - 3)
    for name in ("ttft_s", "decode_s", "total_s"):
        assert summary[name] == sum(prompts[name].to_pylist())
    assert (summary["first_order"], summary["last_order"]) == (0, 2)
    assert summary["finish_reasons"] == {"length": 3}


def test_the_seconds_of_a_decode_are_those_of_its_blocks(tmp_path):
    finished(tmp_path)
    run = open_run(tmp_path)
    for row in run.prompts().to_pylist():
        mine = [
            b["total_s"] for b in run.blocks().to_pylist() if b["prompt_id"] == row["prompt_id"]
        ]
        assert row["decode_s"] == sum(mine)


def test_a_cell_without_blocks_has_an_empty_table_of_the_same_schema(tmp_path):
    part = begin(tmp_path, ())
    part.add_decode(line("first", max_new_tokens=1))
    finish_cell(part, PROMPTS, "2026-01-01T00:01:00+00:00")
    run = open_run(tmp_path)
    assert len(run.blocks()) == 0
    assert run.blocks().schema.equals(store.BLOCKS)
    assert strict((run.cells[0].folder / "cell.json").read_text())["summary"]["drafted"] == 0


def test_rows_stand_in_the_order_of_the_prompts_whatever_came_first(tmp_path):
    part = begin(tmp_path, ("third", "first"))
    part.add_decode(line("second", order=2))
    finish_cell(part, PROMPTS, "2026-01-01T00:01:00+00:00")
    assert open_run(tmp_path).prompts()["prompt_id"].to_pylist() == list(PROMPTS)


def test_pieces_of_a_decode_joined_are_its_text(tmp_path):
    finished(tmp_path)
    run = open_run(tmp_path)
    texts = run.texts(run.cells[0].id)
    for row in run.prompts().to_pylist():
        pieces = texts["pieces"][f"{row['prompt_id']}|0|0"]
        assert len(pieces) == len(row["new_ids"])
        assert "".join(pieces) == row["text"]
    assert texts["tokens"]
    for token, text in texts["tokens"].items():
        assert text == scripted_pair().text_so_far([int(token)])


def test_provenance_counts_processes_and_keeps_those_of_other_versions(tmp_path):
    part = begin(tmp_path, PROMPTS[:1])
    part.add_process({"versions": {"python": "3"}, "started_utc": "2026-01-02T00:00:00+00:00"})
    part.add_process({"versions": {"python": "4"}, "started_utc": "2026-01-03T00:00:00+00:00"})
    finish_cell(part, PROMPTS, "2026-01-04T00:00:00+00:00")
    said = open_run(tmp_path).cells[0].provenance
    assert said["processes"] == 3
    assert said["versions"] == {"python": "4"}
    assert [one["versions"] for one in said["unlike"]] == [{"python": "3"}] * 2
    assert (said["started_utc"], said["ended_utc"]) == (
        "2026-01-01T00:00:00+00:00",
        "2026-01-04T00:00:00+00:00",
    )


# --- reading ------------------------------------------------------------------------------------


def test_a_folder_that_is_no_run_is_refused_with_the_reason(tmp_path):
    with pytest.raises(NotARun, match=r"missing is not a run: there is no such folder"):
        open_run(tmp_path / "missing")
    with pytest.raises(NotARun, match="is not a run: it has no folder cells/"):
        open_run(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotARun, match="is not a run"):
        open_run(tmp_path / "file")


def test_cells_are_finished_failed_or_unfinished(tmp_path):
    whole = finished(tmp_path)
    broken = begin(tmp_path, PROMPTS[:2], block_size=8)
    store.fail_cell(broken, "RuntimeError: out of memory", "Traceback ...")
    open_one = begin(tmp_path, PROMPTS[:1], block_size=16)
    run = open_run(tmp_path)
    assert [cell.id for cell in run.cells] == [whole.name]
    assert [(cell.id, cell.error) for cell in run.failed] == [
        (broken.folder.name, "RuntimeError: out of memory")
    ]
    assert [(c.id, c.done, c.request) for c in run.unfinished] == [
        (open_one.folder.name, 1, open_one.cell["request"])
    ]
    assert len(run.blocks()) == len(run.select(block_size=4).blocks()) > 0


def test_a_failed_cell_keeps_its_decodes_and_its_request(tmp_path):
    part = begin(tmp_path, PROMPTS[:2])
    store.fail_cell(part, "RuntimeError: x", "Traceback")
    kept = strict((part.folder / "failed.json").read_text())
    assert kept == {"error": "RuntimeError: x", "traceback": "Traceback", "request": REQUEST}
    assert read_part(part.folder).decodes == part.decodes


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES = {
    "half of cell.json": ("cell.json", half, open_run),
    "an empty cell.json": ("cell.json", lambda path: path.write_bytes(b""), open_run),
    "a list in cell.json": ("cell.json", lambda path: path.write_text("[]"), open_run),
    "an empty object": ("cell.json", lambda path: path.write_text('{"schema": 1}'), open_run),
    "bytes that are no text": ("cell.json", lambda path: path.write_bytes(b"\xff{"), open_run),
    "half a table": ("blocks.parquet", half, lambda path: open_run(path).blocks()),
    "no table": ("prompts.parquet", Path.unlink, lambda path: open_run(path).prompts()),
    "other columns": (
        "blocks.parquet",
        lambda path: pq.write_table(pa.table({"x": [1]}), path),
        lambda path: open_run(path).blocks(),
    ),
    "half the texts": (
        "texts.json",
        half,
        lambda path: [open_run(path).texts(cell.id) for cell in open_run(path).cells],
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_named_in_one_line_with_the_way_out(tmp_path, name):
    file, damage, read = DAMAGES[name]
    folder = finished(tmp_path)
    read(tmp_path)
    damage(folder / file)
    with pytest.raises(DamagedCell, match=r"Remove its folder; the next run makes it") as caught:
        read(tmp_path)
    assert str(folder / file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_newer_cell_is_refused(tmp_path):
    path = finished(tmp_path) / "cell.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 2}))
    with pytest.raises(NewerSchema, match="schema 2, and this version reads up to 1"):
        open_run(tmp_path)


def test_a_newer_table_is_refused(tmp_path):
    path = finished(tmp_path) / "blocks.parquet"
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({b"dflash_lab.schema": b"2"}), path)
    with pytest.raises(NewerSchema, match="schema 2"):
        open_run(tmp_path).blocks()


def test_select_takes_a_value_or_any_of_a_tuple(tmp_path):
    for size, window in ((4, None), (8, None), (8, 16), (16, None)):
        finished(tmp_path, block_size=size, draft_window=window)
    run = open_run(tmp_path)

    def found(**equals):
        return [(cell.block_size, cell.draft_window) for cell in run.select(**equals).cells]

    assert found() == [(4, None), (8, None), (8, 16), (16, None)]
    assert found(block_size=8) == [(8, None), (8, 16)]
    assert found(block_size=(4, 16)) == [(4, None), (16, None)]
    assert found(block_size=8, draft_window=None) == [(8, None)]
    assert found(block_size=5) == []
    chosen = run.select(draft_window=16)
    assert set(chosen.prompts()["cell"].to_pylist()) == {chosen.cells[0].id}


def test_select_by_a_name_that_no_request_has_lists_those_there_are(tmp_path):
    finished(tmp_path)
    with pytest.raises(ValueError, match=r"'window'; there are: .*draft_window"):
        open_run(tmp_path).select(window=16)


def test_texts_of_a_cell_that_is_not_there_are_refused(tmp_path):
    finished(tmp_path)
    with pytest.raises(ValueError, match="no finished cell 'abc'"):
        open_run(tmp_path).texts("abc")


def test_a_check_comes_back_as_it_was_written_or_is_none(tmp_path):
    finished(tmp_path)
    run = open_run(tmp_path)
    assert run.check("exactness") is None
    run.write_check("exactness", {"equal": np.int64(3), "of": 3, "margin": float("nan")})
    assert open_run(tmp_path).check("exactness") == {"equal": 3, "of": 3, "margin": None}
