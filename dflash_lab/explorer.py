"""Sliders over a stored run, in a notebook: they choose, and what they choose was made elsewhere.

JupyterLab may run a callback beside a cell, on another thread. So nothing here touches pyplot, one
lock is held while the view is made, and the view is one trait, assigned once.
"""

from __future__ import annotations

import asyncio
import html
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import RLock, Timer
from typing import Any

from dflash_lab.panels import (
    Found,
    Panels,
    facts,
    facts_html,
    place_name,
    window_name,
    window_order,
)
from dflash_lab.store import Run, open_run
from dflash_lab.tokens import trace_html

AHEAD_S = 4.0  # outside a notebook pictures are drawn ahead for so long
FULL = "full"  # of the window slider, whose value cannot be None
IDLE_S = 0.05  # in a notebook they are drawn with such pauses
QUIET_S = 0.1  # a picture that has to be drawn waits for so long a pause between changes
STYLE = """<style>
.dl-view { max-width: 72em; line-height: 1.45; }
.dl-view .pictures { display: flex; flex-wrap: wrap; gap: 1em; margin: 0.6em 0; }
.dl-view img { flex: 1 1 26em; min-width: 0; max-width: 40em; height: auto; background: #fff; }
.dl-view .facts { display: flex; flex-wrap: wrap; gap: 0.4em 2em; margin: 0.4em 0; }
.dl-view .facts dt { float: none; width: auto; font-weight: normal; opacity: 0.8; }
.dl-view .facts dd { margin: 0; white-space: nowrap; font-variant-numeric: tabular-nums; }
.dl-view p { margin: 0.3em 0; }
</style>"""


def explore(run: Run | str | Path) -> Explorer:
    """The panel of a run: block size and draft window on sliders, and one prompt's text.

    Raises ImportError naming the way out where ipywidgets is not installed, ValueError for a run in
    which no cell of our own loop is finished.
    """
    widgets = _ipywidgets()
    return Explorer(run if isinstance(run, Run) else open_run(run), widgets)


