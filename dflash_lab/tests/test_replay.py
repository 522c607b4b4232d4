"""Replay beside live decoding, block for block, and what is computed from its maps."""

import itertools
import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from dflash_lab import DecodeConfig, decode, load_pair, load_prompts, open_run
from dflash_lab.decoding import BlockSizeWarning
from dflash_lab.policies import BackOff, ConfidenceThreshold, Fixed, SurvivalTimesCost
from dflash_lab.replay import (
    AcceptanceMap,
    InconsistentText,
    InconsistentTextWarning,
    PromptMap,
    Text,
    acceptance_chances,
    acceptance_frame,
    acceptance_map,
    clip_frame,
    draw_accepted,
    expected_blocks,
    load_map,
    per_block_best,
    per_prompt_best,
    policy_frame,
    replay_frame,
    replay_traces,
    save_map,
)
from dflash_lab.replay.maps import consistency
from dflash_lab.tests.runs import write_run
from dflash_lab.tests.toys import scripted_pair
from dflash_lab.tests.variants import FORMS, prompts, text, tiny, variant

pytestmark = pytest.mark.usefixtures("quiet")

SIZES, WINDOWS = tuple(range(1, 17)), (None, 64, 16, 4)
NEW = 16


def texts(count=2, new=NEW):
    return [
        Text(prompt_id=f"p{place}", prompt_ids=ids, tokens=text(ids, new))
        for place, ids in enumerate(prompts(count))
    ]


def facts(blocks, length):
    """What replay and decoding must agree in; `length` is that of prompt and text."""
    return [
        (
            block.start,
            block.block_size,
            block.drafted,
            min(block.accepted, length - 1 - block.start),
            block.emitted,
            block.cut,
        )
        for block in blocks
    ]


def assert_as_live(pair, acceptance, size, window=None, policy=None, replayed=None, **settings):
    """Decode every text of a map anew and compare block for block."""
    traces = replay_traces(acceptance, size, window, policy=policy, **(replayed or {}))
    for entry, trace in zip(acceptance.prompts, traces, strict=True):
        config = DecodeConfig(
            block_size=size,
            draft_window=window,
            policy=policy,
            **{"max_new_tokens": NEW, "ignore_end": True} | settings,
        )
        live = decode(pair, entry.text.prompt_ids, config)
        assert live.tokens == entry.text.tokens
        length = len(live.prompt_ids) + len(live.tokens)
        assert facts(trace.blocks, length) == facts(live.blocks, length)


# --- replay equals live decoding ----------------------------------------------------------------


@pytest.mark.slow
def test_replay_is_live_decoding_at_every_size_and_window():
    """A quarter of the sizes a prompt, with half of the windows; over all prompts, every pair."""
    seen = set()
    for place, ids in enumerate(prompts(8)):
        sizes, windows = SIZES[place % 4 :: 4], WINDOWS[place // 4 :: 2]
        one = [Text(prompt_id="p", prompt_ids=ids, tokens=text(ids, 12))]
        made = acceptance_map(tiny(), one, sizes, windows, drafted="visited")
        for size, window in made.cells():
            assert_as_live(tiny(), made, size, window, max_new_tokens=12)
            seen.add((size, window))
    assert seen == set(itertools.product(SIZES, WINDOWS))


@pytest.mark.slow
@pytest.mark.parametrize(
    "size",
    [size if size in (5, 16) else pytest.param(size, marks=pytest.mark.thorough) for size in SIZES],
)
def test_replay_is_live_decoding_on_24_prompts(size):
    ids = [tiny().encode(prompt.turns[0]).ids for prompt in load_prompts(limit=24)]
    whole = [
        Text(prompt_id=f"p{place}", prompt_ids=one, tokens=text(one, 32))
        for place, one in enumerate(ids)
    ]
    made = acceptance_map(tiny(), whole, (size,), WINDOWS, drafted="visited")
    for window in WINDOWS:
        assert_as_live(tiny(), made, size, window, max_new_tokens=32, ignore_end=False)


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [1, pytest.param(6, marks=pytest.mark.thorough)])
def test_replay_is_live_decoding_on_the_embedded_pair(prompts):
    pair, windows = load_pair("smollm2", dtype="float32", device="cpu"), (None, 16)
    config = DecodeConfig(block_size=8, max_new_tokens=64)
    whole = [decode(pair, prompt.turns[0], config) for prompt in load_prompts(limit=prompts)]
    sizes = (2, 4, 8, 12, 16)
    made = acceptance_map(pair, whole, sizes, windows, drafted="visited")
    for size, window in itertools.product(sizes, windows):
        assert_as_live(pair, made, size, window, max_new_tokens=64, ignore_end=False)


