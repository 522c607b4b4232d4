"""Every figure in every size: nothing clipped, nothing on top of something else, units on axes."""

import itertools

import numpy as np
import pandas as pd
import pytest

from dflash_lab import plot
from dflash_lab.analyse import cell_frame, published_points, speedup_frame, task_frame
from dflash_lab.costs import BESIDE, CostTable, write_costs
from dflash_lab.figures import FIGURES, Material, NothingToDraw
from dflash_lab.replay import AcceptanceMap, Text, clip_frame, save_map
from dflash_lab.replay.maps import PromptMap
from dflash_lab.store import open_run
from dflash_lab.tests.runs import HARDWARE, block, prompt, request_of, write_cell, write_run
from dflash_lab.tests.test_plot import assert_words_are_readable, said
from dflash_lab.tests.test_what_if import cost

DRAWN = [name for name in FIGURES if name not in ("stages", "clipped", "predicted", "policies")]


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    return Material(open_run(write_run(tmp_path_factory.mktemp("runs") / "demo")))


# Drawn in the fast tests too.
QUICK = {("throughput", "column"), ("published", "page"), ("tasks", "column")}
EVERY = [
    pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow, id="-".join(pair))
    for pair in itertools.product(DRAWN, plot.SIZES)
]


@pytest.mark.parametrize(("name", "size"), EVERY)
def test_no_label_is_clipped_or_covers_another_in_any_size(material, name, size):
    with plot.sized(size):
        figure = FIGURES[name](material).figure
    assert_words_are_readable(figure)
    if size == "slide":
        assert tuple(figure.get_size_inches()) == (6.4, 3.6)


UNITS = {
    "throughput": ["block size (tokens, anchor included)", "decode throughput (tokens/s)"],
    "published": [
        *("block size (tokens)", "speed-up over plain decoding"),
        *("block size (tokens)", "tau (tokens per block)"),
    ],
    "margins": ["margin of the target's choice (logits)"],
    "pairs": ["decode throughput (tokens/s)"],
    "timeline": ["time since the request (s)", "tokens of the block"],
}


@pytest.mark.parametrize("name", UNITS)
def test_axes_say_what_they_show_and_in_which_unit(material, name):
    figure = FIGURES[name](material).figure
    labels = [label for axes in figure.axes for label in (axes.get_xlabel(), axes.get_ylabel())]
    assert [label for label in labels if label] == UNITS[name]


@pytest.mark.parametrize("size", plot.SIZES)
def test_many_tasks_with_long_names_stay_apart(material, size):
    frame = task_frame(material.run).query("dtype == 'bfloat16' and draft_window.isna()")
    one = frame[frame["task"] == frame["task"].iloc[0]]
    many = [one.assign(task=f"{number} summarisation <b>$") for number in range(8)]
    with plot.sized(size):
        figure = plot.tasks(pd.concat(many))
    assert_words_are_readable(figure)
    assert len(figure.axes) == 8
    inches = min(axes.get_position().width for axes in figure.axes) * figure.get_figwidth()
    assert inches > (0.5 if size == "slide" else 1)


@pytest.mark.parametrize("size", plot.SIZES)
def test_long_names_of_prompts_and_policies_are_not_cut_by_the_edge(material, size):
    frame = FIGURES["pairs"](material).table.assign(
        prompt_id=lambda t: "WIDE <m> $x$@" + t.prompt_id
    )
    parted = PARTED.assign(prompt_id="WIDE <m> $x$@ of a name")
    ways = pd.DataFrame({"policy": ["survival times cost, window 4096", "block size 4"]}).assign(
        bound=None, prompts=3, tokens_per_s=9.0, tokens_per_s_low=8.0, tokens_per_s_high=10.0
    )
    with plot.sized(size):
        drawn = [plot.pairs(frame, "one", "other"), plot.margins(parted), plot.policies(ways)]
    for figure in drawn:
        assert_words_are_readable(figure)


def test_a_column_leaves_title_and_notes_to_the_caption_and_has_its_labels_below(material):
    with plot.sized("column"):
        narrow = FIGURES["throughput"](material).figure
    wide = FIGURES["throughput"](material).figure
    title = wide.axes[0].get_title("left")
    assert title in said(wide) and title not in said(narrow)
    assert narrow.words == wide.words
    assert narrow.get_figwidth() == 3.25
    below = [text.get_text() for text in narrow.legends[0].get_texts()]
    assert len(below) == 7 and below[-1] == "window 16"


def test_the_size_holds_inside_its_block_alone(material):
    with plot.sized("slide"):
        assert plot.cost(material.cells).size == "slide"
    assert plot.cost(material.cells).size == "page"


# Published points