def _ipywidgets() -> Any:
    try:
        import ipywidgets
    except ImportError as error:
        raise ImportError(
            'the explorer needs ipywidgets: pip install "ipywidgets>=8.1", then restart the '
            "kernel. dl.report(run) writes the same sliders into a page that needs no kernel."
        ) from error
    return ipywidgets


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
    """The panel: `block_size`, `draft_window`, `prompt` and `lines` choose, `view` shows."""

    def __init__(self, run: Run, widgets: Any):
        self.panels = Panels(run)
        if self.panels.grid is None:
            raise ValueError(f"no cell of {run.path} was decoded by our own loop: nothing to show.")
        self._lock = RLock()
        self._jobs = LatestOnly(QUIET_S)
        start = self.panels.start
        self.block_size = widgets.SelectionSlider(
            options=[(str(size), size) for size in self.panels.grid.block_sizes],
            value=start.block_size,
            description="block size",
            **_wide(widgets),
        )
        windows = self.panels.grid.draft_windows
        self.draft_window = widgets.SelectionSlider(
            options=[(window_name(window), window or FULL) for window in windows],
            value=start.draft_window or FULL,
            description="sliding-window size (draft)",
            disabled=len(windows) == 1,
            **_wide(widgets),
        )
        self.prompt = widgets.Dropdown(
            options=[(prompt.label, prompt.key) for prompt in self.panels.traces.prompts],
            description="prompt",
            **_wide(widgets),
        )
        self.lines = widgets.Checkbox(
            description="each block on a line of its own, with everything that was drafted",
            indent=False,
            layout=widgets.Layout(width="100%"),
        )
        self.problem = widgets.HTML()
        self.view = widgets.HTML()
        self._show()
        for control in (self.block_size, self.draft_window, self.prompt, self.lines):
            control.observe(self._changed, names="value")
        self.widget = widgets.VBox(
            [
                *(self.block_size, self.draft_window, self.prompt, self.lines),
                *(self.problem, self.view),
            ]
        )
        self._draw_ahead()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """The widget for a live notebook, and its twin in HTML for every other reader."""
        bundle = self.widget._repr_mimebundle_()
        if isinstance(bundle, tuple):
            bundle = bundle[0]
        return {**bundle, "text/html": self.html, "text/plain": repr(self)}

    @property
    def found(self) -> Found:
        """The cell that the sliders point at, the nearest one where they point at a hole."""
        window = self.draft_window.value
        return self.panels.grid.find(self.block_size.value, None if window == FULL else window)

    @property
    def html(self) -> str:
        """What the panel shows, without its controls."""
        return self.view.value

    def __repr__(self) -> str:
        grid = self.panels.grid
        return (
            f"Explorer of {self.panels.run.path.name}: {len(grid.cells)} cells, block sizes "
            f"{', '.join(map(str, grid.block_sizes))}, windows "
            f"{', '.join(map(window_name, grid.draft_windows))}; shows "
            f"{place_name(self.found.block_size, self.found.draft_window)}"
        )

    def _changed(self, change: Any) -> None:
        """A control was moved: show its cell now if it is drawn, soon if it is not."""
        try:
            if self.panels.drawn(self.found.cell):
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
                self.problem.value = ""
            except Exception as error:
                self._complain(error)

    def _view_html(self) -> str:
        found = self.found
        pictures = "".join(shown.html for shown in self.panels.pictures(found.cell))
        readout = facts_html(facts(self.panels.rows[found.cell]))
        return (
            f'{STYLE}<div class="dl-view tex2jax_ignore">{self._answer_html()}'
            f"<p><b>{html.escape(found.words)}</b></p>{readout}"
            f'<div class="pictures">{pictures}</div>{self._trace_html(found.cell)}</div>'
        )

    def _answer_html(self) -> str:
        choice = self.panels.choice
        return f"<p>{html.escape(choice.sentence if choice else self.panels.main.problem)}</p>"

    def _trace_html(self, cell: str) -> str:
        trace = self.panels.traces.of(cell, self.prompt.value)
        if trace is None:
            return "<p>This cell does not hold this prompt.</p>"
        return trace_html(trace, lines=self.lines.value)

    def _complain(self, error: Exception) -> None:
        kind, message = type(error).__name__, str(error)
        trace = "".join(traceback.format_exception(error))
        self.problem.value = (
            f'<div role="alert"><p><b>{html.escape(kind)}</b>: {html.escape(message)}</p>'
            f"<p>The picture below is the last one that could be made. Move a slider to try again."
            f"</p><details><summary>where it happened</summary><pre>{html.escape(trace)}</pre>"
            "</details></div>"
        )

    def _draw_ahead(self) -> None:
        """Draw cells before they are asked for, the nearest first.

        In a notebook between its cells, one at a time and on the same thread, never beside them:
        matplotlib's settings are global while a figure is made. Elsewhere at once, for a while.
        """
        cells = iter(self._by_distance())
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            began = time.monotonic()
            while time.monotonic() - began < AHEAD_S and self._draw_next(cells):
                pass
        else:
            loop.call_later(IDLE_S, self._draw_on, loop, cells)

    def _draw_on(self, loop: asyncio.AbstractEventLoop, cells: Iterator[str]) -> None:
        if self._draw_next(cells):
            loop.call_later(IDLE_S, self._draw_on, loop, cells)

    def _draw_next(self, cells: Iterator[str]) -> bool:
        """Draw one of `cells` that is not drawn yet; whether there was one."""
        cell = next((cell for cell in cells if not self.panels.drawn(cell)), None)
        if cell is not None:
            self.panels.pictures(cell)
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


def _wide(widgets: Any) -> dict[str, Any]:
    """Room for the whole description of a control."""
    return {
        "style": {"description_width": "16em"},
        "layout": widgets.Layout(width="min(100%, 46em)"),
    }
