"""Figures as files."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from dflash_lab.plot.style import to_pdf, to_png, to_svg
from dflash_lab.store import write_atomic


def encoded(fig: Figure, name: str) -> dict[str, bytes | str]:
    """The figure as files by suffix: .svg, .pdf and .png.

    SVG and PDF have the same bytes for the same data and libraries; PNG within one environment.
    """
    return {
        ".svg": f'<?xml version="1.0" encoding="utf-8"?>\n{to_svg(fig, name)}',
        ".pdf": to_pdf(fig),
        ".png": to_png(fig),
    }


def save(fig: Figure, stem: str | Path) -> list[Path]:
    """Write `stem`.svg, .pdf and .png; see `encoded`."""
    stem = Path(stem)
    stem.parent.mkdir(parents=True, exist_ok=True)
    contents = encoded(fig, stem.name)
    paths = [stem.with_name(stem.name + suffix) for suffix in contents]
    for path, content in zip(paths, contents.values(), strict=True):
        write_atomic(path, content)
    return paths
