"""Figures: the same bytes everywhere, nothing clipped or left behind, text taken literally."""

import io
import itertools
import re
import subprocess
import sys
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.text import Text

from dflash_lab import plot
from dflash_lab.analyse import cell_frame, choose, length_frame, survival_frame
from dflash_lab.store import open_run
from dflash_lab.tests.runs import write_run

HOSTILE = (
    "$",
    "$$",
    "a$b$c",
    "\\frac{",
    "_x^",
    "%",
    "\n",
    "\t",
    "",
    "x" * 500,
    "\U0001f469",
    "\x00",
)


class Frames:
    """Everything that figures are drawn from, of one run."""

    def __init__(self, path):
        self.run = open_run(path)
        self.cells = cell_frame(self.run)
        self.chosen = choose(self.run)
        self.survival = survival_frame(self.run)
        self.lengths = length_frame(self.run)

    def draw(self, name, highlight=None):
        if name == "throughput":
            return plot.throughput(self.cells, self.chosen, highlight)
        source = {"survival": self.survival, "lengths": self.lengths}.get(name, self.cells)
        return getattr(plot, name)(source, highlight)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return Frames(write_run(tmp_path_factory.mktemp("runs") / "demo"))


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return Frames(write_run(tmp_path_factory.mktemp("runs") / "single", prompts=1))


def words(fig):
    """Every text of a drawn figure that is not empty."""
    FigureCanvasAgg(fig).draw()
    beyond = set(beyond_the_axes(fig))
    texts = (text for text in fig.findobj(Text) if text not in beyond)
    return [text for text in texts if text.get_visible() and text.get_text().strip()]


def beyond_the_axes(fig):
    """Labels of ticks past the ends of their axis: matplotlib keeps them and draws them not."""
    for axis in (axis for axes in fig.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        yield from (t.label1 for t in axis.get_major_ticks() if not low <= t.get_loc() <= high)


def said(fig):
    return [text.get_text() for text in words(fig)]


def lines(axes, **looks):
    """The lines of axes with these properties."""
    found = axes.get_lines()
    return [
        line for line in found if all(getattr(line, f"get_{k}")() == v for k, v in looks.items())
    ]


HIGHLIGHTS = [
    *(None, (6, 64)),
    *(pytest.param(at, marks=pytest.mark.slow) for at in ((8, 64), (1, None), (2, None))),
]
ONE_OF_EACH = ["throughput", "acceptance", "survival", "lengths", "cost"]


# Nothing clipped, nothing on top of something else


def assert_words_are_readable(fig):
    texts = words(fig)
    with plot.house_style():
        renderer = FigureCanvasAgg(fig).get_renderer()
        boxes = [(text.get_text(), Text.get_window_extent(text, renderer)) for text in texts]
    page = fig.bbox
    for text, box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0, f"{text!r} leaves the figure"
        assert box.x1 <= page.x1 and box.y1 <= page.y1, f"{text!r} leaves the figure"
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        assert not a.padded(-1).overlaps(b.padded(-1)), f"{one!r} lies on {other!r}"


@pytest.mark.parametrize("highlight", HIGHLIGHTS, ids=str)
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_no_label_is_clipped_or_covers_another(demo, name, highlight):
    assert_words_are_readable(demo.draw(name, highlight))


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_no_label_is_clipped_or_covers_another_with_one_prompt(single, name):
    assert_words_are_readable(single.draw(name))


def test_a_label_that_leaves_the_figure_is_noticed(demo):
    fig = demo.draw("cost")
    fig.text(0.99, 0.5, "too long for here")
    with pytest.raises(AssertionError, match="leaves the figure"):
        assert_words_are_readable(fig)


def test_a_label_that_covers_another_is_noticed(demo):
    fig = demo.draw("cost")
    fig.text(0.02, 0.02, "on the caption")
    with pytest.raises(AssertionError, match="lies on"):
        assert_words_are_readable(fig)


def test_spreading_keeps_order_and_distance_and_stays_inside():
    rng = np.random.default_rng(0)
    for _ in range(200):
        places = rng.random(int(rng.integers(1, 9))).tolist()
        moved = plot.spread(places, 0.05)
        ordered = np.array(moved)[np.argsort(places, kind="stable")]
        assert (np.diff(ordered) >= 0.05 - 1e-12).all()
        assert ordered[0] >= 0 and ordered[-1] <= 1 + 1e-12


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([0.9, 0.1, 0.5], [0.9, 0.1, 0.5]),
        ([0.5, 0.5], [0.45, 0.55]),
        ([0.5, 0.52, 0.9], [0.46, 0.56, 0.9]),
        ([0.0, 0.01, 0.02], [0.0, 0.1, 0.2]),
        ([1.0, 1.0], [0.9, 1.0]),
    ],
)
def test_spreading_moves_no_more_than_is_needed(places, expected):
    assert plot.spread(places, 0.1) == pytest.approx(expected)


