"""What figures share: house style, a figure that describes itself, axes, words, labels."""

from __future__ import annotations

import base64
import html
import io
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, wraps
from pathlib import Path
from threading import RLock
from typing import Any, ParamSpec

import matplotlib
import numpy as np
import pandas as pd
from matplotlib import font_manager, style
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator

from dflash_lab.analyse import Choice
from dflash_lab.config import one_of
from dflash_lab.plot.compact import compact

STYLE = Path(__file__).with_name("dflash.mplstyle")


Highlight = tuple[int, int | None]  # block size, draft window


# Dark enough to be read on white, and told apart by people of every colour vision.
INK, QUIET, FAINT = "#222222", "#666666", 0.3


LOOKS: tuple[dict[str, Any], ...] = (
    {"color": "#0b62a4", "marker": "o", "linestyle": "-"},
    {"color": "#b8480b", "marker": "s", "linestyle": (0, (5, 2))},
    {"color": "#0a7a5a", "marker": "^", "linestyle": (0, (4, 1.5, 1, 1.5))},
    {"color": "#8a3f8f", "marker": "D", "linestyle": (0, (1.5, 1.5))},
    {"color": "#7a6000", "marker": "v", "linestyle": (0, (8, 2, 1, 2, 1, 2))},
    {"color": "#b3246b", "marker": "P", "linestyle": (0, (3, 1))},
    {"color": "#46601a", "marker": "X", "linestyle": (0, (2, 1, 1, 1))},
    {"color": "#1b1b1b", "marker": "*", "linestyle": (0, (10, 2))},
)


MARKERS = "os^Dvp*hX"


OWN_DASH, LIBRARY_DASH = (0, (6, 3)), (0, (1, 2.5))


SMALL, TINY = 8.5, 8.0  # points


# Words inside axes, readable where a line runs below them.
BACKED: dict[str, Any] = {
    "fontsize": TINY,
    "color": QUIET,
    "zorder": 4,
    "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.8},
}


# What a size changes of the style. "page" is as wide as a page's text; "column" one of two columns,
# with the words that captions hold left out and labels below; "slide" 1920 x 1080 pixels.
COLUMN, ROW = 3.25, 2.2  # inches: width, and height of one of several panels
SIZES: dict[str, dict[str, Any]] = {
    "page": {},
    "column": {
        "figure.figsize": (COLUMN, 2.5),
        "savefig.dpi": 300,
        "axes.labelsize": 8,
        "xtick.labelsize": 7.5,
        "ytick.labelsize": 7.5,
        "lines.linewidth": 1.4,
        "lines.markersize": 4.5,
    },
    "slide": {"figure.figsize": (6.4, 3.6), "savefig.dpi": 300},
}
_SIZE: ContextVar[str] = ContextVar("size", default="page")


# Widget callbacks may run beside a cell, and a style is global while it holds: one at a time.
DRAWING = RLock()


class Picture(Figure):
    """A figure that describes itself in words and shows itself in a notebook, once."""

    size: str = "page"  # of SIZES
    alt: str = ""
    notes: tuple[str, ...] = ()  # how to read it, from the line below it

    @property
    def words(self) -> tuple[str, ...]:
        """Title and notes, for a caption."""
        titles = [text.get_text() for text in self.texts if text.get_fontsize() > SMALL]
        titles += [axes.get_title("left") for axes in self.axes if axes.get_title("left")]
        return (*titles[:1], *self.notes)

    def _repr_html_(self) -> str:
        data = base64.b64encode(to_svg(self).encode()).decode()
        return (
            f'<img alt="{html.escape(self.alt)}" width="{self.get_figwidth() * 100:.0f}" '
            f'style="max-width: 100%" src="data:image/svg+xml;base64,{data}">'
        )


@contextmanager
def house_style(**settings: Any) -> Iterator[None]:
    """Our style alone for a while, whatever a notebook has set; what was set comes back."""
    with DRAWING, style.context(["default", STYLE]), matplotlib.rc_context(settings):
        yield


@contextmanager
def sized(size: str) -> Iterator[None]:
    """Figures drawn meanwhile have this size, one of `SIZES`."""
    one_of("size", size, tuple(SIZES))
    before = _SIZE.set(size)
    try:
        yield
    finally:
        _SIZE.reset(before)


