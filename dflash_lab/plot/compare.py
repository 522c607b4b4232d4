"""Figures side by side: cells on a grid, memory, break-even, tasks, prompts, context length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from dflash_lab.analyse import OWN, Choice
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
    LOOKS,
    OWN_DASH,
    QUIET,
    SMALL,
    TINY,
    Picture,
    add_axes,
    add_caption,
    check_one_kind,
    empty_figure,
    has_room,
    in_words,
    is_narrow,
    label_ends,
    lower_first,
    new_figure,
    number,
    over_prompts,
    points_of,
    room_for,
    rows_of,
    setting_name,
    setting_of,
    shown,
    styled,
    two_axes,
    window_label,
)

MIB = 1 << 20


@styled
def heatmap(cells: pd.DataFrame, chosen: Choice | None = None) -> Picture:
    """Decode throughput by block size and draft window, one field a measured cell.

    `cells` as from `cell_frame`; `chosen` gets a frame. A field without a number was not measured.
    Raises ValueError where hardware classes, timing modes, backends or dtypes would be mixed.
    """
    drafting = cells[(cells["engine"] == OWN) & (cells["block_size"] > 1)]
    fig = new_figure()
    if drafting.empty:
        return empty_figure(fig, "Block size and window")
    check_times(drafting)
    check_one_kind(drafting, "backend", "dtype")
    rows = rows_of(drafting)
    sizes = sorted({row["block_size"] for row in rows})
    windows = sorted({row["draft_window"] for row in rows}, key=lambda w: (w is None, w or 0))
    grid = np.full((len(windows), len(sizes)), np.nan)
    for row in rows:
        grid[windows.index(row["draft_window"]), sizes.index(row["block_size"])] = row[
            "tokens_per_s"
        ]
    axes = add_axes(fig, left=1.15, right=0.3)
    low, high = np.nanmin(grid), np.nanmax(grid)
    axes.imshow(grid, cmap="cividis", aspect="auto", vmin=low, vmax=high, origin="lower")
    letters = SMALL if has_room(axes, len(sizes), 5) else 6
    for y, x in np.argwhere(~np.isnan(grid)):
        dark = grid[y, x] < (low + high) / 2
        colour = "white" if dark else "black"
        text = f"{grid[y, x]:.1f}"
        axes.text(x, y, text, ha="center", va="center", fontsize=letters, color=colour)
    axes.set_xticks(range(len(sizes)), map(str, sizes))
    axes.set_yticks(range(len(windows)), map(window_label, windows))
    axes.set_xlabel("block size (tokens, anchor included)")
    axes.grid(visible=False)
    axes.set_title("Decode throughput (tokens/s) by block size and draft window")
    notes = ["Empty: not measured"] if np.isnan(grid).any() else []
    if chosen is not None and chosen.block_size in sizes and chosen.draft_window in windows:
        at = sizes.index(chosen.block_size) - 0.5, windows.index(chosen.draft_window) - 0.5
        axes.add_patch(Rectangle(at, 1, 1, fill=False, edgecolor="white", linewidth=4))
        axes.add_patch(Rectangle(at, 1, 1, fill=False, edgecolor=INK, linewidth=2))
        notes.append(f"Framed: the choice, {lower_first(setting_name(setting_of(chosen)))}")
    add_caption(fig, notes)
    fig.alt = in_words(
        "Decode throughput in tokens per second by block size and draft window",
        *(
            f"{window_label(window)}: "
            + ", ".join(
                f"{number(value, '.1f')} at {size}" for size, value in zip(sizes, line, strict=True)
            )
            for window, line in zip(windows, grid, strict=True)
        ),
    )
    return fig


@styled
def memory(cells: pd.DataFrame) -> Picture:
    """Peak memory and bytes of the draft's cache against block size, a curve a window."""
    drafting = cells[(cells["engine"] == OWN) & (cells["block_size"] > 1)].copy()
    fig = new_figure()
    if drafting.empty:
        return empty_figure(fig, "Memory")
    check_one_kind(drafting, "hardware", "backend", "dtype")
    for name in ("peak_bytes", "draft_cache_bytes"):
        drafting[name] = drafting[name].astype(float)
        drafting[f"{name}_low"] = drafting[f"{name}_high"] = np.nan
    curves = curves_of(rows_of(drafting), "draft_cache_bytes")
    left, right = two_axes(fig, room_for(curve.label for curve in curves))
    for curve in curves:
        draw_curve(left, curve, "peak_bytes", None, 1 / MIB)
    labels = [draw_curve(right, curve, "draft_cache_bytes", None, 1 / MIB) for curve in curves]
    for axes, name in ((left, "peak memory (MiB)"), (right, "draft cache (MiB)")):
        block_size_axis(axes, list(drafting["block_size"]))
        axes.set_xlabel("block size (tokens)")
        axes.set_ylabel(name)
        axes.set_ylim(0, 1.1 * max(axes.get_ylim()[1], 1e-6))
    left.set_title("Memory by block size", pad=11)
    label_ends(right, labels)
    add_caption(
        fig,
        [
            "Peak: of the GPU, else of the whole process",
            "The draft's cache grows with the context, not the block",
        ],
    )
    fig.alt = in_words(
        "Memory in MiB by block size",
        *(f"Peak, {curve_words(curve, 'peak_bytes', '.0f', 1 / MIB)}" for curve in curves),
        *(
            f"Draft cache, {curve_words(curve, 'draft_cache_bytes', '.2f', 1 / MIB)}"
            for curve in curves
        ),
    )
    return fig