# What is drawn


def test_throughput_has_a_line_and_a_label_for_every_kind_of_plain_decoding(demo):
    fig = demo.draw("throughput")
    (axes,) = fig.axes
    low, high = axes.get_ylim()
    plain = demo.cells[(demo.cells["block_size"] == 1) | (demo.cells["engine"] != "dflash_lab")]
    assert len(plain) == 4
    for row in plain.to_dict("records"):
        maker = "plain" if row["engine"] == "dflash_lab" else row["engine"]
        assert f"{maker}, {row['dtype']}: {row['tokens_per_s']:.1f}" in said(fig)
        assert low < row["tokens_per_s"] < high
        heights = [line.get_ydata()[0] for line in axes.get_lines() if len(line.get_xdata()) == 2]
        assert row["tokens_per_s"] in heights


def test_the_axis_reaches_below_the_slowest_and_above_every_interval(demo):
    low, high = demo.draw("throughput").axes[0].get_ylim()
    assert low < demo.cells["tokens_per_s"].min()
    assert high > demo.cells["tokens_per_s_high"].max()


@pytest.mark.parametrize("name", ["throughput", "acceptance", "cost"])
def test_ticks_stand_at_the_measured_block_sizes(demo, name):
    sizes = [2, 4, 6, 8, 12, 16] if name == "acceptance" else [1, 2, 4, 6, 8, 12, 16]
    for axes in demo.draw(name).axes:
        assert axes.get_xticks().tolist() == sizes


@pytest.mark.slow
def test_close_block_sizes_keep_their_ticks_and_lose_numbers_that_would_touch(tmp_path):
    frames = Frames(write_run(tmp_path, prompts=2, block_sizes=(1, 2, 3, 8, 64), windows=()))
    fig = frames.draw("throughput")
    (axes,) = fig.axes
    assert axes.get_xticks().tolist() == [1, 8, 64]
    assert axes.get_xticks(minor=True).tolist() == [2, 3]
    assert_words_are_readable(fig)


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("throughput", ["block size (tokens, anchor included)", "decode throughput (tokens/s)"]),
        ("acceptance", ["draft rate (accepted / drafted)", "tau (tokens per block)"]),
        ("cost", ["time per block (ms)"]),
        ("lengths", ["accepted drafts per block (tokens)", "share of blocks"]),
        ("survival", ["share of blocks accepted so far"]),
    ],
)
def test_axes_name_what_they_show_and_its_unit(demo, name, labels):
    assert set(labels) <= set(said(demo.draw(name)))


def test_shares_and_rates_have_their_per_cent_sign_on_the_axis(demo):
    for name in ("acceptance", "survival", "lengths"):
        assert "20 %" in said(demo.draw(name))


def test_windows_differ_in_colour_and_marker_and_dashes(demo):
    (axes,) = demo.draw("throughput").axes
    curves = [line for line in axes.get_lines() if len(line.get_xdata()) > 2]
    assert [len(curve.get_xdata()) for curve in curves] == [7, 3, 3]
    for look in ("get_color", "get_marker"):
        assert len({getattr(curve, look)() for curve in curves}) == 3
    assert len({str(curve._unscaled_dash_pattern) for curve in curves}) == 3


@pytest.mark.parametrize("look", plot.LOOKS, ids=lambda look: look["color"])
def test_every_colour_can_be_read_on_white(look):
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(look["color"])
    ]
    luminance = np.dot(linear, [0.2126, 0.7152, 0.0722])
    assert 1.05 / (luminance + 0.05) > 4.5


def test_points_of_a_curve_are_those_of_the_frame(demo):
    (axes,) = demo.draw("throughput").axes
    (curve,) = [line for line in axes.get_lines() if len(line.get_xdata()) == 7]
    own = demo.cells.query("engine == 'dflash_lab' and dtype == 'bfloat16'")
    full = own[own["draft_window"].isna()]
    assert curve.get_ydata().tolist() == full["tokens_per_s"].to_list()
    assert np.abs(curve.get_xdata() - full["block_size"].to_numpy()).max() < 0.25


