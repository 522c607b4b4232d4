"""Figures against block size: throughput, acceptance and cost, a curve a draft window."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from dflash_lab.analyse import (
    OWN,
    Choice,
)
from dflash_lab.plot.style import (
    BACKED,
    FAINT,
    INK,
    LIBRARY_DASH,
    LOOKS,
    OWN_DASH,
    QUIET,
    EndLabel,
    Highlight,
    Picture,
    add_axes,
    add_caption,
    check_one_kind,
    empty_figure,
    in_words,
    label_ends,
    looking_at,
    lower_first,
    mark_size,
    new_figure,
    number,
    over_prompts,
    percent,
    room_for,
    rows_of,
    setting_name,
    setting_of,
    shown,
    styled,
    ticks_at,
    two_axes,
    why_missing,
    window_label,
    with_ends,
)

COMFORTABLE, TOO_LOW = 0.6, 0.3  # draft rates that guides name; no measurement backs them
PREDICTED = {"linestyle": (0, (2, 1.2)), "linewidth": 2.6}  # wide and short dashes


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Cells that differ in block size alone, in order of it."""

    window: int | None
    label: str
    look: dict[str, Any]
    rows: list[dict[str, Any]]  # of cell_frame, and `x`, where to draw it

    def row(self, block_size: int) -> dict[str, Any] | None:
        return next((row for row in self.rows if row["block_size"] == block_size), None)


def check_times(cells: pd.DataFrame) -> None:
    if cells.empty:
        raise ValueError("there are no cells to draw; the run has finished none that were chosen.")
    check_one_kind(cells, "hardware", "timing")


def curves_of(cells: Sequence[dict[str, Any]], needed: str) -> list[Curve]:
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


