"""Costs measured on pairs whose seconds are known, and what a table predicts of blocks."""

import json
import statistics
import time

import numpy as np
import pandas as pd
import pytest

from dflash_lab.checkpoint import read_draft_config
from dflash_lab.costs import (
    BLOCK_COLUMNS,
    Cost,
    CostTable,
    best_block_size,
    longer_pays,
    measure_costs,
    measure_shape,
    measured_blocks,
    predict,
    prediction_frame,
    read_costs,
    write_costs,
)
from dflash_lab.store import open_run
from dflash_lab.tests.runs import HARDWARE, block, prompt, request_of, write_cell
from dflash_lab.tests.toys import ScriptedModels, ScriptedSession, scripted_pair

# By hand


def toy_best(draft_cost, row_cost, alpha):
    """Best block size up to 32 and speedup where each draft is right with a chance of alpha."""
    tau = {size: (1 - alpha**size) / (1 - alpha) for size in range(1, 33)}
    seconds = {1: 1.0} | {size: 1 + draft_cost + row_cost * (size - 1) for size in range(2, 33)}
    return tau, seconds, best_block_size(tau, seconds)


TOY_TABLE = """
0.1 0.02 4 1.40 5 1.64 7 1.99 9 2.54 12 3.53 21 5.94
0.1 0.1  3 1.20 3 1.35 4 1.55 5 1.85 7 2.32 11 3.27
0.1 0.3  1 1.00 2 1.07 3 1.15 3 1.29 4 1.48 6 1.80
0.3 0.02 5 1.20 6 1.41 7 1.71 9 2.19 13 3.07 22 5.24
0.3 0.1  3 1.04 4 1.17 4 1.36 6 1.63 8 2.08 12 2.99
0.3 0.3  1 1.00 1 1.00 3 1.03 3 1.15 5 1.34 7 1.68
"""