def test_the_chosen_cell_has_a_ring_and_the_caption_says_so(demo):
    fig = demo.draw("throughput")
    (ring,) = lines(fig.axes[0], markerfacecolor="none")
    assert ring.get_ydata().tolist() == [demo.chosen.tokens_per_s]
    label = f"block size {demo.chosen.block_size}, window {demo.chosen.draft_window}"
    assert f"Ring: the fastest, {label}." in " ".join(said(fig))
    without = plot.throughput(demo.cells)
    assert not lines(without.axes[0], markerfacecolor="none")
    assert "Ring" not in " ".join(said(without))


@pytest.mark.parametrize("name", ["throughput", "acceptance", "cost", "survival"])
def test_the_caption_says_what_the_interval_is_over(demo, single, name):
    assert "95 % interval over 12 prompts" in " ".join(said(demo.draw(name)))
    assert "1 prompt: no interval." in " ".join(said(single.draw(name)))
    assert "95 %" not in " ".join(said(single.draw(name)))


def test_what_is_highlighted_stands_in_the_title_and_the_rest_is_faint(demo):
    fig = plot.throughput(demo.cells, highlight=(8, 64))
    row = demo.cells.query("block_size == 8 and draft_window == 64").iloc[0]
    assert fig.axes[0].get_title("left") == (
        f"Block size 8, window 64: {row.tokens_per_s:.1f} "
        f"[{row.tokens_per_s_low:.1f}, {row.tokens_per_s_high:.1f}] tokens/s"
    )
    curves = [line for line in fig.axes[0].get_lines() if len(line.get_xdata()) > 2]
    assert [curve.get_alpha() == 1 for curve in curves] == [False, True, False]


@pytest.mark.parametrize("name", ["throughput", "acceptance", "survival", "lengths", "cost"])
def test_a_setting_that_was_not_measured_is_named_so(demo, name):
    fig = demo.draw(name, (6, 64))
    assert "block size 6, window 64" in fig.alt.lower()
    assert "not measured" in fig.alt


@pytest.mark.parametrize("name", ["acceptance", "survival", "lengths"])
def test_block_size_1_drafts_nothing_and_the_figure_says_so(demo, name):
    assert "plain decoding: nothing is drafted" in demo.draw(name, (1, 16)).alt


def test_rules_of_thumb_are_labelled_as_such(demo):
    fig = demo.draw("acceptance")
    assert {"rule of thumb: 60 %", "rule of thumb: 30 %"} <= set(said(fig))
    heights = [line.get_ydata()[0] for line in fig.axes[0].get_lines()]
    assert {0.6, 0.3} <= set(heights)


def test_tau_has_its_ceiling_at_the_block_size(demo):
    axes = demo.draw("acceptance").axes[1]
    (ceiling,) = [line for line in axes.get_lines() if len(line.get_xdata()) == 2]
    assert ceiling.get_xdata().tolist() == ceiling.get_ydata().tolist()


def test_survival_draws_a_line_a_block_size_of_one_window(demo):
    (axes,) = demo.draw("survival").axes
    assert [len(line.get_xdata()) for line in axes.get_lines()] == [1, 3, 5, 7, 11, 15]
    (axes,) = demo.draw("survival", (8, 16)).axes
    alphas = {len(line.get_xdata()): line.get_alpha() for line in axes.get_lines()}
    assert alphas == {3: plot.FAINT, 7: 1.0, 15: plot.FAINT}


def test_survival_keeps_its_axes_and_looks_when_a_slider_moves(demo):
    def limits_and_look(highlight):
        (axes,) = demo.draw("survival", highlight).axes
        (line,) = [line for line in axes.get_lines() if len(line.get_xdata()) == 7]
        return axes.get_xlim(), axes.get_ylim(), line.get_marker(), tuple(line.get_color())

    assert len({limits_and_look(highlight) for highlight in [(4, None), (8, 64), (16, 16)]}) == 1


def test_only_the_censored_bar_is_hatched(demo):
    (axes,) = demo.draw("lengths", (8, None)).axes
    bars = axes.patches
    assert [bool(bar.get_hatch()) for bar in bars] == [False] * 7 + [True]
    shares = demo.lengths.query("block_size == 8 and draft_window.isna()")["share"]
    assert [bar.get_height() for bar in bars] == shares.to_list()
    assert sum(bar.get_height() for bar in bars) == pytest.approx(1)


