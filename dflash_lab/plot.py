"""From frames to figures: drawing only. Nothing is computed here, and no global state is touched.

Each function returns a `Figure` that carries its description in words (`alt`) and shows itself in
a notebook. Colour, marker and dashes say the same thing, so that any one of them suffices.
"""

from __future__ import annotations

import base64
import html
import io
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from matplotlib.ticker import FixedLocator, PercentFormatter

from dflash_lab.analyse import (
    OWN,
    Choice,
    cell_frame,
    choose,
    comparable,
    length_frame,
    survival_frame,
)
from dflash_lab.store import Run, write_atomic

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
COMFORTABLE, TOO_LOW = 0.6, 0.3  # draft rates that guides name; no measurement backs them


# Widget callbacks may run beside a cell, and a style is global while it holds: one at a time.
DRAWING = RLock()


class Picture(Figure):
    """A figure that describes itself in words and shows itself in a notebook, once."""

    alt: str = ""

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


Arguments = ParamSpec("Arguments")


def styled(draw: Callable[Arguments, Picture]) -> Callable[Arguments, Picture]:
    """Let a function draw in our style."""

    @wraps(draw)
    def drawn(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Picture:
        with house_style():
            return draw(*args, **kwargs)

    return drawn


# Words


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


def _number(value: Any, form: str) -> str:
    return "n/a" if pd.isna(value) else format(value, form)


def _with_ends(row: Mapping[str, Any], name: str, form: str, scale: float = 1) -> str:
    """A figure and its interval, as in "25.1 [23.9, 26.4]"."""
    value, low, high = (row[n] * scale for n in (name, f"{name}_low", f"{name}_high"))
    ends = "" if pd.isna(low) else f" [{low:{form}}, {high:{form}}]"
    return f"{_number(value, form)}{ends}"


def _over(counts: pd.Series) -> str:
    """What the intervals stand for."""
    few, many = int(counts.min()), int(counts.max())
    if many == 1:
        return "1 prompt: no interval"
    return f"95 % interval over {many if few == many else f'{few} to {many}'} prompts"


# Cells as curves


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Cells that differ in block size alone, in order of it."""

    window: int | None
    label: str
    look: dict[str, Any]
    rows: list[dict[str, Any]]  # of cell_frame, and `x`, where to draw it

    def row(self, block_size: int) -> dict[str, Any] | None:
        return next((row for row in self.rows if row["block_size"] == block_size), None)


def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as dictionaries, the draft window as the user says it: a number or None."""
    windows = [None if pd.isna(window) else int(window) for window in frame["draft_window"]]
    rows = frame.to_dict("records")
    return [row | {"draft_window": window} for row, window in zip(rows, windows, strict=True)]


def _check_one_kind(frame: pd.DataFrame, *names: str) -> None:
    for name in names:
        if frame[name].nunique() > 1:
            values = " and ".join(sorted(map(str, frame[name].unique())))
            raise ValueError(
                f"one figure does not mix cells whose {name} is {values}. "
                f"Take one by run.select({name}=...)."
            )


def _check_times(cells: pd.DataFrame) -> None:
    if cells.empty:
        raise ValueError("there are no cells to draw; the run has finished none that were chosen.")
    _check_one_kind(cells, "hardware", "timing")


def _curves(cells: Sequence[dict[str, Any]], needed: str) -> list[Curve]:
    """Cells of our loop in each dtype that drafts, a curve a window, where `needed` is known."""
    own = [row for row in cells if row["engine"] == OWN and not pd.isna(row[needed])]
    groups: dict[tuple[str, str, int | None], list[dict[str, Any]]] = {}
    drafting = {(row["backend"], row["dtype"]) for row in own if row["block_size"] > 1}
    for row in sorted(own, key=lambda row: row["block_size"]):
        if (row["backend"], row["dtype"]) in drafting:
            key = (row["backend"], row["dtype"], row["draft_window"])
            group = groups.setdefault(key, [])
            if group and group[-1]["block_size"] == row["block_size"]:
                raise ValueError(
                    f"two cells of block size {row['block_size']} for one curve: they differ in "
                    "prompts, draft or settings. Take one kind by run.select(...)."
                )
            group.append(row)
    keys = sorted(groups, key=lambda key: (*key[:2], key[2] is not None, -(key[2] or 0)))
    _set_apart([groups[key] for key in keys])
    return [
        Curve(
            window=key[2],
            label=_curve_label(key, drafting),
            look=LOOKS[place % len(LOOKS)],
            rows=groups[key],
        )
        for place, key in enumerate(keys)
    ]


def _set_apart(curves: Sequence[list[dict[str, Any]]]) -> None:
    """Move points of the same block size a little to the side, or intervals hide each other."""
    rows = [row for curve in curves for row in curve]
    step = 0.012 * max([4, *(row["block_size"] for row in rows)])
    for size in {row["block_size"] for row in rows}:
        same = [row for row in rows if row["block_size"] == size]
        for place, row in enumerate(same):
            row["x"] = size + step * (place - (len(same) - 1) / 2)


def _curve_label(key: tuple[str, str, int | None], drafting: set[tuple[str, str]]) -> str:
    """The window; dtype and backend too where they differ between curves."""
    backend, dtype, window = key
    words = [window_label(window)]
    if len({dtype for _, dtype in drafting}) > 1:
        words.insert(0, shown(dtype, 12))
    if len({backend for backend, _ in drafting}) > 1:
        words.insert(0, shown(backend, 8))
    return " ".join(words)


def _plain_rows(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Plain decoding: our loop at block size 1, and the library's generators."""
    return [row for row in cells if row["block_size"] == 1 or row["engine"] != OWN]


def _plain_label(row: Mapping[str, Any]) -> str:
    maker = "plain" if row["engine"] == OWN else shown(row["engine"], 14)
    return f"{maker}, {shown(row['dtype'], 12)}"


def _is_strong(window: int | None, highlight: Highlight | None) -> bool:
    """Whether a curve is the one looked at; block size 1 has no window of its own."""
    return highlight is None or window == (None if highlight[0] == 1 else highlight[1])


# Figures and axes


def _figure() -> Picture:
    return Picture()


def _room_for(labels: Iterable[str]) -> float:
    """Inches beside the axes that labels of lines take."""
    return 0.36 + 0.065 * max(map(len, labels), default=0)


def _axes(
    fig: Picture, left: float = 0.7, right: float = 0.2, bottom: float = 0.76, top: float = 0.36
) -> Axes:
    """Axes with margins in inches: the same room for labels in every figure."""
    width, height = fig.get_size_inches()
    return fig.add_axes(
        (left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height)
    )


def _caption(fig: Picture, notes: Sequence[str]) -> None:
    text = textwrap.fill(" ".join(f"{note}." for note in notes if note), 104)
    fig.text(0.012, 0.02, text, fontsize=TINY, color=QUIET, va="bottom")


def _points(axes: Axes) -> tuple[float, float]:
    """Width and height of axes in points."""
    width, height = axes.figure.get_size_inches() * 72
    return width * axes.get_position().width, height * axes.get_position().height


def _block_size_axis(axes: Axes, sizes: Sequence[int]) -> None:
    """Ticks at what was measured and nowhere else."""
    axes.set_xlabel("block size (tokens, anchor included)")
    pad = 0.04 * max(max(sizes) - min(sizes), 4)
    axes.set_xlim(min(sizes) - pad, max(sizes) + pad)
    _ticks_at(axes, sorted(set(sizes)))


def _ticks_at(axes: Axes, places: Sequence[int]) -> None:
    """A tick at every place, and a number where there is room for one."""
    axes.xaxis.set_major_locator(FixedLocator(_with_room(axes, places)))
    axes.xaxis.set_minor_locator(FixedLocator(places))


def _with_room(axes: Axes, places: Sequence[int]) -> list[int]:
    """Those of the places on x, first to last, that are two digits' width apart."""
    low, high = axes.get_xlim()
    room = 14 * (high - low) / _points(axes)[0]
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


def _draw_curve(
    axes: Axes, curve: Curve, name: str, highlight: Highlight | None, scale: float = 1
) -> EndLabel:
    """One curve with its intervals; sizes above the trained one have hollow markers."""
    values = np.array([row[name] for row in curve.rows]) * scale
    ends = np.array([[row[f"{name}_low"], row[f"{name}_high"]] for row in curve.rows]) * scale
    strong, look = _is_strong(curve.window, highlight), curve.look
    xs = [row["x"] for row in curve.rows]
    alpha = 1.0 if strong else FAINT
    axes.plot(xs, values, alpha=alpha, **look)
    axes.vlines(xs, ends[:, 0], ends[:, 1], color=look["color"], linewidth=1.0, alpha=alpha)
    for x, value, row in zip(xs, values, curve.rows, strict=True):
        face = "white" if row["beyond_trained"] else look["color"]
        looked_at = highlight is not None and strong and row["block_size"] == highlight[0]
        if looked_at or row["beyond_trained"]:
            size = 9 if looked_at else None
            axes.plot(x, value, look["marker"], color=look["color"], mfc=face, ms=size, alpha=alpha)
    return EndLabel(x=xs[-1], y=values[-1], text=curve.label, color=look["color"], strong=strong)


def _draw_plain(
    axes: Axes, row: Mapping[str, Any], name: str, form: str, scale: float = 1
) -> EndLabel:
    """A horizontal line for decoding without a draft, dotted where the library does it."""
    value = row[name] * scale
    dash = OWN_DASH if row["engine"] == OWN else LIBRARY_DASH
    axes.axhline(value, color=QUIET, linewidth=1.1, linestyle=dash, zorder=1.5)
    text = f"{_plain_label(row)}: {_number(value, form)}"
    return EndLabel(x=axes.get_xlim()[1], y=value, text=text, color=QUIET)


def _draw_ring(axes: Axes, curves: Sequence[Curve], chosen: Choice) -> bool:
    """A ring around the chosen cell; whether it is among what is drawn."""
    for curve in curves:
        for row in curve.rows:
            if row["cell"] == chosen.cell:
                axes.plot(row["x"], row["tokens_per_s"], "o", ms=14, mfc="none", mec=INK, mew=1.4)
                return True
    return False


def _mark_size(axes: Axes, highlight: Highlight | None) -> None:
    if highlight is not None:
        axes.axvline(highlight[0], color=INK, linewidth=0.8, linestyle=(0, (1, 2)), zorder=0.5)


def _label_ends(axes: Axes, labels: Sequence[EndLabel]) -> None:
    """Write labels beside the axes, moved apart where they would touch, each tied to its line."""
    if not labels:
        return
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    ends = [((label.x - left) / (right - left), (label.y - low) / (high - low)) for label in labels]
    width, height = _points(axes)
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


def _empty(fig: Picture, title: str, words: str = "nothing is drafted in these cells") -> Picture:
    axes = _axes(fig)
    axes.set_axis_off()
    axes.set_title(title)
    axes.text(0.5, 0.5, words, ha="center", color=QUIET)
    fig.alt = f"{title}: {words}."
    return fig


def _setting(highlight: Highlight) -> str:
    size, window = highlight
    if size == 1:
        return "Block size 1, plain decoding"
    return f"Block size {size}, {window_label(window)}"


def _looked_at(curves: Sequence[Curve], highlight: Highlight) -> dict[str, Any] | None:
    strong = (curve for curve in curves if _is_strong(curve.window, highlight))
    return next((row for curve in strong if (row := curve.row(highlight[0]))), None)


# The figures


@styled
def throughput(
    cells: pd.DataFrame, chosen: Choice | None = None, highlight: Highlight | None = None
) -> Picture:
    """Decode tokens per second against block size, beside plain decoding of every kind.

    `cells` as from `cell_frame`. `chosen` gets a ring; `highlight` is the setting looked at.
    Raises ValueError where hardware classes or timing modes would be mixed.
    """
    _check_times(cells)
    rows = _rows(cells)
    curves, plain = _curves(rows, "tokens_per_s"), _plain_rows(rows)
    fig = _figure()
    names = [*(curve.label for curve in curves), *(f"{_plain_label(row)}: 00.0" for row in plain)]
    axes = _axes(fig, right=_room_for(names))
    _block_size_axis(axes, list(cells["block_size"]))
    axes.margins(y=0.08)
    axes.set_ylabel("decode throughput (tokens/s)")
    axes.set_title(_title("Throughput", cells, curves, highlight, _throughput_of))
    labels = [_draw_plain(axes, row, "tokens_per_s", ".1f") for row in plain]
    for curve in curves:
        labels.append(_draw_curve(axes, curve, "tokens_per_s", highlight))
    _mark_size(axes, highlight)
    notes = [_over(cells["prompts"]), "Plain: block size 1", *_hollow(cells)]
    if chosen is not None and _draw_ring(axes, curves, chosen):
        notes.append(f"Ring: the fastest, {_lower(_setting(_of(chosen)))}")
    _label_ends(axes, labels)
    _caption(fig, notes)
    fig.alt = _words(
        *_looking(axes, highlight),
        f"Decode throughput in tokens per second by block size, {_over(cells['prompts'])}",
        *(_curve_words(curve, "tokens_per_s", ".1f") for curve in curves),
        *(f"{_plain_label(row)}: {_number(row['tokens_per_s'], '.1f')}" for row in plain),
        *([] if chosen is None else [chosen.sentence]),
    )
    return fig


def _throughput_of(row: Mapping[str, Any]) -> str:
    return f"{_with_ends(row, 'tokens_per_s', '.1f')} tokens/s"


@styled
def acceptance(cells: pd.DataFrame, highlight: Highlight | None = None) -> Picture:
    """Draft rate and tau against block size: how much of a block is right, and what that gives.

    The lines at 60 % and 30 % are what guides say; the ceiling of tau is the block size itself.
    """
    drafted = cells[cells["draft_rate"].notna()]
    fig = _figure()
    if drafted.empty:
        return _empty(fig, "Acceptance")
    curves = _curves(_rows(drafted), "draft_rate")
    room = _room_for(curve.label for curve in curves)
    half = (fig.get_figwidth() - room - 0.7) / 2  # inches of a panel and the numbers beside it
    left = _axes(fig, right=half + room + 0.2, top=0.44)
    right = _axes(fig, left=half + 1.15, right=room, top=0.44)
    _draw_rates(left, curves, highlight)
    labels = _draw_taus(right, curves, highlight)
    for axes in (left, right):
        _block_size_axis(axes, list(drafted["block_size"]))
        axes.set_xlabel("block size (tokens)")
        _mark_size(axes, highlight)
    left.set_title(_title("Acceptance", cells, curves, highlight, _acceptance_of), pad=11)
    _label_ends(right, labels)
    _caption(fig, [_over(drafted["prompts"]), "Blocks that were cut are left out", *_hollow(cells)])
    fig.alt = _words(
        *_looking(left, highlight),
        f"Draft rate and tau by block size, {_over(drafted['prompts'])}",
        *(f"Draft rate in %, {_curve_words(curve, 'draft_rate', '.0f', 100)}" for curve in curves),
        *(f"Tau, {_curve_words(curve, 'tau', '.2f')}" for curve in curves),
        "Rules of thumb at 60 % and 30 %; tau can at most be the block size",
    )
    return fig


def _draw_rates(axes: Axes, curves: Sequence[Curve], highlight: Highlight | None) -> None:
    for curve in curves:
        _draw_curve(axes, curve, "draft_rate", highlight)
    for level in (COMFORTABLE, TOO_LOW):
        axes.axhline(level, color=QUIET, linewidth=1, linestyle=OWN_DASH, zorder=1.5)
        axes.text(
            0.99,
            level + 0.012,
            f"rule of thumb: {_percent(level)}",
            transform=axes.get_yaxis_transform(),
            ha="right",
            va="bottom",
            **BACKED,
        )
    top = _highest(curves, "draft_rate", "draft_rate_high")
    axes.set_ylim(0, max(0.75, 1.1 * top))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0, symbol=" %"))
    axes.set_ylabel("draft rate (accepted / drafted)")


