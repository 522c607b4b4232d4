"""The pair in `data/tiny_pair`: small, exact, alive, alike in both backends, from a recipe."""

import itertools
import re
from dataclasses import replace

import pytest
import torch

from dflash_lab import DecodeConfig, decode, load_pair
from dflash_lab.analyse import repetition
from dflash_lab.load import EMBEDDED, TARGETS, flat_ids, spec_of_draft
from dflash_lab.prompts import load_prompts
from dflash_lab.train.fit import FitConfig
from dflash_lab.train.tiny import (
    END,
    FOLDER,
    LONGEST,
    MEASURED,
    SIZE,
    VOCABULARY,
    TinyConfig,
    answer,
    make_pair,
    measure,
    tiny_tokenizer,
)

WINDOWS = (4, 16, 64, None)
NEAR_TIE = 1e-3  # logits; torch and MLX differ by less than a hundredth of it


@pytest.fixture(scope="module")
def pair():
    return load_pair("tiny", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def made():
    """The 28 short bundled prompts, answered by the target alone and walked with the draft."""
    return measure(FOLDER, [(8, window) for window in WINDOWS])


@pytest.fixture(scope="module")
def ids(pair):
    return [pair.encode(prompt.turns[0]).ids for prompt in load_prompts()]


def test_both_models_with_tokenizer_and_card_take_under_a_megabyte():
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in files
    }
    assert sum(path.stat().st_size for path in files) < 1_000_000


def test_the_pair_goes_by_its_name_and_by_the_folder_of_its_draft(pair):
    assert (pair.spec.name, pair.draft_config.block_size) == ("tiny", 16)
    assert spec_of_draft(EMBEDDED["tiny"]).name == "tiny"
    assert TARGETS["tiny"].is_dir() and pair.models.context_limit >= 2048


@pytest.mark.slow
def test_decoding_says_what_the_target_says_alone_and_accepts_what_the_walk_does(pair, made, ids):
    config, accepted = DecodeConfig(block_size=8, max_new_tokens=LONGEST), []
    for prompt, alone in list(zip(ids, made.answers, strict=True))[:3]:
        trace = decode(pair, prompt, config)
        assert trace.tokens == alone
        accepted += [block.accepted for block in trace.blocks if not block.cut]
    assert accepted == made.accepted[8, None][: len(accepted)]


@pytest.mark.slow
def test_acceptance_at_block_size_8_is_alive_and_survival_falls(made):
    accepted = made.accepted[8, None]
    survival = [sum(count >= k for count in accepted) / len(accepted) for k in range(1, 8)]
    assert 2.5 < 1 + sum(survival) < 6
    assert all(later < earlier for earlier, later in itertools.pairwise([1.0, *survival]))


@pytest.mark.slow
def test_a_wider_window_brings_a_longer_acceptance(made):
    taus = [made.tau(8, window) for window in WINDOWS]
    assert all(wide - narrow > 0.1 for narrow, wide in itertools.pairwise(taus))


@pytest.mark.slow
def test_the_card_tells_what_is_measured(made):
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    told = re.findall(r"\d\.\d\d", card.partition("draft window at block size 8")[2])
    taus = [made.tau(8, window) for window in WINDOWS]
    assert [float(number) for number in told] == pytest.approx(taus, abs=0.02)


@pytest.mark.slow
def test_near_ties_are_as_good_as_none(pair, made, ids):
    gaps = []
    for prompt, tokens in zip(ids, made.answers, strict=True):
        with torch.inference_mode():
            logits = pair.models.target.model(torch.tensor([[*prompt, *tokens]])).logits[0]
        best = logits[len(prompt) - 1 : -1].topk(2).values
        gaps.append(best[:, 0] - best[:, 1])
    assert (torch.cat(gaps) < NEAR_TIE).float().mean() < 1e-3


@pytest.mark.slow
def test_answers_end_by_themselves_do_not_loop_and_differ(made):
    assert all(tokens[-1] == END and len(tokens) >= 40 for tokens in made.answers)
    assert sum(repetition(tokens).looped for tokens in made.answers) <= 2
    assert len(set(made.answers)) >= 22


@pytest.mark.slow
def test_answers_are_in_the_language_and_mostly_the_one_that_belongs_to_the_prompt(pair, made, ids):
    texts = [pair.text(tokens) for tokens in made.answers]
    for text in texts:
        assert text.startswith("Today ") and "\nAt last " in text and text.endswith(".")
    assert sum(text == answer(prompt) for text, prompt in zip(texts, ids, strict=True)) >= 14


def test_both_backends_tell_one_story(pair):
    twin = load_pair("tiny", backend="mlx", dtype="float32")
    for window in (None, 4):
        config = DecodeConfig(block_size=8, draft_window=window, max_new_tokens=16)
        told = [decode(one, "Give me five tips.", config) for one in (pair, twin)]
        blocks = [[(b.drafted, b.posterior, b.accepted) for b in trace.blocks] for trace in told]
        assert blocks[0] == blocks[1]


def test_mlx_lm_loads_target_and_tokenizer(pair):
    from mlx_lm import load

    _, tokenizer = load(str(TARGETS["tiny"]))
    message = [{"role": "user", "content": "naïve 🙂 lamp"}]
    ids = tokenizer.apply_chat_template(message, add_generation_prompt=True)
    assert flat_ids(ids) == pair.encode(message).ids


def test_any_text_is_encoded_and_the_longest_bundled_prompt_fits(pair):
    assert len(VOCABULARY) == SIZE == pair.models.vocabulary
    text = "Today the lamp naïve 机器学习 🙂👩‍👩‍👧 ď\n\x00 lamps"
    ids = pair.encode(text, chat=False).ids
    assert pair.text(ids) == text
    assert {VOCABULARY["Today"], VOCABULARY["\u0120lamp"]} <= set(ids)
    for prompt in load_prompts("mini", categories=["long"]):
        assert len(pair.encode(prompt.turns[0]).ids) < pair.models.context_limit - 256


def test_an_answer_is_words_of_the_language_and_hangs_on_the_prompts_end():
    ids = tiny_tokenizer()(answer(b"......red."))["input_ids"]
    assert {token for token in ids if token < 256} <= set(b".,\n12345")
    assert answer(b"abcdefghijklmnop") != answer(b"bcdefghijklmnopq")
    assert answer(b"") == answer([])


@pytest.mark.slow
def test_the_recipe_runs_from_start_to_end_and_twice_gives_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.setattr("dflash_lab.train.tiny.LONGEST", 32)
    quick = FitConfig(
        steps=4,
        rows_a_step=4,
        frequent=SIZE,
        sampled=0,
        bfloat16=False,
        evaluate_every=2,
        optimizer="muon",
    )
    config = TinyConfig(steps=8, texts_a_step=4, prompts=24, fit=quick)
    lines: list[str] = []
    for name in ("first", "second"):
        make_pair(tmp_path / name, config, lines.append)
    for part in ("target", "draft"):
        weights = [tmp_path / name / part / "model.safetensors" for name in ("first", "second")]
        assert weights[0].read_bytes() == weights[1].read_bytes()
    folder = tmp_path / "first"
    taus = measure(folder)
    assert set(taus.accepted) == set(MEASURED)
    assert f"| {taus.tau(2):.2f} | " in (folder / "README.md").read_text()
    pair = load_pair(
        target=folder / "target", draft=folder / "draft", dtype="float32", device="cpu"
    )
    trace = decode(pair, "Hello.", replace(DecodeConfig(), max_new_tokens=6))
    assert len(trace.tokens) == 6
