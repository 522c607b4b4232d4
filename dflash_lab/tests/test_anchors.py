"""The batched anchor pass beside one block at a time, and beside the live session."""

from contextlib import closing

import pytest
import torch

from dflash_lab.backends.torch_anchors import BUDGET, accepted_counts, read_anchors, walk
from dflash_lab.tests.variants import FORMS, prompts, text, variant

CHUNK = 1024


def live_blocks(pair, prompt, tokens, size, window):
    """Drafts and confidences of a block at each anchor, by a session that goes token by token."""
    with closing(pair.models.session(window, speculate=True)) as session:
        session.prefill(prompt)
        for token in tokens[:-1]:
            block = session.draft(token, size)
            yield tuple(block.tokens[0, 1:].tolist()), session.confidences(block)
            session.verify(block, rows=1)
            session.commit(0)


def leading(drafted, tokens, n):
    follows = list(zip(drafted, tokens[n + 1 :], strict=False))
    return next((k for k, (mine, its) in enumerate(follows) if mine != its), len(follows))


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("form", FORMS)
def test_many_anchors_at_once_draft_what_live_blocks_draft(form, window):
    pair, prompt, size = variant(form), prompts(1)[0], 8
    tokens = text(prompt, 24)
    anchors = pair.models.anchors(prompt, tokens)
    everywhere = range(len(tokens) - 1)
    live = list(live_blocks(pair, prompt, tokens, size, window))
    found = anchors.proposals(everywhere, size, window)
    assert [one.drafted for one in found] == [drafted for drafted, _ in live]
    sure = torch.tensor([one.confidences for one in found])
    torch.testing.assert_close(sure, torch.tensor([c for _, c in live]), atol=1e-5, rtol=1e-5)
    counts = [leading(drafted, tokens, n) for n, (drafted, _) in enumerate(live)]
    assert anchors.accepted(everywhere, size, window) == counts
    if window is None:
        assert len(set(counts)) > 2  # else this shows little


@pytest.mark.parametrize("budget", [1, 700_000, BUDGET])
def test_the_budget_changes_the_batches_and_not_the_counts(budget):
    pair, prompt = variant("full"), prompts(3)[2]
    tokens = text(prompt, 24)
    anchors = pair.models.anchors(prompt, tokens)
    wanted = anchors.accepted(range(23), 8, None)
    batches, seen = [], anchors.network.embed
    anchors.network.embed = lambda emb, block: batches.append(len(block)) or seen(emb, block)
    anchors.budget = budget
    assert anchors.accepted(range(23), 8, None) == wanted
    assert sum(batches) == 23
    assert (max(batches) == 1) == (budget == 1)
    assert (len(batches) == 1) == (budget == BUDGET)


def test_the_head_is_asked_only_where_all_slots_before_matched():
    pair, prompt = variant("full"), prompts(1)[0]
    tokens = text(prompt, 24)
    anchors = pair.models.anchors(prompt, tokens)
    asked = []
    hook = anchors.head.register_forward_hook(lambda head, given, _: asked.append(len(given[0])))
    counts = anchors.accepted(range(23), 8, None)
    hook.remove()
    # one row more than was accepted, except where block or text ended
    ends = sum(count == min(7, 23 - n) for n, count in enumerate(counts))
    assert sum(asked) == sum(counts) + len(counts) - ends < 7 * 23


@pytest.mark.parametrize("chunk", [1, 5, CHUNK])
def test_the_target_reads_a_text_in_chunks_of_any_size(chunk):
    pair, prompt = variant("full"), prompts(3)[2]
    tokens, models = text(prompt, 24), pair.models
    anchors = read_anchors(models.target, models.draft, prompt, tokens, chunk)
    assert tuple(anchors.choices) == tokens
    assert set(anchors.margins) == {0.0}
    whole = pair.models.anchors(prompt, tokens)
    for mine, other in zip(anchors.context, whole.context, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


def test_a_token_that_the_target_would_not_write_has_a_margin():
    pair, prompt = variant("full"), prompts(1)[0]
    tokens = list(text(prompt, 24))
    tokens[5] = (tokens[5] + 1) % 256
    anchors = pair.models.anchors(prompt, tokens)
    assert anchors.choices[:5] == tokens[:5]
    assert anchors.choices[5] != tokens[5]
    ids = torch.tensor([[*prompt, *tokens[:5]]])
    logits = pair.models.target.model(ids).logits[0, -1]
    gap = float(logits.max() - logits[tokens[5]])
    assert gap > 0
    assert anchors.margins[5] == pytest.approx(gap, abs=1e-4)


def test_a_text_of_one_token_has_no_anchor():
    pair = variant("full")
    anchors = pair.models.anchors(prompts(1)[0], text(prompts(1)[0], 1))
    assert len(anchors.choices) == 1
    assert anchors.accepted([], 8, None) == []


def test_numbers_that_overflow_in_the_draft_are_told():
    pair = variant("full")
    tokens = text(prompts(1)[0], 24)
    anchors = pair.models.anchors(prompts(1)[0], tokens)
    anchors.accepted(range(3), 4, None)
    assert anchors.finite
    pair.models.draft.norm.weight.fill_(float("nan"))
    anchors.accepted(range(3), 4, None)
    assert not anchors.finite


def test_counts_from_features_at_hand_are_those_of_the_pairs_own_pass():
    pair, prompt = variant("full"), prompts(1)[0]
    tokens, target = text(prompt, 24), pair.models.target
    ids = torch.tensor([*prompt, *tokens])
    features = target.read(ids[None], pair.draft_config.target_layer_ids)[1][0]
    counts = accepted_counts(
        pair.models.draft, target.embedding, target.head, features, ids, len(prompt), 8, 5
    )
    assert counts == pair.models.anchors(prompt, tokens).accepted(range(23), 8, 5)


@pytest.mark.parametrize(
    ("counts", "visited"),
    [([0, 0, 0], [0, 0, 0]), ([2, 5, 5], [2]), ([1, 9, 0], [1, 0]), ([3, 0, 0], []), ([], [])],
)
def test_a_walk_visits_what_decoding_would_and_leaves_the_cut_block_out(counts, visited):
    assert walk(counts) == visited
