"""Definitions by hand, intervals by simulation, and every figure again in plain Python."""

import json
import math
import statistics
from dataclasses import asdict

import numpy as np
import pyarrow.parquet as pq
import pytest

from dflash_lab.analyse import (
    HardwareWarning,
    block_frame,
    cell_frame,
    choose,
    comparable,
    draw_prompts,
    drift,
    intervals,
    length_frame,
    paired_frame,
    prompt_frame,
    records,
    repetition,
    resampling,
    survival_frame,
)
from dflash_lab.store import open_run, plain, to_json
from dflash_lab.tests.runs import block, prompt, request_of, write_cell, write_run


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return open_run(write_run(tmp_path_factory.mktemp("runs") / "demo"))


def hand_run(path, *cells):
    """A run of cells made by hand, each (request settings, prompt rows, block rows)."""
    for settings, prompts, blocks in cells:
        ids = list(dict.fromkeys(row["prompt_id"] for row in prompts))
        write_cell(path, request_of(ids, **settings), prompts, blocks)
    return open_run(path)


def timed(prompt_id, tokens_per_s, tokens=101):
    """A prompt whose tokens after the first came at this rate."""
    return prompt(prompt_id, new_ids=list(range(tokens)), decode_s=(tokens - 1) / tokens_per_s)


def cell_at(speed, block_size=4, spread=0.0, prompts=8, **settings):
    """A cell of `timed` prompts around one speed, for the choice, where blocks do not matter."""
    rows = [timed(f"p{i}", speed * (1 + spread * math.sin(7 * i))) for i in range(prompts)]
    return {"block_size": block_size, **settings}, rows, []


# Definitions

HAND = [block(3), block(0), block(1), block(2)]
CUT = block(3, emitted=2)


@pytest.mark.parametrize("blocks", [HAND, [*HAND, CUT]], ids=["whole", "with a cut block"])
def test_hand_made_trace_gives_the_figures_worked_out_by_hand(tmp_path, blocks):
    run = hand_run(tmp_path, ({}, [prompt()], blocks))
    (row,) = records(cell_frame(run))
    assert row["tau"] == row["tau_by_prompt"] == 2.5
    assert row["draft_rate"] == 6 / 12
    assert row["draft_share"] == 6 / 10
    assert row["full_block_share"] == 1 / 4
    survival = records(survival_frame(run))
    assert [r["survival"] for r in survival] == [3 / 4, 2 / 4, 1 / 4]
    assert [r["conditional"] for r in survival] == [3 / 4, 2 / 3, 1 / 2]
    assert [r["at_risk"] for r in survival] == [4, 4, 4]
    assert [r["conditional_at_risk"] for r in survival] == [4, 3, 2]
    lengths = records(length_frame(run))
    assert [(r["accepted"], r["blocks"], r["censored"]) for r in lengths] == [
        (0, 1, False),
        (1, 1, False),
        (2, 1, False),
        (3, 1, True),
    ]


def test_cut_blocks_count_in_tokens_per_block_and_are_named(tmp_path):
    (row,) = records(cell_frame(hand_run(tmp_path, ({}, [prompt()], [*HAND, CUT]))))
    assert (row["blocks"], row["cut_blocks"]) == (5, 1)
    assert row["tokens_per_block"] == (4 + 1 + 2 + 3 + 2) / 5


def test_tau_is_a_ratio_of_sums_and_the_mean_of_prompts_has_its_own_name(tmp_path):
    short = [block(3, prompt_id="a")]
    long = [block(0, prompt_id="b") for _ in range(9)]
    run = hand_run(tmp_path, ({}, [prompt("a"), prompt("b")], short + long))
    (row,) = records(cell_frame(run))
    assert row["tau"] == (4 + 9) / 10
    assert row["tau_by_prompt"] == (4 + 1) / 2


def test_throughput_is_a_ratio_of_sums_over_tokens_after_the_first(tmp_path):
    rows = [
        prompt("a", new_ids=[1] * 11, decode_s=1.0, ttft_s=0.5),
        prompt("b", new_ids=[1] * 101, decode_s=2.0, ttft_s=0.1),
    ]
    (row,) = records(cell_frame(hand_run(tmp_path, ({}, rows, []))))
    assert row["tokens_per_s"] == (10 + 100) / 3
    assert row["end_to_end_per_s"] == pytest.approx((11 + 101) / 3.6)
    assert row["ttft_s"] == pytest.approx(0.3)


