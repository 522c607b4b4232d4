"""Figures that only the explorer shows: the grid with two marks, and what another cost would give.

The what-if curve follows a slider, so it is an SVG written at once, not a figure laid out anew.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.patches import Rectangle

from dflash_lab.analyse import OWN, Choice
from dflash_lab.plot.compare import heatmap
from dflash_lab.plot.style import (
    INK,
    LOOKS,
    QUIET,
    Highlight,
    Picture,
    lower_first,
    rows_of,
    setting_name,
    spread,
    styled,
    window_label,
)

WIDTH, HEIGHT = 640, 340  # pixels
LEFT, RIGHT, TOP, BOTTOM = 62, 110, 34, 74  # margins
NOTE = "Faint: with the costs as they are. Ring: the fastest with those chosen above."

_Label = tuple[float, str]  # pixels from the top, and words


@styled
def marked_grid(cells: pd.DataFrame, chosen: Choice | None, highlight: Highlight) -> Picture:
    """`heatmap` with the setting that is looked at in a dashed frame, inside the choice's own."""
    fig = heatmap(cells, chosen)
    drafting = rows_of(cells[(cells["engine"] == OWN) & (cells["block_size"] > 1)])
    sizes = sorted({row["block_size"] for row in drafting})
    windows = sorted({row["draft_window"] for row in drafting}, key=lambda w: (w is None, w or 0))
    words = f"Looked at: {lower_first(setting_name(highlight))}"
    if highlight[0] in sizes and highlight[1] in windows:
        at = sizes.index(highlight[0]) - 0.42, windows.index(highlight[1]) - 0.42
        for colour, width, dash in (("white", 3.5, "-"), (INK, 1.5, (0, (4, 2)))):
            look = {"fill": False, "edgecolor": colour, "linewidth": width, "linestyle": dash}
            fig.axes[0].add_patch(Rectangle(at, 0.84, 0.84, **look))
        words += ", dashed frame"
    fig.alt = f"{words}. {fig.alt}"
    return fig


def what_if(frame: pd.DataFrame, words: str) -> tuple[str, str]:
    """An SVG of throughput against block size as it is (faint) and with scaled costs, and its alt.

    `frame` as from `scaled_frame`; `words` say which scale. A ring marks the fastest setting
    with them.
    """
    rows = rows_of(frame)
    scale = _Scale(rows)
    windows = sorted(
        {row["draft_window"] for row in rows}, key=lambda w: (w is not None, -(w or 0))
    )
    parts = [_plain(scale, rows)]
    for place, window in enumerate(windows):
        line = [row for row in rows if row["draft_window"] == window and row["block_size"] > 1]
        if line:
            parts.append(_curve(scale, line, place))
    drawn = [_axes(scale), *(svg for svg, _ in parts)]
    drawn += [_beside([label for _, labels in parts for label in labels])]
    drawn += [_ring(scale, row) for row in rows if row["best"]]
    alt = _alt(rows, words)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" role="img" aria-label="{html.escape(alt)}" font-family="DejaVu Sans, '
        f'sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="{LEFT}" y="20" font-size="13">{html.escape(_title(rows))}</text>'
        f'<text x="10" y="{HEIGHT - 8}" font-size="10" fill="{QUIET}">{NOTE}</text>'
        f"{''.join(drawn)}</svg>"
    ), alt


class _Scale:
    """From block size and tokens a second to pixels."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]):
        self.sizes = sorted({row["block_size"] for row in rows})
        values = [row[name] for row in rows for name in ("tokens_per_s", "now_per_s")]
        self.step = _round_step(max((v for v in values if math.isfinite(v)), default=1.0) / 5)
        self.top = self.step * max(
            math.ceil(v / self.step) for v in (*values, self.step) if math.isfinite(v)
        )

    def x(self, size: float) -> float:
        low, high = self.sizes[0], max(self.sizes[-1], self.sizes[0] + 1)
        return round(LEFT + (WIDTH - LEFT - RIGHT) * (0.03 + 0.94 * (size - low) / (high - low)), 1)

    def y(self, value: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / self.top, 1)


def _round_step(value: float) -> float:
    """The next larger of 1, 2 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= value)