@pytest.mark.parametrize("form", FORMS)
def test_replay_is_live_decoding_for_every_form_of_draft(form):
    pair = variant(form)
    made = acceptance_map(pair, texts(1), (3, 12), (None, 6), drafted="visited")
    for size, window in [(3, 6), (12, None), (12, 6)]:
        assert_as_live(pair, made, size, window)
    assert made.prompts[0].accepted.max() > 1


def test_one_pass_at_the_largest_size_serves_a_causal_draft(monkeypatch):
    pair, asked = variant("causal"), []
    made = acceptance_map(pair, texts(1), (4,))
    anchors = pair.models.anchors

    def counting(*args):
        source = anchors(*args)
        accepted = source.accepted
        source.accepted = lambda *call: asked.append(call[1]) or accepted(*call)
        return source

    monkeypatch.setattr(pair.models, "anchors", counting)
    several = acceptance_map(pair, texts(1), (2, 4, 8))
    assert asked == [8]
    assert np.array_equal(several.prompts[0].accepted[1], made.prompts[0].accepted[0])


def test_windows_made_together_are_those_made_alone_from_the_first_hidden_position_on():
    begun = [ids[8:11] for ids in prompts(6)]  # behind what all templates begin with
    short = [
        Text(prompt_id=f"p{place}", prompt_ids=ids, tokens=text(ids, 24))
        for place, ids in enumerate(dict.fromkeys(begun))
    ]
    windows, sizes = (4, None, 9, 6), (4, 9)
    made = acceptance_map(tiny(), short, sizes, windows)
    columns = [np.concatenate([e.accepted[:, w] for e in made.prompts], -1) for w in range(4)]
    for window, column in zip(windows, columns, strict=True):
        alone = acceptance_map(tiny(), short, sizes, (window,))
        assert np.array_equal(column, np.concatenate([e.accepted[:, 0] for e in alone.prompts], -1))
    assert len({column.tobytes() for column in columns}) > 2


def test_cells_do_not_read_the_text_again(monkeypatch):
    calls, target, one = [], tiny().models.target, texts(1)
    read = target.logits
    monkeypatch.setattr(
        target, "logits", lambda *a, **k: calls.append(a[0].shape[1]) or read(*a, **k)
    )
    made = acceptance_map(tiny(), one, (2, 3, 4, 8), WINDOWS)
    once = sorted((len(one[0].prompt_ids), NEW - 1))
    assert sorted(calls) == once
    replay_frame(made)
    assert sorted(calls) == once


# --- where texts end ----------------------------------------------------------------------------


def test_a_stop_token_ends_a_replay_where_it_ended_the_text():
    ids = prompts(1)[0]
    whole = text(ids, NEW)
    stops = sorted({whole.index(token) for token in whole if whole.index(token) > 2})[:3]
    for place in stops:
        settings = {"stop_tokens": (whole[place],)}
        short = Text(prompt_id="p", prompt_ids=ids, tokens=whole[: place + 1])
        made = acceptance_map(tiny(), [short], (3, 8), drafted="visited")
        for size in (3, 8):
            assert_as_live(tiny(), made, size, **settings)


