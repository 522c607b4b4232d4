"""Figures where a count is zero, missing or of another kind than its neighbours."""

import json
import math

import pytest

import dflash_lab as dl
from dflash_lab import DecodeConfig, SweepConfig, decode, load_prompts, sweep
from dflash_lab.analyse import (
    block_frame,
    cell_frame,
    choose,
    length_frame,
    paired_frame,
    prompt_frame,
    records,
    survival_frame,
)
from dflash_lab.analyse.benchmarked import benchmark_frame, unknowns
from dflash_lab.analyse.between import diff_frame
from dflash_lab.decoding import stream
from dflash_lab.reports.content import provenance, settings
from dflash_lab.tests.runs import block, prompt
from dflash_lab.tests.test_analyse import hand_run, timed
from dflash_lab.tests.toys import ORACLE, cut, noise, scripted_pair
from dflash_lab.trace import tau

pytestmark = pytest.mark.usefixtures("quiet")

FRAMES = (
    *(cell_frame, benchmark_frame, paired_frame),
    *(survival_frame, length_frame, block_frame, prompt_frame),
)
PLAIN = {"block_size": 1}
ACCEPTANCE = ("tau", "tau_by_prompt", "draft_rate", "draft_share", "full_block_share")


def cut_block(prompt_id):
    """A block of which the output took two tokens of four."""
    return block(3, emitted=2, prompt_id=prompt_id)


def at_once(prompt_id):
    """An output that ended with the prefill's token."""
    return prompt(prompt_id, new_ids=[5], decode_s=0.0)


def nothing(prompt_id):
    """An output of no token."""
    return prompt(prompt_id, new_ids=[], ttft_s=0.0, decode_s=0.0)


def of_no_time(prompt_id):
    return prompt(prompt_id, ttft_s=0.0, decode_s=0.0)


ODD_CELLS = {
    "all blocks cut": [({}, [prompt("a"), prompt("b")], [cut_block("a"), cut_block("b")])],
    "ended at once": [(PLAIN, [at_once("a")], []), ({}, [at_once("a")], [])],
    "no token": [(PLAIN, [nothing("a")], []), ({}, [nothing("a")], [])],
    "no prompt": [(PLAIN, [prompt("a")], [block(0, 1, prompt_id="a")]), ({}, [], [])],
    "no seconds": [
        (PLAIN, [of_no_time("a")], [block(0, 1, prompt_id="a", total_s=0.0)]),
        ({}, [of_no_time("a")], [block(2, prompt_id="a", total_s=0.0)]),
    ],
}


@pytest.mark.parametrize("cells", ODD_CELLS.values(), ids=ODD_CELLS)
def test_what_cannot_be_divided_is_missing_in_every_frame_and_no_nan_in_json(tmp_path, cells):
    if cells[0][0] != PLAIN:
        cells = [(PLAIN, [prompt("a")], [block(0, 1, prompt_id="a")]), *cells]
    run = hand_run(tmp_path, *cells)
    for frame in FRAMES:
        rows = records(frame(run))
        json.dumps(rows, allow_nan=False)
        for row in rows:
            assert not any(isinstance(v, float) and not math.isfinite(v) for v in row.values())
    (row,) = records(cell_frame(run.select(block_size=4)))
    if not any(one["block_size"] == 4 and not one["cut"] for one in run.blocks().to_pylist()):
        assert {name: row[name] for name in ACCEPTANCE} == dict.fromkeys(ACCEPTANCE)
        assert unknowns(benchmark_frame(run))


def test_a_prompt_without_a_block_that_counts_is_left_out_of_the_mean_of_prompts(tmp_path):
    prompts = [prompt("a"), prompt("b"), at_once("c")]
    blocks = [cut_block("a"), block(1, prompt_id="b"), block(3, prompt_id="b"), cut_block("b")]
    (row,) = records(cell_frame(hand_run(tmp_path, ({}, prompts, blocks))))
    assert (row["tau"], row["tau_by_prompt"], row["draft_rate"]) == (3.0, 3.0, 4 / 6)
    assert row["tau_low"] is row["tau_high"] is None  # one prompt alone says anything of it
    assert (row["prompts"], row["blocks"], row["cut_blocks"]) == (3, 4, 2)
    assert row["tokens_per_block"] == (2 + 2 + 4 + 2) / 4


def test_a_block_that_drafted_nothing_is_in_no_share_of_drafts(tmp_path):
    blocks = [block(3), block(0, 1), block(0)]  # the second was made narrow: no room for drafts
    run = hand_run(tmp_path, ({}, [prompt()], blocks))
    assert [row["at_risk"] for row in records(survival_frame(run))] == [2, 2, 2]
    lengths = records(length_frame(run))
    assert [(row["accepted"], row["blocks"], row["share"]) for row in lengths] == [
        *((0, 1, 0.5), (1, 0, 0.0), (2, 0, 0.0), (3, 1, 0.5)),
    ]