def _draw_taus(axes: Axes, curves: Sequence[Curve], highlight: Highlight | None) -> list[EndLabel]:
    labels = [_draw_curve(axes, curve, "tau", highlight) for curve in curves]
    top = max(1 + 1.35 * (_highest(curves, "tau") - 1), 1.05 * _highest(curves, "tau_high"), 1.5)
    axes.plot([1, top], [1, top], color=QUIET, linewidth=1, linestyle=OWN_DASH, zorder=1.5)
    axes.text(top + 0.3, top, "ceiling: the block size", va="top", **BACKED)
    axes.set_ylim(1, top)
    axes.set_ylabel("tau (tokens per block)")
    return labels


def _highest(curves: Sequence[Curve], *names: str) -> float:
    """The largest of these figures, 0 where none is known."""
    values = [row[name] for curve in curves for row in curve.rows for name in names]
    return max((value for value in values if not pd.isna(value)), default=0.0)


def _acceptance_of(row: Mapping[str, Any]) -> str:
    rate = _with_ends(row, "draft_rate", ".0f", 100)
    return f"draft rate {rate} %, tau {_with_ends(row, 'tau', '.2f')}"


@styled
def cost(cells: pd.DataFrame, highlight: Highlight | None = None) -> Picture:
    """Time of a block against block size: what drafting and verifying it costs.

    Raises ValueError where hardware classes or timing modes would be mixed.
    """
    _check_times(cells)
    rows = _rows(cells)
    curves = _curves(rows, "seconds_per_block")
    drawn = {row["cell"] for curve in curves for row in curve.rows}
    plain = [
        row
        for row in _plain_rows(rows)
        if row["engine"] == OWN and row["cell"] not in drawn and row["blocks"]
    ]
    fig = _figure()
    names = [*(curve.label for curve in curves), *(f"{_plain_label(row)}: 00.0" for row in plain)]
    axes = _axes(fig, right=_room_for(names))
    _block_size_axis(axes, list(cells["block_size"]))
    axes.set_ylabel("time per block (ms)")
    axes.set_title(_title("Time per block", cells, curves, highlight, _cost_of))
    labels = [_draw_plain(axes, row, "seconds_per_block", ".1f", 1000) for row in plain]
    for curve in curves:
        labels.append(_draw_curve(axes, curve, "seconds_per_block", highlight, 1000))
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    _mark_size(axes, highlight)
    _label_ends(axes, labels)
    _caption(fig, [_over(cells["prompts"]), *_hollow(cells)])
    fig.alt = _words(
        *_looking(axes, highlight),
        f"Milliseconds per block by block size, {_over(cells['prompts'])}",
        *(_curve_words(curve, "seconds_per_block", ".1f", 1000) for curve in curves),
        *(f"{_plain_label(row)}: {row['seconds_per_block'] * 1000:.1f}" for row in plain),
    )
    return fig


