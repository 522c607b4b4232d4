"""What stands beside figures: captions, the cells as LaTeX, versions to install."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from dflash_lab import plot
from dflash_lab.analyse import OWN
from dflash_lab.store import Run


def caption(figure: plot.Picture, run: Run) -> str:
    """A caption to begin with: what is drawn, how to read it, what was measured and where."""
    target = run.cells[0].request["target"]
    drafts = sorted({cell.request["draft"] for cell in run.cells} - {None})
    begun = min(cell.provenance["started_utc"] for cell in run.cells)[:10]
    pair = f"{target} with the draft {', '.join(drafts)}" if drafts else target
    measured = f"{pair}, {run.cells[0].hardware}, {begun}"
    return " ".join(f"{part.rstrip('.')}." for part in (*figure.words, measured) if part)


TEX_COLUMNS = {
    "engine": "engine",
    "dtype": "dtype",
    "block_size": "block size",
    "draft_window": "window",
    "prompts": "prompts",
    "tokens_per_s": "tokens/s",
    "tau": r"$\tau$",
    "draft_rate": "draft rate",
}


def latex_table(cells: pd.DataFrame) -> str:
    """The cells as a LaTeX `tabular`, intervals in brackets; what is missing is a dash."""
    lines = [" & ".join(TEX_COLUMNS.values()) + r" \\", r"\hline"]
    for row in cells.to_dict("records"):
        lines.append(" & ".join(_tex(row, name) for name in TEX_COLUMNS) + r" \\")
    form = "l" * 2 + "r" * (len(TEX_COLUMNS) - 2)
    body = "\n".join(lines)
    return f"\\begin{{tabular}}{{{form}}}\n{body}\n\\end{{tabular}}\n"


def _tex(row: Mapping[str, Any], name: str) -> str:
    value = row[name]
    if name == "draft_window" and row["engine"] == OWN and pd.isna(value):
        return "full" if row["block_size"] > 1 else "--"
    if value is None or pd.isna(value):
        return "--"
    if not isinstance(value, float):
        return "".join(TEX.get(letter, letter) for letter in str(value))
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    ends = "" if pd.isna(low) else f" [{low:.2f}, {high:.2f}]"
    return f"{value:.2f}{ends}"


TEX = {letter: f"\\{letter}" for letter in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}


def requirements(run: Run) -> str:
    """Lines that install the versions a run was measured with, as pip takes them.

    Local parts of a version ("+cpu") are left out: they name a build, not a release.
    """
    lines: dict[str, set[str]] = {}
    for cell in run.cells:
        for name, version in cell.provenance["versions"].items():
            if version is not None and name not in ("python", "dflash_lab"):
                lines.setdefault(name, set()).add(version.partition("+")[0])
    head = [
        f"# {name} {', '.join(sorted({cell.provenance['versions'][name] for cell in run.cells}))}"
        for name in ("dflash_lab", "python")
    ]
    for name, found in lines.items():
        if len(found) > 1:
            head.append(f"# {name} in several versions: {', '.join(sorted(found))}")
    pins = [f"{name}=={max(found)}" for name, found in lines.items()]
    return "\n".join([*head, *pins]) + "\n"