Arguments = ParamSpec("Arguments")


def styled(draw: Callable[Arguments, Picture]) -> Callable[Arguments, Picture]:
    """Let a function draw in our style."""

    @wraps(draw)
    def drawn(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Picture:
        with house_style(**SIZES[_SIZE.get()]):
            return draw(*args, **kwargs)

    return drawn


def shown(text: Any, limit: int = 32) -> str:
    """Text of a file or a model as a label: short, on one line, only what the font has."""
    known = _font_characters()
    text = str(text).replace("\n", "\u21b5").replace("\t", "\u2192")
    text = "".join(c if ord(c) in known and c.isprintable() else "\ufffd" for c in text)
    return text if len(text) <= limit else f"{text[: limit - 1]}\u2026"


@cache
def _font_characters() -> frozenset[int]:
    path = font_manager.findfont("DejaVu Sans", fallback_to_default=False)
    return frozenset(font_manager.get_font(path).get_charmap())


def window_label(window: int | None) -> str:
    return "full window" if window is None else f"window {window}"


def number(value: Any, form: str) -> str:
    return "n/a" if pd.isna(value) else format(value, form)


def with_ends(row: Mapping[str, Any], name: str, form: str, scale: float = 1) -> str:
    """A figure and its interval, as in "25.1 [23.9, 26.4]"."""
    value, low, high = (row[n] * scale for n in (name, f"{name}_low", f"{name}_high"))
    ends = "" if pd.isna(low) else f" [{low:{form}}, {high:{form}}]"
    return f"{number(value, form)}{ends}"


def over_prompts(counts: pd.Series) -> str:
    """What the intervals stand for."""
    few, many = int(counts.min()), int(counts.max())
    if many == 1:
        return "1 prompt: no interval"
    return f"95 % interval over {many if few == many else f'{few} to {many}'} prompts"


def rows_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as dictionaries, the draft window as the user says it: a number or None."""
    windows = [None if pd.isna(window) else int(window) for window in frame["draft_window"]]
    rows = frame.to_dict("records")
    return [row | {"draft_window": window} for row, window in zip(rows, windows, strict=True)]


def check_one_kind(frame: pd.DataFrame, *names: str) -> None:
    for name in names:
        if frame[name].nunique() > 1:
            values = " and ".join(sorted(map(str, frame[name].unique())))
            raise ValueError(
                f"one figure does not mix cells whose {name} is {values}. "
                f"Take one by run.select({name}=...)."
            )


def new_figure() -> Picture:
    figure = Picture()
    figure.size = _SIZE.get()
    return figure


def is_narrow(fig: Figure) -> bool:
    """Whether labels go below the axes, panels below each other, and words into the caption."""
    return getattr(fig, "size", "") == "column"


def room_for(labels: Iterable[str]) -> float:
    """Inches beside the axes that labels of lines take."""
    if _SIZE.get() == "column":
        return 0.12
    return 0.36 + 0.065 * max(map(len, labels), default=0)


def add_axes(
    fig: Picture, left: float = 0.7, right: float = 0.2, bottom: float = 0.76, top: float = 0.36
) -> Axes:
    """Axes with margins in inches: the same room for labels in every figure.

    A narrow figure has neither title nor notes, and less room for them.
    """
    width, height = fig.get_size_inches()
    if is_narrow(fig):
        left, right, bottom, top = 0.85 * left, 0.7 * right, bottom - 0.34, top - 0.28
    return fig.add_axes(
        (left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height)
    )


def two_axes(fig: Picture, room: float = 0.2) -> tuple[Axes, Axes]:
    """Axes side by side with `room` inches to the right, one below the other where it is narrow."""
    if is_narrow(fig):
        fig.set_size_inches(COLUMN, 2 * ROW)
        upper = add_axes(fig, right=room, bottom=0.76 + ROW)
        return upper, add_axes(fig, right=room, top=0.36 + ROW)
    half = (fig.get_figwidth() - room - 0.7) / 2  # inches of a panel and the numbers beside it
    left = add_axes(fig, right=half + room + 0.2, top=0.44)
    return left, add_axes(fig, left=half + 1.15, right=room, top=0.44)


def add_caption(fig: Picture, notes: Sequence[str]) -> None:
    """Notes on how to read a figure, below it; a narrow one keeps them and its title unseen."""
    fig.notes = tuple(note for note in notes if note)
    if is_narrow(fig):
        _hide_titles(fig)
        return
    text = textwrap.fill(" ".join(f"{note}." for note in notes if note), 104)
    fig.text(0.012, 0.02, text, fontsize=TINY, color=QUIET, va="bottom")


def _hide_titles(fig: Picture) -> None:
    for text in fig.findobj(Text):
        if text.get_fontsize() > SMALL and text.get_text() in fig.words[:1]:
            text.set_visible(False)


def has_room(axes: Axes, count: int, letters: int) -> bool:
    """Whether so many labels of so many tiny letters fit side by side on axes."""
    return count * (letters + 0.5) * 0.62 * TINY <= points_of(axes)[0]


def has_height(axes: Axes, count: int) -> bool:
    """Whether so many tiny labels fit below each other beside axes."""
    return count * 1.2 * TINY <= points_of(axes)[1]


def make_tall(fig: Picture, inches: float) -> None:
    """Let a figure be so high at least; a slide keeps its height."""
    if fig.size != "slide":
        fig.set_figheight(max(fig.get_figheight(), inches))


def points_of(axes: Axes) -> tuple[float, float]:
    """Width and height of axes in points."""
    width, height = axes.figure.get_size_inches() * 72
    return width * axes.get_position().width, height * axes.get_position().height


def ticks_at(axes: Axes, places: Sequence[int]) -> None:
    """A tick at every place, and a number where there is room for one."""
    axes.xaxis.set_major_locator(FixedLocator(with_room(axes, places)))
    axes.xaxis.set_minor_locator(FixedLocator(places))


def with_room(axes: Axes, places: Sequence[int]) -> list[int]:
    """Those of the places on x, first to last, that are two digits' width apart."""
    low, high = axes.get_xlim()
    room = 14 * (high - low) / points_of(axes)[0]
    kept: list[int] = []
    for place in places:
        if not kept or place - kept[-1] >= room:
            kept.append(place)
    return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class EndLabel:
    """Words in the margin for a line that ends at (x, y)."""

    x: float
    y: float
    text: str
    color: str
    strong: bool = True
    look: Mapping[str, Any] = field(default_factory=dict)  # marker and dashes, for a key


def mark_size(axes: Axes, highlight: Highlight | None) -> None:
    if highlight is not None:
        axes.axvline(highlight[0], color=INK, linewidth=0.8, linestyle=(0, (1, 2)), zorder=0.5)


def label_ends(axes: Axes, labels: Sequence[EndLabel]) -> None:
    """Write labels beside the axes, moved apart where they would touch, each tied to its line."""
    if not labels:
        return
    if is_narrow(axes.figure):
        _add_key(axes.figure, labels)
        return
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    ends = [((label.x - left) / (right - left), (label.y - low) / (high - low)) for label in labels]
    width, height = points_of(axes)
    places = spread([y for _, y in ends], 1.3 * SMALL / height)
    for label, place in zip(labels, places, strict=True):
        looks = {"fontsize": SMALL, "color": INK if label.strong else QUIET, "va": "center"}
        axes.text(1 + 14 / width, place, label.text, transform=axes.transAxes, **looks)
    ties = [
        [(x + 3.5 / width, y), (1 + 11 / width, place)]
        for (x, y), place in zip(ends, places, strict=True)
    ]
    colours = [to_rgba(label.color, 1.0 if label.strong else FAINT) for label in labels]
    lines = LineCollection(
        ties, colors=colours, linewidths=0.9, transform=axes.transAxes, clip_on=False
    )
    axes.add_collection(lines, autolim=False)


def _add_key(fig: Picture, labels: Sequence[EndLabel]) -> None:
    """The labels below everything else, each beside a piece of its line; the figure grows."""
    handles = [
        Line2D([], [], color=label.color, alpha=1.0 if label.strong else FAINT, **label.look)
        for label in labels
    ]
    columns = 2 if max(len(label.text) for label in labels) <= 18 and len(labels) > 1 else 1
    rows = -(-len(labels) // columns)
    grow(fig, 0.145 * rows + 0.02)
    fig.legend(
        handles,
        [label.text for label in labels],
        loc="lower left",
        bbox_to_anchor=(0.02, 0.0),
        ncols=columns,
        fontsize=7.5,
        frameon=False,
        borderpad=0.2,
        labelspacing=0.3,
        handlelength=2.6,
    )


def grow(fig: Picture, inches: float) -> None:
    """Add room below everything that is drawn; on a slide, whose height is given, axes shrink."""
    width, height = fig.get_size_inches()
    new = height if fig.size == "slide" else height + inches
    fig.set_size_inches(width, new)
    for axes in fig.axes:
        place = axes.get_position()
        bottom = (place.y0 * height + inches) / new
        top = 1 - (1 - place.y1) * height / new
        axes.set_position((place.x0, bottom, place.width, top - bottom))


def spread(places: Sequence[float], gap: float) -> list[float]:
    """The same places between 0 and 1, in the same order, moved to lie `gap` apart.

    Neighbours that are too close form a group around their mean (pool adjacent violators).
    """
    order = sorted(range(len(places)), key=lambda i: places[i])
    groups: list[list[float]] = []  # of sorted places, each less its number of gaps
    for rank, i in enumerate(order):
        groups.append([places[i] - rank * gap])
        while len(groups) > 1 and np.mean(groups[-2]) > np.mean(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    moved = [float(np.mean(group)) for group in groups for _ in group]
    # A group at an end is pushed inside; where there is no room for all, the lower end gives way.
    shift = np.arange(len(places)) * gap
    moved = np.maximum(moved, 0)
    moved = np.minimum(moved, 1 - shift[-1]) + shift
    return [float(moved[order.index(i)]) for i in range(len(places))]


def empty_figure(
    fig: Picture, title: str, words: str = "nothing is drafted in these cells"
) -> Picture:
    axes = add_axes(fig)
    axes.set_axis_off()
    axes.set_title(title)
    axes.text(0.5, 0.5, words, ha="center", color=QUIET)
    fig.alt = f"{title}: {words}."
    return fig


def setting_name(highlight: Highlight) -> str:
    size, window = highlight
    if size == 1:
        return "Block size 1, plain decoding"
    return f"Block size {size}, {window_label(window)}"


def why_missing(highlight: Highlight) -> str:
    return "nothing is drafted" if highlight[0] == 1 else "not measured"


def looking_at(axes: Axes, highlight: Highlight | None) -> list[str]:
    return [] if highlight is None else [axes.get_title("left")]


def setting_of(chosen: Choice) -> Highlight:
    return chosen.block_size, chosen.draft_window


def lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def in_words(*sentences: str) -> str:
    """Sentences as one description."""
    return " ".join(f"{sentence.rstrip('.')}." for sentence in sentences)


def alt_text(fig: Figure) -> str:
    """What the figure shows, in words made from its data."""
    return getattr(fig, "alt", "")


NO_SVG_METADATA = dict.fromkeys(("Date", "Creator", "Type", "Format"))


NO_PDF_METADATA = dict.fromkeys(("Creator", "Producer", "CreationDate"))


def to_svg(fig: Figure, salt: str = "dflash-lab") -> str:
    """The figure as an `<svg>` element with its description; the same text for the same data.

    Several may stand on one page: groups are not numbered, and clips and markers share no names
    where the salts differ.
    """
    buffer = io.StringIO()
    with house_style(**{"svg.hashsalt": salt}):
        fig.savefig(buffer, format="svg", metadata=NO_SVG_METADATA)
    text = compact(re.sub(r'<g id="[^"]*"', "<g", buffer.getvalue()))
    words = html.escape(alt_text(fig))
    return text[text.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{words}"', 1)


def to_png(fig: Figure) -> bytes:
    buffer = io.BytesIO()
    with house_style(**SIZES[getattr(fig, "size", "page")]):
        fig.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def to_pdf(fig: Figure) -> bytes:
    buffer = io.BytesIO()
    with house_style():
        fig.savefig(buffer, format="pdf", metadata=NO_PDF_METADATA)
    return buffer.getvalue()
