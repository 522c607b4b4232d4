"""Sliders over a stored run, in a notebook: they choose, and what they choose was made elsewhere.

JupyterLab may run a callback beside a cell, on another thread. So nothing here touches pyplot, one
lock is held while the view is made, and the view is one trait, assigned once.
"""

from __future__ import annotations

import asyncio
import html
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import RLock, Timer
from typing import Any

from dflash_lab.config import window_name
from dflash_lab.costs import CostTable, costs_beside
from dflash_lab.kinds import (
    Kind,
    NoPrompts,
    kinds,
    lengths,
    nearest,
    prompts_said,
    tasks,
    values,
)
from dflash_lab.panels import (
    FIRST,
    Found,
    Panels,
    facts,
    facts_html,
    place_name,
    window_order,
)
from dflash_lab.scaling import WhatIf
from dflash_lab.store import Run, open_run
from dflash_lab.tokens import ShownTrace, trace_html
from dflash_lab.viewer import NOTHING, bundle_of, trace_widget, view
from dflash_lab.widget_parts import import_widgets, problem_html, wide

AHEAD_S = 4.0  # outside a notebook pictures are drawn ahead for so long
ALL = "all prompts"
FULL = "full"  # of the window slider, whose value cannot be None
FURTHER = {
    "acceptance rate and tau": "acceptance",
    "accepted drafts per block": "lengths",
    "time of a block": "cost",
    "time of a block by stages": "stages",
    "block size and window as a grid": "heatmap",
    "memory": "memory",
    "task by task": "tasks",
    "along the context": "depth",
}  # figures of `panels` that are shown one at a time
UNPRICED = (
    "The cost table is of other sizes, another dtype, machine or pair: it predicts nothing here."
)
LACKING = "This cell does not hold this prompt."
IDLE_S = 0.05  # in a notebook they are drawn with such pauses
QUIET_S = 0.1  # a picture that has to be drawn waits for so long a pause between changes
STYLE = """<style>
.dl-view { max-width: 1300px; line-height: 1.45; }
.dl-view .pictures { display: flex; flex-wrap: wrap; gap: 1em; margin: 0.6em 0; }
.dl-view img { flex: 1 1 460px; min-width: 0; max-width: 640px; height: auto; background: #fff; }
.dl-view .facts { display: flex; flex-wrap: wrap; gap: 0.4em 2em; margin: 0.4em 0; }
.dl-view .facts dt { float: none; width: auto; font-weight: normal; opacity: 0.8; }
.dl-view .facts dd { margin: 0; white-space: nowrap; font-variant-numeric: tabular-nums; }
.dl-view p { margin: 0.3em 0; }
</style>"""


def explore(run: Run | str | Path, *, costs: CostTable | None = None) -> Explorer:
    """The panel of a run: block size and draft window on sliders, and one prompt's text.

    With a cost table, given or stored beside the run, the throughput that it predicts is drawn too.
    With one, or where the run was timed by stages, costs can be scaled to see where the fastest
    setting would move. Raises ImportError naming the way out where ipywidgets is not
    installed, ValueError for a run in which no cell of our own loop is finished.
    """
    widgets = import_widgets(
        "the explorer",
        "dl.report(run) writes the same sliders into a page that needs no kernel.",
    )
    run = run if isinstance(run, Run) else open_run(run)
    return Explorer(run, widgets, costs or costs_beside(run.path))


class LatestOnly:
    """Runs the newest of the jobs given in quick succession; the ones in between are dropped.

    A job after a pause runs at once, one that follows another closely after `quiet` seconds
    without a newer one.
    """

    def __init__(self, quiet: float, timer: type[Timer] = Timer):
        self.quiet, self._make_timer = quiet, timer
        self._lock = RLock()
        self._last = -quiet
        self._timer: Timer | None = None

    def submit(self, job: Callable[[], None]) -> None:
        with self._lock:
            self.cancel()
            if time.monotonic() - self._last >= self.quiet:
                self._run(job)
            else:
                self._timer = self._make_timer(self.quiet, self._run, [job])
                self._timer.daemon = True
                self._timer.start()

    def cancel(self) -> None:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None

    def _run(self, job: Callable[[], None]) -> None:
        with self._lock:
            job()
            self._last = time.monotonic()