def test_where_nothing_is_drafted_rates_are_missing_and_not_zero(tmp_path):
    ones = [block(0, 1), block(0, 1)]
    run = hand_run(
        tmp_path,
        ({"block_size": 1}, [prompt()], ones),
        ({"block_size": 1, "engine": "transformers"}, [prompt()], []),
    )
    own, library = records(cell_frame(run))
    for name in ("draft_rate", "draft_rate_low", "draft_share", "full_block_share"):
        assert own[name] is None and library[name] is None
    assert own["draft_cache_bytes"] is None
    assert own["tau"] == 1 and library["tau"] is None
    assert library["tokens_per_block"] is None and library["blocks"] == 0
    assert survival_frame(run).empty and length_frame(run).empty


def test_an_output_of_one_token_has_no_throughput(tmp_path):
    rows = [prompt(new_ids=[5], decode_s=0.0)]
    (row,) = records(cell_frame(hand_run(tmp_path, ({}, rows, []))))
    assert row["tokens_per_s"] is None
    assert row["tokens"] == 1


def test_a_block_without_drafts_counts_in_tau_but_not_in_the_rates(tmp_path):
    rows = [block(1, 2), block(0, 1)]  # the second was made narrow: no room for drafts
    (row,) = records(cell_frame(hand_run(tmp_path, ({"block_size": 2}, [prompt()], rows))))
    assert row["tau"] == 1.5
    assert row["draft_rate"] == 1.0
    assert row["full_block_share"] == 1.0


def test_survival_sums_to_tau(demo):
    cells = cell_frame(demo).set_index("cell")
    sums = survival_frame(demo).groupby("cell")["survival"].sum()
    assert len(sums) == 12
    for cell, survival in sums.items():
        assert 1 + survival == pytest.approx(cells.loc[cell, "tau"])


def test_lengths_add_up_to_the_blocks_that_were_not_cut(demo):
    cells = cell_frame(demo).set_index("cell")
    groups = length_frame(demo).groupby("cell")
    assert groups["share"].sum().to_list() == pytest.approx([1.0] * len(groups))
    for cell, blocks in groups["blocks"].sum().items():
        assert blocks == cells.loc[cell, "blocks"] - cells.loc[cell, "cut_blocks"]


# Every number again, from the files, by code that shares nothing


def plain_figures(folder):
    """One cell's figures from its parquet files, in plain Python."""
    blocks = pq.read_table(folder / "blocks.parquet").to_pylist()
    prompts = pq.read_table(folder / "prompts.parquet").to_pylist()
    kept = [b for b in blocks if b["emitted"] == b["accepted"] + 1]
    drafts = sum(len(b["drafted"]) for b in kept)
    taus = []
    for name in {p["prompt_id"] for p in prompts}:
        mine = [b["accepted"] + 1 for b in kept if b["prompt_id"] == name]
        taus += [sum(mine) / len(mine)] if mine else []
    drafting = [b for b in kept if b["drafted"]]
    return {
        "prompts": len({p["prompt_id"] for p in prompts}),
        "tokens": sum(len(p["new_ids"]) for p in prompts),
        "blocks": len(blocks),
        "cut_blocks": len(blocks) - len(kept),
        "decode_s": sum(p["decode_s"] for p in prompts),
        "tokens_per_s": sum(len(p["new_ids"]) - 1 for p in prompts)
        / sum(p["decode_s"] for p in prompts),
        "end_to_end_per_s": sum(len(p["new_ids"]) for p in prompts)
        / sum(p["total_s"] for p in prompts),
        "ttft_s": statistics.median(p["ttft_s"] for p in prompts),
        "tau": sum(b["accepted"] + 1 for b in kept) / len(kept) if kept else None,
        "tau_by_prompt": sum(taus) / len(taus) if taus else None,
        "draft_rate": sum(b["accepted"] for b in kept) / drafts if drafts else None,
        "draft_share": sum(b["accepted"] for b in kept) / sum(b["emitted"] for b in kept)
        if drafts
        else None,
        "tokens_per_block": sum(b["emitted"] for b in blocks) / len(blocks) if blocks else None,
        "full_block_share": sum(b["accepted"] == len(b["drafted"]) for b in drafting)
        / len(drafting)
        if drafting
        else None,
        "seconds_per_block": sum(b["total_s"] for b in blocks) / len(blocks) if blocks else None,
        "draft_cache_bytes": max(b["draft_cache_bytes"] for b in blocks) if drafts else None,
        "peak_bytes": max(p["peak_bytes"] for p in prompts),
        "looped": 0,
    }


