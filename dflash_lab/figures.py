"""Every figure of a run as files: SVG, PDF, PNG, the points as CSV, captions, and a manifest.

`write_figures` draws what the run holds and says why it left out the rest; `check_figures` draws
again and compares. Nothing but the stored cells goes in.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd

from dflash_lab import plot
from dflash_lab.analyse import (
    OWN,
    Choice,
    break_even_frame,
    cell_frame,
    choose,
    comparable,
    depth_frame,
    length_frame,
    prompt_pairs,
    stage_frame,
    survival_frame,
    task_frame,
    timeline_frame,
)
from dflash_lab.provenance import ROOT, code_state, versions
from dflash_lab.replay import clip_frame, load_map
from dflash_lab.store import Run, canonical, map_names, to_json, write_atomic

SCHEMA = 1
MANIFEST = "MANIFEST.json"
DRAWS = ("matplotlib", "pandas", "seaborn")  # versions that a picture may depend on, and numpy


class NothingToDraw(ValueError):
    """The run does not hold what a figure is made of; the message says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A figure and the rows that it shows."""

    figure: plot.Picture
    table: pd.DataFrame


class Material:
    """What figures are drawn from: the frames of a run, each made when it is first asked for."""

    def __init__(self, run: Run):
        self.run = comparable(run)

    @cached_property
    def cells(self) -> pd.DataFrame:
        return cell_frame(self.run)

    @cached_property
    def drafting(self) -> pd.DataFrame:
        """The cells of our own loop that draft, in the one dtype that the choice is about."""
        own = self.cells[(self.cells["engine"] == OWN) & (self.cells["block_size"] > 1)]
        if own.empty:
            raise NothingToDraw("no cell drafts anything")
        return own[own["dtype"] == own["dtype"].mode()[0]]

    @cached_property
    def chosen(self) -> Choice | None:
        return choose(self.run) if self.cells["draft_rate"].notna().any() else None

    @cached_property
    def survival(self) -> pd.DataFrame:
        return survival_frame(self.run)

    @property
    def setting(self) -> tuple[int, int | None] | None:
        """Block size and window of the choice, where it drafts."""
        chosen = self.chosen
        drafts = chosen is not None and chosen.block_size > 1
        return (chosen.block_size, chosen.draft_window) if drafts else None

    @property
    def pair(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The drafting cell to look at closely, and plain decoding in the same dtype."""
        drafting = self.drafting.sort_values("tokens_per_s", ascending=False)
        best = drafting.iloc[0]
        plain = self.cells[
            (self.cells["engine"] == OWN)
            & (self.cells["block_size"] == 1)
            & (self.cells["dtype"] == best["dtype"])
        ]
        if plain.empty:
            raise NothingToDraw(f"plain decoding in {best['dtype']} was not measured")
        return best.to_dict(), plain.iloc[0].to_dict()


def _throughput(m: Material) -> Drawn:
    return Drawn(figure=plot.throughput(m.cells, m.chosen), table=m.cells)


def _acceptance(m: Material) -> Drawn:
    return Drawn(figure=plot.acceptance(m.cells), table=m.drafting)


def _survival(m: Material) -> Drawn:
    return Drawn(figure=plot.survival(m.survival), table=m.survival)


def _conditional(m: Material) -> Drawn:
    return Drawn(figure=plot.conditional(m.survival), table=m.survival)


def _lengths(m: Material) -> Drawn:
    table = length_frame(m.run)
    return Drawn(figure=plot.lengths(table, m.setting), table=table)


def _cost(m: Material) -> Drawn:
    return Drawn(figure=plot.cost(m.cells), table=m.cells)


def _stages(m: Material) -> Drawn:
    table = stage_frame(m.run)
    if table.empty:
        raise NothingToDraw("no cell was timed by stages; sweep with timing = stages")
    return Drawn(figure=plot.stages(table), table=table)


def _break_even(m: Material) -> Drawn:
    table = break_even_frame(m.cells)
    if table.empty:
        raise NothingToDraw("plain decoding or drafting was not measured")
    return Drawn(figure=plot.break_even(table), table=table)