@pytest.mark.parametrize("budget", [1, 2, 3, 9])
def test_a_budget_ends_a_replay_where_it_ended_the_text(budget):
    made = acceptance_map(tiny(), texts(2, budget), (1, 2, 8), drafted="visited")
    for size in (1, 2, 8):
        assert_as_live(tiny(), made, size, max_new_tokens=budget)
    if budget == 1:
        assert [trace.blocks for trace in replay_traces(made, 8)] == [(), ()]


@pytest.mark.parametrize("room", [1, 2, 14])
def test_blocks_are_narrower_where_the_context_ends(room):
    pair, ids = variant("full"), prompts(1)[0]
    pair.models.context_limit = len(ids) + room
    one = [Text(prompt_id="p", prompt_ids=ids, tokens=text(ids, NEW)[:room])]
    made = acceptance_map(pair, one, (4, 16), (None, 4), drafted="visited")
    for size, window in made.cells():
        assert_as_live(pair, made, size, window)
    for block in replay_traces(made, 16)[0].blocks:
        assert block.block_size == min(16, len(ids) + room - block.start)


# --- policies -----------------------------------------------------------------------------------


@cache
def with_confidences(form):
    pair, sizes = variant(form), range(4, 17, 2)
    return pair, acceptance_map(pair, texts(2), sizes, drafted="all", confidences=True)


COSTS = {(b, rows): 1 + 0.05 * b + 0.1 * rows for b in (4, 8, 16) for rows in range(1, b + 1)}


@pytest.mark.parametrize(
    "policy",
    [
        Fixed(block_size=4, verify_cap=3),
        ConfidenceThreshold(threshold=0.6),
        SurvivalTimesCost(costs=COSTS),
        BackOff(start=8, ceiling=16, blocks=3),
    ],
    ids=lambda policy: policy.name,
)
@pytest.mark.parametrize("form", ["full", "dflash 2"])
def test_a_policy_decides_in_replay_as_it_does_live(policy, form):
    pair, made = with_confidences(form)
    assert_as_live(pair, made, 16, policy=policy)
    blocks = [block for trace in replay_traces(made, 16, policy=policy) for block in trace.blocks]
    assert {(b.block_size, b.rows) for b in blocks} != {(16, 16)}


def test_a_verify_cap_is_live_decoding_with_that_many_rows():
    made = acceptance_map(tiny(), texts(2), (8,), drafted="all")
    traces = replay_traces(made, 8, verify_cap=3)
    assert traces == tuple(
        replace(trace, policy=None) for trace in replay_traces(made, 8, policy=Fixed(verify_cap=3))
    )
    assert_as_live(tiny(), made, 8, policy=Fixed(verify_cap=3))
    assert {block.rows for block in traces[0].blocks} == {3}


def test_a_policy_that_looks_at_confidences_needs_a_map_that_has_them():
    with pytest.raises(ValueError, match="confidences=True"):
        replay_traces(by_hand([0, 1]), 4, policy=ConfidenceThreshold(threshold=0.5))


def test_a_policy_that_wants_a_size_outside_the_map_is_an_error():
    with pytest.raises(ValueError, match="block size 3 is not in this map; it has 4"):
        replay_traces(by_hand([0, 1]), 4, policy=Fixed(block_size=3))


# --- maps by hand -------------------------------------------------------------------------------


def by_hand(*columns, sizes=(4,), windows=(None,), limit=1000):
    """A map of one text for each list of accepted counts, or of nested lists by size."""
    made = []
    for place, counts in enumerate(columns):
        counts = np.array(counts, np.int32).reshape(len(sizes), len(windows), -1)
        tokens = tuple(range(counts.shape[2] + 1))
        made.append(
            PromptMap(
                text=Text(prompt_id=f"p{place}", prompt_ids=(1, 2), tokens=tokens),
                accepted=counts,
            )
        )
    return AcceptanceMap(
        block_sizes=sizes,
        draft_windows=windows,
        prompts=tuple(made),
        context_limit=limit,
        trained_block_size=16,
    )