def plain_interval(folder, draws, names):
    """Ends of the interval of tokens per second, resample by resample."""
    rows = {p["prompt_id"]: p for p in pq.read_table(folder / "prompts.parquet").to_pylist()}
    found = []
    for draw in draws:
        tokens = sum(k * (len(rows[n]["new_ids"]) - 1) for n, k in zip(names, draw, strict=True))
        seconds = sum(k * rows[n]["decode_s"] for n, k in zip(names, draw, strict=True))
        found.append(tokens / seconds)
    found.sort()
    students = {12: 2.200985}[len(names)]  # 97.5 % of Student's t with 11 degrees, from a table
    share = statistics.NormalDist().cdf(-students * math.sqrt(12 / 11))
    return [_percentile(found, share), _percentile(found, 1 - share)]


def _percentile(ordered, share):
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def test_cell_frame_equals_plain_python_on_the_files(demo):
    rows = {row["cell"]: row for row in records(cell_frame(demo))}
    assert len(rows) == len(demo.cells) == 16
    for cell in demo.cells:
        for name, value in plain_figures(cell.folder).items():
            assert rows[cell.id][name] == (None if value is None else pytest.approx(value)), name


def test_intervals_equal_plain_python_on_the_same_draws(demo):
    names = sorted(set(prompt_frame(demo)["prompt_id"]))
    draws = draw_prompts(len(names), 200, 3).tolist()
    frame = cell_frame(demo, resamples=200, seed=3).set_index("cell")
    for cell in demo.cells[:4]:
        ends = frame.loc[cell.id, ["tokens_per_s_low", "tokens_per_s_high"]].to_list()
        assert ends == pytest.approx(plain_interval(cell.folder, draws, names), rel=1e-5)


def test_frames_carry_the_stored_columns_and_the_settings_of_their_cell(demo):
    cell = demo.select(block_size=8, draft_window=16).cells[0]
    blocks, prompts = block_frame(demo), prompt_frame(demo)
    mine = blocks[blocks["cell"] == cell.id]
    assert len(mine) == cell.summary["blocks"]
    assert set(mine["draft_window"]) == {16} and set(mine["dtype"]) == {"bfloat16"}
    assert len(blocks) == sum(c.summary["blocks"] for c in demo.cells)
    assert len(prompts) == 16 * 12
    assert set(prompts.loc[prompts["cell"] == cell.id, "block_size"]) == {8}
    full = prompts[prompts["draft_window"].isna()]
    assert set(full["cell"]) == {c.id for c in demo.cells if c.draft_window is None}


def test_repeats_and_turns_of_a_prompt_are_one_prompt(tmp_path):
    rows = [prompt("a", repeat=r, turn=t) for r in (0, 1) for t in (0, 1)]
    blocks = [block(1, prompt_id="a", repeat=1), block(3, prompt_id="a", turn=1)]
    (row,) = records(cell_frame(hand_run(tmp_path, ({"repeats": 2}, rows, blocks))))
    assert row["prompts"] == 1 and row["single_prompt"]
    assert row["tau"] == row["tau_by_prompt"] == 3
    assert row["tokens"] == 16


def test_rows_stand_in_the_order_a_reader_expects(demo):
    """Our loop before the library, by dtype, the full window first, small sizes first."""
    rows = records(cell_frame(demo))
    windows = [row["draft_window"] for row in rows]
    assert windows == [None] * 7 + [64] * 3 + [16] * 3 + [None] * 3
    sizes = [row["block_size"] for row in rows]
    assert sizes == [1, 2, 4, 6, 8, 12, 16, *[4, 8, 16] * 2, 1, 1, 1]
    assert [row["engine"] for row in rows[13:]] == ["dflash_lab", "transformers", "transformers"]
    positions = survival_frame(demo)
    assert positions["draft_position"].head(9).to_list() == [1, 1, 2, 3, 1, 2, 3, 4, 5]


def test_records_are_strict_json(demo):
    for frame in (cell_frame(demo), survival_frame(demo), length_frame(demo)):
        assert json.loads(json.dumps(records(frame), allow_nan=False)) == records(frame)


def test_an_empty_run_gives_empty_frames_and_no_choice(tmp_path):
    (tmp_path / "cells").mkdir()
    run = open_run(tmp_path)
    for make in (cell_frame, survival_frame, length_frame, block_frame, prompt_frame):
        assert make(run).empty
    with pytest.raises(ValueError, match="no finished cell with a block size above 1"):
        choose(run)


# Intervals


