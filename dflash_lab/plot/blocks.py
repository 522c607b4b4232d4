"""Figures of what blocks accepted: survival by draft position, accepted drafts as a histogram."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from dflash_lab.analyse import (
    OWN,
)
from dflash_lab.plot.style import (
    FAINT,
    INK,
    LOOKS,
    MARKERS,
    QUIET,
    SMALL,
    TINY,
    Highlight,
    Picture,
    add_axes,
    add_caption,
    check_one_kind,
    empty_figure,
    has_room,
    in_words,
    is_narrow,
    looking_at,
    lower_first,
    new_figure,
    over_prompts,
    percent,
    rows_of,
    setting_name,
    styled,
    ticks_at,
    why_missing,
    window_label,
    with_room,
)


@styled
def survival(frame: pd.DataFrame, highlight: Highlight | None = None) -> Picture:
    """Share of blocks accepted up to each draft position, a line a block size.

    `frame` as from `survival_frame`. Drawn for one draft window: the one highlighted, else the
    largest. Intervals stand on the line looked at, else on the longest. Raises ValueError where
    cells of several dtypes, backends or hardware classes would be mixed, as `lengths` does.
    """
    check_one_kind(frame, "hardware", "backend", "dtype")
    fig = new_figure()
    lines = _survival_lines(frame, highlight)
    if not lines:
        return empty_figure(fig, "Survival")
    looked_at = highlight[0] if highlight is not None else max(lines)
    window = next(iter(lines.values()))[0]["draft_window"]
    axes = add_axes(fig, right=0.35)
    _survival_axes(axes, frame)
    looks, named = _ordinal_looks(frame["block_size"]), {looked_at, *with_room(axes, list(lines))}
    for size, rows in lines.items():
        strong, bars = highlight is None or size == highlight[0], size == looked_at
        _draw_survival(axes, rows, looks[size], strong, bars, size in named)
    title = f"Survival by draft position, {window_label(window)}"
    if highlight is not None:
        rows = lines.get(highlight[0])
        words = _survival_of(rows) if rows else why_missing(highlight)
        title = f"{setting_name(highlight)}: {words}"
    axes.set_title(title)
    counts = pd.Series([row["prompts"] for rows in lines.values() for row in rows])
    bars = over_prompts(counts) if looked_at in lines else ""
    if counts.max() > 1 and bars:
        bars += f", on block size {looked_at}"
    told = "Numbers on the lines: block size" if is_narrow(fig) else ""
    add_caption(fig, [bars, told, "Blocks that were cut are left out"])
    fig.alt = in_words(
        *looking_at(axes, highlight),
        f"Share of blocks accepted up to each draft position, {window_label(window)}",
        *(
            f"block size {size}: " + ", ".join(percent(row["survival"]) for row in rows)
            for size, rows in lines.items()
        ),
    )
    return fig


def _survival_lines(
    frame: pd.DataFrame, highlight: Highlight | None
) -> dict[int, list[dict[str, Any]]]:
    """Rows by block size, of one window; the largest where the one wanted drafted nothing."""
    rows = rows_of(frame[frame["engine"] == OWN])
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
    told = "" if is_narrow(axes.figure) else " (numbers on the lines: block size)"
    axes.set_xlabel(f"draft position in the block{told}")
    axes.set_ylabel("share of blocks accepted so far")
    axes.set_xlim(0.5, last + 0.8)
    axes.set_ylim(-0.02 * top, 1.08 * top + 0.01)
    ticks_at(axes, range(1, last + 1))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0, symbol=" %"))


def _survival_of(rows: Sequence[Mapping[str, Any]]) -> str:
    first, last = rows[0], rows[-1]
    words = f"{percent(first['survival'])} of blocks accept the first draft"
    return words if len(rows) == 1 else f"{words}, {percent(last['survival'])} all {len(rows)}"


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
    check_one_kind(frame, "hardware", "backend", "dtype")
    fig = new_figure()
    rows = _length_rows(frame, highlight)
    if not rows and highlight is not None:
        title = f"Accepted drafts, {lower_first(setting_name(highlight))}"
        return empty_figure(fig, title, why_missing(highlight))
    if not rows:
        return empty_figure(fig, "Accepted drafts")
    axes = add_axes(fig, right=0.25)
    setting = setting_name((rows[0]["block_size"], rows[0]["draft_window"]))
    for row in rows:
        _draw_bar(axes, row, counted=has_room(axes, len(rows), 3))
    axes.set_xlabel("accepted drafts per block (tokens)")
    axes.set_ylabel("share of blocks")
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set_ylim(0, 1.1 * frame["share"].max())
    ticks_at(axes, [row["accepted"] for row in rows])
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0, symbol=" %"))
    axes.set_title(f"Accepted drafts, {lower_first(setting)}")
    total = sum(row["blocks"] for row in rows)
    hatched = "Hatched: every draft accepted, so how far it would have gone is unknown"
    add_caption(fig, [f"{total} blocks, cut ones left out", hatched])
    fig.alt = in_words(
        f"Share of {total} blocks by accepted drafts, {lower_first(setting)}",
        ", ".join(f"{row['accepted']}: {percent(row['share'])}" for row in rows),
    )
    return fig


def _length_rows(frame: pd.DataFrame, highlight: Highlight | None) -> list[dict[str, Any]]:
    rows = [row for row in rows_of(frame) if row["engine"] == OWN]
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