def test_cost_is_in_milliseconds_and_starts_at_zero(demo):
    (axes,) = demo.draw("cost").axes
    assert axes.get_ylim()[0] == 0
    (curve,) = [line for line in axes.get_lines() if len(line.get_xdata()) == 7]
    row = demo.cells.query("block_size == 16 and draft_window.isna()").iloc[0]
    assert curve.get_ydata()[-1] == pytest.approx(1000 * row["seconds_per_block"])


def test_sizes_above_the_trained_one_are_hollow(demo):
    cells = demo.cells.assign(beyond_trained=demo.cells["block_size"] > 8)
    fig = plot.throughput(cells)
    assert len(lines(fig.axes[0], markerfacecolor="white")) == 2 + 1 + 1
    assert "Hollow: above the trained block size." in " ".join(said(fig)).replace("\n", " ")


def test_a_run_that_drafted_nothing_says_so_instead_of_an_empty_plot(demo):
    plain = demo.cells[demo.cells["block_size"] == 1]
    nothing = {
        "acceptance": plot.acceptance(plain),
        "survival": plot.survival(demo.survival.iloc[:0]),
        "lengths": plot.lengths(demo.lengths.iloc[:0]),
    }
    for fig in nothing.values():
        assert "nothing is drafted in these cells" in said(fig)
    assert "plain, float32" in plot.throughput(plain).alt


@pytest.mark.parametrize("name", ["hardware", "timing"])
def test_times_of_two_kinds_are_never_in_one_figure(demo, name):
    other = demo.cells.assign(**{name: "other"})
    both = pd.concat([demo.cells, other])
    for draw in (plot.throughput, plot.cost):
        with pytest.raises(
            ValueError, match=rf"does not mix cells whose {name} is.*select\({name}"
        ):
            draw(both)


@pytest.mark.parametrize("draw", ["survival", "lengths"])
def test_two_dtypes_are_never_drawn_as_one(demo, draw):
    frame = getattr(demo, draw)
    both = pd.concat([frame, frame.assign(dtype="float32")])
    with pytest.raises(ValueError, match=r"dtype is bfloat16 and float32"):
        getattr(plot, draw)(both)


def test_two_dtypes_are_told_apart_where_both_are_drawn(demo):
    own = demo.cells[demo.cells["block_size"] > 1]
    fig = plot.throughput(pd.concat([demo.cells, own.assign(dtype="float32")]))
    assert {"bfloat16 window 64", "float32 window 64"} <= set(said(fig))
    assert_words_are_readable(fig)


def test_no_cells_are_refused_with_a_reason(demo):
    with pytest.raises(ValueError, match="no cells to draw"):
        plot.throughput(demo.cells.iloc[:0])


# Text is taken literally


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_hostile_text_is_drawn_literally_and_short(demo, text):
    engine = demo.cells["engine"].replace({"transformers": text})
    fig = plot.throughput(demo.cells.assign(engine=engine))
    plot.to_svg(fig)
    plot.to_png(fig)
    label = f"{plot.shown(text, 14)}, float32: "
    assert [one for one in said(fig) if one.startswith(label)]
    assert not any(one.get_parse_math() for one in words(fig))
    assert_words_are_readable(fig)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$x$", "$x$"),
        ("a\nb\tc", "a\u21b5b\u2192c"),
        ("x" * 500, "x" * 31 + "\u2026"),
        ("\U0001f469", "\ufffd"),
        ("\u202eabc", "\ufffdabc"),
        ("caf\u00e9 \u2264", "caf\u00e9 \u2264"),
    ],
)
def test_labels_keep_what_the_font_has_and_mark_the_rest(text, expected):
    assert plot.shown(text) == expected


# Words


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_the_description_is_made_from_the_data(demo, name):
    fig = demo.draw(name)
    assert plot.alt_text(fig) == fig.alt
    numbers = {
        "throughput": [f"{v:.1f}" for v in demo.cells["tokens_per_s"]] + [demo.chosen.sentence],
        "acceptance": [f"{v:.2f}" for v in demo.cells["tau"].dropna() if v > 1],
        "survival": [f"{v:.0%}".replace("%", " %") for v in demo.survival["survival"][:20]],
        "lengths": ["block size 16, full window", "blocks by accepted drafts"],
        "cost": [f"{1000 * v:.1f}" for v in demo.cells["seconds_per_block"].dropna()],
    }[name]
    assert [number for number in numbers if number not in fig.alt] == []


