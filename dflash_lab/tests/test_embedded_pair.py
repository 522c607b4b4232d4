"""The embedded pair: the draft as it lies in data/, and what it does with the real target."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

import dflash_lab as dl
from dflash_lab.exactness import read_audits
from dflash_lab.load import EMBEDDED
from dflash_lab.train.rows import ngram_hashes

DRAFT = EMBEDDED["smollm2"]
DATASETS = os.environ.get("DFLASH_LAB_DATASETS")
needs_datasets = pytest.mark.skipif(
    DATASETS is None, reason="DFLASH_LAB_DATASETS is not set: no sample data sets here"
)


@pytest.fixture(scope="module")
def float32_pair():
    return dl.load_pair("smollm2", dtype="float32")


def training():
    return json.loads((DRAFT / "training.json").read_text())


def manifest():
    """The hashed runs of 13 words that the training prompts hold."""
    raw = (DRAFT / "training_ngrams.bin").read_bytes()
    return {raw[at : at + 5] for at in range(0, len(raw), 5)}


def texts_of(path):
    """Every text in a prompt file, whatever its columns are called."""
    for line in path.read_text(encoding="utf-8").splitlines():
        for value in json.loads(line).values():
            yield from (v for v in (value if isinstance(value, list) else [value]))


def test_the_draft_is_an_upstream_folder_of_the_promised_shape():
    from safetensors import safe_open

    from dflash_lab.checkpoint import check_tensors, read_draft_config

    config = read_draft_config(DRAFT)
    assert (config.block_size, config.trained_block_size) == (16, 16)
    assert config.target_layer_ids == (1, 8, 14, 20, 27)
    assert config.mask_token == 16  # <empty_output>, which no training text holds
    assert config.notes == ()
    with safe_open(DRAFT / "model.safetensors", framework="np") as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, no mapping
        check_tensors(config, {name: part.get_shape() for name, part in parts.items()})
        assert {part.get_dtype() for part in parts.values()} == {"BF16"}
    assert (DRAFT / "model.safetensors").stat().st_size <= 30e6
    card = (DRAFT / "README.md").read_text()
    assert "SmolLM2-135M-Instruct" in card
    assert "tau" in card


def test_no_bundled_prompt_shares_13_words_with_the_training_prompts():
    seen, prompts = manifest(), (*dl.load_prompts(), *dl.load_prompts(categories=["long"]))
    assert len(seen) == training()["ngrams"] > 10_000
    shared = {p.id for p in prompts if seen & set().union(*map(ngram_hashes, p.turns))}
    assert shared == set()


@needs_datasets
@pytest.mark.parametrize("name", ["gsm8k", "humaneval", "mt-bench", "spec-bench"])
def test_no_evaluation_prompt_shares_13_words_with_the_training_prompts(name):
    seen = manifest()
    for path in (Path(DATASETS) / name).glob("*.jsonl"):
        grams = set().union(
            *(ngram_hashes(text) for text in texts_of(path) if isinstance(text, str))
        )
        assert len(grams) > 100
        assert not grams & seen


@needs_datasets
@pytest.mark.slow
def test_the_manifest_holds_the_answers_that_were_given_to_the_recipe():
    from dflash_lab.train.rows import imported_rows, usable

    samples = [p for p in Path(DATASETS).glob("*/*.jsonl") if "selfgen" not in str(p)]
    bundled = Path(dl.prompts.DATA) / "prompts" / "mini.jsonl"
    forbidden = [t for path in (*samples, bundled) for t in texts_of(path) if isinstance(t, str)]
    tokenizer = dl.load_pair("smollm2").tokenizer
    rows = imported_rows(
        Path(DATASETS) / "smollm2-selfgen" / "greedy-256.jsonl.gz", tokenizer, 49152
    )
    _, counts = usable(rows, tokenizer, forbidden)
    assert len(counts.ngrams) > 90_000
    assert counts.ngrams < manifest()  # the others are of prompts from the run itself
    assert counts.used < training()["rows_used"]


def test_the_draft_was_trained_on_as_much_text_as_was_promised():
    assert training()["answer_tokens"] >= 2_500_000
    assert training()["overlapping_dropped"] == 0


def test_tau_on_public_samples_is_what_the_card_says_and_what_was_asked_for():
    from dflash_lab.train.evaluate import tau_table

    measured = pd.read_parquet(DRAFT / "evaluation.parquet")
    assert set(measured.groupby("dataset").prompt.nunique()) == {20}
    taus = tau_table(measured)
    card = (DRAFT / "README.md").read_text()
    assert all(
        f"{row.tau:.2f} [{row.low:.2f}, {row.high:.2f}]" in card for row in taus.itertuples()
    )
    free = taus[taus.loop_free & (taus.block_size == 8)]
    assert set(free.dataset) == {"gsm8k", "humaneval", "mt-bench"}
    assert free.tau.min() >= 1.6
    assert free.tau.mean() >= 1.85


@needs_datasets
@pytest.mark.slow
def test_other_prompts_of_the_same_sets_go_about_as_well(float32_pair):
    from dflash_lab.train.evaluate import acceptance, greedy_texts, questions
    from dflash_lab.train.rows import prompt_ids

    files = ("gsm8k/test-sample", "humaneval/test-sample", "mt-bench/question-sample")
    asked = [q for name in files for q in questions(Path(DATASETS) / f"{name}.jsonl")[20:28]]
    ids = [prompt_ids(float32_pair.tokenizer, text) for text in asked]
    models = float32_pair.models
    texts = greedy_texts(models.target, ids, 64, float32_pair.stop_tokens)
    table = acceptance(models.draft, models.target, texts, (8,))
    assert len(table) == len(asked)
    assert table.emitted.sum() / table.blocks.sum() >= 0.9 * 1.85


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("block_size", [1, 4, 8, 16])
def test_tokens_in_float32_equal_transformers_generate(float32_pair, block_size, window):
    config = dl.DecodeConfig(block_size=block_size, draft_window=window, max_new_tokens=24)
    made = dl.audit(float32_pair, dl.load_prompts(limit=3), config=config)
    assert [row.first_difference for row in made.prompts] == [None] * 3


@pytest.mark.slow
def test_tokens_in_float32_equal_a_loop_without_any_cache(float32_pair):
    from dflash_lab.tests.toys import greedy

    trace = dl.decode(
        float32_pair,
        dl.load_prompts(limit=1)[0].turns[0],
        dl.DecodeConfig(block_size=8, max_new_tokens=24),
    )
    tokens, _ = greedy(float32_pair.models.target.model, trace.prompt_ids, 24)
    assert trace.tokens == tokens


@pytest.mark.slow
def test_tau_at_block_size_8_on_the_bundled_prompts_is_what_the_draft_promises(tmp_path):
    config = dl.SweepConfig(dtype="float32", block_sizes=(8,), max_new_tokens=48, warm_up=False)
    run = dl.sweep(config, tmp_path / "run")
    row = dl.cell_frame(run).iloc[0]
    assert row.prompts == len(dl.load_prompts())
    assert row.tau >= 1.35
    assert row.tau_low > 1.15


@pytest.mark.slow
def test_a_long_prompt_is_decoded_within_a_window(float32_pair):
    prompt = dl.load_prompts(categories=["long"], limit=1)[0].turns[0]
    config = dl.DecodeConfig(block_size=8, draft_window=64, max_new_tokens=12)
    trace = dl.decode(float32_pair, prompt, config)
    assert len(trace.prompt_ids) > 900
    assert {block.draft_cache_tokens for block in trace.blocks} == {64}
    made = float32_pair.models.library_generate(trace.prompt_ids, 12, float32_pair.stop_tokens)
    assert trace.tokens == made.tokens


@pytest.mark.slow
def test_the_demo_ends_in_a_choice_a_check_figures_and_a_report(tmp_path, monkeypatch):
    from dflash_lab import demo

    small = replace(
        demo.SWEEP,
        block_sizes=(1, 4, 8),
        windowed_block_sizes=(8,),
        max_prompts=2,
        max_new_tokens=8,
    )
    monkeypatch.setattr(demo, "SWEEP", small)
    monkeypatch.setattr(demo, "block_seconds", lambda dtype: 0.1)  # bfloat16 on every machine
    made = demo.run_demo(tmp_path / "demo")
    exact, rounded = read_audits(made.run)
    assert (exact.dtype, exact.count("equal")) == ("float32", 2)
    assert (rounded.dtype, rounded.count("mismatch")) == ("bfloat16", 0)
    assert made.choice.block_size in (1, 4, 8)
    assert made.report.is_file()
    assert {path.suffix for path in (tmp_path / "demo" / "figures").iterdir()} >= {".svg", ".png"}
    engines = {(cell.engine, cell.dtype) for cell in made.run.cells}
    assert engines >= {("dflash_lab", "float32"), ("transformers", "bfloat16")}
    before = {cell.id: cell.provenance["ended_utc"] for cell in made.run.cells}
    again = demo.run_demo(tmp_path / "demo")  # what is finished is not done again
    assert {cell.id: cell.provenance["ended_utc"] for cell in again.run.cells} == before