@styled
def break_even(frame: pd.DataFrame) -> Picture:
    """Tau beside the tau at which a block pays for itself, against block size.

    `frame` as from `break_even_frame`. Where tau lies above the dashed line, drafting gains.
    """
    fig = new_figure()
    if frame.empty:
        return empty_figure(fig, "Break-even", "plain decoding or drafting was not measured")
    check_times(frame)
    curves = curves_of(rows_of(frame), "tau")
    names = [f"{curve.label}: tau" for curve in curves]
    axes = add_axes(fig, right=room_for([*names, "needed, full window"]))
    block_size_axis(axes, list(frame["block_size"]))
    labels = []
    for curve, name in zip(curves, names, strict=True):
        label = draw_curve(axes, curve, "tau", None)
        labels.append(replace(label, text=name))
        needed = f"needed, {curve.label}"
        labels.append(draw_dashed(axes, curve, "round_cost", label, needed, 1.2))
    axes.set_ylim(bottom=1)
    axes.set_ylabel("tokens per block")
    axes.set_title("Tau, and the tau at which a block pays for itself")
    label_ends(axes, labels)
    add_caption(
        fig,
        [
            over_prompts(frame["prompts"]),
            "Dashed: a block's time in steps of plain decoding, fastest dtype",
        ],
    )
    fig.alt = in_words(
        "Tau and the break-even tau by block size",
        *(f"Tau, {curve_words(curve, 'tau', '.2f')}" for curve in curves),
        *(f"Needed, {curve_words(curve, 'round_cost', '.2f')}" for curve in curves),
    )
    return fig