def known_survival(rng, prompts, block_sizes=(4, 12)):
    """Tokens, blocks and seconds a prompt of two settings whose survival is known.

    A drafted token is right with a chance of the prompt's own, wherever it stands.
    """
    ease, blocks = rng.beta(3, 2, prompts), rng.integers(15, 45, prompts)
    made = []
    for size in block_sizes:
        chances = ease[:, None] ** np.arange(1, size)  # of accepting 1, 2, ... drafts
        luck = rng.random((prompts, 45, 1))
        accepted = (luck < chances[:, None]).sum(axis=2)
        accepted = np.where(np.arange(45) < blocks[:, None], accepted, -1)
        seconds = blocks * (1 + 0.03 * size) * np.exp(0.05 * rng.normal(size=prompts))
        made.append(((accepted + 1).sum(axis=1), blocks, seconds))
    return made


def coverage(prompts, runs):
    """How often intervals of tau and of the throughput ratio hold the truth."""
    rng = np.random.default_rng(7)
    moments = [np.prod([(3 + i) / (5 + i) for i in range(k)]) for k in range(1, 12)]
    taus = [1 + sum(moments[: size - 1]) for size in (4, 12)]  # moments of Beta(3, 2)
    noise = math.exp(0.05**2 / 2)
    truth = (taus[1] / (1 + 0.03 * 12)) / (taus[0] / (1 + 0.03 * 4))
    assert truth == pytest.approx(taus[1] / (1.36 * noise) / (taus[0] / (1.12 * noise)))
    held = np.zeros(2)
    draws = draw_prompts(prompts, 1000, 0)
    for _ in range(runs):
        (few, blocks, slow), (many, _, fast) = known_survival(rng, prompts)
        low, high = intervals(draws, few[None], blocks[None])
        drawn = (draws @ many) / (draws @ fast) / ((draws @ few) / (draws @ slow))
        ends = resampling.ends(drawn, prompts)
        held += [low[0] <= taus[0] <= high[0], ends[0] <= truth <= ends[1]]
    return held / runs


@pytest.mark.parametrize(("prompts", "low", "high"), [(24, 0.91, 0.97), (48, 0.93, 0.97)])
def test_in_a_thousand_runs_intervals_cover_the_truth_as_often_as_they_say(prompts, low, high):
    held = coverage(prompts, 1000)
    assert (low <= held).all() and (held <= high).all(), held


def test_an_interval_over_few_prompts_is_wider_than_the_plain_percentiles():
    assert resampling.shares(12)[0] == pytest.approx(0.01075, abs=2e-5)  # t table: 2.201
    assert resampling.shares(1000)[0] == pytest.approx(0.025, abs=2e-4)
    shares = [resampling.shares(count)[0] for count in (2, 4, 8, 16, 32)]
    assert shares == sorted(shares)
    assert sum(resampling.shares(5)) == 1


def test_resampling_blocks_instead_of_prompts_would_be_too_sure(tmp_path):
    """Blocks of one prompt are alike, so the interval has to be much wider than theirs."""
    blocks = [block(3 * (i % 2), prompt_id=f"p{i}") for i in range(12) for _ in range(50)]
    rows = [prompt(f"p{i}") for i in range(12)]
    (row,) = records(cell_frame(hand_run(tmp_path, ({}, rows, blocks))))
    over_blocks = 2 * 1.96 * 1.5 / math.sqrt(600)
    assert row["tau_high"] - row["tau_low"] > 4 * over_blocks


def test_all_cells_see_the_same_resamples(tmp_path):
    """Where one cell is twice as fast on every prompt, so it is in every resample."""
    slow = [timed(f"p{i}", 10 + i) for i in range(6)]
    fast = [timed(f"p{i}", 20 + 2 * i) for i in range(6)]
    run = hand_run(tmp_path, ({"block_size": 1}, slow, []), ({"block_size": 4}, fast, []))
    one, two = records(cell_frame(run))
    assert two["tokens_per_s_low"] == pytest.approx(2 * one["tokens_per_s_low"])
    assert two["tokens_per_s_high"] == pytest.approx(2 * one["tokens_per_s_high"])
    choice = choose(run)
    assert [choice.speedup, choice.speedup_low, choice.speedup_high] == pytest.approx([2, 2, 2])


def test_the_same_seed_gives_the_same_interval_and_another_seed_another(demo):
    first, again, other = (cell_frame(demo, 300, seed)["tau_low"].to_list() for seed in (1, 1, 2))
    assert np.array_equal(first, again, equal_nan=True)
    assert not np.array_equal(first, other, equal_nan=True)