def _heatmap(m: Material) -> Drawn:
    if m.drafting["draft_window"].nunique(dropna=False) < 2:
        raise NothingToDraw("one draft window alone was measured")
    return Drawn(figure=plot.heatmap(m.drafting, m.chosen), table=m.drafting)


def _memory(m: Material) -> Drawn:
    return Drawn(figure=plot.memory(m.drafting), table=m.drafting)


def _tasks(m: Material) -> Drawn:
    table = task_frame(m.run)
    table = table[table["dtype"] == m.drafting["dtype"].iloc[0]]
    if table["task"].nunique() < 2:
        raise NothingToDraw("the prompts are of one task")
    full = table[table["draft_window"].isna()]
    return Drawn(figure=plot.tasks(full), table=full)


def _pairs(m: Material) -> Drawn:
    best, plain = m.pair
    table = prompt_pairs(m.run, best["cell"], plain["cell"])
    name = f"block size {best['block_size']}"
    return Drawn(figure=plot.pairs(table, name, "plain decoding"), table=table)


def _depth(m: Material) -> Drawn:
    table = depth_frame(m.run)
    table = table[table["dtype"] == m.drafting["dtype"].iloc[0]]
    return Drawn(figure=plot.depth(table), table=table)


def _timeline(m: Material) -> Drawn:
    best, _ = m.pair
    prompt = _first_prompt(m.run)
    table = timeline_frame(m.run, best["cell"], prompt)
    name = f"{prompt}, block size {best['block_size']}"
    return Drawn(figure=plot.timeline(table, name), table=table)


def _race(m: Material) -> Drawn:
    best, plain = m.pair
    prompt = _first_prompt(m.run)
    ways = {f"block size {best['block_size']}": best, "plain decoding": plain}
    frames = {name: timeline_frame(m.run, row["cell"], prompt) for name, row in ways.items()}
    table = pd.concat([frame.assign(way=name) for name, frame in frames.items()])
    return Drawn(figure=plot.race(frames), table=table)


def _clipped(m: Material) -> Drawn:
    if not map_names(m.run.path):
        raise NothingToDraw("no acceptance map is stored; make one with recommend --map")
    table = clip_frame(load_map(m.run))
    if table.empty:
        raise NothingToDraw("the acceptance map has no size between 1 and its largest")
    return Drawn(figure=plot.clipped(table), table=table)


def _first_prompt(run: Run) -> str:
    return min(run.prompts(("prompt_id",))["prompt_id"].to_pylist())


