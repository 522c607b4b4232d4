"""The what-if sliders of the explorer: they scale the parts of a block's cost, `what_if` counts."""

from __future__ import annotations

import html
from collections.abc import Callable
from threading import RLock
from typing import Any

from dflash_lab.costs import CostTable
from dflash_lab.panels import Image
from dflash_lab.plot.explored import HEIGHT, WIDTH, what_if
from dflash_lab.store import Run
from dflash_lab.what_if import PARTS, NoParts, cost_parts, scaled_frame
from dflash_lab.widget_parts import wide

FACTORS = (0.1, 0.2, 0.25, 0.33, 0.5, 0.67, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0, 10.0)
TITLES = {"draft": "drafting takes", "verify": "verifying takes", "other": "the rest takes"}


class WhatIf:
    """Three sliders, and the curve and optimum that follow them."""

    def __init__(self, widgets: Any, complain: Callable[[Exception], None]):
        self._complain, self._lock = complain, RLock()
        self.parts: Any = None
        options = [(f"{factor:g} times", factor) for factor in FACTORS]
        self.sliders = {
            part: widgets.SelectionSlider(
                options=options, value=1.0, description=TITLES[part], **wide(widgets)
            )
            for part in PARTS
        }
        self.picture = widgets.HTML()
        for slider in self.sliders.values():
            slider.observe(self._changed, names="value")
        title = widgets.HTML("<b>What if, on another machine or engine, ...</b>")
        self.widget = widgets.VBox([title, *self.sliders.values(), self.picture])

    def look_at(self, run: Run, table: CostTable | None) -> None:
        """Take the parts of these cells; the sliders rest where nothing tells them."""
        try:
            self.parts, told = cost_parts(run, table), ""
        except NoParts as error:
            self.parts, told = None, f"Nothing to scale: {error}"
        for slider in self.sliders.values():
            slider.disabled = self.parts is None
        self.picture.value = f"<p>{html.escape(told)}</p>"
        self._show()

    @property
    def words(self) -> str:
        """What the sliders say."""
        told = (f"{TITLES[part]} {s.value:g} times as long" for part, s in self.sliders.items())
        return "If " + ", ".join(told)

    def _changed(self, change: Any) -> None:
        try:
            self._show()
        except Exception as error:
            self._complain(error)

    def _show(self) -> None:
        """Show what the sliders say at this moment, in one trait."""
        with self._lock:
            if self.parts is None:
                return
            scale = {part: slider.value for part, slider in self.sliders.items()}
            svg, alt = what_if(scaled_frame(self.parts, scale), self.words)
            self.picture.value = Image(svg=svg, alt=alt, width=WIDTH, height=HEIGHT).html