def test_one_prompt_has_no_interval_and_is_flagged(tmp_path):
    (row,) = records(cell_frame(hand_run(tmp_path, ({}, [prompt()], HAND))))
    assert row["single_prompt"]
    names = ("tau", "draft_rate", "tokens_per_s", "seconds_per_block")
    assert [row[f"{name}_{end}"] for name in names for end in ("low", "high")] == [None] * 8


def test_resamples_below_one_are_refused(demo):
    with pytest.raises(ValueError, match="resamples is 0"):
        cell_frame(demo, resamples=0)


def test_a_paired_difference_is_sharper_than_two_intervals(tmp_path):
    """Prompts differ by a factor of two, the cells always by a tenth."""
    slow, fast = cell_at(10, 1, spread=0.3), cell_at(11, 4, spread=0.3)
    run = hand_run(tmp_path, slow, fast)
    one, two = records(paired_frame(run))
    assert one["cell"] == one["against"] == two["against"]
    assert (one["speedup"], one["speedup_low"], one["speedup_high"]) == (1, 1, 1)
    assert (two["speedup"], two["speedup_low"]) == pytest.approx((1.1, 1.1))
    assert two["tau_difference"] is None  # there are no blocks


def test_paired_differences_of_tau_are_over_the_prompts_that_both_cells_hold(tmp_path):
    first = [block(3, prompt_id="a"), block(1, prompt_id="b")]
    second = [block(2, prompt_id="a"), block(0, prompt_id="c")]
    run = hand_run(
        tmp_path,
        ({"draft_window": 16}, [prompt("a"), prompt("b")], first),
        ({}, [prompt("a"), prompt("c")], second),
    )
    against = run.select(draft_window=16).cells[0].id
    rows = {row["cell"]: row for row in records(paired_frame(run, against))}
    (other,) = (row for name, row in rows.items() if name != against)
    assert (other["prompts"], other["tau_difference"]) == (1, -1)
    assert other["tau_difference_low"] is None
    with pytest.raises(ValueError, match="no plain decoding to compare with; name a cell"):
        paired_frame(run)


# Drift


def paced(order_factor, cells=(1, 4), prompts=6):
    """Cells, in rotated order, whose decodes grow slower by a factor from one to the next."""
    made = []
    for place, size in enumerate(cells):
        rows = []
        for i in range(prompts):
            order = i * len(cells) + (place + i) % len(cells)
            seconds = (2.0 + i) / size * order_factor**order
            rows.append(prompt(f"p{i}", new_ids=[1] * 21, decode_s=seconds, order=order))
        made.append(({"block_size": size}, rows, []))
    return made


@pytest.mark.parametrize(("factor", "sign"), [(1.05, 1), (0.95, -1)])
def test_drift_shows_in_the_rank_correlation_of_residual_time_and_order(tmp_path, factor, sign):
    found = drift(hand_run(tmp_path, *paced(factor)))
    assert found.decodes == 12
    assert found.rank_correlation == pytest.approx(sign)
    assert found.again is None
    assert "not measured again" in found.sentence


def test_without_drift_nothing_is_left_to_rank(tmp_path):
    assert drift(hand_run(tmp_path, *paced(1.0))).rank_correlation is None


def test_the_first_cell_measured_again_is_compared_prompt_by_prompt(tmp_path):
    run = hand_run(tmp_path, *paced(1.01))
    first = run.select(block_size=1).cells[0]
    rows = run.prompts(("cell", "prompt_id", "decode_s")).to_pylist()
    again = [row | {"decode_s": 1.2 * row["decode_s"]} for row in rows if row["cell"] == first.id]
    run.write_check("first_again", {"cell": first.id, "prompts": again})
    found = drift(run)
    assert (found.again, found.again_low, found.again_high) == pytest.approx((1.2, 1.2, 1.2))
    assert found.sentence.endswith("took 1.20x [1.20, 1.20].")


# Loops


@pytest.mark.parametrize(
    "tokens",
    [[7] * 200, [1, 2, 3] * 20, [*range(30), *[4, 5] * 20], [9] * 16],
    ids=["one token", "three tokens", "after a beginning", "short"],
)
def test_an_output_that_repeats_itself_is_a_loop(tokens):
    assert repetition(tokens).looped


@pytest.mark.parametrize(
    "tokens",
    [[], [7], [7] * 15, list(range(100)), [*range(200), *[5] * 20], [1, 2, 3, 4, 5] * 3],
    ids=["empty", "one", "few", "all different", "a row of dashes in a text", "said three times"],
)
def test_an_ordinary_output_is_no_loop(tokens):
    assert not repetition(tokens).looped