@styled
def tasks(frame: pd.DataFrame) -> Picture:
    """Decode throughput against block size, a small panel a task, on one scale.

    `frame` as from `task_frame`. Block size 1, plain decoding, is the dashed line of each panel.
    """
    check_times(frame)
    check_one_kind(frame, "backend")
    fig = new_figure()
    names = sorted(set(frame["task"]))
    rows = _panels(fig, len(names))
    panels = [axes for row in rows for axes in row]
    drafting = frame[frame["block_size"] > 1]
    top = 1.08 * np.nanmax(frame[["tokens_per_s", "tokens_per_s_high"]].to_numpy())
    curves: list[Curve] = []
    told: list[str] = []
    for axes, task in zip(panels, names, strict=True):
        mine = drafting[drafting["task"] == task]
        plain = frame[(frame["task"] == task) & (frame["block_size"] == 1)]["tokens_per_s"].max()
        curves = curves_of(rows_of(mine), "tokens_per_s") if len(mine) else []
        block_size_axis(axes, list(drafting["block_size"]))
        for curve in curves:
            draw_curve(axes, curve, "tokens_per_s", None)
            told.append(f"{task}, {curve_words(curve, 'tokens_per_s', '.1f')}")
        if not pd.isna(plain):
            axes.axhline(plain, color=QUIET, linewidth=1.1, linestyle=OWN_DASH)
            told.append(f"{task}, plain: {plain:.1f}")
        prompts = int(mine["prompts"].max()) if len(mine) else 0
        letters = int((points_of(axes)[0] + 8) / (0.56 * SMALL)) - len(f" ({prompts})")
        axes.set_title(f"{shown(task, max(letters, 4))} ({prompts})", fontsize=SMALL)
        axes.set_xlabel("block size (tokens)" if axes is rows[-1][len(rows[-1]) // 2] else "")
        axes.set_ylim(0, top)
        axes.tick_params(labelsize=TINY)
    for row in rows:
        for axes in row[1:]:
            axes.tick_params(labelleft=False)
        row[0].set_ylabel("tokens/s" if len(rows) > 1 else "decode throughput (tokens/s)")
    title = "Throughput by block size and task"
    fig.text(0.62 / fig.get_figwidth(), 1 - 0.23 / fig.get_figheight(), title, fontsize=10)
    looks = ", ".join(f"{curve.look['marker']} {curve.label}" for curve in curves)
    add_caption(
        fig,
        [
            "In brackets: the number of prompts",
            "Dashed: plain decoding, the fastest dtype",
            f"Markers: {looks}" if len(curves) > 1 else "",
        ],
    )
    fig.alt = in_words("Decode throughput in tokens per second by block size and task", *told)
    return fig


def _panels(fig: Picture, count: int) -> list[list[Axes]]:
    """Rows of axes of one size, from the top: on a slide one row, else as many as there must be."""
    most = {"column": 2, "page": 5}.get(fig.size, count)  # panels that are readable side by side
    down = -(-count // most)
    across = -(-count // down)
    height = 1.3 if is_narrow(fig) else fig.get_figheight() if down == 1 else 1.9  # of a row
    head = 0.4 if height == 1.9 else 0.0
    width, gap = fig.get_figwidth(), 0.14
    fig.set_size_inches(width, down * height + head)
    each = (width - 0.62 - 0.15 - gap * (across - 1)) / across
    starts = [0.62 + place * (each + gap) for place in range(across)]
    panels = [
        add_axes(
            fig,
            left=x / (0.85 if is_narrow(fig) else 1),
            right=(width - x - each) / (0.7 if is_narrow(fig) else 1),
            bottom=0.76 + (down - 1 - row) * height,
            top=0.55 + row * height,
        )
        for row in range(down)
        for x in starts[: count - row * across]
    ]
    return [panels[place : place + across] for place in range(0, count, across)]


@styled
def pairs(frame: pd.DataFrame, name: str, against: str) -> Picture:
    """Each prompt's throughput in two cells, tied by a line; the one that gains least at the top.

    `frame` as from `prompt_pairs`; `name` and `against` say what the two are.
    """
    fig = new_figure()
    if frame.empty:
        return empty_figure(fig, "Prompts in pairs", "the two cells share no prompt")
    rows = frame.to_dict("records")[::-1]
    axes = add_axes(fig, left=1.6, right=0.75)
    for place, row in enumerate(rows):
        gains = row["speedup"] > 1
        ends = [row["against_per_s"], row["tokens_per_s"]]
        axes.plot(ends, [place, place], color=LOOKS[0 if gains else 1]["color"], linewidth=1.4)
    ys = range(len(rows))
    axes.plot([row["against_per_s"] for row in rows], ys, "o", mfc="white", mec=INK, ms=5, ls="")
    axes.plot([row["tokens_per_s"] for row in rows], ys, "o", color=INK, ms=5, ls="")
    some = len(rows) <= 30
    axes.set_yticks(
        ys if some else [], [shown(row["prompt_id"], 16) for row in rows] if some else []
    )
    axes.tick_params(axis="y", labelsize=TINY if len(rows) <= 18 else 6)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("decode throughput (tokens/s)")
    for place, row in enumerate(rows):
        if some:
            axes.annotate(
                f"{row['speedup']:.2f}x",
                xy=(1, place),
                xycoords=axes.get_yaxis_transform(),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=TINY if len(rows) <= 18 else 6,
                color=QUIET,
            )
    gained = sum(row["speedup"] > 1 for row in rows)
    axes.set_title(f"{gained} of {len(rows)} prompts gain")
    add_caption(fig, [f"Full: {name}", f"Hollow: {against}"])
    fig.alt = in_words(
        f"Throughput of {len(rows)} prompts in {name} over {against}; {gained} gain",
        ", ".join(f"{row['prompt_id']}: {row['speedup']:.2f}x" for row in rows[::-1]),
    )
    return fig


@styled
def depth(frame: pd.DataFrame, block_size: int | None = None) -> Picture:
    """Tau and time of a block against context length, a curve a window, for one block size.

    `frame` as from `depth_frame`; without `block_size` the one with most windows, then the largest.
    """
    fig = new_figure()
    if frame.empty:
        return empty_figure(fig, "Context length")
    check_one_kind(frame, "hardware", "backend", "dtype")
    if block_size is None:
        windows = frame.groupby("block_size")["draft_window"].agg(lambda w: w.nunique(dropna=False))
        block_size = max(windows.index, key=lambda size: (windows[size], size))
    part = frame[frame["block_size"] == block_size]
    groups: dict[int | None, list[dict[str, Any]]] = {}
    for row in rows_of(part):
        groups.setdefault(row["draft_window"], []).append(row)
    order = sorted(groups, key=lambda window: (window is not None, -(window or 0)))
    left, right = two_axes(fig)
    for window, look in zip(order, LOOKS, strict=False):
        lines = groups[window]
        xs = [row["context"] for row in lines]
        left.plot(xs, [row["tau"] for row in lines], label=window_label(window), **look)
        right.plot(xs, [1000 * row["block_s"] for row in lines], **look)
    for axes, name in ((left, "tau (tokens per block)"), (right, "time per block (ms)")):
        axes.set_xlabel("context before the block (tokens)")
        axes.set_ylabel(name)
    left.set_ylim(1, max(1 + 1.1 * (part["tau"].max() - 1), 1.5))
    right.set_ylim(0, 1100 * part["block_s"].max())
    left.legend(fontsize=TINY, frameon=False)
    left.set_title(f"Block size {block_size} along the context", pad=11)
    add_caption(fig, ["Blocks of all prompts, cut into parts of equally many by where they begin"])
    fig.alt = in_words(
        f"Tau and milliseconds per block by context length at block size {block_size}",
        *(f"{window_label(window)}: {_along(groups[window])}" for window in order),
    )
    return fig


def _along(rows: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(
        f"tau {row['tau']:.2f} and {1000 * row['block_s']:.0f} ms at {row['context']:.0f}"
        for row in rows
    )