def test_the_hand_made_walk_counts_as_the_definitions_say():
    # blocks at 0, 4, 5, 7 with 3, 0, 1, 2 accepted; then one that the text cuts
    made = by_hand([3, 9, 9, 9, 0, 1, 9, 2, 9, 9, 1])
    (trace,) = replay_traces(made)
    assert [(b.start, b.accepted, b.emitted, b.cut) for b in trace.blocks] == [
        (2, 3, 4, False),
        (6, 0, 1, False),
        (7, 1, 2, False),
        (9, 2, 3, False),
        (12, 1, 1, True),
    ]
    assert trace.tau == 2.5
    row = acceptance_frame(made).iloc[0]
    assert (row.accepted_visited, row.tau) == (1.5, 2.5)
    assert row.accepted_all_anchors == pytest.approx(np.mean([3, 9, 9, 9, 0, 1, 9, 2, 9, 9, 1]))
    assert (row.blocks, row.cut_blocks, row.emitted) == (5, 1, 11)
    assert row.tokens_per_block == 11 / 5


def test_pooled_tau_and_the_mean_of_prompts_taus_are_two_figures():
    row = acceptance_frame(by_hand([3, 9, 9, 9, 0], [0, 0, 0])).iloc[0]
    assert row.tau == 8 / 5
    assert row.tau_by_prompt == (2.5 + 1) / 2


def test_figures_without_a_block_are_missing_and_not_zero():
    row = acceptance_frame(by_hand([])).iloc[0]
    assert (row.blocks, row.anchors) == (0, 0)
    assert row[["tau", "accepted_visited", "accepted_all_anchors", "tokens_per_block"]].isna().all()


def test_the_long_frame_has_a_row_a_block_of_every_cell():
    made = by_hand([[0, 0, 0], [1, 0, 0]], sizes=(1, 2))
    frame = replay_frame(made)
    assert frame.cell_block_size.tolist() == [1, 1, 1, 2, 2]
    assert frame.remaining.tolist() == [3, 2, 1, 3, 1]
    assert frame.emitted.groupby(frame.cell_block_size).sum().tolist() == [3, 3]


def test_what_a_clipped_trace_claims_stands_beside_the_truth():
    # size 8 begins uncut blocks at 0 (5 accepted) and 6 (1); at size 4 the truth is 1 and 1
    made = by_hand([[1, 0, 0, 0, 0, 0, 1, 0], [5, 0, 0, 0, 0, 0, 1, 0]], sizes=(4, 8))
    frame = clip_frame(made).set_index("kind")
    assert frame.states.tolist() == [2, 2]
    assert frame.accepted.to_dict() == {"estimate": 2.0, "re-draft": 1.0}
    assert frame.tau["estimate"] == pytest.approx(8 / 4)  # 4, 1, 1 and 2 of the clipped walk
    assert frame.tau["re-draft"] == pytest.approx(8 / 6)
    assert frame.wrong_share["estimate"] == 0.5


def test_policies_stand_beside_fixed_sizes_and_bounds_that_say_what_they_are():
    costs = {(1, 1): 1.0, (4, 4): 1.9, (4, 2): 1.5}
    made = by_hand([[0, 0, 0, 0, 0], [3, 0, 0, 0, 0]], [[0, 0], [0, 0]], sizes=(1, 4))
    frame = policy_frame(made, costs, [Fixed(verify_cap=2)]).set_index("policy")
    # emitted are 5 and 2 tokens; at size 1 in 5 and 2 blocks, at size 4 in 2 and 2
    assert frame.loc["block size 1", ["blocks", "tokens_per_s"]].tolist() == [7, 1.0]
    assert frame.loc["block size 4", "tokens_per_s"] == pytest.approx(7 / (4 * 1.9))
    assert frame.loc["fixed 1", ["blocks", "rows"]].tolist() == [6, 12]
    assert frame.loc["fixed 1", "tokens_per_s"] == pytest.approx(7 / (6 * 1.5))
    assert frame.loc["fixed 1", "speedup"] == pytest.approx(7 / 9)
    prompt, block = "best block size of each prompt", "best block size of each block"
    assert frame.loc[prompt, "tokens_per_s"] == pytest.approx(7 / (2 * 1.9 + 2 * 1.0))
    assert frame.loc[block, "tokens_per_s"] == pytest.approx(7 / (1.9 + 1.0 + 2 * 1.0))
    assert frame["bound"].notna().tolist() == [False, False, False, True, True]
    assert frame.loc[prompt, "bound"] == "upper bound: chosen after the fact"
    assert (frame["tokens_per_s_low"] <= frame["tokens_per_s"]).all()
    cheap = policy_frame(made, costs | {(4, 2): 1.0}, [Fixed(verify_cap=2)]).set_index("policy")
    assert cheap.loc["fixed 1", "speedup"] == pytest.approx(7 / 6)  # over a fixed size, not itself