@pytest.mark.parametrize("line", TOY_TABLE.strip().splitlines())
def test_best_block_size_and_speedup_of_the_published_toy_table(line):
    draft_cost, row_cost, *expected = map(float, line.split())
    found = []
    for alpha in (0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
        size, speedup = toy_best(draft_cost, row_cost, alpha)[2]
        found += [size, round(speedup, 2)]
    assert found == expected


@pytest.mark.parametrize("alpha", [0.5, 0.7, 0.9])
def test_the_marginal_rule_stops_at_the_best_size_where_costs_are_a_line(alpha):
    tau, seconds, (best, _) = toy_best(0.1, 0.1, alpha)
    pays = [
        longer_pays(alpha**size, seconds[size], seconds[size + 1], tau[size])
        for size in range(2, 32)
    ]
    assert pays == [size < best for size in range(2, 32)]


def test_a_row_that_costs_nothing_always_pays():
    assert longer_pays(0.0, 1.0, 1.0, 2.0)


def test_a_cliff_in_the_costs_does_not_hide_the_better_size_behind_it():
    """Size 8 is the worst of three; a search that stops at the first fall never sees 16."""
    tau, seconds = {1: 1, 4: 2.0, 8: 2.6, 16: 4.0}, {1: 1, 4: 1.4, 8: 2.4, 16: 2.5}
    assert best_block_size(tau, seconds) == (16, pytest.approx(1.6))


# Measuring


class PricedSession(ScriptedSession):
    """Takes its time by the kind of pass, so that every figure is known."""

    def draft(self, anchor, block_size):
        if block_size > 1:
            first = self.calls == ["prefill"]
            time.sleep(0.004 + 0.012 * first)
        return super().draft(anchor, block_size)

    def verify(self, block, rows=None):
        time.sleep(0.002 + 0.002 * (len(block) >= 4))
        return super().verify(block, rows)


class PricedModels(ScriptedModels):
    def session(self, draft_window, speculate):
        self.sessions.append(PricedSession(self, draft_window, speculate))
        return self.sessions[-1]


@pytest.fixture(scope="module")
def measured():
    models = PricedModels(prefill_s=0.003)
    pair = scripted_pair(block_size=8)
    object.__setattr__(pair, "models", models)
    return models, measure_costs(pair, (2, 4), (None, 16), (20, 200), repeats=5)


def test_a_table_holds_what_was_waited_for_at_every_size_window_and_context(measured):
    _, table = measured
    assert table.block_sizes == (1, 2, 4) and table.draft_windows == (None, 16)
    assert len(table.costs) == 2 * (1 + 2 * 2)
    for cost in table.costs:
        drafts = cost.block_size > 1
        # A sleep is never shorter than asked for; on a busy machine it is longer.
        assert cost.draft_s >= 0.004 if drafts else cost.draft_s < 0.001
        assert cost.verify_s >= (0.004 if cost.block_size == 4 else 0.002)
        assert cost.total_s >= 0.002 + 0.004 * drafts + 0.002 * (cost.block_size == 4)
        assert cost.total_s_low <= cost.total_s <= cost.total_s_high
        assert cost.blocks == 5
        assert cost.prefill_s >= 0.003
        if drafts:
            assert cost.first_draft_s >= 0.016
            assert cost.draft_cache_bytes == 8 * min(16, cost.draft_cache_bytes // 8) or (
                cost.draft_window is None
            )
    assert {cost.context // 20 for cost in table.costs} == {1, 10}


def test_the_circumstances_stand_in_the_table(measured):
    facts = measured[1].facts
    assert {"device", "dtype", "threads", "hardware", "versions", "draft_sha"} <= set(facts)
    assert (facts["trained_block_size"], facts["threads"], facts["dtype"]) == (8, 1, "float32")


def test_every_session_is_closed_and_the_order_of_shapes_is_rotated(measured):
    sessions = measured[0].sessions
    assert all(session.closed for session in sessions)
    plain = [session for session in sessions if not session.speculate]
    assert plain and all(session.draft_window is None for session in plain)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"contexts": (5000,)}, "context 5000 does not fit: this target holds 4096 positions"),
        ({"block_sizes": (0,)}, "block_size is 0"),
        ({"repeats": 0}, "repeats is 0"),
        ({"draft_windows": None}, "draft_windows is None; expected a list"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_the_call(settings, words):
    with pytest.raises(ValueError, match=words):
        measure_costs(scripted_pair(), **({"block_sizes": (2,)} | settings))


def test_random_weights_of_a_given_shape_make_a_table(qwen3_toy):
    config = read_draft_config(qwen3_toy.draft)
    target = qwen3_toy.target / "config.json"
    table = measure_shape(
        target, config, (2, 8), (None, 16), (20,), repeats=2, dtype="float32", device="cpu"
    )
    assert len(table.costs) == 5 and all(cost.total_s > 0 for cost in table.costs)
    assert "random weights" in table.facts["target"]
    seen = {cost.draft_window: cost.draft_cache_bytes for cost in table.costs}
    assert 0 < seen[16] <= config.context_bytes_per_token(4) * 2 * 16 * 4


# Tables


def priced(size, window, context, total, **figures):
    made = {
        "draft_s": 0.2 * total if size > 1 else 0.0,
        "verify_s": 0.7 * total,
        "other_s": 0.1 * total,
        "first_draft_s": 0.2 * total if size > 1 else 0.0,
        "prefill_s": 0.5,
        "draft_cache_bytes": 100 * size,
    } | figures
    return Cost(
        block_size=size,
        draft_window=window,
        context=context,
        blocks=5,
        total_s=total,
        total_s_low=0.9 * total,
        total_s_high=1.2 * total,
        **made,
    )


FACTS = {"hardware": HARDWARE, "dtype": "bfloat16", "trained_block_size": 8}
TABLE = CostTable(
    costs=(
        priced(1, None, 0, 1.0),
        priced(1, None, 100, 2.0),
        priced(4, None, 0, 1.5),
        priced(4, None, 100, 3.5),
        priced(8, None, 0, 1.6, first_draft_s=1.32),
        priced(8, 16, 0, 1.4),
    ),
    facts=FACTS,
)


def test_costs_lie_on_a_line_between_contexts_and_are_the_last_beyond_them():
    assert TABLE.seconds(4, None, [0, 50, 100, 900]).tolist() == [1.5, 2.5, 3.5, 3.5]
    assert TABLE.seconds(1, 16, 50) == 1.5  # nothing is drafted: any window is none


def test_verifying_fewer_rows_costs_what_that_many_rows_cost():
    assert float(TABLE.seconds(8, None, 0, rows=4)) == pytest.approx(1.6 - 0.7 * (1.6 - 1.5))


def test_break_even_is_the_block_in_plain_steps_at_the_same_context():
    assert TABLE.break_even(4, None, 0) == 1.5
    assert TABLE.break_even(4, None, 100) == 1.75
    frame = TABLE.frame().set_index(["block_size", "context"])
    assert frame.loc[(4, 100), "round_cost"] == 1.75
    assert (frame.loc[1, "round_cost"] == 1).all()


def test_a_size_that_was_not_measured_is_an_error_that_lists_those_that_were():
    with pytest.raises(ValueError, match=r"no block size 6 with window full.*sizes 1, 4, 8 .*16"):
        TABLE.seconds(6, None, 0)


@pytest.mark.parametrize("name", ["costs.json", "costs.parquet"])
def test_a_table_comes_back_from_a_file_as_it_was(tmp_path, name):
    assert read_costs(write_costs(TABLE, tmp_path / name)) == TABLE


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"schema": 9}', '{"schema": 1, "costs": []}'])
def test_a_file_that_is_no_table_is_named(tmp_path, content):
    path = tmp_path / "costs.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"costs\.json is no cost table"):
        read_costs(path)
    with pytest.raises(ValueError, match=r"expected a \.json or \.parquet file"):
        read_costs(tmp_path / "costs.csv")


