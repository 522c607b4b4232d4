"""The figures of a run, drawn and written as files."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from dflash_lab.analyse import (
    cell_frame,
    choose,
    comparable,
    length_frame,
    survival_frame,
)
from dflash_lab.plot.blocks import lengths, survival
from dflash_lab.plot.curves import acceptance, cost, throughput
from dflash_lab.plot.style import setting_of, to_pdf, to_png, to_svg
from dflash_lab.store import Run, write_atomic


def save(fig: Figure, stem: str | Path) -> list[Path]:
    """Write `stem`.svg, .pdf and .png. SVG and PDF have the same bytes for the same data and
    libraries; PNG within one environment."""
    stem = Path(stem)
    stem.parent.mkdir(parents=True, exist_ok=True)
    contents = {
        ".svg": f'<?xml version="1.0" encoding="utf-8"?>\n{to_svg(fig, stem.name)}',
        ".pdf": to_pdf(fig),
        ".png": to_png(fig),
    }
    paths = [stem.with_name(stem.name + suffix) for suffix in contents]
    for path, content in zip(paths, contents.values(), strict=True):
        write_atomic(path, content)
    return paths


def save_figures(run: Run, folder: str | Path) -> list[Path]:
    """Draw and write every figure of a run, of the largest part whose cells compare."""
    run = comparable(run)
    cells, survivals = cell_frame(run), survival_frame(run)
    drafted = bool(cells["draft_rate"].notna().any())
    chosen = choose(run) if drafted else None
    setting = None if chosen is None or chosen.block_size == 1 else setting_of(chosen)
    figures = {
        "throughput": throughput(cells, chosen),
        "acceptance": acceptance(cells),
        "survival": survival(survivals),
        "lengths": lengths(length_frame(run), setting),
        "cost": cost(cells),
    }
    return [path for name, fig in figures.items() for path in save(fig, Path(folder) / name)]
