"""Figures of replays: what a clipped trace claims beside the truth, and policies."""

from __future__ import annotations

import textwrap

import pandas as pd

from dflash_lab.plot.style import (
    INK,
    LOOKS,
    OWN_DASH,
    QUIET,
    TINY,
    Picture,
    add_axes,
    add_caption,
    empty_figure,
    in_words,
    is_narrow,
    make_tall,
    new_figure,
    number,
    over_prompts,
    percent,
    rows_of,
    shown,
    styled,
    ticks_at,
    window_label,
)


@styled
def clipped(frame: pd.DataFrame, draft_window: int | None = None) -> Picture:
    """Tau by block size as a clipped longer trace claims it, and as drafting anew gives it.

    `frame` as from `clip_frame`, drawn for one window.
    """
    fig = new_figure()
    rows = [row for row in rows_of(frame) if row["draft_window"] == draft_window]
    if not rows:
        return empty_figure(fig, "Clipped or drafted anew", "no block size lies between")
    axes = add_axes(fig, right=0.3)
    largest = rows[0]["from_block_size"]
    names = {"estimate": f"claimed by blocks of {largest}, clipped", "re-draft": "drafted anew"}
    told = []
    for (kind, name), look in zip(names.items(), (LOOKS[1], LOOKS[0]), strict=True):
        mine = sorted((r for r in rows if r["kind"] == kind), key=lambda row: row["block_size"])
        xs, ys = ([row[key] for row in mine] for key in ("block_size", "tau"))
        axes.plot(xs, ys, label=name, **look)
        values = [f"{number(y, '.2f')} at {x}" for x, y in zip(xs, ys, strict=True)]
        told.append(f"{name}: {', '.join(values)}")
    sizes = sorted({row["block_size"] for row in rows})
    ticks_at(axes, sizes)
    axes.set_ylim(bottom=1)
    axes.set_xlabel("block size (tokens, anchor included)")
    axes.set_ylabel("tau (tokens per block)")
    axes.set_title(
        f"A shorter block is not the beginning of a longer one, {window_label(draft_window)}"
    )
    axes.legend(fontsize=TINY, frameon=False, loc="best")
    wrong = [row["wrong_share"] for row in rows if not pd.isna(row["wrong_share"])]
    worst = f"Accepted counts differ in up to {percent(max(wrong))} of the blocks" if wrong else ""
    add_caption(fig, [worst])
    fig.alt = in_words("Tau by block size", *told)
    return fig


@styled
def policies(frame: pd.DataFrame) -> Picture:
    """Throughput of ways to size blocks, a line each: fixed sizes, policies and upper bounds.

    `frame` as from `policy_frame`: policy, prompts, tokens_per_s with ends, and `bound`, the reason
    why a way can only be an upper bound, missing else. Rows that name no cell are predictions.
    """
    fig = new_figure()
    if frame.empty:
        return empty_figure(fig, "Policies", "no policy was measured or replayed")
    rows = frame.to_dict("records")[::-1]
    lines = [textwrap.wrap(shown(row["policy"], 34), 18 if is_narrow(fig) else 34) for row in rows]
    make_tall(fig, 1.2 + (0.28 if max(map(len, lines)) > 1 else 0.22) * len(rows))
    axes = add_axes(
        fig, left=0.25 + 0.068 * max(len(line) for name in lines for line in name), right=0.6
    )
    for place, row in enumerate(rows):
        bound = not pd.isna(row["bound"])
        colour = (
            QUIET if bound else INK if row["policy"].startswith("block size") else LOOKS[1]["color"]
        )
        ends = [row["tokens_per_s_low"], row["tokens_per_s_high"]]
        axes.plot(ends, [place, place], color=colour, linewidth=1.2)
        axes.plot(
            row["tokens_per_s"],
            place,
            "D" if bound else "o",
            color=colour,
            mfc="white" if bound else colour,
        )
        axes.annotate(
            number(row["tokens_per_s"], ".1f"),
            xy=(1, place),
            xycoords=axes.get_yaxis_transform(),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=TINY,
            color=QUIET,
        )
    fixed = [row["tokens_per_s"] for row in rows if row["policy"].startswith("block size")]
    if fixed:
        axes.axvline(max(fixed), color=QUIET, linewidth=1, linestyle=OWN_DASH, zorder=0.5)
    axes.set_yticks(range(len(rows)), ["\n".join(name) for name in lines])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")
    predicted = "cell" not in frame
    axes.set_xlabel(f"{'predicted' if predicted else 'decode'} throughput (tokens/s)")
    axes.set_title("Policies beside fixed block sizes")
    add_caption(
        fig,
        [
            "Predicted: texts replayed, blocks at their measured costs" if predicted else "",
            over_prompts(frame["prompts"]),
            "Dashed: the fastest fixed size" if fixed else "",
            "Hollow: chosen after the fact, an upper bound" if frame["bound"].notna().any() else "",
        ],
    )
    fig.alt = in_words(
        f"{'Predicted' if predicted else 'Decode'} throughput in tokens per second by the way "
        "blocks are sized",
        ", ".join(f"{row['policy']}: {number(row['tokens_per_s'], '.1f')}" for row in rows[::-1]),
    )
    return fig
