"""The batched anchor pass in MLX: beside torch on the same pair, and beside one block at a time."""

from contextlib import closing
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from transformers import AutoConfig

from dflash_lab import DecodeConfig, acceptance_map, decode, load_pair, replay_traces
from dflash_lab.backends.mlx_anchors import read_anchors
from dflash_lab.policies import ConfidenceThreshold
from dflash_lab.replay import InconsistentText, Text
from dflash_lab.tests.test_torch_model import FORMS
from dflash_lab.tests.toys import save_draft
from dflash_lab.tests.variants import prompts, text

pytestmark = pytest.mark.usefixtures("quiet")

NEW = 14


@pytest.fixture(scope="module")
def pairs():
    """The trained tiny pair in torch and in MLX."""
    settings = {"dtype": "float32", "device": "cpu"}
    return [load_pair("tiny", backend=name, **settings) for name in ("torch", "mlx")]


@pytest.fixture(scope="module")
def read(pairs):
    """One text as both backends have read it."""
    prompt = prompts(1)[0]
    return [pair.models.anchors(prompt, text(prompt, NEW)) for pair in pairs]


def test_the_target_reads_the_text_as_torch_does(read):
    theirs, ours = read
    assert ours.choices == theirs.choices == list(text(prompts(1)[0], NEW))
    assert set(ours.margins) == {0.0}
    for mine, other in zip(ours.context, theirs.context, strict=True):
        for a, b in zip(mine, other, strict=True):
            np.testing.assert_allclose(np.array(a), b.numpy(), atol=1e-4)


@pytest.mark.parametrize(("size", "window"), [(8, None), (8, 4), (3, 16)])
def test_blocks_at_every_anchor_are_those_of_torch(read, size, window):
    everywhere = range(NEW - 1)
    theirs, ours = (one.proposals(everywhere, size, window) for one in read)
    assert [one.drafted for one in ours] == [one.drafted for one in theirs]
    sure = [np.array([one.confidences for one in some]) for some in (ours, theirs)]
    np.testing.assert_allclose(*sure, atol=1e-5)
    counts = [one.accepted(everywhere, size, window) for one in read]
    assert counts[0] == counts[1]
    if window is None:
        assert len(set(counts[1])) > 2  # else this shows little


def test_blocks_at_many_anchors_are_what_live_blocks_draft(pairs):
    pair, prompt = pairs[1], prompts(1)[0]
    tokens = text(prompt, 7)
    found = pair.models.anchors(prompt, tokens).proposals(range(6), 8, 5)
    with closing(pair.models.session(5, speculate=True)) as session:
        session.prefill(prompt)
        for token, mine in zip(tokens[:-1], found, strict=True):
            block = session.draft(token, 8)
            assert mine.drafted == tuple(block.tokens[0, 1:].tolist())
            assert mine.confidences == pytest.approx(session.confidences(block), abs=1e-5)
            session.verify(block, rows=1)
            session.commit(0)


@pytest.mark.parametrize("form", ["dflash 2", "mixed"])
def test_other_forms_of_draft_agree_with_torch(qwen3_toy, tmp_path, form):
    save_draft(tmp_path / "draft", AutoConfig.from_pretrained(qwen3_toy.target), **FORMS[form])
    other = replace(qwen3_toy, draft=tmp_path / "draft")
    prompt, tokens = other.prompts[0], other.greedy[0][:6]
    told = [
        other.load(backend=name).models.anchors(prompt, tokens).proposals(range(5), 6, 7)
        for name in ("torch", "mlx")
    ]
    assert [one.drafted for one in told[0]] == [one.drafted for one in told[1]]


def test_a_selector_goes_by_the_texts_own_token_before_each_slot(pairs, monkeypatch):
    prompt, told = prompts(1)[0], []
    tokens, network = text(prompt, 6), pairs[1].models.draft
    choose = network.choose

    def noting(states, head, previous):
        told.append(previous.tolist())
        return choose(states, head, previous)

    anchors = pairs[1].models.anchors(prompt, tokens)
    monkeypatch.setattr(network, "choose", noting)
    [count] = anchors.accepted([0], 4, None)
    assert told == [[token] for token in tokens[: len(told)]]
    assert len(told) == min(3, count + 1) > 1


def test_budget_and_chunk_change_the_batches_and_not_the_counts(pairs):
    models, prompt = pairs[1].models, prompts(1)[0]
    tokens = text(prompt, 6)
    wanted = models.anchors(prompt, tokens)
    anchors = read_anchors(models.target, models.draft, prompt, tokens, 5)
    assert anchors.choices == wanted.choices
    anchors.budget = 1
    assert anchors.accepted(range(5), 4, None) == wanted.accepted(range(5), 4, None)


def test_numbers_that_overflow_in_the_draft_are_told(pairs):
    prompt = prompts(1)[0]
    anchors = pairs[1].models.anchors(prompt, text(prompt, 4))
    anchors.accepted(range(2), 4, None)
    assert anchors.finite
    head = anchors.head
    anchors.head = lambda states: head(states) * mx.inf
    anchors.accepted(range(2), 4, None)
    assert not anchors.finite


def test_a_map_made_in_mlx_replays_live_mlx_decoding_policies_included(pairs):
    pair, prompt = pairs[1], prompts(1)[0]
    asked = Text(prompt_id="p", prompt_ids=prompt, tokens=text(prompt, 10))
    made = acceptance_map(pair, [asked], (4, 8), (None, 4), confidences=True)
    policy = ConfidenceThreshold(threshold=0.5)
    for size, window, steered in [(4, None, None), (8, 4, None), (8, None, policy)]:
        settings = DecodeConfig(
            block_size=size, draft_window=window, max_new_tokens=10, policy=steered
        )
        live = decode(pair, prompt, settings)
        [trace] = replay_traces(made, size, window, policy=steered)
        names = ("start", "block_size", "rows", "emitted", "cut")
        told = [
            [tuple(getattr(b, n) for n in names) for b in some.blocks] for some in (live, trace)
        ]
        assert told[0] == told[1]
    assert made.facts["backend"] == "mlx"


def test_a_text_that_the_target_would_not_write_is_refused(pairs):
    prompt = prompts(1)[0]
    wrong = list(text(prompt, 6))
    wrong[3] = (wrong[3] + 1) % 256
    with pytest.raises(InconsistentText, match="at position"):
        acceptance_map(
            pairs[1], [Text(prompt_id="p", prompt_ids=prompt, tokens=tuple(wrong))], (4,)
        )