def test_repetition_measures_run_and_distinct_share():
    found = repetition([1, 2, 2, 2, 3, 1])
    assert found.longest_run == 3
    assert found.distinct_share == 3 / 6
    assert repetition([]).distinct_share is None


def test_looped_outputs_are_counted_and_can_be_left_out_of_every_cell(tmp_path):
    loop = prompt("b", new_ids=[7] * 40, decode_s=0.1)
    own = ({}, [timed("a", 10), loop], [block(0, prompt_id="a"), block(3, prompt_id="b")])
    other = ({"block_size": 1}, [timed("a", 5), timed("b", 5)], [])
    run = hand_run(tmp_path, own, other)
    headline, free = records(cell_frame(run)), records(cell_frame(run, loop_free=True))
    assert [row["looped"] for row in headline] == [0, 1]
    assert [row["prompts"] for row in headline] == [2, 2]
    assert [row["prompts"] for row in free] == [1, 1]
    assert (headline[1]["tau"], free[1]["tau"]) == (2.5, 1.0)


def test_leaving_out_every_prompt_leaves_no_figures(tmp_path):
    run = hand_run(tmp_path, ({}, [prompt(new_ids=[7] * 40)], HAND))
    (row,) = records(cell_frame(run, loop_free=True))
    assert (row["prompts"], row["tau"], row["tokens_per_s"]) == (0, None, None)


# Hardware


def two_machines(path):
    return hand_run(
        path,
        cell_at(10, 1, hardware="laptop"),
        cell_at(20, 4, hardware="laptop"),
        cell_at(99, 4, hardware="server"),
    )


def test_hardware_classes_stand_apart_with_a_warning(tmp_path):
    run = two_machines(tmp_path)
    with pytest.warns(HardwareWarning, match=r"2 hardware classes: laptop; server.*run\.select"):
        frame = cell_frame(run)
    assert frame["hardware"].to_list() == ["laptop", "laptop", "server"]


def test_a_choice_refuses_to_mix_hardware_classes(tmp_path):
    run = two_machines(tmp_path)
    with pytest.raises(ValueError, match=r"hardware is laptop and server.*select\(hardware"):
        choose(run)
    assert choose(run.select(hardware="laptop")).tokens_per_s == pytest.approx(20)


# The choice


def test_the_fastest_setting_is_chosen_and_compared_with_the_fastest_plain_dtype(tmp_path):
    run = hand_run(
        tmp_path,
        cell_at(10, 1),
        cell_at(25, 1, dtype="float32"),
        cell_at(40, 4, spread=0.02),
        cell_at(30, 8),
        cell_at(20, 1, engine="transformers"),
        cell_at(22, 1, engine="transformers", dtype="float32"),
    )
    choice = choose(run)
    assert (choice.block_size, choice.draft_window, choice.dtype) == (4, None, "bfloat16")
    assert (choice.plain_dtype, choice.library_dtype) == ("float32", "float32")
    assert choice.speedup == pytest.approx(choice.tokens_per_s / 25)
    assert choice.speedup_library == pytest.approx(choice.tokens_per_s / 22)
    assert choice.speedup_low < choice.speedup < choice.speedup_high
    assert (choice.verdict, choice.p_best, choice.near) == ("speculate", 1.0, ())
    assert choice.gain_held_out == pytest.approx(choice.speedup, rel=0.02)
    assert choice.sentence == (
        f"Block size 4 with the full window is fastest: {choice.tokens_per_s:.1f} tokens/s "
        f"[{choice.low:.1f}, {choice.high:.1f}] over 8 prompts, {choice.speedup:.2f}x "
        f"[{choice.speedup_low:.2f}, {choice.speedup_high:.2f}] of plain decoding in float32; "
        "speculation pays."
    )


def test_block_size_1_can_be_the_answer(tmp_path):
    choice = choose(hand_run(tmp_path, cell_at(30, 1), cell_at(25, 4), cell_at(20, 8)))
    assert (choice.block_size, choice.verdict) == (1, "do not speculate")
    assert choice.speedup == 1
    assert choice.sentence == (
        "Do not speculate: plain decoding is fastest in bfloat16, 30.0 tokens/s [30.0, 30.0] "
        "over 8 prompts."
    )


def test_block_size_1_in_the_slower_dtype_names_the_faster_one(tmp_path):
    run = hand_run(tmp_path, cell_at(30, 1), cell_at(40, 1, dtype="float32"), cell_at(20, 8))
    choice = choose(run)
    assert (choice.block_size, choice.dtype, choice.plain_dtype) == (1, "bfloat16", "float32")
    assert choice.sentence.endswith("; plain decoding in float32 is faster still, 40.0 tokens/s.")


