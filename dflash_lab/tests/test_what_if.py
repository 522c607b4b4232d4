"""What if: parts that add up, scales that do what they say, an optimum that moves."""

import pytest

from dflash_lab.costs import Cost, CostTable, measured_blocks, predict
from dflash_lab.plot.explored import what_if
from dflash_lab.store import open_run
from dflash_lab.tests.pages import read_page
from dflash_lab.tests.runs import block, prompt, request_of, write_cell, write_run
from dflash_lab.what_if import PARTS, NoParts, cost_parts, only, scaled_frame


def cost(block_size, draft_window=None, context=64, draft_s=0.02, verify_s=0.05):
    draft = draft_s if block_size > 1 else 0.0
    whole = draft + verify_s + 0.001
    return Cost(
        block_size=block_size,
        draft_window=draft_window,
        context=context,
        blocks=5,
        draft_s=draft,
        verify_s=verify_s,
        other_s=0.001,
        total_s=0.9 * whole,  # stages that are waited for add up to more
        total_s_low=0.8 * whole,
        total_s_high=whole,
        first_draft_s=2 * draft,
        prefill_s=0.1,
        draft_cache_bytes=0,
    )


TABLE = CostTable(costs=tuple(cost(size) for size in (1, 4, 8)))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "scaled"
    made = open_run(write_run(path, prompts=2, block_sizes=(1, 4, 8), windows=()))
    return made.select(engine="dflash_lab", dtype="bfloat16")


def test_the_parts_of_a_table_add_up_to_it(run):
    whole = predict(measured_blocks(run), TABLE)["decode_s"]
    parts = [predict(measured_blocks(run), only(TABLE, part))["decode_s"] for part in PARTS]
    assert sum(parts).to_numpy() == pytest.approx(whole.to_numpy())


def test_a_scale_of_1_predicts_what_the_table_does(run):
    frame = scaled_frame(cost_parts(run, TABLE), {})
    assert (frame["tokens_per_s"] == frame["now_per_s"]).all()
    made = predict(measured_blocks(run), TABLE).groupby("block_size")
    sums = made[["after_first", "decode_s"]].sum()
    expected = sums["after_first"] / sums["decode_s"]
    assert frame.set_index("block_size")["now_per_s"].to_dict() == pytest.approx(expected.to_dict())


def test_twice_every_cost_is_half_the_throughput(run):
    frame = scaled_frame(cost_parts(run, TABLE), dict.fromkeys(PARTS, 2.0))
    assert (frame["tokens_per_s"] * 2).to_numpy() == pytest.approx(frame["now_per_s"].to_numpy())


def test_plain_decoding_pays_for_no_draft(run):
    frame = scaled_frame(cost_parts(run, TABLE), {"draft": 10.0}).set_index("block_size")
    assert frame.loc[1, "tokens_per_s"] == frame.loc[1, "now_per_s"]
    assert frame.loc[8, "tokens_per_s"] < frame.loc[8, "now_per_s"] / 2


def staged(path):
    for size, draft_s in ((1, 0.0), (4, 0.02)):
        rows = [
            block(1, size, index=i, draft_s=draft_s, verify_s=0.05, commit_s=0.0, total_s=0.08)
            for i in range(3)
        ]
        write_cell(path, request_of(["p0"], block_size=size, timing="stages"), [prompt()], rows)
    return open_run(path)


def test_without_a_table_the_stages_of_the_run_are_the_parts(tmp_path):
    parts = cost_parts(staged(tmp_path)).set_index("block_size")
    assert parts.loc[4, list(PARTS)].to_dict() == pytest.approx(
        {"draft": 0.06, "verify": 0.15, "other": 0.03}
    )
    assert parts.loc[4, "after_first"] == 6


def test_a_run_that_knows_no_parts_is_refused_with_the_way_out(run):
    with pytest.raises(NoParts, match=r"dl\.measure_costs.*timing='stages'"):
        cost_parts(run)
    with pytest.raises(NoParts, match="no cost table knows its block sizes"):
        cost_parts(run, CostTable(costs=(cost(3),)))


def test_settings_that_a_table_does_not_know_are_left_out(run):
    assert list(cost_parts(run, CostTable(costs=(cost(1), cost(4))))["block_size"]) == [1, 4]


@pytest.mark.parametrize(
    ("scale", "words"), [({"commit": 2}, "is no part"), ({"draft": -1}, "factors of 0 and more")]
)
def test_a_scale_that_makes_no_sense_is_refused(run, scale, words):
    with pytest.raises(ValueError, match=words):
        scaled_frame(cost_parts(run, TABLE), scale)


# The figure


def test_the_figure_says_where_the_optimum_was_and_where_it_is(run):
    parts = cost_parts(run, CostTable(costs=tuple(cost(s, draft_s=0.4) for s in (1, 4, 8))))
    svg, alt = what_if(scaled_frame(parts, {"draft": 0.01}), "If drafting were cheap")
    assert alt.startswith("The fastest moves from block size 1, plain decoding to block size ")
    assert "If drafting were cheap." in alt
    (picture,) = read_page(svg).all("svg")
    assert picture.attributes["aria-label"] == alt
    assert len(list(picture.all("polyline"))) == 2
    assert "nan" not in svg


def test_the_same_figures_give_the_same_bytes(run):
    frame = scaled_frame(cost_parts(run, TABLE), {"verify": 2.0})
    assert what_if(frame, "a") == what_if(frame, "a")