def plain_rows(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Plain decoding: our loop at block size 1, and the library's generators."""
    return [row for row in cells if row["block_size"] == 1 or row["engine"] != OWN]


def plain_label(row: Mapping[str, Any]) -> str:
    maker = "plain" if row["engine"] == OWN else shown(row["engine"], 14)
    return f"{maker}, {shown(row['dtype'], 12)}"


def _is_strong(window: int | None, highlight: Highlight | None) -> bool:
    """Whether a curve is the one looked at; block size 1 has no window of its own."""
    return highlight is None or window == (None if highlight[0] == 1 else highlight[1])


def block_size_axis(axes: Axes, sizes: Sequence[int]) -> None:
    """Ticks at what was measured and nowhere else."""
    axes.set_xlabel("block size (tokens, anchor included)")
    pad = 0.04 * max(max(sizes) - min(sizes), 4)
    axes.set_xlim(min(sizes) - pad, max(sizes) + pad)
    ticks_at(axes, sorted(set(sizes)))


def draw_curve(
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
    told = {name: look[name] for name in ("marker", "linestyle")}
    return EndLabel(
        x=xs[-1], y=values[-1], text=curve.label, color=look["color"], strong=strong, look=told
    )


def draw_dashed(
    axes: Axes, curve: Curve, name: str, beside: EndLabel, text: str, width: float
) -> EndLabel:
    """Another column of a curve's rows, dashed in its colour; labelled as `beside` is."""
    xs, ys = ([row[key] for row in curve.rows] for key in ("x", name))
    dashed = {"linestyle": OWN_DASH, "linewidth": width}
    axes.plot(xs, ys, color=curve.look["color"], **dashed)
    return replace(beside, text=text, x=xs[-1], y=ys[-1], look=dashed)


def draw_plain(
    axes: Axes, row: Mapping[str, Any], name: str, form: str, scale: float = 1
) -> EndLabel:
    """A horizontal line for decoding without a draft, dotted where the library does it."""
    value = row[name] * scale
    dash = OWN_DASH if row["engine"] == OWN else LIBRARY_DASH
    axes.axhline(value, color=QUIET, linewidth=1.1, linestyle=dash, zorder=1.5)
    text = f"{plain_label(row)}: {number(value, form)}"
    told = {"linestyle": dash, "linewidth": 1.1}
    return EndLabel(x=axes.get_xlim()[1], y=value, text=text, color=QUIET, look=told)


def _draw_ring(axes: Axes, curves: Sequence[Curve], chosen: Choice) -> bool:
    """A ring around the chosen cell; whether it is among what is drawn."""
    for curve in curves:
        for row in curve.rows:
            if row["cell"] == chosen.cell:
                axes.plot(row["x"], row["tokens_per_s"], "o", ms=14, mfc="none", mec=INK, mew=1.4)
                return True
    return False


def looked_at_row(curves: Sequence[Curve], highlight: Highlight) -> dict[str, Any] | None:
    strong = (curve for curve in curves if _is_strong(curve.window, highlight))
    return next((row for curve in strong if (row := curve.row(highlight[0]))), None)


@styled
def throughput(
    cells: pd.DataFrame,
    chosen: Choice | None = None,
    highlight: Highlight | None = None,
    predicted: pd.DataFrame | None = None,
) -> Picture:
    """Decode tokens per second against block size, beside plain decoding of every kind.

    `cells` as from `cell_frame`. `chosen` gets a ring; `highlight` is the setting looked at.
    `predicted`, as from `forecast`, is drawn over the curve looked at, else over every one.
    Raises ValueError where hardware classes or timing modes would be mixed.
    """
    check_times(cells)
    rows = rows_of(cells)
    curves, plain = curves_of(rows, "tokens_per_s"), plain_rows(rows)
    foretold = _foretold(predicted, [c for c in curves if _is_strong(c.window, highlight)])
    fig = new_figure()
    names = [curve.label for curve in (*curves, *foretold)]
    names += [f"{plain_label(row)}: 00.0" for row in plain]
    axes = add_axes(fig, right=room_for(names))
    sizes = [row["block_size"] for curve in foretold for row in curve.rows]
    block_size_axis(axes, [*cells["block_size"], *sizes])
    axes.margins(y=0.08)
    axes.set_ylabel("decode throughput (tokens/s)")
    axes.set_title(title_of("Throughput", cells, curves, highlight, _throughput_of))
    labels = [draw_plain(axes, row, "tokens_per_s", ".1f") for row in plain]
    for curve in curves:
        labels.append(draw_curve(axes, curve, "tokens_per_s", highlight))
    labels += [_draw_foretold(axes, curve) for curve in foretold]
    mark_size(axes, highlight)
    notes = [over_prompts(cells["prompts"]), "Plain: block size 1", *hollow_note(cells)]
    notes += ["Pale dashes: predicted from measured costs"] if foretold else []
    if chosen is not None and _draw_ring(axes, curves, chosen):
        notes.append(f"Ring: the fastest, {lower_first(setting_name(setting_of(chosen)))}")
    label_ends(axes, labels)
    add_caption(fig, notes)
    fig.alt = in_words(
        *looking_at(axes, highlight),
        f"Decode throughput in tokens per second by block size, {over_prompts(cells['prompts'])}",
        *(curve_words(curve, "tokens_per_s", ".1f") for curve in curves),
        *(curve_words(curve, "predicted_tokens_per_s", ".1f") for curve in foretold),
        *(f"{plain_label(row)}: {number(row['tokens_per_s'], '.1f')}" for row in plain),
        *([] if chosen is None else [chosen.sentence]),
    )
    return fig


def _foretold(predicted: pd.DataFrame | None, curves: Sequence[Curve]) -> list[Curve]:
    """Curves of what is predicted for the windows and dtypes of these."""
    if predicted is None:
        return []
    rows = [row | {"x": row["block_size"]} for row in rows_of(predicted)]
    made = [
        replace(
            curve,
            label=f"predicted, {curve.label}",
            rows=[r for r in rows if (r["draft_window"], r["dtype"]) == _kind_of(curve)],
        )
        for curve in curves
    ]
    return [curve for curve in made if len(curve.rows) > 1]


def _kind_of(curve: Curve) -> tuple[int | None, str]:
    return curve.window, curve.rows[0]["dtype"]


def _draw_foretold(axes: Axes, curve: Curve) -> EndLabel:
    xs, ys = ([row[key] for row in curve.rows] for key in ("x", "predicted_tokens_per_s"))
    axes.plot(xs, ys, color=curve.look["color"], alpha=0.55, **PREDICTED)
    told = {"color": curve.look["color"], "look": PREDICTED}
    return EndLabel(x=xs[-1], y=ys[-1], text=curve.label, **told)


def _throughput_of(row: Mapping[str, Any]) -> str:
    return f"{with_ends(row, 'tokens_per_s', '.1f')} tokens/s"


@styled
def acceptance(cells: pd.DataFrame, highlight: Highlight | None = None) -> Picture:
    """Draft rate and tau against block size: how much of a block is right, and what that gives.

    The lines at 60 % and 30 % are what guides say; the ceiling of tau is the block size itself.
    """
    drafted = cells[cells["draft_rate"].notna()]
    fig = new_figure()
    if drafted.empty:
        return empty_figure(fig, "Acceptance")
    curves = curves_of(rows_of(drafted), "draft_rate")
    left, right = two_axes(fig, room_for(curve.label for curve in curves))
    _draw_rates(left, curves, highlight)
    labels = _draw_taus(right, curves, highlight)
    for axes in (left, right):
        block_size_axis(axes, list(drafted["block_size"]))
        axes.set_xlabel("block size (tokens)")
        mark_size(axes, highlight)
    left.set_title(title_of("Acceptance", cells, curves, highlight, _acceptance_of), pad=11)
    label_ends(right, labels)
    notes = [over_prompts(drafted["prompts"]), "Blocks that were cut are left out"]
    add_caption(fig, [*notes, *hollow_note(cells)])
    fig.alt = in_words(
        *looking_at(left, highlight),
        f"Draft rate and tau by block size, {over_prompts(drafted['prompts'])}",
        *(f"Draft rate in %, {curve_words(curve, 'draft_rate', '.0f', 100)}" for curve in curves),
        *(f"Tau, {curve_words(curve, 'tau', '.2f')}" for curve in curves),
        "Rules of thumb at 60 % and 30 %; tau can at most be the block size",
    )
    return fig


def _draw_rates(axes: Axes, curves: Sequence[Curve], highlight: Highlight | None) -> None:
    for curve in curves:
        draw_curve(axes, curve, "draft_rate", highlight)
    for level in (COMFORTABLE, TOO_LOW):
        axes.axhline(level, color=QUIET, linewidth=1, linestyle=OWN_DASH, zorder=1.5)
        axes.text(
            0.99,
            level + 0.012,
            f"rule of thumb: {percent(level)}",
            transform=axes.get_yaxis_transform(),
            ha="right",
            va="bottom",
            **BACKED,
        )
    top = highest(curves, "draft_rate", "draft_rate_high")
    axes.set_ylim(0, max(0.75, 1.1 * top))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0, symbol=" %"))
    axes.set_ylabel("draft rate (accepted / drafted)")