def _cost_of(row: Mapping[str, Any]) -> str:
    return f"{_with_ends(row, 'seconds_per_block', '.1f', 1000)} ms per block"


@styled
def survival(frame: pd.DataFrame, highlight: Highlight | None = None) -> Picture:
    """Share of blocks accepted up to each draft position, a line a block size.

    `frame` as from `survival_frame`. Drawn for one draft window: the one highlighted, else the
    largest. Intervals stand on the line looked at, else on the longest. Raises ValueError where
    cells of several dtypes, backends or hardware classes would be mixed, as `lengths` does.
    """
    _check_one_kind(frame, "hardware", "backend", "dtype")
    fig = _figure()
    lines = _survival_lines(frame, highlight)
    if not lines:
        return _empty(fig, "Survival")
    looked_at = highlight[0] if highlight is not None else max(lines)
    window = next(iter(lines.values()))[0]["draft_window"]
    axes = _axes(fig, right=0.35)
    _survival_axes(axes, frame)
    looks, named = _ordinal_looks(frame["block_size"]), {looked_at, *_with_room(axes, list(lines))}
    for size, rows in lines.items():
        strong, bars = highlight is None or size == highlight[0], size == looked_at
        _draw_survival(axes, rows, looks[size], strong, bars, size in named)
    title = f"Survival by draft position, {window_label(window)}"
    if highlight is not None:
        rows = lines.get(highlight[0])
        title = f"{_setting(highlight)}: {_survival_of(rows) if rows else _missing(highlight)}"
    axes.set_title(title)
    counts = pd.Series([row["prompts"] for rows in lines.values() for row in rows])
    bars = _over(counts) if looked_at in lines else ""
    if counts.max() > 1 and bars:
        bars += f", on block size {looked_at}"
    _caption(fig, [bars, "Blocks that were cut are left out"])
    fig.alt = _words(
        *_looking(axes, highlight),
        f"Share of blocks accepted up to each draft position, {window_label(window)}",
        *(
            f"block size {size}: " + ", ".join(_percent(row["survival"]) for row in rows)
            for size, rows in lines.items()
        ),
    )
    return fig