def test_hindsight_is_no_slower_than_any_fixed_size_and_says_that_it_is_a_bound():
    costs = {(1, 1): 1.0, (4, 4): 1.9, (4, 2): 1.5}
    made = by_hand([[0, 0, 0, 0, 0], [3, 0, 0, 0, 0]], [[0, 0], [0, 0]], sizes=(1, 4))
    fixed = per_prompt_best(made, costs)
    assert [one.seconds for one in fixed] == [pytest.approx(3.8), 2.0]
    assert fixed[1].chosen == ((1, 1), (1, 1))
    best = per_block_best(made, costs)
    assert best[0].chosen == ((4, 4), (1, 1))
    assert [one.seconds for one in best] == [pytest.approx(2.9), 2.0]
    assert {one.label for one in (*fixed, *best)} == {"upper bound: chosen after the fact"}


def test_a_map_refuses_what_it_has_not():
    made = by_hand([0])
    with pytest.raises(ValueError, match="draft window 7 is not in this map; it has None"):
        replay_traces(made, 4, 7)
    with pytest.raises(ValueError, match="no prompt p9"):
        made.select(["p9"])


# --- the consistency gate -----------------------------------------------------------------------

PARTED = Text(prompt_id="p", prompt_ids=(1, 2, 3), tokens=(5, 6, 7))
LARGEST = (20.0, 20.0, 20.0)  # logits of each row


def test_a_text_of_another_target_is_an_error_in_float32():
    wanted = r"'p' has token 6 at position 4, where the target in float32 says 9, 0.01 logits"
    with pytest.raises(InconsistentText, match=wanted):
        consistency(PARTED, (5, 9, 8), (0.0, 0.01, 3.0), LARGEST, "float32")


def test_partings_in_bfloat16_are_listed_with_their_margins():
    (at,) = consistency(PARTED, (5, 9, 7), (0.0, 0.2, 0.0), LARGEST, "bfloat16")
    assert (at.position, at.text_token, at.target_token, at.margin) == (4, 6, 9, 0.2)
    assert at.kind == "near tie"
    with pytest.warns(InconsistentTextWarning, match="more than rounding explains"):
        (at,) = consistency(PARTED, (5, 9, 7), (0.0, 2.0, 0.0), LARGEST, "bfloat16")
    assert at.kind == "mismatch"


def test_a_token_changed_in_the_text_does_not_pass_the_gate():
    one = texts(1)[0]
    changed = (*one.tokens[:7], (one.tokens[7] + 1) % 256, *one.tokens[8:])
    with pytest.raises(InconsistentText, match=f"at position {len(one.prompt_ids) + 7}"):
        acceptance_map(tiny(), [replace(one, tokens=changed)], (4,))


# --- where texts come from ----------------------------------------------------------------------


def test_prompts_traces_and_texts_give_one_map():
    prompt = load_prompts(limit=1)[0]
    trace = decode(tiny(), prompt.turns[0], DecodeConfig(block_size=3, max_new_tokens=NEW))
    made = [
        acceptance_map(tiny(), [source], (4,), max_new_tokens=NEW).prompts[0]
        for source in (
            prompt,
            trace,
            Text(prompt_id="x", prompt_ids=trace.prompt_ids, tokens=trace.tokens),
        )
    ]
    assert len({one.text.tokens for one in made}) == 1
    assert len({tuple(one.accepted.ravel()) for one in made}) == 1
    assert (made[0].text.prompt_id, made[0].text.task) == (prompt.id, prompt.category)