def test_a_draft_slower_than_plain_decoding_is_not_recommended(tmp_path):
    run = hand_run(
        tmp_path, cell_at(10, 1), cell_at(40, 1, dtype="float32"), cell_at(20, 4, spread=0.1)
    )
    choice = choose(run)
    assert (choice.block_size, choice.verdict) == (4, "do not speculate")
    assert choice.speedup_high < 1
    assert choice.sentence.startswith("Do not speculate: block size 4 with the full window is ")
    assert choice.sentence.endswith("of plain decoding in float32 (40.0 tokens/s).")


def test_an_interval_around_1_is_called_not_distinguishable(tmp_path):
    choice = choose(hand_run(tmp_path, cell_at(20, 1), cell_at(20.5, 4, spread=0.2)))
    assert choice.speedup_low < 1 < choice.speedup_high
    assert choice.verdict == "not distinguishable"
    assert choice.sentence.endswith("; not distinguishable, plain decoding is as good.")


def test_settings_within_2_per_cent_are_named(tmp_path):
    run = hand_run(
        tmp_path,
        cell_at(10, 1),
        cell_at(20, 4),
        cell_at(19.7, 8, draft_window=16),
        cell_at(19.0, 16),
    )
    (near,) = choose(run).near
    assert (near.block_size, near.draft_window) == (8, 16)
    assert near.label == "block size 8 with window 16"


def test_a_window_is_part_of_the_answer(tmp_path):
    run = hand_run(tmp_path, cell_at(10, 1), cell_at(20, 4), cell_at(22, 4, draft_window=64))
    choice = choose(run)
    assert choice.draft_window == 64
    assert choice.sentence.startswith("Block size 4 with window 64 is fastest: 22.0 tokens/s")


def test_the_gain_on_prompts_left_out_is_smaller_where_the_winner_won_by_luck(tmp_path):
    """Sizes that differ by chance alone: the best of them gains nothing on other prompts."""
    rng = np.random.default_rng(0)
    cells = [({"block_size": 1}, [timed(f"p{i}", 20) for i in range(10)], [])]
    for size in range(2, 14):
        rows = [timed(f"p{i}", 20 * math.exp(0.3 * rng.normal())) for i in range(10)]
        cells.append(({"block_size": size}, rows, []))
    choice = choose(hand_run(tmp_path, *cells))
    assert choice.speedup > 1.1
    assert choice.gain_held_out < choice.speedup - 0.05
    assert choice.p_best < 0.9


def test_one_prompt_allows_no_verdict(tmp_path):
    choice = choose(hand_run(tmp_path, cell_at(10, 1, prompts=1), cell_at(30, 4, prompts=1)))
    assert choice.speedup == pytest.approx(3)
    assert (choice.low, choice.speedup_low, choice.gain_held_out) == (None, None, None)
    assert choice.verdict == "not distinguishable"
    assert choice.sentence == (
        "Block size 4 with the full window is fastest: 30.0 tokens/s over 1 prompt, too few for an "
        "interval, 3.00x of plain decoding in bfloat16; not distinguishable, one prompt stands for "
        "no other."
    )


def test_latency_counts_prefill_and_the_last_token_throughput_does_not(tmp_path):
    quick = [prompt(f"p{i}", new_ids=[1] * 11, decode_s=1.0, ttft_s=3.0) for i in range(4)]
    prompt_ = [prompt(f"p{i}", new_ids=[1] * 11, decode_s=2.0, ttft_s=0.2) for i in range(4)]
    run = hand_run(tmp_path, ({"block_size": 8}, quick, []), ({"block_size": 4}, prompt_, []))
    assert choose(run).block_size == 8
    choice = choose(run, objective="latency")
    assert (choice.block_size, choice.tokens_per_s) == (4, pytest.approx(11 / 2.2))
    assert "answers soonest: 5.0 tokens/s with prefill" in choice.sentence


def test_memory_takes_the_least_draft_cache_within_2_per_cent_of_the_best(tmp_path):
    def cached(speed, size, window, count):
        settings, rows, _ = cell_at(speed, size, draft_window=window)
        blocks = [block(0, size, prompt_id="p0", draft_cache_bytes=count)]
        return settings, rows, blocks

    run = hand_run(
        tmp_path,
        cell_at(10, 1),
        cached(20.0, 8, None, 900),
        cached(19.8, 8, 64, 500),
        cached(19.7, 4, 64, 500),
        cached(19.0, 8, 16, 100),  # too slow
    )
    choice = choose(run, objective="memory")
    assert (choice.block_size, choice.draft_window) == (8, 64)
    assert choice.p_best == 1
    assert choice.regret == pytest.approx(0.01)
    assert [other.block_size for other in choice.near] == [8, 4]
    assert [other.p_near for other in choice.near] == [1, 1]
    with pytest.raises(ValueError, match="objective is 'speed'; expected one of throughput"):
        choose(run, objective="speed")