def _survival_lines(
    frame: pd.DataFrame, highlight: Highlight | None
) -> dict[int, list[dict[str, Any]]]:
    """Rows by block size, of one window; the largest where the one wanted drafted nothing."""
    rows = _rows(frame[frame["engine"] == OWN])
    windows = {row["draft_window"] for row in rows}
    window = highlight[1] if highlight is not None and highlight[0] > 1 else None
    if window not in windows and windows:
        window = max(windows, key=lambda w: float("inf") if w is None else w)
    lines: dict[int, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: (row["block_size"], row["draft_position"])):
        if row["draft_window"] == window:
            lines.setdefault(row["block_size"], []).append(row)
    return lines


def _draw_survival(
    axes: Axes,
    rows: Sequence[Mapping[str, Any]],
    look: dict[str, Any],
    strong: bool,
    bars: bool,
    named: bool,
) -> None:
    xs, ys = ([row[n] for row in rows] for n in ("draft_position", "survival"))
    alpha = 1.0 if strong else FAINT
    axes.plot(xs, ys, alpha=alpha, zorder=3 if bars else 2, **look)
    if bars:
        low, high = ([row[n] for row in rows] for n in ("low", "high"))
        axes.vlines(xs, low, high, color=look["color"], linewidth=1.2)
    axes.annotate(
        str(rows[-1]["block_size"]) if named else "",
        xy=(xs[-1], ys[-1]),
        xytext=(6, 6),
        textcoords="offset points",
        fontsize=SMALL,
        color=INK if strong else QUIET,
        fontweight="bold" if strong and bars else "normal",
    )