FIGURES: dict[str, Callable[[Material], Drawn]] = {
    "throughput": _throughput,
    "acceptance": _acceptance,
    "survival": _survival,
    "conditional": _conditional,
    "lengths": _lengths,
    "cost": _cost,
    "stages": _stages,
    "break-even": _break_even,
    "heatmap": _heatmap,
    "memory": _memory,
    "tasks": _tasks,
    "pairs": _pairs,
    "depth": _depth,
    "timeline": _timeline,
    "race": _race,
    "clipped": _clipped,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What `write_figures` did."""

    folder: Path
    files: tuple[Path, ...]
    left_out: Mapping[str, str]  # figure -> why


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What `check_figures` found."""

    equal: tuple[str, ...]  # names of files
    different: Mapping[str, str]  # name -> what is different about it
    cells_changed: bool
    versions_changed: Mapping[str, tuple[str | None, str | None]]  # name -> (then, now)

    @property
    def sentences(self) -> tuple[str, ...]:
        """The findings in words, one line each."""
        said = [f"{len(self.equal)} of {len(self.equal) + len(self.different)} files are the same"]
        said += [f"{name}: {what}" for name, what in self.different.items()]
        if self.cells_changed:
            said.append("the run's cells are not those that were drawn")
        for name, (then, now) in self.versions_changed.items():
            said.append(f"{name} was {then} and is {now}")
        return tuple(said)


def write_figures(run: Run, folder: str | Path) -> Written:
    """Draw every figure that the run holds material for, into `folder`.

    Of each `NAME.svg`, `.pdf`, `.png` and `.csv`; beside them `captions.md`, `cells.tex`,
    `requirements.txt` and `MANIFEST.json`. SVG, PDF and CSV have the same bytes for the same cells
    and library versions, PNG within one environment. Raises ValueError for a run without cells.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    contents, left_out = _contents(run)
    manifest = {
        "schema": SCHEMA,
        "code": code_state(ROOT),
        "versions": _versions(),
        "cells": cells_sha(run),
        "files": {name: _sha(content) for name, content in contents.items()},
        "left_out": left_out,
    }
    contents[MANIFEST] = to_json(manifest, indent=1) + "\n"
    for name, content in contents.items():
        write_atomic(folder / name, content)
    return Written(
        folder=folder, files=tuple(folder / name for name in contents), left_out=left_out
    )


def check_figures(run: Run, folder: str | Path) -> Checked:
    """Draw again what `write_figures` wrote to `folder`, and compare with the manifest there.

    PNG is drawn again only where the libraries are the same. Raises ValueError without a manifest.
    """
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise ValueError(f"{folder} holds no {MANIFEST}. Write the figures there first.")
    told = json.loads(path.read_text(encoding="utf-8"))
    then, now = told["versions"], _versions()
    changed = {
        name: (then.get(name), now.get(name))
        for name in sorted({*then, *now})
        if then.get(name) != now.get(name)
    }
    fresh = {name: _sha(content) for name, content in _contents(run)[0].items()}
    found: dict[str, str] = {}
    for name in sorted({*told["files"], *fresh}):
        if not (changed and name.endswith(".png")):
            found[name] = _difference(Path(folder) / name, told["files"].get(name), fresh.get(name))
    return Checked(
        equal=tuple(name for name, what in found.items() if not what),
        different={name: what for name, what in found.items() if what},
        cells_changed=told["cells"] != cells_sha(run),
        versions_changed=changed,
    )


def _difference(path: Path, told: str | None, fresh: str | None) -> str:
    """What is different about a file, `told` and `fresh` being hashes; empty where nothing is."""
    if told is None:
        return "was not written then"
    if fresh is None:
        return "is not drawn any more"
    if not path.is_file():
        return "is missing"
    if _sha(path.read_bytes()) != told:
        return "was changed on disk"
    return "" if told == fresh else "is drawn differently now"


def _contents(run: Run) -> tuple[dict[str, bytes | str], dict[str, str]]:
    """Every file by name, and why figures were left out."""
    material = Material(run)
    if not material.run.cells:
        raise ValueError(f"{run.path} has no finished cell, so there is nothing to draw.")
    contents: dict[str, bytes | str] = {}
    left_out: dict[str, str] = {}
    captions = ["# Figures\n"]
    for name, draw in FIGURES.items():
        try:
            drawn = draw(material)
        except NothingToDraw as reason:
            left_out[name] = str(reason)
            continue
        for suffix, content in plot.encoded(drawn.figure, name).items():
            contents[name + suffix] = content
        contents[f"{name}.csv"] = drawn.table.to_csv(index=False, lineterminator="\n")
        captions.append(f"## {name}\n\n{caption(drawn.figure, material.run)}\n")
    contents["captions.md"] = "\n".join(captions)
    contents["cells.tex"] = latex_table(material.cells)
    contents["requirements.txt"] = requirements(material.run)
    return contents, left_out


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


def cells_sha(run: Run) -> str:
    """One hash of all rows of a run's cells, whatever wrote the files."""
    digest = hashlib.sha256()
    for cell in sorted(comparable(run).cells, key=lambda cell: cell.id):
        one = Run(path=run.path, cells=(cell,))
        digest.update(canonical(cell.request).encode())
        for table in (one.prompts(), one.blocks()):
            for row in table.to_pylist():
                digest.update(canonical(row).encode())
    return digest.hexdigest()


def _versions() -> dict[str, str | None]:
    return versions() | {name: metadata.version(name) for name in DRAWS}


def _sha(content: bytes | str) -> str:
    data = content.encode() if isinstance(content, str) else content
    return hashlib.sha256(data).hexdigest()