def test_published_points_are_hollow_lettered_and_named_with_their_source(material):
    points = published_points()
    figure = FIGURES["published"](material).figure
    left = figure.axes[0]
    (hollow,) = [line for line in left.get_lines() if line.get_marker() == "D"]
    assert hollow.get_markerfacecolor() == "white"
    assert sorted(hollow.get_ydata()) == pytest.approx(sorted(points["speedup"]))
    shown = " ".join(said(figure))
    for letter, told in zip("abcdefgh", points["told"], strict=True):
        assert f"{letter} {told}" in shown
    assert "other machines" in shown
    assert "Published by DFlash paper: H200" in figure.alt


def test_a_published_speedup_is_over_the_sources_own_plain_decoding():
    points = published_points().set_index("setup")
    row = points[points["source"] == "mlxcel#1937"].iloc[0]
    assert (row.block_size, round(row.speedup, 2)) == (4, 1.16)
    assert pd.isna(row.tau)
    assert points[points["tau"] < points["speedup"]].empty  # a block costs at least a plain step


def test_speedup_is_over_the_fastest_plain_decoding_and_paired(material):
    cells = cell_frame(material.run)
    frame = speedup_frame(material.run, cells)
    own = cells[cells["engine"] == "dflash_lab"]
    fastest = own[own["block_size"] == 1]["tokens_per_s"].max()
    wanted = (frame["tokens_per_s"] / fastest).tolist()
    assert frame["speedup"].tolist() == pytest.approx(wanted)
    assert (frame["speedup_low"] < frame["speedup"]).all()
    assert speedup_frame(material.run, own[own["block_size"] > 1]).empty


# Predicted


def costed(path, sizes=(1, 4, 8), hardware=HARDWARE):
    """A run, and in its folder a table in which a block takes a fiftieth of a second and more."""
    write_run(path, prompts=3, block_sizes=(1, 4, 8), windows=())
    table = tuple(cost(size, verify_s=0.02 + 0.001 * size) for size in sizes)
    facts = {"dtype": "bfloat16", "hardware": hardware}
    write_costs(CostTable(costs=table, facts=facts), path / BESIDE)
    return Material(open_run(path))


@pytest.mark.parametrize("size", plot.SIZES)
def test_a_predicted_curve_stands_beside_measured_points(tmp_path, size):
    with plot.sized(size):
        drawn = FIGURES["predicted"](costed(tmp_path))
    assert_words_are_readable(drawn.figure)
    assert set(drawn.table["dtype"]) == {"bfloat16"}  # the table says nothing of others
    dashed, *_ = [line for line in drawn.figure.axes[0].get_lines() if len(line.get_xdata()) == 3]
    measured = next(line for line in drawn.figure.axes[0].get_lines() if line.get_marker() == "o")
    rows = drawn.table.sort_values("block_size")
    assert measured.get_ydata().tolist() == pytest.approx(rows["tokens_per_s"].tolist())
    assert "Predicted, full window: " in drawn.figure.alt
    assert dashed is not None


@pytest.mark.parametrize(
    ("change", "why"),
    [({"sizes": (1, 4)}, "no block size 8"), ({"hardware": "another"}, "hardware class")],
)
def test_a_table_that_does_not_fit_is_a_reason_to_draw_nothing(tmp_path, change, why):
    with pytest.raises(NothingToDraw, match=why):
        FIGURES["predicted"](costed(tmp_path, **change))


def test_a_run_without_a_table_says_how_to_make_one(material):
    with pytest.raises(NothingToDraw, match=r"dflash-lab costs --out RUN/costs.json"):
        FIGURES["predicted"](material)


# Audits and policies


def audited(prompt_id, dtype, label, **values):
    names = ("margin", "tolerance", "first_difference")
    return {
        "prompt_id": prompt_id,
        "dtype": dtype,
        "label": label,
        "smallest_margin": 0.4,
        **dict.fromkeys(names, None),
        **values,
    }


PARTED = pd.DataFrame(
    [
        audited("math-01", "float32", "equal"),
        audited("math-01", "bfloat16", "near tie", margin=0.1, tolerance=0.2, first_difference=7),
        audited("chat-01 $x$ <b>", "bfloat16", "mismatch", first_difference=3),
    ]
)


@pytest.mark.parametrize("size", plot.SIZES)
def test_margins_are_full_where_outputs_part_and_hollow_where_they_are_equal(size):
    with plot.sized(size):
        figure = plot.margins(PARTED)
    assert_words_are_readable(figure)
    faces = [
        line.get_markerfacecolor()
        for line in figure.axes[0].get_lines()
        if len(line.get_xdata()) == 1
    ]
    assert len(faces) == 2 and faces.count("white") == 1  # where a text ends there is no margin
    assert figure.words[0] == "Audited outputs that part from the reference: 2 of 3"
    assert "math-01 in bfloat16: near tie, 0.1 at token 7" in figure.alt


