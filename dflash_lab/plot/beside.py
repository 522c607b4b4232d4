"""What was measured beside what was predicted, and beside what others published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from dflash_lab.plot.curves import (
    Curve,
    block_size_axis,
    check_times,
    curve_words,
    curves_of,
    draw_curve,
    draw_dashed,
)
from dflash_lab.plot.style import (
    INK,
    OWN_DASH,
    QUIET,
    TINY,
    EndLabel,
    Picture,
    add_axes,
    add_caption,
    empty_figure,
    grow,
    in_words,
    is_narrow,
    label_ends,
    new_figure,
    over_prompts,
    points_of,
    room_for,
    rows_of,
    spread,
    styled,
    two_axes,
)


@styled
def predicted(frame: pd.DataFrame) -> Picture:
    """Throughput measured, and as a cost table and the same blocks predict it, by block size.

    `frame` is that of `cell_frame` with a column `predicted_tokens_per_s`, as from
    `prediction_frame`; rows without a prediction have no place in it.
    """
    fig = new_figure()
    if frame.empty:
        return empty_figure(fig, "Predicted throughput", "the cost table fits no cell")
    check_times(frame)
    curves = curves_of(rows_of(frame), "tokens_per_s")
    axes = add_axes(fig, right=room_for(f"predicted, {curve.label}" for curve in curves))
    block_size_axis(axes, list(frame["block_size"]))
    labels = [label for curve in curves for label in _draw_both(axes, curve)]
    axes.margins(y=0.08)
    axes.set_ylabel("decode throughput (tokens/s)")
    axes.set_title("Throughput, measured and predicted from measured costs")
    label_ends(axes, labels)
    wrong = max(
        abs(row["predicted_tokens_per_s"] / row["tokens_per_s"] - 1) for row in _rows(curves)
    )
    add_caption(
        fig,
        [
            over_prompts(frame["prompts"]),
            "Dashed: seconds of the cost table for the blocks that were decoded",
            f"The prediction is off by {100 * wrong:.0f} % at most",
        ],
    )
    fig.alt = in_words(
        "Decode throughput in tokens per second by block size, measured and predicted",
        *(f"Measured, {curve_words(curve, 'tokens_per_s', '.1f')}" for curve in curves),
        *(f"Predicted, {curve_words(curve, 'predicted_tokens_per_s', '.1f')}" for curve in curves),
    )
    return fig


def _rows(curves: Sequence[Curve]) -> list[dict[str, Any]]:
    return [row for curve in curves for row in curve.rows]


def _draw_both(axes: Axes, curve: Curve) -> list[EndLabel]:
    """Measured points with their intervals, and the predicted curve."""
    measured = draw_curve(
        axes, replace(curve, look=curve.look | {"linestyle": ""}), "tokens_per_s", None
    )
    name = f"predicted, {curve.label}"
    column = "predicted_tokens_per_s"
    return [measured, draw_dashed(axes, curve, column, measured, name, 1.3)]


LETTERS = "abcdefghijklmnopqrstuvwxyz"


@styled
def published(frame: pd.DataFrame, points: pd.DataFrame) -> Picture:
    """Speed-up over plain decoding and tau by block size, beside points that others published.

    `frame` is that of `cell_frame` with `speedup` and its ends; `points` as from `published_points`
    (block_size, speedup, tau, told). Published points are hollow, lettered and told one by one:
    they are of other machines, models and prompts.
    """
    fig = new_figure()
    if frame.empty:
        return empty_figure(fig, "Published points", "no speed-up was measured")
    check_times(frame)
    curves = curves_of(rows_of(frame), "speedup")
    left, right = two_axes(fig, room_for(curve.label for curve in curves))
    sizes = sorted({*frame["block_size"], *points["block_size"]})
    places = points.assign(letter=list(LETTERS[: len(points)]))
    told = [f"{row['letter']} {row['told']}" for row in places.to_dict("records")]
    _add_list(fig, told)
    for axes, name, words in (
        (left, "speedup", "speed-up over plain decoding"),
        (right, "tau", "tau (tokens per block)"),
    ):
        block_size_axis(axes, sizes)
        axes.set_xlabel("block size (tokens)")
        axes.set_ylabel(words)
        labels = [draw_curve(axes, curve, name, None) for curve in curves]
        _draw_published(axes, places, name)
    left.axhline(1, color=QUIET, linewidth=1, linestyle=OWN_DASH, zorder=0.5)
    left.set_title("This run beside published points", pad=11)
    label_ends(right, labels)
    add_caption(fig, [over_prompts(frame["prompts"]), "Dashed: plain decoding"])
    fig.notes = (*fig.notes, "Published, on other machines: " + "; ".join(told))
    fig.alt = in_words(
        "Speed-up over plain decoding and tau by block size",
        *(f"This run's speed-up, {curve_words(curve, 'speedup', '.2f')}" for curve in curves),
        *(f"This run's tau, {curve_words(curve, 'tau', '.2f')}" for curve in curves),
        *(f"Published by {_said(row)}" for row in points.to_dict("records")),
    )
    return fig


def _said(row: dict[str, Any]) -> str:
    values = [f"{name} {row[name]:.2f}" for name in ("speedup", "tau") if not pd.isna(row[name])]
    return f"{row['told']}: {', '.join(values)} at block size {row['block_size']}"


def _draw_published(axes: Axes, points: pd.DataFrame, name: str) -> None:
    """Hollow diamonds, each with its letter to the right, moved apart where letters would touch."""
    known = points[points[name].notna()].sort_values(name)
    low, high = axes.get_ylim()
    top = max(high, 1.08 * known[name].max())
    axes.set_ylim(0, top)
    low, high = axes.get_xlim()
    axes.set_xlim(low, high + 0.04 * (high - low))
    axes.plot(known["block_size"], known[name], "D", color=QUIET, mfc="white", ms=4.5, ls="")
    for size, group in known.groupby("block_size"):
        places = spread([value / top for value in group[name]], 1.15 * TINY / points_of(axes)[1])
        for letter, place in zip(group["letter"], places, strict=True):
            axes.annotate(
                letter,
                xy=(size, place * top),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=TINY,
                color=INK,
            )


def _add_list(fig: Picture, told: Sequence[str]) -> None:
    """The published points in words, in two columns below the axes, where it is not narrow."""
    if is_narrow(fig):
        return
    half = -(-len(told) // 2)
    grow(fig, 0.15 * half + 0.15)
    height = fig.get_figheight()
    head = "Published, on other machines with other models and prompts:"
    for x, lines in ((0.012, told[:half]), (0.5, told[half:])):
        text = "\n".join([head if x < 0.1 else "", *lines])
        y = (0.26 + 0.15 * (half + 1)) / height
        fig.text(x, y, text, fontsize=7, color=QUIET, va="top", linespacing=1.35)