def test_the_description_changes_with_the_setting_looked_at(demo):
    for name in ONE_OF_EACH:
        texts = {demo.draw(name, highlight).alt for highlight in [(4, 64), (8, 64), (8, None)]}
        assert len(texts) == 3, name


def test_a_figure_shows_itself_once_with_its_description(demo):
    fig = demo.draw("throughput")
    fig.alt = 'a "quoted" <b>'
    shown = fig._repr_html_()
    assert shown.count("<img") == 1 and "<svg" not in shown
    assert 'alt="a &quot;quoted&quot; &lt;b&gt;"' in shown


def test_an_svg_carries_its_description_and_is_well_formed(demo):
    fig = demo.draw("survival")
    root = ElementTree.fromstring(plot.to_svg(fig))
    assert root.tag.endswith("svg")
    assert root.attrib["role"] == "img" and root.attrib["aria-label"] == fig.alt


def test_an_svg_is_what_matplotlib_draws_to_a_hundredth_of_a_point(demo):
    fig, buffer = demo.draw("survival"), io.StringIO()
    with plot.style.house_style(**{"svg.hashsalt": "dflash-lab"}):
        fig.savefig(buffer, format="svg", metadata=plot.style.NO_SVG_METADATA)
    drawn, ours = (
        list(ElementTree.fromstring(text).iter()) for text in (buffer.getvalue(), plot.to_svg(fig))
    )
    assert [part.tag for part in ours] == [part.tag for part in drawn]
    for one, other in zip(ours, drawn, strict=True):
        assert numbers(one) == pytest.approx(numbers(other), abs=0.0051)


def numbers(part):
    """What places and shapes an element, in order; `x` and a shift to the right are the same."""
    names = ("d", "x", "y", "width", "height", "transform", "style")
    words = " ".join(part.get(name, "") for name in names)
    found = [float(word) for word in re.findall(r"-?\d+(?:\.\d+)?", words)]
    letter = part.tag.endswith("use") and len(found) == 2 and part.get("transform")
    return found[:1] if letter else found


# State


@pytest.mark.slow
def test_no_figure_stays_open_and_no_setting_changes(demo):
    import matplotlib.pyplot as plt

    before, settings = plt.get_fignums(), dict(matplotlib.rcParams)
    for _ in range(8):  # 40 figures: a leak would warn from the twenty-first on
        figures = [demo.draw(name, (8, 64)) for name in ONE_OF_EACH]
    plot.to_svg(figures[0])
    plot.to_png(figures[0])
    assert plt.get_fignums() == before
    assert dict(matplotlib.rcParams) == settings


@pytest.mark.slow
def test_drawing_does_not_import_pyplot(demo):
    code = "import sys, dflash_lab.plot; print('matplotlib.pyplot' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert shown.stdout.strip() == "False"


def test_a_users_own_settings_do_not_reach_our_figures(demo):
    ours = plot.to_svg(plot.cost(demo.cells))
    with matplotlib.rc_context(
        {"font.size": 30, "axes.facecolor": "black", "svg.fonttype": "none"}
    ):
        assert plot.to_svg(plot.cost(demo.cells)) == ours


# Bytes


def test_files_hold_no_date_and_no_program(demo, tmp_path):
    fig = demo.draw("cost")
    svg, pdf, png = (path.read_bytes() for path in plot.save(fig, tmp_path / "new" / "cost"))
    assert svg.startswith(b"<?xml") and b"<metadata" not in svg and b"atplotlib" not in svg
    assert pdf.startswith(b"%PDF") and b"CreationDate" not in pdf and b"atplotlib" not in pdf
    assert png.startswith(b"\x89PNG") and b"Software" not in png


def test_a_salt_keeps_the_parts_of_two_figures_apart(demo):
    fig = demo.draw("cost")
    one, again, other = (plot.to_svg(fig, salt) for salt in ("a", "a", "b"))
    assert one == again != other
    ids = [set(re.findall(r' id="(?!DejaVu)([^"]+)"', text)) for text in (one, other)]
    assert ids[0] and ids[1] and not ids[0] & ids[1]


def test_a_changed_number_changes_the_picture(demo):
    cells = demo.cells.copy()
    before = plot.to_svg(plot.throughput(cells))
    cells.loc[3, "tokens_per_s"] += 0.5
    assert plot.to_svg(plot.throughput(cells)) != before