@pytest.mark.parametrize(("timed_ones", "verdict"), [(1, "not distinguishable"), (6, "speculate")])
def test_outputs_that_ended_at_once_make_no_verdict_surer(tmp_path, timed_ones, verdict):
    def cells(more):
        speeds = {1: 100, 4: 90, 8: 150}
        return [
            (
                {"block_size": size},
                [*(timed(f"p{n}", speed) for n in range(timed_ones)), *map(at_once, more)],
                [block(min(1, size - 1), size, prompt_id=f"p{n}") for n in range(timed_ones)],
            )
            for size, speed in speeds.items()
        ]

    alone, beside = (
        hand_run(tmp_path / "run of" / str(len(more)), *cells(more)) for more in ("", "abc")
    )
    wanted, found = choose(alone), choose(beside)
    assert (found.verdict, found.p_best, found.prompts) == (verdict, 1.0, timed_ones)
    for name in ("tokens_per_s", "speedup", "speedup_low", "gain_held_out", "regret"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name)), name
    assert choose(beside, objective="latency").prompts == timed_ones + 3
    for frame in (paired_frame(beside), diff_frame(alone, beside)):
        for row in records(frame):
            assert (row["speedup_low"] is None) == (timed_ones == 1)
            assert (row["tau_difference_low"] is None) == (timed_ones == 1)


# From the loop to the frame


@pytest.mark.parametrize("limit", range(1, 19))
def test_a_stored_cell_tells_what_its_traces_do_wherever_the_budget_cuts_a_block(tmp_path, limit):
    pair, prompts = scripted_pair(noise(0.7, 3), block_size=4), load_prompts(limit=2)
    config = SweepConfig(
        block_sizes=(4,), max_prompts=2, max_new_tokens=limit, warm_up=False, seed=0
    )
    (row,) = records(cell_frame(sweep(config, tmp_path, pair=pair)))
    asked = DecodeConfig(block_size=4, max_new_tokens=limit)
    traces = [decode(pair, one.turns[0], asked) for one in prompts]
    blocks = [block for trace in traces for block in trace.blocks]
    assert row["tokens"] == sum(len(trace.tokens) for trace in traces) == 2 * limit
    assert (row["blocks"], row["cut_blocks"]) == (len(blocks), sum(one.cut for one in blocks))
    assert row["tau"] == tau(blocks)
    assert tau(blocks, cut_blocks=True) == (
        sum(one.accepted + 1 for one in blocks) / len(blocks) if blocks else None
    )
    whole = [one for one in blocks if not one.cut]
    if whole:
        drafted = sum(len(one.drafted) for one in whole)
        assert row["draft_rate"] == sum(one.accepted for one in whole) / drafted


def test_a_last_block_that_ends_with_the_output_is_whole_and_one_token_less_cuts_it():
    whole, less = (
        decode(scripted_pair(ORACLE, block_size=4), (5, 3), DecodeConfig(max_new_tokens=limit))
        for limit in (9, 8)
    )
    assert [block.cut for block in whole.blocks] == [False, False]
    assert [block.cut for block in less.blocks] == [False, True]
    assert whole.tau == less.tau == 4


def test_a_stopped_decode_has_the_figures_of_the_blocks_it_made():
    pair, config = scripted_pair(cut(2), block_size=4), DecodeConfig(max_new_tokens=30)
    asked = iter((False, False, True))
    trace = decode(pair, (5, 3), config, should_stop=lambda: next(asked))
    assert (trace.tau, len(trace.tokens), trace.finish_reason) == (3.0, 7, "cancelled")
    assert decode(pair, (5, 3), config, should_stop=lambda: True).tau is None
    first = next(stream(pair, (5, 3), config))
    assert trace.tokens[0] == first.token


# Sets of prompts


@pytest.mark.parametrize("limit", [0, -1, 2.5])
def test_a_limit_of_prompts_that_is_no_whole_number_from_1_is_refused(limit):
    with pytest.raises(ValueError, match=r"limit is .*expected a whole number from 1"):
        load_prompts(limit=limit)


def test_an_audit_refuses_the_same_id_twice_and_no_prompt_at_all():
    one = load_prompts(limit=1)[0]
    with pytest.raises(ValueError, match=f"has the id '{one.id}' twice"):
        dl.audit(scripted_pair(), [one, one])
    with pytest.raises(ValueError, match="no prompt to audit"):
        dl.audit(scripted_pair(), [])


# Circumstances


def test_a_stored_cell_tells_every_circumstance_and_the_report_repeats_it(tmp_path, toy_pair):
    config = SweepConfig(
        block_sizes=(4,), max_prompts=2, max_new_tokens=2, random_state=3, warm_up=False
    )
    run = sweep(config, tmp_path, pair=toy_pair)
    (path,) = tmp_path.glob("cells/*/cell.json")
    stored = json.loads(path.read_text())
    request, told = stored["request"], stored["provenance"]
    asked = ("dtype", "attention", "block_size", "draft_window", "temperature", "thinking")
    asked += ("target", "target_sha", "draft", "draft_sha", "template_sha", "max_new_tokens")
    assert request.keys() >= {*asked, "rule", "proposal", "hardware", "backend", "device"}
    assert request["prompts"].keys() >= {"source", "ids", "set_sha", "random_state"}
    assert len(request["prompts"]["ids"]) == 2
    assert told.keys() >= {"target_revision", "draft_revision", "code", "started_utc", "sweep"}
    assert told["hardware"].keys() >= {"cpu", "gpu", "cores", "memory_gb"}
    assert {"dflash_lab", "torch", "transformers", "mlx"} <= told["versions"].keys()
    listed = dict(settings(run)) | dict(provenance(run))
    for name in (*asked, "target_revision", "started_utc"):
        assert name.replace("_", " ") in listed
    for name in ("prompts ids", "prompts set sha", "hardware cpu", "versions torch", "sweep seed"):
        assert name in listed
