"""The figure of an audit: how close the target's choice was, prompt by prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from dflash_lab.plot.style import (
    LOOKS,
    TINY,
    Picture,
    add_axes,
    add_caption,
    empty_figure,
    has_height,
    in_words,
    make_tall,
    new_figure,
    shown,
    styled,
)


@styled
def margins(frame: pd.DataFrame) -> Picture:
    """The target's margin, best logit less second best, of each audited prompt, a colour a dtype.

    `frame` as from `audit_frame`. Full: at the first token that differs from the reference. Hollow:
    the smallest margin over a text that is equal, which says how near it came to a difference. A
    bar marks what rounding may move.
    """
    fig = new_figure()
    if frame.empty:
        return empty_figure(fig, "Audit", "no audit was made")
    rows = frame.to_dict("records")
    prompts = sorted({row["prompt_id"] for row in rows}, reverse=True)
    dtypes = sorted({row["dtype"] for row in rows})
    make_tall(fig, 1.3 + 0.15 * min(len(prompts), 40))
    axes = add_axes(fig, left=1.6, right=0.3)
    looks = dict(zip(dtypes, LOOKS, strict=False))
    for row in rows:
        step = 0.28 * (dtypes.index(row["dtype"]) - (len(dtypes) - 1) / 2)
        _draw_margin(axes, row, prompts.index(row["prompt_id"]) + step, looks[row["dtype"]])
    some = has_height(axes, len(prompts))
    axes.set_yticks(range(len(prompts)) if some else [])
    if some:
        axes.set_yticklabels([shown(name, 16) for name in prompts], fontsize=TINY)
    axes.set_ylim(-0.7, len(prompts) - 0.3)
    axes.set_xlim(left=0)
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("margin of the target's choice (logits)")
    parted = [row for row in rows if row["label"] != "equal"]
    told = f"{len(parted)} of {len(rows)}"
    axes.set_title(f"Audited outputs that part from the reference: {told}")
    marks = ", ".join(f"{_MARKS[looks[dtype]['marker']]} {shown(dtype, 12)}" for dtype in dtypes)
    add_caption(
        fig,
        [
            f"{marks}. Full: at the first difference" if parted else marks,
            "Hollow: smallest margin of an equal output",
            "Bar: what rounding may move" if parted else "",
        ],
    )
    fig.alt = in_words(
        f"Margins in logits of audited outputs, of which {told} part from the reference",
        "; ".join(f"{row['prompt_id']} in {row['dtype']}: {_words(row)}" for row in rows),
    )
    return fig


_MARKS = {"o": "Circle:", "s": "square:", "^": "triangle:", "D": "diamond:"}


def _draw_margin(axes: Any, row: Mapping[str, Any], y: float, look: Mapping[str, Any]) -> None:
    equal = row["label"] == "equal"
    place = _margin(row)
    if not equal and not pd.isna(row["tolerance"]):
        axes.plot([0, row["tolerance"]], [y, y], color=look["color"], linewidth=3, alpha=0.35)
    if not pd.isna(place):
        face = "white" if equal else look["color"]
        axes.plot(place, y, look["marker"], color=look["color"], mfc=face, ms=5)


def _margin(row: Mapping[str, Any]) -> float:
    return row["smallest_margin"] if row["label"] == "equal" else row["margin"]


def _words(row: Mapping[str, Any]) -> str:
    if row["label"] == "equal":
        return f"equal, smallest {row['smallest_margin']:.2g}"
    if pd.isna(row["margin"]):
        return f"{row['label']}, one text ends"
    return f"{row['label']}, {row['margin']:.2g} at token {row['first_difference']}"