def _survival_axes(axes: Axes, frame: pd.DataFrame) -> None:
    """The same axes for every window of a run, so that a slider moves lines and not scales."""
    last, top = int(frame["draft_position"].max()), frame[["survival", "high"]].max().max()
    axes.set_xlabel("draft position in the block (numbers on the lines: block size)")
    axes.set_ylabel("share of blocks accepted so far")
    axes.set_xlim(0.5, last + 0.8)
    axes.set_ylim(-0.02 * top, 1.08 * top + 0.01)
    _ticks_at(axes, range(1, last + 1))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0, symbol=" %"))


def _survival_of(rows: Sequence[Mapping[str, Any]]) -> str:
    first, last = rows[0], rows[-1]
    words = f"{_percent(first['survival'])} of blocks accept the first draft"
    return words if len(rows) == 1 else f"{words}, {_percent(last['survival'])} all {len(rows)}"


def _ordinal_looks(sizes: pd.Series) -> dict[int, dict[str, Any]]:
    """Block sizes in order of darkness, each with its marker."""
    ordered = sorted(set(sizes))
    shades = matplotlib.colormaps["plasma"](np.linspace(0.68, 0, len(ordered)))
    return {
        size: {"color": shade, "marker": MARKERS[place % len(MARKERS)], "linewidth": 1.5}
        for place, (size, shade) in enumerate(zip(ordered, shades, strict=True))
    }