def test_cells_under_a_policy_stand_beside_those_of_a_fixed_size(tmp_path):
    for policy, seconds in ((None, 0.2), ({"name": "back-off", "version": "1"}, 0.1)):
        write_cell(
            tmp_path,
            request_of(
                ["p0", "p1"], block_size=4, **({} if policy is None else {"policy": policy})
            ),
            [prompt(p, decode_s=seconds) for p in ("p0", "p1")],
            [block(2, 4, prompt_id=p) for p in ("p0", "p1")],
        )
    drawn = FIGURES["policies"](Material(open_run(tmp_path)))
    names = said(drawn.figure)
    assert "block size 4" in names and any("back-off" in name for name in names)
    assert drawn.table["tokens_per_s"].tolist() == pytest.approx([15.0, 30.0])


@pytest.mark.parametrize("size", plot.SIZES)
def test_a_bound_that_no_policy_can_reach_is_hollow(size):
    rows = [
        {"policy": name, "bound": bound, "prompts": 3}
        | {"tokens_per_s": pace, "tokens_per_s_low": pace - 1, "tokens_per_s_high": pace + 1}
        for name, bound, pace in (
            ("block size 4", None, 20.0),
            ("best block size of each prompt", "chosen after the fact", 22.0),
        )
    ]
    with plot.sized(size):
        figure = plot.policies(pd.DataFrame(rows))
    assert_words_are_readable(figure)
    hollow = [line for line in figure.axes[0].get_lines() if line.get_marker() == "D"]
    assert [line.get_xdata()[0] for line in hollow] == [22.0]
    assert "Hollow: chosen after the fact, an upper bound" in figure.notes


# An acceptance map beside the run, and no cell under a policy


def mapped(sizes=(1, 4, 8), windows=(None,)):
    """Two texts of eight blocks' anchors; half of what is drafted is right."""
    counts = np.array([[min(size // 2, 8 - at) for at in range(8)] for size in sizes], np.int32)
    texts = [Text(prompt_id=p, prompt_ids=(1, 2), tokens=tuple(range(9))) for p in ("p0", "p1")]
    accepted = np.repeat(counts[:, None], len(windows), axis=1)
    return AcceptanceMap(
        block_sizes=sizes,
        draft_windows=windows,
        prompts=tuple(PromptMap(text=text, accepted=accepted) for text in texts),
        context_limit=1000,
        trained_block_size=16,
    )


@pytest.mark.parametrize("size", plot.SIZES)
def test_policies_of_a_map_alone_are_predictions_and_say_so(tmp_path, size):
    material = costed(tmp_path)
    acceptance = mapped()
    save_map(material.run, acceptance)
    with plot.sized(size):
        drawn = FIGURES["policies"](material)
    assert_words_are_readable(drawn.figure)
    fixed = drawn.table.set_index("policy").loc["block size 4"]
    context = round(np.mean(material.run.blocks(("start",))["start"].to_numpy()))
    block_s = material.costs.by_rows(None, context)[4, 4]
    # 8 tokens a text: three each from the blocks at 0 and 3, then two; three blocks
    assert fixed["tokens_per_s"] == pytest.approx(8 / (3 * block_s))
    assert drawn.figure.axes[0].get_xlabel() == "predicted throughput (tokens/s)"
    assert drawn.figure.alt.startswith("Predicted throughput")
    assert "Predicted: texts replayed, blocks at their measured costs" in drawn.figure.notes
    assert drawn.cells == ()


def test_a_size_without_a_whole_block_is_drawn_without_a_tau():
    figure = plot.clipped(clip_frame(mapped(sizes=(4, 12, 16))))
    assert "clipped: 4.00 at 4, n/a at 12. drafted anew: 3.00 at 4, 7.00 at 12" in figure.alt


def test_a_map_without_costs_or_with_others_is_a_reason_to_draw_no_policies(tmp_path):
    material = Material(open_run(write_run(tmp_path, prompts=2, block_sizes=(1, 4), windows=())))
    with pytest.raises(NothingToDraw, match="no acceptance map is stored"):
        FIGURES["policies"](material)
    save_map(material.run, mapped())
    with pytest.raises(NothingToDraw, match=r"dflash-lab costs --out RUN/costs.json"):
        FIGURES["policies"](material)
    with pytest.raises(NothingToDraw, match="have no seconds for block size 8"):
        FIGURES["policies"](costed(tmp_path, sizes=(1, 4)))


def test_a_map_of_other_windows_and_two_maps_are_reasons_to_draw_no_policies(tmp_path):
    material = costed(tmp_path)
    save_map(material.run, mapped(windows=(16,)))
    with pytest.raises(NothingToDraw, match="draft window None is not in this map"):
        FIGURES["policies"](material)
    save_map(material.run, mapped())
    for name in ("policies", "clipped"):
        with pytest.raises(NothingToDraw, match="holds 2 acceptance maps"):
            FIGURES[name](Material(material.run))
