"""Figures of single blocks: stages, conditional acceptance, one prompt in time, a race."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.ticker import MaxNLocator, PercentFormatter

from dflash_lab.analyse import OWN
from dflash_lab.plot.style import (
    INK,
    LOOKS,
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
    new_figure,
    percent,
    rows_of,
    shown,
    styled,
    ticks_at,
    window_label,
)

# What a block's time is made of: column, name, colour, hatch.
PARTS = (
    ("draft_s", "draft", LOOKS[0]["color"], ""),
    ("verify_s", "verify", "#e9b872", "///"),
    ("other_s", "other", "#bbbbbb", "..."),
)


@styled
def stages(frame: pd.DataFrame, draft_window: int | None = None) -> Picture:
    """Time of a block against block size, stacked by stage, for one window.

    `frame` as from `stage_frame`, or a cost table's frame at one context: columns block_size,
    draft_window, draft_s, verify_s, other_s, where `commit_s`, if there, counts as other.
    """
    fig = new_figure()
    rows = rows_of(frame)
    rows = [row for row in rows if row["block_size"] == 1 or row["draft_window"] == draft_window]
    if not rows:
        return empty_figure(fig, "Stages of a block", "no cell was timed by stages")
    check_one_kind(frame, *({"hardware", "backend", "dtype"} & set(frame.columns)))
    rows.sort(key=lambda row: row["block_size"])
    if len({row["block_size"] for row in rows}) < len(rows):
        raise ValueError("two rows of one block size: take one context or one kind of cell.")
    axes = add_axes(fig, right=0.9)
    bottom = np.zeros(len(rows))
    for name, title, colour, hatch in PARTS:
        values = 1000 * np.array([_part(row, name) for row in rows])
        axes.bar(
            range(len(rows)), values, 0.7, bottom, color=colour, hatch=hatch, edgecolor="white"
        )
        axes.annotate(
            title,
            xy=(len(rows) - 0.6, bottom[-1] + values[-1] / 2),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=SMALL,
        )
        bottom += values
    axes.set_xticks(range(len(rows)), [str(row["block_size"]) for row in rows])
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set_xlabel("block size (tokens, anchor included)")
    axes.set_ylabel("time per block (ms)")
    axes.set_title(f"What a block costs, {window_label(draft_window)}")
    add_caption(fig, ["Stages are waited for one by one, so they may add up to more than a block"])
    fig.alt = in_words(
        f"Milliseconds per block by stage, {window_label(draft_window)}",
        *(
            f"block size {row['block_size']}: "
            + ", ".join(f"{title} {1000 * _part(row, name):.1f}" for name, title, *_ in PARTS)
            for row in rows
        ),
    )
    return fig


def _part(row: Mapping[str, float], name: str) -> float:
    extra = row.get("commit_s", 0.0) if name == "other_s" else 0.0
    return row[name] + extra


@styled
def conditional(frame: pd.DataFrame, block_size: int | None = None) -> Picture:
    """Share of blocks accepted at each draft position among those accepted up to there.

    `frame` as from `survival_frame`; one block size (the largest), the largest window. Numbers on
    the bars say how many blocks a share stands for.
    """
    fig = new_figure()
    check_one_kind(frame, "hardware", "backend", "dtype")
    rows = [row for row in rows_of(frame) if row["engine"] == OWN]
    if not rows:
        return empty_figure(fig, "Conditional acceptance")
    size = max(row["block_size"] for row in rows) if block_size is None else block_size
    rows = [row for row in rows if row["block_size"] == size]
    window = max((row["draft_window"] for row in rows), key=lambda w: w or float("inf"))
    rows = [row for row in rows if row["draft_window"] == window and row["conditional_at_risk"]]
    axes = add_axes(fig, right=0.25)
    for row in rows:
        few = row["conditional_at_risk"] < 20
        looks = {"hatch": "////", "facecolor": "white"} if few else {"facecolor": LOOKS[0]["color"]}
        axes.bar(
            row["draft_position"], row["conditional"], 0.8, edgecolor=LOOKS[0]["color"], **looks
        )
        axes.annotate(
            str(row["conditional_at_risk"]) if has_room(axes, len(rows), 3) else "",
            xy=(row["draft_position"], row["conditional"]),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
            fontsize=TINY,
            color=QUIET,
        )
    places = [row["draft_position"] for row in rows]
    axes.set_xlim(0.4, max(places) + 0.6)
    axes.set_ylim(0, 1.12)
    ticks_at(axes, places)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0, symbol=" %"))
    axes.set_xlabel("draft position in the block")
    axes.set_ylabel("accepted, of those at risk")
    axes.set_title(f"Conditional acceptance, block size {size}, {window_label(window)}")
    notes = ["Numbers: blocks accepted up to there", "Blocks that were cut are left out"]
    if any(row["conditional_at_risk"] < 20 for row in rows):
        notes.append("Hatched: fewer than 20 blocks")
    add_caption(fig, notes)
    fig.alt = in_words(
        f"Conditional acceptance by draft position at block size {size}, {window_label(window)}",
        ", ".join(f"{row['draft_position']}: {percent(row['conditional'])}" for row in rows),
    )
    return fig


@styled
def timeline(frame: pd.DataFrame, name: str = "") -> Picture:
    """One decoded prompt in time: a field a block, as high as the tokens it brought.

    `frame` as from `timeline_frame`. Where stages were timed, drafting is the darker part.
    """
    fig = new_figure()
    if frame.empty:
        return empty_figure(fig, "Timeline", "the prompt ended with its first token")
    rows = frame.to_dict("records")
    axes = add_axes(fig, right=0.25)
    staged = not frame["draft_s"].isna().any()
    for place, row in enumerate(rows):
        looks = {"edgecolor": "white", "linewidth": 0.6, "align": "edge"}
        width = row["end_s"] - row["begin_s"]
        shade = LOOKS[0]["color"] if place % 2 else "#5b9bc9"
        axes.bar(row["begin_s"], row["emitted"], width, facecolor=shade, **looks)
        if staged:
            axes.bar(row["begin_s"], row["emitted"], row["draft_s"], facecolor=INK, **looks)
    first, end = rows[0]["begin_s"], rows[-1]["end_s"]
    axes.axvspan(0, first, facecolor="#e6e6e6", edgecolor="none")
    axes.set_xlim(0, end)
    axes.set_ylim(0, 1.1 * max(row["emitted"] for row in rows))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("time since the request (s)")
    axes.set_ylabel("tokens of the block")
    tokens = rows[-1]["tokens"]
    axes.set_title(f"{shown(name, 40) + ': ' if name else ''}{tokens} tokens in {len(rows)} blocks")
    add_caption(
        fig,
        [
            "A field a block: as wide as its time, as high as its tokens",
            "Grey: the prefill",
            "Black: drafting" if staged else "Stages were not timed",
        ],
    )
    fig.alt = in_words(
        f"{tokens} tokens in {len(rows)} blocks and {end:.2f} seconds, the first after {first:.2f}",
        "Tokens of the blocks in turn: " + ", ".join(str(row["emitted"]) for row in rows),
    )
    return fig


@styled
def race(
    frames: Mapping[str, pd.DataFrame], title: str = "The same prompt, decoded in several ways"
) -> Picture:
    """Tokens against time of one prompt decoded in several ways, or in several runs, a line each.

    `frames` are as from `timeline_frame`, by the name of the way.
    """
    fig = new_figure()
    running = {name: frame for name, frame in frames.items() if not frame.empty}
    if not running:
        return empty_figure(fig, "Race", "every way ended with its first token")
    axes = add_axes(fig, right=0.3)
    told = []
    for (name, frame), look in zip(running.items(), _many(LOOKS), strict=False):
        xs = [frame["begin_s"].iloc[0], *frame["end_s"]]
        ys = [1, *frame["tokens"]]
        line = {key: look[key] for key in ("color", "linestyle")}
        axes.step(xs, ys, where="post", label=shown(name, 40), **line)
        axes.plot(xs[-1], ys[-1], look["marker"], color=look["color"])
        told.append(f"{name}: {ys[-1]} tokens after {xs[-1]:.2f} seconds")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("time since the request (s)")
    axes.set_ylabel("tokens of the output")
    axes.set_title(shown(title, 70))
    axes.legend(fontsize=SMALL, frameon=False, loc="upper left")
    add_caption(fig, ["A step a block, as high as the tokens that it brought"])
    fig.alt = in_words("Tokens of the output against time", *told)
    return fig


def _many(looks: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    return [*looks, *looks, *looks]