@styled
def lengths(frame: pd.DataFrame, highlight: Highlight | None = None) -> Picture:
    """How many drafts blocks accepted, for one setting: the one highlighted, else the largest.

    `frame` as from `length_frame`. The hatched bar holds the blocks accepted whole: with more
    drafts they might have gone on.
    """
    _check_one_kind(frame, "hardware", "backend", "dtype")
    fig = _figure()
    rows = _length_rows(frame, highlight)
    if not rows and highlight is not None:
        return _empty(fig, f"Accepted drafts, {_lower(_setting(highlight))}", _missing(highlight))
    if not rows:
        return _empty(fig, "Accepted drafts")
    axes = _axes(fig, right=0.25)
    setting = _setting((rows[0]["block_size"], rows[0]["draft_window"]))
    for row in rows:
        _draw_bar(axes, row, counted=len(rows) <= 17)
    axes.set_xlabel("accepted drafts per block (tokens)")
    axes.set_ylabel("share of blocks")
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set_ylim(0, 1.1 * frame["share"].max())
    _ticks_at(axes, [row["accepted"] for row in rows])
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0, symbol=" %"))
    axes.set_title(f"Accepted drafts, {_lower(setting)}")
    total = sum(row["blocks"] for row in rows)
    hatched = "Hatched: every draft accepted, so how far it would have gone is unknown"
    _caption(fig, [f"{total} blocks, cut ones left out", hatched])
    fig.alt = _words(
        f"Share of {total} blocks by accepted drafts, {_lower(setting)}",
        ", ".join(f"{row['accepted']}: {_percent(row['share'])}" for row in rows),
    )
    return fig