def test_a_run_gives_its_texts_to_the_target_it_is_of(tmp_path):
    from dflash_lab import SweepConfig, sweep

    config = SweepConfig(
        pair="tiny",
        block_sizes=(1, 4),
        max_prompts=2,
        max_new_tokens=8,
        warm_up=False,
        device="cpu",
        dtype="float32",
    )
    run = sweep(config, tmp_path / "run", pair=tiny())
    made = acceptance_map(tiny(), run, (4,))
    stored = {row["prompt_id"]: tuple(row["new_ids"]) for row in run.prompts().to_pylist()}
    assert {one.text.prompt_id: one.text.tokens for one in made.prompts} == stored
    stranger = replace(tiny(), fingerprint={"target": "other"})
    with pytest.raises(ValueError, match="no finished cell of this target"):
        acceptance_map(stranger, run, (4,))


def test_what_cannot_be_replayed_is_refused():
    one = texts(1)[0]
    for source, words in [
        ([], "there is no text"),
        ([one, one], "is there twice"),
        ([replace(one, tokens=())], "has no token"),
        (["a prompt"], "a str cannot be replayed"),
    ]:
        with pytest.raises(ValueError, match=words):
            acceptance_map(tiny(), source, (4,))
    with pytest.raises(ValueError, match="drafted is 'some'"):
        acceptance_map(tiny(), [one], (4,), drafted="some")


def test_a_backend_without_an_anchor_pass_is_refused(monkeypatch):
    pair = scripted_pair()
    monkeypatch.delattr(type(pair.models), "anchors")
    with pytest.raises(ValueError, match="no batched anchor pass"):
        acceptance_map(pair, texts(1), (4,))


def test_sizes_above_the_trained_one_are_lowered_with_a_warning():
    with pytest.warns(BlockSizeWarning, match="block size 24"):
        made = acceptance_map(tiny(), texts(1), (4, 24))
    assert made.block_sizes == (4, 16)
    assert acceptance_map(tiny(), texts(1), (24,), beyond_trained=True).block_sizes == (24,)


# --- stored -------------------------------------------------------------------------------------


def test_a_stored_map_comes_back_as_it_was(tmp_path):
    write_run(tmp_path / "run")
    run = open_run(tmp_path / "run")
    made = acceptance_map(
        tiny(), texts(2), (1, 2, 8), (None, 4), drafted="visited", confidences=True
    )
    name = save_map(run, made)
    assert save_map(run, made) == name
    back = load_map(run)
    assert replay_frame(back).equals(replay_frame(made))
    assert (back.facts["target_sha"], back.facts["dtype"]) == (
        made.facts["target_sha"],
        "float32",
    )
    for mine, its in zip(made.prompts, back.prompts, strict=True):
        assert mine.text == its.text
        for part in ("accepted", "drafted", "confidences"):
            assert np.array_equal(getattr(mine, part), getattr(its, part), equal_nan=part[0] == "c")
    assert len(open_run(tmp_path / "run").cells) == len(run.cells)


def test_a_map_whose_writing_was_not_finished_is_not_there(tmp_path):
    write_run(tmp_path / "run")
    run = open_run(tmp_path / "run")
    name = save_map(run, by_hand([1, 0]))
    header = run.path / "maps" / name / "map.json"
    assert json.loads(header.read_text())["id"] == name
    header.unlink()
    with pytest.raises(ValueError, match=f"no acceptance map '{name}'"):
        load_map(run, name)
    with pytest.raises(ValueError, match="holds 0 acceptance maps"):
        load_map(run)


# --- sampled text -------------------------------------------------------------------------------


