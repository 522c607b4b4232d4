"""The figures of a report: two that say why, and every other one that the run holds."""

from __future__ import annotations

from typing import Any

from dflash_lab.figures import FIGURES, Drawn, Material, NothingToDraw
from dflash_lab.panels import Panels, to_image
from dflash_lab.store import Run

WHY = {
    "acceptance": "What a block yields: of a longer one more is accepted, of more drafted.",
    "cost": "What a block costs: drafting, verifying and keeping it.",
    "break-even": "Both in one: where tau lies above what a block needs, drafting gains.",
}
WITH_SLIDERS = ("throughput", "survival")


def gallery(run: Run, panels: Panels) -> dict[str, Any]:
    """Figures with captions and the cells they are drawn from, and reasons for those left out."""
    hardware = panels.main.hardware
    material = Material(run.select(hardware=hardware))
    made: dict[str, dict[str, Any]] = {}
    undrawn: dict[str, str] = {}
    for name in FIGURES:
        if name in WITH_SLIDERS and panels.grid is not None:
            continue
        try:
            made[name] = shown(name, FIGURES[name](material))
        except NothingToDraw as reason:
            undrawn[name] = str(reason)
    return {
        "why": [made.pop(name) for name in WHY if name in made],
        "gallery": list(made.values()),
        "undrawn": undrawn,
    }


def shown(name: str, drawn: Drawn) -> dict[str, Any]:
    """One figure, what is said below it, and the ids of the cells whose rows it shows.

    Title and notes stand in the picture; `name` is that of the file `dflash-lab figures` writes.
    """
    picture = to_image(drawn.figure, name)
    return {"picture": picture, "caption": WHY.get(name, f"Figure {name}."), "cells": drawn.cells}