def _length_rows(frame: pd.DataFrame, highlight: Highlight | None) -> list[dict[str, Any]]:
    rows = [row for row in _rows(frame) if row["engine"] == OWN]
    if highlight is None and rows:
        best = max(rows, key=lambda row: (row["draft_window"] is None, row["block_size"]))
        highlight = (best["block_size"], best["draft_window"])
    return [row for row in rows if (row["block_size"], row["draft_window"]) == highlight]


def _draw_bar(axes: Axes, row: Mapping[str, Any], counted: bool) -> None:
    colour = LOOKS[0]["color"]
    if row["censored"]:
        looks = {"facecolor": "white", "edgecolor": colour, "hatch": "////"}
    else:
        looks = {"facecolor": colour, "edgecolor": colour}
    axes.bar(row["accepted"], row["share"], width=0.8, **looks)
    axes.annotate(
        str(row["blocks"]) if counted else "",
        xy=(row["accepted"], row["share"]),
        xytext=(0, 2),
        textcoords="offset points",
        ha="center",
        fontsize=TINY,
        color=QUIET,
    )


# Words that come from the data


@styled
def training(curve: pd.DataFrame) -> Picture:
    """Loss and held-out tau by step, and accuracy by draft position at the first and last look.

    `curve` is the table `curve.parquet` of a trained draft: step, name, slot, value.
    """
    fig = _figure()
    by_name = {name: part.dropna(subset="value") for name, part in curve.groupby("name")}
    tau, loss = by_name["held-out tau"], by_name["loss"]
    gap, width = 0.5, fig.get_figwidth()
    part = (width - 3 * gap - 0.15) / 3  # inches of a panel
    starts = [gap + k * (part + gap) for k in range(3)]
    panels = [_axes(fig, left=x, right=width - x - part, top=0.66) for x in starts]
    for axes, rows, look in ((panels[0], loss, LOOKS[0]), (panels[1], tau, LOOKS[1])):
        axes.plot(rows["step"], rows["value"], **look)
        axes.set_xlabel("step")
    names = ("loss (nats per token)", "held-out tau (tokens)", "accuracy in training")
    for axes, name in zip(panels, names, strict=True):
        axes.set_title(name, fontsize=SMALL)
    accuracy = by_name["accuracy"]
    looks = dict(zip((tau["step"].min(), tau["step"].max()), (LOOKS[3], LOOKS[2]), strict=True))
    for step, look in looks.items():
        rows = accuracy[accuracy["step"] == step]
        panels[2].plot(rows["slot"], rows["value"], label=f"step {step}", **look)
    panels[2].set(xlabel="draft position", ylim=(0, None))
    panels[2].yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0, symbol=" %"))
    panels[2].legend(fontsize=TINY, frameon=False)
    best = tau.loc[tau["value"].idxmax()]
    title = f"Held-out tau {best['value']:.2f} at step {best['step']}"
    fig.text(starts[0] / width, 0.94, title, fontsize=10)
    _caption(fig, ["Tau from walks over held-out answers; accuracy over the steps before a look"])
    fig.alt = _words(
        "Training by step",
        "loss: " + ", ".join(f"{v:.2f}" for v in loss["value"]),
        "held-out tau: " + ", ".join(f"{v:.2f}" for v in tau["value"]),
        f"steps {', '.join(map(str, tau['step']))}",
    )
    return fig


