"""Figures of replays: what a clipped trace claims beside the truth, and policies."""

from __future__ import annotations

import pandas as pd

from dflash_lab.plot.style import (
    LOOKS,
    Picture,
    add_axes,
    add_caption,
    empty_figure,
    in_words,
    new_figure,
    rows_of,
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
        told.append(f"{name}: " + ", ".join(f"{y:.2f} at {x}" for x, y in zip(xs, ys, strict=True)))
    sizes = sorted({row["block_size"] for row in rows})
    ticks_at(axes, sizes)
    axes.set_ylim(bottom=1)
    axes.set_xlabel("block size (tokens, anchor included)")
    axes.set_ylabel("tau (tokens per block)")
    axes.set_title(
        f"A shorter block is not the beginning of a longer one, {window_label(draft_window)}"
    )
    axes.legend(frameon=False, loc="lower right")
    wrong = [row["wrong_share"] for row in rows if row["kind"] == "estimate"]
    add_caption(fig, [f"Accepted counts differ in up to {100 * max(wrong):.0f} % of the blocks"])
    fig.alt = in_words("Tau by block size", *told)
    return fig
