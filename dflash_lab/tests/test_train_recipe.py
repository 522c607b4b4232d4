"""The whole recipe on a toy target: stages, budget, resuming, the card, and what it refuses."""

import json
import shutil
from collections import namedtuple
from dataclasses import replace

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from typer.main import get_command

from dflash_lab.checkpoint import (
    CheckpointError,
    UnsupportedDraft,
    WidthMismatch,
    draft_fingerprint,
)
from dflash_lab.cli.flags import app
from dflash_lab.cli.settings import width_shares
from dflash_lab.lease import Leases
from dflash_lab.load import ModelUnavailable, load_pair
from dflash_lab.tests.drafts import TWO
from dflash_lab.tests.toys import byte_tokenizer, draft_json, save_draft
from dflash_lab.tests.variants import SELECTS
from dflash_lab.train.evaluate import tau_table
from dflash_lab.train.export import card, pick_mask_token, pick_taps, read_ngrams, write_manifest
from dflash_lab.train.fit import FitConfig
from dflash_lab.train.recipe import FIT_SETTINGS, SETTINGS, TrainConfig, train_draft, typed
from dflash_lab.train.rows import RowCounts, ngram_hashes

FIT = FitConfig(steps=6, rows_a_step=2, labels_a_step=56, frequent=40, sampled=8, evaluate_every=3)