class Explorer:
    """The panel: `block_size`, `draft_window`, `prompt` and `figure` choose, `view` shows.

    `kind`, a picker by property, `task` and `length` choose among what the run holds, `costs` what
    another machine might cost.
    """

    def __init__(self, run: Run, widgets: Any, table: CostTable | None = None):
        self.run, self.table = run, table
        self._kinds = kinds(run)
        self._kind: Kind | None = None
        self._made: dict[tuple[str | None, ...], Panels] = {}
        self._trace: ShownTrace | None = None
        self._lock, self._moving, self._note = RLock(), False, ""
        self._jobs = LatestOnly(QUIET_S)
        self._make_pickers(widgets)
        self._begin_at_the_choice()
        self.panels = self._panels()
        if self.panels.grid is None:
            raise ValueError(f"no cell of {run.path} was decoded by our own loop: nothing to show.")
        self._make_controls(widgets)
        self.problem, self.view = widgets.HTML(), widgets.HTML()
        self.viewer = trace_widget()
        self.costs = WhatIf(widgets, self._complain)
        self._offer()
        self._show()
        self._observe()
        pickers = [picker for picker in self.pickers if len(picker.options) > 1]
        sliders = [self.block_size, self.draft_window, self.figure]
        shown = [self.problem, self.view, self.costs.widget, self.prompt, self.viewer]
        self.widget = widgets.VBox([*pickers, *sliders, *shown])
        self._draw_ahead()

    def _make_pickers(self, widgets: Any) -> None:
        def picker(name: str, options: list[str]) -> Any:
            return widgets.Dropdown(options=options, description=name, **wide(widgets))

        names = self._kinds[0].told if self._kinds else ()
        self.kind = {name: picker(name, values(self._kinds, name)) for name in names}
        named, bands = tasks(self.run), lengths(self.run)
        self.task = picker("task", [ALL, *named] if len(named) > 1 else [ALL])
        self.length = picker("context length", [ALL, *bands] if len(bands) > 1 else [ALL])

    @property
    def pickers(self) -> tuple[Any, ...]:
        """What chooses among cells and prompts, beside the sliders."""
        return (*self.kind.values(), self.task, self.length)

    def _begin_at_the_choice(self) -> None:
        """Take the kind of cells among which the run's own recommendation lies."""
        panels = Panels(self.run, costs=self.table)
        ids = set() if panels.grid is None else set(panels.grid.cells.values())
        kind = next((kind for kind in self._kinds if kind.cell.id in ids), None)
        if kind is not None:
            self._take(kind)
        self._made[kind and kind.cell.id, None, None] = panels

    def _take(self, kind: Kind) -> None:
        self._kind = kind
        for name, picker in self.kind.items():
            picker.value = kind.told[name]

    def _make_controls(self, widgets: Any) -> None:
        room = wide(widgets)
        self.block_size = widgets.SelectionSlider(
            options=[("1", 1)], description="block size", **room
        )
        self.draft_window = widgets.SelectionSlider(
            options=[(FULL, FULL)], description="sliding-window size (draft)", **room
        )
        self.prompt = widgets.Dropdown(description="prompt", **room)
        self.figure = widgets.Dropdown(options=list(FURTHER.items()), description="beside", **room)

    def _offer(self) -> None:
        """Let the controls offer what the panels hold, at the values that they had if they can."""
        grid, start = self.panels.grid, self.panels.start
        windows = [(window_name(window), window or FULL) for window in grid.draft_windows]
        offers = (
            (self.block_size, [(str(n), n) for n in grid.block_sizes], start.block_size),
            (self.draft_window, windows, start.draft_window or FULL),
            (self.prompt, [(p.label, p.key) for p in self.panels.traces.prompts], None),
        )
        for control, options, value in offers:
            values = [value for _, value in options]
            kept = control.value if self._moving and control.value in values else value
            control.options = options
            control.value = kept if kept in values else next(iter(values), None)
        self.draft_window.disabled = len(windows) == 1
        self.costs.look_at(Run(path=self.run.path, cells=self.panels.gridded.cells), self.table)

    def _observe(self) -> None:
        for control in (self.block_size, self.draft_window, self.prompt, self.figure):
            control.observe(self._changed, names="value")
        for picker in self.pickers:
            picker.observe(self._picked, names="value")
        for picker in (*self.pickers, self.figure):
            picker.observe(lambda change: self._draw_when_idle(), names="value")

    def _panels(self) -> Panels:
        """What the pickers point at; read once."""
        chosen = [None if p.value == ALL else p.value for p in (self.task, self.length)]
        key = (self._kind and self._kind.cell.id, *chosen)
        if key not in self._made:
            cell = None if self._kind is None else self._kind.cell
            self._made[key] = Panels(self.run, cell, *chosen, costs=self.table)
        return self._made[key]

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """The widget for a live notebook, and its twin in HTML for every other reader."""
        bundle = bundle_of(self.widget._repr_mimebundle_())
        return {**bundle, "text/html": self.html, "text/plain": repr(self)}

    @property
    def found(self) -> Found:
        """The cell that the sliders point at, the nearest one where they point at a hole."""
        window = self.draft_window.value
        return self.panels.grid.find(self.block_size.value, None if window == FULL else window)

    @property
    def html(self) -> str:
        """What the panel shows, without its controls."""
        text = f"<p>{LACKING}</p>" if self._trace is None else trace_html(self._trace)
        return f"{self.view.value}{self.costs.picture.value}{text}"

    def __repr__(self) -> str:
        grid = self.panels.grid
        return (
            f"Explorer of {self.panels.run.path.name}: {len(grid.cells)} cells, block sizes "
            f"{', '.join(map(str, grid.block_sizes))}, windows "
            f"{', '.join(map(window_name, grid.draft_windows))}; shows "
            f"{place_name(self.found.block_size, self.found.draft_window)}"
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The figures that are shown."""
        return (*FIRST, self.figure.value)

    def _picked(self, change: Any) -> None:
        """Other cells or prompts: the controls offer theirs, and what is shown follows."""
        if self._moving:
            return
        with self._lock:
            self._moving, self._note = True, ""
            try:
                self._follow(change.owner)
                self.panels = self._panels()
                self._offer()
            except NoPrompts as error:
                self._note = f"{error} What is shown did not change."
            except Exception as error:
                return self._complain(error)
            finally:
                self._moving = False
        self._changed(change)

    def _follow(self, moved: Any) -> None:
        """Take the kind of cells nearest to what the pickers say; one that is moved wins."""
        name = next((name for name, picker in self.kind.items() if picker is moved), None)
        if name is None:
            return
        wanted = {name: picker.value for name, picker in self.kind.items()}
        kind = nearest(self._kinds, wanted, name)
        lost = {other: value for other, value in wanted.items() if kind.told[other] != value}
        self._take(kind)
        if lost:
            asked = " and ".join(f"{other} {value}" for other, value in lost.items())
            given = " and ".join(f"{other} {kind.told[other]}" for other in lost)
            self._note = f"No cells have {name} {wanted[name]} with {asked}; shown is {given}."

    def _changed(self, change: Any) -> None:
        """A control was moved: show its cell now if it is drawn, soon if it is not."""
        if self._moving:
            return
        try:
            if self.panels.drawn(self.found.cell, self.names):
                self._jobs.cancel()
                self._show()
            else:
                self._jobs.submit(self._show)
        except Exception as error:
            self._complain(error)

    def _show(self) -> None:
        """Show what the controls say at this moment; what goes wrong is shown as well."""
        with self._lock:
            try:
                self.view.value = self._view_html()
                self._show_trace()
                self.problem.value = ""
            except Exception as error:
                self._complain(error)

    def _show_trace(self) -> None:
        self._trace = self.panels.traces.of(self.found.cell, self.prompt.value)
        told = NOTHING | {"note": LACKING} if self._trace is None else view(self._trace)
        if told != self.viewer.trace:
            with self.viewer.hold_sync():
                self.viewer.block, self.viewer.trace = 0, told

    def _view_html(self) -> str:
        found = self.found
        pictures = "".join(shown.html for shown in self.panels.pictures(found.cell, self.names))
        readout = facts_html(facts(self.panels.rows[found.cell]))
        return (
            f'{STYLE}<div class="dl-view tex2jax_ignore">{self._answer_html()}'
            f"<p><b>{html.escape(found.words)}</b></p>{readout}"
            f'<div class="pictures">{pictures}</div></div>'
        )

    def _answer_html(self) -> str:
        panels, words = self.panels, [self.panels.main.problem]
        if panels.choice:
            words = [panels.choice.sentence]
        if panels.prompts is not None:
            said = prompts_said(panels.task, panels.length)
            words.append(f"That is of all prompts; shown are those {said} alone.")
        if panels.predicted is not None and panels.predicted.empty:
            words.append(UNPRICED)
        note = f"<p><b>{html.escape(self._note)}</b></p>" if self._note else ""
        return f"<p>{html.escape(' '.join(words))}</p>{note}"

    def _complain(self, error: Exception) -> None:
        hint = "The picture below is the last one that could be made. Move a slider to try again."
        self.problem.value = problem_html(error, hint)

    def _draw_ahead(self) -> None:
        """Draw cells before they are asked for, the nearest first: when idle, else for a while."""
        if not self._draw_when_idle():
            cells, began = iter(self._by_distance()), time.monotonic()
            while time.monotonic() - began < AHEAD_S and self._draw_next(cells):
                pass

    def _draw_when_idle(self) -> bool:
        """Draw in a notebook between its cells; whether there is one.

        One at a time and on the same thread, never beside them: matplotlib's settings are global
        while a figure is made. What is to be drawn now replaces what was before.
        """
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return False
        self._ahead = iter(self._by_distance())
        loop.call_later(IDLE_S, self._draw_on, loop, self._ahead)
        return True

    def _draw_on(self, loop: asyncio.AbstractEventLoop, cells: Iterator[str]) -> None:
        if cells is self._ahead and self._draw_next(cells):
            loop.call_later(IDLE_S, self._draw_on, loop, cells)

    def _draw_next(self, cells: Iterator[str]) -> bool:
        """Draw one of `cells` that is not drawn yet; whether there was one."""
        panels, names = self.panels, self.names
        cell = next((cell for cell in cells if not panels.drawn(cell, names)), None)
        if cell is not None:
            panels.pictures(cell, names)
        return cell is not None

    def _by_distance(self) -> list[str]:
        grid, start = self.panels.grid, self.panels.start
        sizes, windows = grid.block_sizes, grid.draft_windows

        def steps(place: tuple[int, int | None]) -> int:
            return abs(sizes.index(place[0]) - sizes.index(start.block_size)) + abs(
                windows.index(place[1]) - windows.index(start.draft_window)
            )

        return [
            grid.cells[place]
            for place in sorted(grid.cells, key=lambda p: (steps(p), p[0], window_order(p[1])))
        ]