def test_a_stored_table_is_strict_json(tmp_path):
    raw = json.loads(write_costs(TABLE, tmp_path / "costs.json").read_text())
    assert raw["facts"] == FACTS and len(raw["costs"]) == len(TABLE.costs)


# Predicting


def blocks_frame(*rows):
    """Blocks as a prediction needs them, each (index, (prompt, size, window, start, emitted))."""
    made = [
        {
            "prompt_id": name,
            "turn": 0,
            "cell_block_size": size,
            "draft_window": window,
            "index": index,
            "start": start,
            "block_size": size,
            "rows": size,
            "accepted": emitted - 1,
            "emitted": emitted,
            "cut": False,
        }
        for index, (name, size, window, start, emitted) in rows
    ]
    return pd.DataFrame(made)[list(BLOCK_COLUMNS)].astype({"draft_window": "Int64"})


def test_predicted_seconds_are_those_of_every_block_at_its_own_context():
    rows = [(0, ("a", 4, None, 0, 3)), (1, ("a", 4, None, 50, 2)), (0, ("b", 4, None, 100, 4))]
    made = predict(blocks_frame(*rows), TABLE).set_index("prompt_id")
    assert made.loc["a", "decode_s"] == 1.5 + 2.5
    assert made.loc["b", "decode_s"] == 3.5
    assert made["after_first"].to_dict() == {"a": 5, "b": 4}
    assert made.loc["a", "total_s"] == 4.0 + 0.5


def test_the_first_draft_pass_of_a_prompt_is_paid_once():
    rows = [(0, ("a", 8, None, 0, 3)), (1, ("a", 8, None, 3, 2))]
    (made,) = predict(blocks_frame(*rows), TABLE)["decode_s"]
    assert made == pytest.approx(1.6 + 1.6 + (1.32 - 0.32))


def test_a_block_made_narrow_by_the_end_of_the_context_costs_what_its_cell_does():
    blocks = blocks_frame((0, ("a", 8, None, 0, 3)), (1, ("a", 8, None, 3, 1)))
    narrow = blocks.assign(block_size=[8, 3], rows=[8, 3])
    assert predict(narrow, TABLE)["decode_s"][0] == predict(blocks, TABLE)["decode_s"][0]


def test_policies_get_seconds_by_size_and_rows():
    found = TABLE.by_rows(None, 0)
    assert set(found) == {(1, 1), (4, 1), (4, 4), (8, 1), (8, 4), (8, 8)}
    assert found[8, 4] == pytest.approx(1.6 - 0.7 * 0.1) and found[4, 4] == 1.5


def test_blocks_without_a_column_are_refused_by_its_name():
    with pytest.raises(ValueError, match=r"the blocks lack rows; replay_frame"):
        predict(blocks_frame((0, ("a", 4, None, 0, 1))).drop(columns="rows"), TABLE)


def test_predictions_stand_beside_measured_throughput_with_their_residual(tmp_path):
    ids = ["p0"]
    for size, seconds in ((4, 3.0), (8, 1.6)):
        blocks = [block(1, size, index=i, start=0) for i in range(2)]
        row = prompt("p0", new_ids=[1] * 5, decode_s=seconds)
        write_cell(tmp_path, request_of(ids, block_size=size), [row], blocks)
    write_cell(tmp_path, request_of(ids, block_size=4, hardware="other"), [row], blocks)
    frame = prediction_frame(open_run(tmp_path), TABLE).set_index("block_size")
    assert frame["tokens_per_s"].to_dict() == pytest.approx({4: 4 / 3, 8: 2.5})
    assert frame.loc[4, "predicted_tokens_per_s"] == pytest.approx(4 / 3)
    assert frame.loc[4, "residual"] == pytest.approx(0)
    assert frame.loc[8, "residual"] == pytest.approx(1.6 / 4.2 - 1)


def test_blocks_of_a_run_carry_the_settings_of_their_cell(tmp_path):
    write_cell(
        tmp_path,
        request_of(["p0"], block_size=4, draft_window=16),
        [prompt("p0")],
        [block(1, 4), block(0, 2, index=1)],
    )
    made = measured_blocks(open_run(tmp_path))
    assert set(BLOCK_COLUMNS) <= set(made.columns)
    assert made["rows"].to_list() == [4, 2] and made["cell_block_size"].to_list() == [4, 4]
    assert made["draft_window"].to_list() == [16, 16]
    assert statistics.mean(made["emitted"]) == np.mean([2, 1])
