"""What two sliders can show of a stored run, the same in a notebook and in a report.

`Panels` picks and words what `analyse` counted and `plot` drew; nothing is computed here.
"""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pandas as pd

from dflash_lab import plot
from dflash_lab.analyse import (
    OWN,
    Choice,
    cell_frame,
    choose,
    comparable,
    depth_frame,
    hardware_classes,
    length_frame,
    records,
    stage_frame,
    survival_frame,
    task_frame,
)
from dflash_lab.costs import CostTable
from dflash_lab.forecast import forecast
from dflash_lab.kinds import OfPrompts, alike, like, some_prompts
from dflash_lab.plot.explored import marked_grid
from dflash_lab.store import Cell, Run
from dflash_lab.tokens import Traces

Place = tuple[int, int | None]  # a block size and a draft window
FIRST = ("throughput", "survival")  # the figures that are always shown


# The grid of measured cells


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What is shown for a position of the sliders."""

    cell: str
    block_size: int
    draft_window: int | None
    words: str  # which cell that is, and why, where the position itself is a hole
    measured: bool  # the position itself, or one that is the same thing


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Cells that differ in block size and draft window alone; it may have holes."""

    cells: Mapping[Place, str]
    failed: Mapping[Place, str]  # the error of each

    @property
    def block_sizes(self) -> tuple[int, ...]:
        return tuple(sorted({size for size, _ in self.cells}))

    @property
    def draft_windows(self) -> tuple[int | None, ...]:
        """From the smallest to none at all."""
        return tuple(sorted({window for _, window in self.cells}, key=window_order))

    def place_of(self, cell: str) -> Place:
        return next(place for place, name in self.cells.items() if name == cell)

    def find(self, block_size: int, draft_window: int | None) -> Found:
        """The cell of a position; the nearest measured one, and says so, where it is a hole."""
        asked = (block_size, draft_window)
        if asked in self.cells:
            return self._found(asked, f"Shown: {place_name(*asked)}.")
        if block_size == 1 and (1, None) in self.cells:
            words = "Shown: block size 1. It drafts nothing, so the window plays no part."
            return self._found((1, None), words)
        near = min(self.cells, key=lambda place: _distance(asked, place))
        why = f"failed ({self.failed[asked]})" if asked in self.failed else "not measured"
        words = (
            f"{_capital(place_name(*asked))}: {why}. "
            f"Shown instead is the nearest measured, {place_name(*near)}."
        )
        return self._found(near, words, measured=False)

    def _found(self, place: Place, words: str, measured: bool = True) -> Found:
        return Found(
            cell=self.cells[place],
            block_size=place[0],
            draft_window=place[1],
            words=words,
            measured=measured,
        )


def window_order(window: int | None) -> float:
    return math.inf if window is None else window


def _distance(asked: Place, other: Place) -> tuple[bool, float, int]:
    """The same window comes first, then the block size by ratio, then the smaller one."""
    ratio = abs(math.log(other[0] / asked[0]))
    return (other[1] != asked[1], ratio, other[0])