@pytest.fixture(scope="module")
def settings(llama_toy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipe")
    questions = folder / "questions.jsonl"
    questions.write_text(
        "".join(json.dumps({"question": f"What is {n} and {n}?"}) + "\n" for n in range(3))
    )
    return TrainConfig(
        target=str(llama_toy.target),
        out=str(folder / "draft"),
        prompts=(str(questions),),
        evaluate=(str(questions),),
        framed_prompts=0,
        written_prompts=12,
        answer_tokens=400,
        max_new_tokens=40,
        slots=8,
        held_out=2,
        layers=1,
        block_size=8,
        device="cpu",
        dtype="float32",
        fit=FIT,
    )


@pytest.fixture(scope="module")
def trained(settings):
    lines = []
    folder = train_draft(settings, lines.append)
    return folder, lines


@pytest.mark.slow
def test_the_draft_loads_and_decodes_with_its_target(trained, llama_toy):
    folder, _ = trained
    pair = load_pair(target=llama_toy.target, draft=folder, dtype="float32", device="cpu")
    assert pair.draft_config.block_size == 8
    assert len(pair.draft_config.layer_windows) == 1
    modes = {path.name: oct(path.stat().st_mode) for path in folder.iterdir()}
    assert len(set(modes.values())) == 1  # whoever may read the card may read the weights


@pytest.mark.slow
def test_every_stage_says_first_how_long_and_how_much_disk(trained):
    _, lines = trained
    for number, stage in enumerate(("prompts", "answers", "features", "fit"), start=1):
        told = [line for line in lines if line.startswith(f"stage {number} of 4, {stage}: about ")]
        assert len(told) == 1 and " min and " in told[0] and " MB in " in told[0]


@pytest.mark.slow
def test_curves_and_card_come_from_the_run(trained):
    folder, _ = trained
    curve = pd.read_parquet(folder / "curve.parquet")
    assert {"loss", "held-out tau", "accuracy", "held-out survival"} == set(curve.name)
    assert sorted(set(curve.step)) == [3, 6]
    facts = json.loads((folder / "training.json").read_text())
    taus = pd.read_parquet(folder / "evaluation.parquet")
    card = (folder / "README.md").read_text()
    assert f"{facts['answer_tokens']:,} tokens" in card
    assert f"{facts['parameters']:,} parameters" in card
    row = taus[taus.block_size == 8]
    assert f"| {row.emitted.sum() / row.blocks.sum():.2f} [" in card
    assert "dflash-lab train" in card and facts["target"] in card
    settings = "--written-prompts 12", "--framed-prompts 0", "--layers 1"
    for setting in (*settings, "--steps 6", "--evaluate-every 3"):
        assert setting in card
    assert "--optimizer" not in card  # the usual one
    assert "--evaluate questions.jsonl" in card
    assert str(folder.parent) not in card + (folder / "training.json").read_text()


@pytest.mark.slow
def test_a_second_run_repeats_nothing_and_gives_the_same_weights(trained, settings, tmp_path):
    folder, _ = trained
    again = replace(settings, out=str(tmp_path / "draft"), work=f"{settings.out}.work")
    lines = []
    train_draft(again, lines.append)
    assert {"prompts: done before", "answers: done before", "features: done before"} <= set(lines)
    first, second = (f / "model.safetensors" for f in (folder, tmp_path / "draft"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.slow
def test_a_fit_goes_on_from_a_draft_in_its_own_form(trained, settings, tmp_path):
    before, _ = trained
    shutil.copytree(f"{settings.out}.work", tmp_path / "work")
    shutil.rmtree(tmp_path / "work" / "fit")
    (tmp_path / "work" / "plan.json").write_text(
        json.dumps({"target": json.loads((tmp_path / "work" / "plan.json").read_text())["target"]})
    )
    further = replace(
        settings,
        draft=str(before),
        layers=None,
        block_size=None,
        out=str(tmp_path / "draft"),
        work=str(tmp_path / "work"),
        fit=replace(FIT, learning_rate=1e-12),  # weights stay where they began
    )
    lines = []
    after = train_draft(further, lines.append)
    assert f"the fit begins with the draft {before}" in lines
    first, second = (load_file(folder / "model.safetensors") for folder in (before, after))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (after / "config.json").read_bytes() == (before / "config.json").read_bytes()
    told = json.loads((after / "training.json").read_text())["start"]
    assert told["fingerprint"] == draft_fingerprint(before)
    assert told["training"] == json.loads((before / "training.json").read_text())
    assert told["training"]["start"] is None
    card = (after / "README.md").read_text()
    assert "- began as: the draft `draft` (sha256 of settings and weights " in card
    assert "--draft draft" in card and "--layers" not in card
    assert read_ngrams(after) == read_ngrams(before)

    other = replace(further, draft=None, layers=1, block_size=8)
    with pytest.raises(ValueError, match="was begun with another draft to go on from"):
        train_draft(other, lambda line: None)


def test_what_a_draft_was_trained_on_stays_known_when_another_goes_on_from_it(tmp_path):
    counts = RowCounts()
    counts.ngrams |= ngram_hashes("one two three four five six seven eight nine ten a b c d")
    assert len(counts.ngrams) == 2
    write_manifest(tmp_path, counts, [], {})
    assert read_ngrams(tmp_path) == counts.ngrams
    assert read_ngrams(tmp_path / "none") == set()


@pytest.mark.parametrize("form", [{"layers": 2}, {"block_size": 16}, {"taps": (1,)}])
def test_a_draft_to_go_on_from_keeps_its_form(form):
    with pytest.raises(ValueError, match=f"{next(iter(form))} cannot be given beside draft 'd'"):
        TrainConfig(target="t", out="o", draft="d", **form)


def test_a_draft_that_training_cannot_go_on_from_is_told_before_the_first_stage(
    settings, llama_toy, tmp_path
):
    bare = replace(settings, layers=None, block_size=None, out=str(tmp_path / "d"))
    with pytest.raises(ModelUnavailable, match=r"the draft .*nowhere' is neither a folder"):
        train_draft(replace(bare, draft=str(tmp_path / "nowhere")))
    for told, changes, error in (
        ("is a DFlash 2 draft", {"dflash_config": SELECTS, "architectures": TWO}, UnsupportedDraft),
        ("trained for another target", {"hidden_size": 32, "head_dim": 8}, WidthMismatch),
    ):
        folder = tmp_path / told.replace(" ", "-")
        nested = draft_json()["dflash_config"] | changes.pop("dflash_config", {})
        save_draft(folder, llama_toy.load().models.target.config, dflash_config=nested, **changes)
        with pytest.raises(error, match=told):
            train_draft(replace(bare, draft=str(folder)))
    (folder / "model.safetensors").write_bytes(b"cut off")
    shutil.copy(llama_toy.draft / "config.json", folder)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        train_draft(replace(bare, draft=str(folder)))
    assert not bare.work_folder.exists()


@pytest.mark.slow
def test_until_stops_after_a_stage(settings, tmp_path):
    short = replace(settings, out=str(tmp_path / "d"), until="answers")
    assert train_draft(short, lambda line: None) is None
    assert not (tmp_path / "d").exists()
    assert list((tmp_path / "d.work" / "answers").glob("shard-*.parquet"))


def test_a_target_that_is_none_is_one_clear_error(settings, tmp_path):
    with pytest.raises(ModelUnavailable, match="neither a folder here nor a hub id"):
        train_draft(replace(settings, target=str(tmp_path / "nowhere")))


def test_an_empty_prompt_file_is_one_clear_error(settings, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(ValueError, match=r"empty\.jsonl holds no prompts"):
        train_draft(replace(settings, out=str(tmp_path / "d"), prompts=(str(empty),)))


def test_a_row_without_a_question_names_file_and_row(settings, tmp_path):
    odd = tmp_path / "odd.jsonl"
    odd.write_text('{"prompt": "What?"}\n{"answer": "x"}\n')
    with pytest.raises(ValueError, match=r"odd\.jsonl, row 2: none of the columns"):
        train_draft(replace(settings, out=str(tmp_path / "d"), prompts=(str(odd),)))


@pytest.mark.parametrize(
    ("setting", "value", "told"),
    [
        ("taps", (4,), r"taps is \(4,\); expected different layers of the target, 0 to 3"),
        ("taps", (), r"taps is \(\); expected different layers"),
        ("taps", (1, 1), r"taps is \(1, 1\); expected different layers"),
        ("mask_token", 512, "mask_token is 512; expected a token of the target, 0 to 511"),
        ("max_new_tokens", 1024, "max_new_tokens is 1024; expected fewer than the target's con"),
    ],
)
def test_what_the_target_cannot_have_is_told_before_the_first_stage(
    settings, tmp_path, setting, value, told
):
    config = replace(settings, out=str(tmp_path / "d"), **{setting: value})
    with pytest.raises(ValueError, match=told):
        train_draft(config)
    assert not config.work_folder.exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", r"rows\.jsonl holds no rows"),
        ("no json\n", r"rows\.jsonl, line 1: expected one JSON object a line"),
        ("\n[1, 2]\n", r"rows\.jsonl, line 2: expected one JSON object a line"),
        ('{"prompt": "x"}\n', r"rows\.jsonl, row 1: expected `prompt`"),
        ('{"prompt": "x", "response_ids": [1, 512]}\n', "512 is no token of this target"),
        ('{"prompt": "x", "response_ids": [1.5]}\n', r"1\.5 is no token of this target"),
    ],
)
def test_rows_that_are_none_are_told_before_the_first_stage(settings, tmp_path, text, told):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(text)
    config = replace(settings, out=str(tmp_path / "d"), rows=(str(rows),))
    with pytest.raises(ValueError, match=told):
        train_draft(config)
    assert not config.work_folder.exists()


def test_an_evaluation_file_without_questions_is_told_before_the_first_stage(settings, tmp_path):
    odd = tmp_path / "odd.jsonl"
    odd.write_text('{"answer": "x"}\n')
    config = replace(settings, out=str(tmp_path / "d"), evaluate=(str(odd),))
    with pytest.raises(ValueError, match=r"odd\.jsonl, row 1: none of the columns"):
        train_draft(config)
    assert not config.work_folder.exists()


def test_another_draft_is_not_written_over(settings, tmp_path):
    out = tmp_path / "d"
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"somebody's")
    config = replace(settings, out=str(out), work=str(tmp_path / "work"), until="prompts")
    with pytest.raises(FileExistsError, match=r"d holds a draft that was not made from .*work"):
        train_draft(config, lambda line: None)
    assert (out / "model.safetensors").read_bytes() == b"somebody's"
    with pytest.raises(ValueError, match="which is a file"):
        replace(settings, out=str(out / "model.safetensors"))


def test_prompts_longer_than_the_context_are_left_out_and_counted(settings, tmp_path):
    long = tmp_path / "long.jsonl"
    long.write_text('{"prompt": "short"}\n' + json.dumps({"prompt": "x" * 1000}) + "\n")
    own = {"prompts": (str(long),), "written_prompts": 0, "until": "prompts"}
    lines = []
    train_draft(replace(settings, out=str(tmp_path / "d"), **own), lines.append)
    assert [line for line in lines if "left out" in line] == [
        "1 of them left out: with 40 new tokens they are longer than the target's context of 1024"
    ]


def test_prompts_to_evaluate_on_need_a_tokenizer_and_this_is_told_at_once(settings, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(settings.target, bare, ignore=shutil.ignore_patterns("*token*"))
    config = replace(settings, target=str(bare), out=str(tmp_path / "d"), prompts=())
    with pytest.raises(ValueError, match="bare has no tokenizer"):
        train_draft(config)
    assert not config.work_folder.exists()


def test_a_set_whose_answers_all_loop_has_a_card_all_the_same():
    counts = {"block_size": 8, "blocks": 50, "emitted": 95}
    taus = tau_table(
        pd.DataFrame(
            [
                {"prompt": 0, "looped": True, "dataset": "all", **counts},
                {"prompt": 0, "looped": True, "dataset": "some", **counts},
                {"prompt": 1, "looped": False, "dataset": "some", **counts},
            ]
        )
    )
    facts = {"target": "t", "layers": 1, "block_size": 8, "parameters": 1, "taps": [1]}
    text = card(
        facts | {"mask_token": 2, "held_out": 1, "start": None, "fit": {}},
        RowCounts(),
        taus,
        "command",
    )
    assert "| all (1) | 8 | 1.90 (one prompt, no interval) | none |" in text
    assert "| some (2) | 8 | 1.90 [1.90, 1.90] | 1.90 (one prompt, no interval) (1) |" in text


def test_too_little_disk_is_told_before_anything_is_written(settings, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10, 10, 1000))
    with pytest.raises(OSError, match=r"stage prompts takes .* MB free\. Make room"):
        train_draft(replace(settings, out=str(tmp_path / "d")), lambda line: None)


@pytest.mark.slow
def test_another_targets_work_is_refused(settings, trained, qwen3_toy):
    other = replace(settings, target=str(qwen3_toy.target))
    with pytest.raises(ValueError, match="work for another target"):
        train_draft(other, lambda line: None)


@pytest.mark.slow
def test_a_fit_that_was_begun_with_other_settings_is_refused_and_says_which(settings, trained):
    other = replace(settings, fit=replace(FIT, learning_rate=1e-3))
    with pytest.raises(ValueError, match=r"begun with learning_rate 0\.0015 \(now 0\.001\)"):
        train_draft(other, lambda line: None)


def test_a_second_run_on_a_work_folder_is_refused_while_the_first_is_alive(settings, tmp_path):
    config = replace(settings, out=str(tmp_path / "d"), until="prompts")
    first = Leases(cells=config.work_folder)
    assert first.take(config.work_folder)
    with pytest.raises(RuntimeError, match=r"another run is at work in .*d\.work"):
        train_draft(config, lambda line: None)
    first.close()
    assert train_draft(config, lambda line: None) is None


def test_taps_are_different_layers_of_the_target_and_evenly_spaced_where_there_is_room():
    assert pick_taps(30) == (1, 8, 14, 20, 27)
    assert (pick_taps(4), pick_taps(2), pick_taps(1)) == ((0, 1, 2), (0,), (0,))
    for layers in range(1, 80):
        taps = pick_taps(layers)
        assert len(set(taps)) == len(taps) and 0 <= min(taps) <= max(taps) < layers


def test_the_mask_is_a_token_that_no_row_holds():
    tokenizer = byte_tokenizer()
    used = set(range(300))
    mask = pick_mask_token(tokenizer, 512, used)
    assert mask not in used | {tokenizer.eos_token_id, tokenizer.pad_token_id}
    assert pick_mask_token(tokenizer, len(tokenizer) + 8, used) == len(tokenizer)
    assert pick_mask_token(None, 512, used) == 511
    with pytest.raises(ValueError, match="every one of the target's 300 tokens"):
        pick_mask_token(None, 300, used)


def test_settings_are_checked():
    with pytest.raises(ValueError, match="minutes is 0"):
        TrainConfig(target="t", out="d", minutes=0.0)
    with pytest.raises(ValueError, match="minutes is inf"):
        TrainConfig(target="t", out="d", minutes=float("inf"))
    with pytest.raises(ValueError, match="temperature is nan"):
        TrainConfig(target="t", out="d", temperature=float("nan"))
    with pytest.raises(ValueError, match="block_size is 1"):
        TrainConfig(target="t", out="d", block_size=1)
    with pytest.raises(ValueError, match="until is 'end'"):
        TrainConfig(target="t", out="d", until="end")
    for wrong in (
        {"steps": 0},
        {"learning_rate": float("nan")},
        {"average": 1.0},
        {"soft": 2.0},
        {"evaluate_every": -1},
        {"patience": 0},  # would end the fit before its first step
    ):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} is"):
            FitConfig(**wrong)
    with pytest.raises(ValueError, match="width is 1"):
        FitConfig(widths=((1, 0.5),))


def test_whatever_the_cards_command_may_say_the_command_takes():
    options = get_command(app).commands["train"].params
    flags = {flag for option in options for flag in option.opts}
    assert {f"--{name.replace('_', '-')}" for name in (*SETTINGS, *FIT_SETTINGS)} <= flags


def test_widths_are_read_from_the_command_line_and_written_back():
    assert width_shares("4:0.2,16:0.8") == ((4, 0.2), (16, 0.8))
    assert width_shares("2") == ((2, 1.0),)
    assert typed(((4, 0.2), (16, 0.8))) == "4:0.2,16:0.8"
    with pytest.raises(ValueError, match="widths is '4;8'"):
        width_shares("4;8")