def live_blocks(p, q, size, rng):
    """Speculative sampling of a table by the rejection rule, written as in the definition.

    `p` [tokens, tokens]: next-token law by the last token; `q` [size - 1, tokens]: the draft's law
    by slot. A prefill token 0, then blocks until the text has its length; blocks and cut ones.
    """
    length, last, made, blocks, cuts = 16, 0, 1, 0, 0
    while made < length:
        accepted, at = 0, last
        for slot in range(size - 1):
            x = rng.choice(len(p), p=q[slot])
            if rng.random() * q[slot][x] < p[at][x]:
                accepted, at = accepted + 1, x
                continue
            left = np.maximum(p[at] - q[slot], 0)
            at = rng.choice(len(p), p=left / left.sum())
            break
        else:
            at = rng.choice(len(p), p=p[at])
        blocks += 1
        cuts += accepted + 1 > length - made
        made, last = made + accepted + 1, at
    return blocks, cuts


def test_replay_of_sampled_text_is_live_sampling_in_distribution_and_the_recursion_its_mean():
    rng = np.random.default_rng(1)
    p, q, size, length = rng.dirichlet(np.ones(4), 4), rng.dirichlet(np.ones(4) * 3, 4), 5, 16
    live = np.array([live_blocks(p, q, size, rng) for _ in range(800)])
    drawn, expected = [], []
    for seed in range(800):
        tokens = [0]
        while len(tokens) < length:
            tokens.append(rng.choice(4, p=p[tokens[-1]]))
        of_text = np.array([1.0, *(p[a][b] for a, b in itertools.pairwise(tokens))])
        of_draft = np.array(
            [
                [q[k - 1][tokens[n + k]] if n + k < length else np.nan for k in range(1, size)]
                for n in range(length - 1)
            ]
        )
        chances = acceptance_chances(of_text, of_draft)
        (trace,) = replay_traces(by_hand(draw_accepted(chances, seed), sizes=(size,)))
        drawn.append((len(trace.blocks), sum(block.cut for block in trace.blocks)))
        exact = expected_blocks(chances)
        expected.append((exact.blocks, exact.cut_blocks))
        assert exact.tokens_per_block == (length - 1) / exact.blocks
    drawn, expected = np.array(drawn), np.array(expected)
    for a, b in ((live, drawn), (live, expected), (drawn, expected)):
        error = np.sqrt(a.var(0) / len(a) + b.var(0) / len(b))
        assert (np.abs(a.mean(0) - b.mean(0)) < 4 * error).all()
    assert expected.std(0)[0] < drawn.std(0)[0]  # no draw in it


def test_the_expectation_of_certain_and_of_impossible_acceptance_is_the_walk():
    sure = expected_blocks(np.ones((8, 3)))  # 8 tokens after the first, four at a time
    assert (sure.blocks, sure.cut_blocks, sure.tau) == (2, 0, 4)
    odd = expected_blocks(np.ones((9, 3)))
    assert (odd.blocks, odd.cut_blocks, odd.emitted_cut, odd.tau) == (3, 1, 1, 4)
    cut = expected_blocks(np.ones((10, 3)))
    assert (cut.blocks, cut.cut_blocks, cut.emitted_cut, cut.tau) == (3, 1, 2, 4)
    never = expected_blocks(np.zeros((8, 3)))
    assert (never.blocks, never.tau) == (8, 1)
    assert expected_blocks(np.zeros((0, 3))).tau is None


def test_draws_repeat_by_their_seed_and_go_no_further_than_the_text():
    chances = acceptance_chances(np.full(6, 0.5), np.full((5, 3), 0.4))
    assert np.isnan(chances[4]).tolist() == [False, True, True]
    assert chances[0, 0] == 0.8
    draws = [draw_accepted(chances, seed) for seed in (0, 0, 1, 2, 3)]
    assert np.array_equal(draws[0], draws[1])
    assert any(not np.array_equal(draws[0], other) for other in draws[2:])
    assert all((counts <= [3, 3, 3, 2, 1]).all() for counts in draws)


def test_chances_need_a_row_for_each_anchor():
    with pytest.raises(ValueError, match=r"expected \[4, slots\]"):
        acceptance_chances(np.full(5, 0.5), np.full((5, 3), 0.4))