def place_name(block_size: int, draft_window: int | None) -> str:
    if block_size == 1:
        return "block size 1, plain decoding"
    return (
        f"block size {block_size} with the full window"
        if draft_window is None
        else (f"block size {block_size} with window {draft_window}")
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def make_grid(run: Run, like: Cell) -> Grid:
    """The cells of a run that ask for the same as `like` but for block size and window."""
    return Grid(
        cells={_place(cell.request): cell.id for cell in run.cells if alike(cell, like)},
        failed={_place(cell.request): cell.error for cell in run.failed if alike(cell, like)},
    )


def _place(request: Mapping[str, Any]) -> Place:
    return (request["block_size"], request["draft_window"])


# Figures of a cell, in words


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One figure of a cell: its name, how it is written, and the value in full."""

    name: str
    text: str
    value: float | int | str | None


def written(value: float | None, digits: int = 3) -> str:
    """A number with so many significant digits and no exponent; "n/a" where there is none."""
    if value is None:
        return "n/a"
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def with_interval(row: Mapping[str, Any], name: str, scale: float = 1.0) -> str:
    """A figure and its interval; just the figure where one prompt gives no interval."""
    if row[name] is None:
        return "n/a"
    text = written(row[name] * scale)
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    if low is None or high is None:
        return f"{text} (no interval)"
    return f"{text} [{written(low * scale)}, {written(high * scale)}]"


def facts(row: Mapping[str, Any]) -> tuple[Fact, ...]:
    """The figures of one row of `cell_frame` that stand beside the pictures."""
    rate, block_s = row["draft_rate"], row["seconds_per_block"]
    loops = f", {row['looped']} of them repeating themselves" if row["looped"] else ""
    texts = {
        "tokens/s": (with_interval(row, "tokens_per_s"), row["tokens_per_s"]),
        "tau": (with_interval(row, "tau"), row["tau"]),
        "draft rate": ("n/a" if rate is None else f"{written(rate * 100)} %", rate),
        "tokens per block": (written(row["tokens_per_block"]), row["tokens_per_block"]),
        "time per block": (
            "n/a" if block_s is None else f"{written(block_s * 1000)} ms",
            block_s,
        ),
        "prompts": (f"{row['prompts']}{loops}", row["prompts"]),
        "cell": (row["cell"], row["cell"]),
    }
    return tuple(Fact(name=name, text=text, value=value) for name, (text, value) in texts.items())


def facts_html(shown: Iterable[Fact]) -> str:
    rows = (
        f"<div><dt>{html.escape(fact.name)}</dt><dd>"
        f'<data value="{html.escape("" if fact.value is None else str(fact.value))}">'
        f"{html.escape(fact.text)}</data></dd></div>"
        for fact in shown
    )
    return f'<dl class="facts">{"".join(rows)}</dl>'


# Pictures


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A figure that stands in a page by itself."""

    svg: str
    alt: str
    width: int  # in pixels, as the height: room is kept before it is there
    height: int

    @property
    def source(self) -> str:
        code = base64.b64encode(self.svg.encode()).decode()
        return f"data:image/svg+xml;base64,{code}"

    @property
    def html(self) -> str:
        size = f'width="{self.width}" height="{self.height}"'
        return f'<img src="{self.source}" alt="{html.escape(self.alt)}" {size} decoding="sync">'


def to_image(figure: Any, salt: str) -> Image:
    """A figure as an image that needs no file; `salt` keeps its ids its own."""
    width, height = (round(inches * 96) for inches in figure.get_size_inches())
    return Image(
        svg=plot.to_svg(figure, salt), alt=plot.alt_text(figure), width=width, height=height
    )


# All of it together


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a run recommends for one hardware class, or why it recommends nothing."""

    hardware: str
    choice: Choice | None
    problem: str


def answer(run: Run, hardware: str) -> Answer:
    try:
        choice = choose(comparable(run.select(hardware=hardware)))
    except ValueError as error:
        return Answer(hardware=hardware, choice=None, problem=str(error))
    return Answer(hardware=hardware, choice=choice, problem="")


class Panels:
    """One run, looked at through two sliders; of one arm, and of some prompts, if named.

    They move over the cells like the recommended one, on the hardware class with most cells; where
    nothing is recommended, over the largest grid of our own loop. `grid` is None where there is
    none. Of cells that do not compare, such as those over other prompts, the largest part is shown
    and `left_out` counts the rest. `task` and `length`, a name of `kinds.band`, choose the prompts;
    a cost table adds what it predicts. Raises ValueError for a run without a finished cell,
    `NoPrompts` where none is left.
    """

    def __init__(
        self,
        run: Run,
        arm: Cell | None = None,
        task: str | None = None,
        length: str | None = None,
        costs: CostTable | None = None,
    ):
        if not run.cells:
            raise ValueError(
                f"the run in {run.path} has no finished cell ({len(run.failed)} failed). "
                "Run its sweep again."
            )
        self.run = run = run if arm is None else like(run, arm)
        self.arm, self.task, self.length, self.costs = arm, task, length, costs
        whole = task is None and length is None
        self.prompts = None if whole else some_prompts(run, task, length)  # ids; None for all
        classes = hardware_classes(run)
        self.answers = tuple(answer(run, hardware) for hardware in classes)
        self.main = max(self.answers, key=self._weight)
        self.choice = self.main.choice
        parts = {name: comparable(run.select(hardware=name)) for name in classes}
        self.left_out = len(run.cells) - sum(len(part.cells) for part in parts.values())
        seen = {name: self._seen(part) for name, part in parts.items()}
        frames = {name: cell_frame(part) for name, part in seen.items()}
        self.frame = frames[self.main.hardware]
        self.rows = {row["cell"]: row for frame in frames.values() for row in records(frame)}
        here = parts[self.main.hardware]
        self.survival = survival_frame(seen[self.main.hardware])
        self.grid = self._grid(here)
        cells = set() if self.grid is None else set(self.grid.cells.values())
        kept = tuple(cell for cell in here.cells if cell.id in cells)
        self.gridded = self._seen(replace(here, cells=kept))  # the cells of the grid
        self.traces = Traces(self.gridded, cells)
        self._drawn: dict[tuple[str, str], Image] = {}

    def _seen(self, run: Run) -> Run:
        if self.prompts is None:
            return run
        return OfPrompts(path=run.path, cells=run.cells, failed=run.failed, ids=self.prompts)

    def _weight(self, found: Answer) -> tuple[bool, int]:
        cells = sum(cell.hardware == found.hardware for cell in self.run.cells)
        return (found.choice is not None, cells)

    def _grid(self, here: Run) -> Grid | None:
        own = [cell for cell in here.cells if cell.engine == OWN]
        if self.arm is not None:
            own = [self.arm]
        elif self.choice is not None:
            own = [here.cell(self.choice.cell)]
        grids = [make_grid(here, cell) for cell in own]
        return max(grids, key=lambda grid: len(grid.cells), default=None)

    @property
    def start(self) -> Found:
        """Where the sliders stand at first: the recommended cell, if the grid has it."""
        assert self.grid is not None
        if self.choice is None or self.choice.cell not in self.grid.cells.values():
            return self.grid.find(self.grid.block_sizes[0], self.grid.draft_windows[-1])
        return self.grid.find(self.choice.block_size, self.choice.draft_window)

    @property
    def cells(self) -> pd.DataFrame:
        """The rows of the frame that the sliders move over."""
        return self.frame[self.frame["cell"].isin(self.grid.cells.values())]

    @cached_property
    def lengths(self) -> pd.DataFrame:
        return length_frame(self.gridded)

    @cached_property
    def predicted(self) -> pd.DataFrame | None:
        """What the cost table predicts for the grid's settings; None without a table."""
        return None if self.costs is None else forecast(self.gridded, self.costs)

    def drawn(self, cell: str, names: Sequence[str] = FIRST) -> bool:
        return all((name, cell) in self._drawn for name in names)

    def pictures(self, cell: str, names: Sequence[str] = FIRST) -> tuple[Image, ...]:
        """Figures with one cell of the grid marked, by their names; each is drawn once."""
        with plot.DRAWING:
            for name in names:
                if (name, cell) not in self._drawn:
                    self._drawn[name, cell] = self._draw(name, cell)
            return tuple(self._drawn[name, cell] for name in names)

    def _draw(self, name: str, cell: str) -> Image:
        assert self.grid is not None
        return to_image(FIGURES[name](self, self.grid.place_of(cell)), name)


# What can be drawn of a run with one place of the grid marked, by name.
FIGURES: dict[str, Callable[[Panels, Place], plot.Picture]] = {
    "throughput": lambda p, at: plot.throughput(
        p.frame, p.choice, highlight=at, predicted=p.predicted
    ),
    "survival": lambda p, at: plot.survival(
        p.survival[p.survival["cell"].isin(p.grid.cells.values())], highlight=at
    ),
    "acceptance": lambda p, at: plot.acceptance(p.cells, highlight=at),
    "lengths": lambda p, at: plot.lengths(p.lengths, highlight=at),
    "cost": lambda p, at: plot.cost(p.cells, highlight=at),
    "stages": lambda p, at: plot.stages(stage_frame(p.gridded), at[1]),
    "heatmap": lambda p, at: marked_grid(p.cells, p.choice, at),
    "memory": lambda p, at: plot.memory(p.cells),
    "tasks": lambda p, at: plot.tasks(task_frame(p.gridded)),
    "depth": lambda p, at: plot.depth(depth_frame(p.gridded)),
}