def _title(
    name: str,
    cells: pd.DataFrame,
    curves: Sequence[Curve],
    highlight: Highlight | None,
    say: Callable[[Mapping[str, Any]], str],
) -> str:
    """What is drawn, or what was measured at the setting looked at."""
    dtypes = sorted({row["dtype"] for curve in curves for row in curve.rows})
    if highlight is None:
        kind = f", {shown(dtypes[0], 12)}" if len(dtypes) == 1 else ""
        return f"{name} by block size{kind}"
    row = _looked_at(curves, highlight)
    if len(dtypes) > 1 and row is not None:
        return f"{_setting(highlight)}, {shown(row['dtype'], 12)}: {say(row)}"
    return f"{_setting(highlight)}: {_missing(highlight) if row is None else say(row)}"


def _missing(highlight: Highlight) -> str:
    return "nothing is drafted" if highlight[0] == 1 else "not measured"


def _looking(axes: Axes, highlight: Highlight | None) -> list[str]:
    return [] if highlight is None else [axes.get_title("left")]


def _hollow(cells: pd.DataFrame) -> list[str]:
    return ["Hollow: above the trained block size"] if cells["beyond_trained"].any() else []


def _of(chosen: Choice) -> Highlight:
    return chosen.block_size, chosen.draft_window


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _curve_words(curve: Curve, name: str, form: str, scale: float = 1) -> str:
    """Every value of a curve, as in "window 64: 25.9 at block size 4, 23.6 at 8"."""
    values = [f"{_number(row[name] * scale, form)} at {row['block_size']}" for row in curve.rows]
    return f"{curve.label}: {', '.join(values).replace(' at ', ' at block size ', 1)}"


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def _words(*sentences: str) -> str:
    """Sentences as one description."""
    return " ".join(f"{sentence.rstrip('.')}." for sentence in sentences)


def alt_text(fig: Figure) -> str:
    """What the figure shows, in words made from its data."""
    return getattr(fig, "alt", "")


# Files

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
    text = re.sub(r'<g id="[^"]*"', "<g", buffer.getvalue())
    words = html.escape(alt_text(fig))
    return text[text.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{words}"', 1)


def to_png(fig: Figure) -> bytes:
    buffer = io.BytesIO()
    with house_style():
        fig.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def to_pdf(fig: Figure) -> bytes:
    buffer = io.BytesIO()
    with house_style():
        fig.savefig(buffer, format="pdf", metadata=NO_PDF_METADATA)
    return buffer.getvalue()


def save(fig: Figure, stem: str | Path) -> list[Path]:
    """Write `stem`.svg, .pdf and .png. SVG and PDF have the same bytes for the same data and
    libraries; PNG within one environment."""
    stem = Path(stem)
    stem.parent.mkdir(parents=True, exist_ok=True)
    contents = {
        ".svg": f'<?xml version="1.0" encoding="utf-8"?>\n{to_svg(fig, stem.name)}',
        ".pdf": to_pdf(fig),
        ".png": to_png(fig),
    }
    paths = [stem.with_name(stem.name + suffix) for suffix in contents]
    for path, content in zip(paths, contents.values(), strict=True):
        write_atomic(path, content)
    return paths


def save_figures(run: Run, folder: str | Path) -> list[Path]:
    """Draw and write every figure of a run, of the largest part whose cells compare."""
    run = comparable(run)
    cells, survivals = cell_frame(run), survival_frame(run)
    drafted = bool(cells["draft_rate"].notna().any())
    chosen = choose(run) if drafted else None
    setting = None if chosen is None or chosen.block_size == 1 else _of(chosen)
    figures = {
        "throughput": throughput(cells, chosen),
        "acceptance": acceptance(cells),
        "survival": survival(survivals),
        "lengths": lengths(length_frame(run), setting),
        "cost": cost(cells),
    }
    return [path for name, fig in figures.items() for path in save(fig, Path(folder) / name)]