def _draw_taus(axes: Axes, curves: Sequence[Curve], highlight: Highlight | None) -> list[EndLabel]:
    labels = [draw_curve(axes, curve, "tau", highlight) for curve in curves]
    top = max(1 + 1.35 * (highest(curves, "tau") - 1), 1.05 * highest(curves, "tau_high"), 1.5)
    axes.plot([1, top], [1, top], color=QUIET, linewidth=1, linestyle=OWN_DASH, zorder=1.5)
    axes.annotate(
        "ceiling: the block size",
        xy=(top, top),
        xytext=(5, 0),
        textcoords="offset points",
        va="top",
        **BACKED,
    )
    axes.set_ylim(1, top)
    axes.set_ylabel("tau (tokens per block)")
    return labels


def highest(curves: Sequence[Curve], *names: str) -> float:
    """The largest of these figures, 0 where none is known."""
    values = [row[name] for curve in curves for row in curve.rows for name in names]
    return max((value for value in values if not pd.isna(value)), default=0.0)


def _acceptance_of(row: Mapping[str, Any]) -> str:
    rate = with_ends(row, "draft_rate", ".0f", 100)
    return f"draft rate {rate} %, tau {with_ends(row, 'tau', '.2f')}"


@styled
def cost(cells: pd.DataFrame, highlight: Highlight | None = None) -> Picture:
    """Time of a block against block size: what drafting and verifying it costs.

    Raises ValueError where hardware classes or timing modes would be mixed.
    """
    check_times(cells)
    rows = rows_of(cells)
    curves = curves_of(rows, "seconds_per_block")
    drawn = {row["cell"] for curve in curves for row in curve.rows}
    plain = [
        row
        for row in plain_rows(rows)
        if row["engine"] == OWN and row["cell"] not in drawn and row["blocks"]
    ]
    fig = new_figure()
    names = [*(curve.label for curve in curves), *(f"{plain_label(row)}: 00.0" for row in plain)]
    axes = add_axes(fig, right=room_for(names))
    block_size_axis(axes, list(cells["block_size"]))
    axes.set_ylabel("time per block (ms)")
    axes.set_title(title_of("Time per block", cells, curves, highlight, _cost_of))
    labels = [draw_plain(axes, row, "seconds_per_block", ".1f", 1000) for row in plain]
    for curve in curves:
        labels.append(draw_curve(axes, curve, "seconds_per_block", highlight, 1000))
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    mark_size(axes, highlight)
    label_ends(axes, labels)
    add_caption(fig, [over_prompts(cells["prompts"]), *hollow_note(cells)])
    fig.alt = in_words(
        *looking_at(axes, highlight),
        f"Milliseconds per block by block size, {over_prompts(cells['prompts'])}",
        *(curve_words(curve, "seconds_per_block", ".1f", 1000) for curve in curves),
        *(f"{plain_label(row)}: {row['seconds_per_block'] * 1000:.1f}" for row in plain),
    )
    return fig


def _cost_of(row: Mapping[str, Any]) -> str:
    return f"{with_ends(row, 'seconds_per_block', '.1f', 1000)} ms per block"


def title_of(
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
    row = looked_at_row(curves, highlight)
    if len(dtypes) > 1 and row is not None:
        return f"{setting_name(highlight)}, {shown(row['dtype'], 12)}: {say(row)}"
    return f"{setting_name(highlight)}: {why_missing(highlight) if row is None else say(row)}"


def hollow_note(cells: pd.DataFrame) -> list[str]:
    return ["Hollow: above the trained block size"] if cells["beyond_trained"].any() else []


def curve_words(curve: Curve, name: str, form: str, scale: float = 1) -> str:
    """Every value of a curve, as in "window 64: 25.9 at block size 4, 23.6 at 8"."""
    values = [f"{number(row[name] * scale, form)} at {row['block_size']}" for row in curve.rows]
    return f"{curve.label}: {', '.join(values).replace(' at ', ' at block size ', 1)}"