def _axes(scale: _Scale) -> str:
    right, floor = WIDTH - RIGHT, HEIGHT - BOTTOM
    ticks = [scale.step * n for n in range(round(scale.top / scale.step) + 1)]
    lines = "".join(
        f'<path d="M{LEFT} {scale.y(tick)}H{right}" stroke="#e4e4e4"/>'
        f'<text x="{LEFT - 7}" y="{scale.y(tick) + 4}" text-anchor="end">{tick:g}</text>'
        for tick in ticks
    )
    names, last = "", -math.inf
    for size in scale.sizes:
        if scale.x(size) - last >= 18:
            last = scale.x(size)
            names += f'<text x="{last}" y="{floor + 16}" text-anchor="middle">{size}</text>'
    middle = (LEFT + right) / 2
    return (
        f'{lines}{names}<path d="M{LEFT} {floor}H{right}" stroke="{INK}"/>'
        f'<text x="{middle}" y="{floor + 38}" text-anchor="middle">block size (tokens, anchor '
        f'included)</text><text transform="translate(14 {HEIGHT / 2}) rotate(-90)" '
        f'text-anchor="middle">predicted tokens/s</text>'
    )


def _plain(scale: _Scale, rows: Sequence[Mapping[str, Any]]) -> tuple[str, list[_Label]]:
    """Plain decoding with the scale, as a line across."""
    drawn, labels = "", []
    for row in rows:
        value = row["tokens_per_s"]
        if row["block_size"] == 1 and math.isfinite(value):
            across = f"M{LEFT} {scale.y(value)}H{WIDTH - RIGHT}"
            drawn += f'<path d="{across}" stroke="{QUIET}" stroke-dasharray="6 3"/>'
            labels.append((scale.y(value), f"plain: {value:.1f}"))
    return drawn, labels


def _curve(
    scale: _Scale, rows: Sequence[Mapping[str, Any]], place: int
) -> tuple[str, list[_Label]]:
    """One window: as it is, faint and without marks, and with the scale."""
    colour, dash = LOOKS[place % len(LOOKS)]["color"], _DASHES[place % len(_DASHES)]
    now, then = (_points(scale, rows, name) for name in ("now_per_s", "tokens_per_s"))
    look = f'fill="none" stroke="{colour}" stroke-width="1.8"'
    drawn = f'<polyline points="{_path(now)}" {look} opacity="0.35" stroke-dasharray="2 3"/>'
    drawn += f'<polyline points="{_path(then)}" {look} stroke-dasharray="{dash}"/>'
    drawn += "".join(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in then)
    return drawn, [(y, window_label(rows[-1]["draft_window"])) for _, y in then[-1:]]


def _points(
    scale: _Scale, rows: Sequence[Mapping[str, Any]], name: str
) -> list[tuple[float, float]]:
    return [(scale.x(r["block_size"]), scale.y(r[name])) for r in rows if math.isfinite(r[name])]


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x},{y}" for x, y in points)


def _beside(labels: Sequence[_Label]) -> str:
    """Words in the margin, moved apart where they would touch."""
    if not labels:
        return ""
    places = spread([1 - y / HEIGHT for y, _ in labels], 14 / HEIGHT)
    return "".join(
        f'<text x="{WIDTH - RIGHT + 10}" y="{HEIGHT * (1 - place) + 4:.1f}">{text}</text>'
        for place, (_, text) in zip(places, labels, strict=True)
    )


_DASHES = ("none", "7 3", "5 2 1 2", "2 2")


def _ring(scale: _Scale, row: Mapping[str, Any]) -> str:
    x, y = scale.x(row["block_size"]), scale.y(row["tokens_per_s"])
    return f'<circle cx="{x}" cy="{y}" r="8" fill="none" stroke="{INK}" stroke-width="1.6"/>'


def _title(rows: Sequence[Mapping[str, Any]]) -> str:
    marked = [row for name in ("best_now", "best") for row in rows if row[name]]
    if len(marked) < 2:
        return "Nothing can be predicted"
    now, best = marked
    named = [setting_name((row["block_size"], row["draft_window"])) for row in (best, now)]
    if named[0] == named[1]:
        return f"The fastest stays {lower_first(named[0])}"
    return f"The fastest moves from {lower_first(named[1])} to {lower_first(named[0])}"


def _alt(rows: Sequence[Mapping[str, Any]], words: str) -> str:
    told = ", ".join(
        f"{row['tokens_per_s']:.1f} (now {row['now_per_s']:.1f}) at block size "
        f"{row['block_size']}, {window_label(row['draft_window'])}"
        for row in rows
    )
    return f"{_title(rows)}. {words}. Predicted tokens per second: {told}."