def test_a_choice_over_some_of_the_prompts_is_theirs_alone(tmp_path):
    run = hand_run(
        tmp_path,
        ({"block_size": 4}, [timed("a", 30), timed("b", 10), timed("c", 30)], []),
        ({"block_size": 8}, [timed("a", 20), timed("b", 40), timed("c", 20)], []),
    )
    assert choose(run, prompts=["a", "c"]).block_size == 4
    assert choose(run, prompts=["b"]).block_size == 8
    with pytest.raises(ValueError, match="no prompt z in this run"):
        choose(run, prompts=["z"])


def test_without_plain_decoding_there_is_no_speedup(tmp_path):
    choice = choose(hand_run(tmp_path, cell_at(30, 4), cell_at(20, 8)))
    assert (choice.speedup, choice.plain_dtype, choice.verdict) == (None, None, "no baseline")
    assert choice.library_tokens_per_s is None
    assert choice.sentence.endswith("; plain decoding was not measured.")


def test_plain_decoding_of_other_prompts_is_no_baseline(tmp_path):
    few = {"block_size": 4}, [timed("a", 30), timed("b", 30)], []
    many = {"block_size": 1}, [timed("a", 10), timed("b", 10), timed("c", 1000)], []
    assert choose(hand_run(tmp_path, few, many)).verdict == "no baseline"


def test_cells_over_other_prompts_do_not_compare_and_the_larger_part_is_shown(tmp_path):
    few = {"block_size": 4}, [timed("a", 30)], []
    many = [({"block_size": size}, [timed("a", 10), timed("b", 10)], []) for size in (1, 4)]
    run = hand_run(tmp_path, few, *many)
    with pytest.raises(ValueError, match=r"prompts is 1 of mini and 2 of mini.*folder of its own"):
        choose(run)
    part = comparable(run)
    assert sorted(cell.block_size for cell in part.cells) == [1, 4]
    assert choose(part).prompts == 2


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("dtype", ("bfloat16", "float32")),
        ("timing", ("stages", "whole")),
        ("backend", ("mlx", "torch")),
        ("max_new_tokens", (48, 96)),
    ],
)
def test_a_choice_refuses_cells_that_differ_in_more_than_the_grid(tmp_path, name, values):
    run = hand_run(
        tmp_path, cell_at(20, 4, **{name: values[0]}), cell_at(30, 8, **{name: values[1]})
    )
    with pytest.raises(ValueError, match=rf"{name} is .*run\.select\({name}="):
        choose(run)


def test_times_with_the_device_waited_for_are_not_compared_with_the_librarys(tmp_path):
    """Waiting between stages forbids overlap; the library's generator never waits."""
    run = hand_run(
        tmp_path,
        cell_at(10, 1, timing="stages"),
        cell_at(20, 4, timing="stages"),
        cell_at(12, 1, engine="transformers"),
    )
    choice = choose(run)
    assert choice.speedup == pytest.approx(2)
    assert choice.library_tokens_per_s is None


def test_plain_cells_alone_leave_nothing_to_choose(tmp_path):
    with pytest.raises(ValueError, match="nothing to choose from"):
        choose(hand_run(tmp_path, cell_at(20, 1)))


def test_outputs_of_one_token_leave_nothing_to_time(tmp_path):
    run = hand_run(tmp_path, ({}, [prompt(new_ids=[5], decode_s=0.0)], []))
    with pytest.raises(ValueError, match="no cell emitted more than one token"):
        choose(run)


def test_the_choice_agrees_with_the_cell_frame(demo):
    choice = choose(demo)
    row = next(row for row in records(cell_frame(demo)) if row["cell"] == choice.cell)
    figures = (choice.tokens_per_s, choice.low, choice.high)
    assert figures == (row["tokens_per_s"], row["tokens_per_s_low"], row["tokens_per_s_high"])
    drafting = cell_frame(demo).query("engine == 'dflash_lab' and dtype == 'bfloat16'")
    assert choice.tokens_per_s == drafting["tokens_per_s"].max()


def test_a_choice_can_be_stored(demo):
    choice = choose(demo)
    assert json.loads(to_json(choice)) == json.loads(json.dumps(plain(asdict(choice))))
