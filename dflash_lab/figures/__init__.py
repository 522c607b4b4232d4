"""Every figure of a run as files: SVG, PDF, PNG, the points as CSV, captions, and a manifest.

`write_figures` draws what the run holds and says why it left out the rest; `check_figures` draws
again and compares. Nothing but the stored cells goes in.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from dflash_lab import plot
from dflash_lab.analyse import comparable
from dflash_lab.config import one_of
from dflash_lab.figures.drawn import FIGURES, Drawn, Material, NothingToDraw
from dflash_lab.figures.words import caption, latex_table, requirements
from dflash_lab.provenance import ROOT, code_state, versions
from dflash_lab.store import Run, canonical, to_json, write_atomic

SCHEMA = 1
MANIFEST = "MANIFEST.json"
DRAWS = ("matplotlib", "pandas", "seaborn")  # versions that a picture may depend on, and numpy


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


def write_figures(
    run: Run, folder: str | Path, *, names: Sequence[str] | None = None, size: str = "page"
) -> Written:
    """Draw the figures of `names`, without them every one that the run holds material for.

    `size` is "page" (6.4 in wide), "column" (3.25 in) or "slide" (16:9, 1920 x 1080 pixels).

    Of each `NAME.svg`, `.pdf`, `.png` and `.csv`; beside them `captions.md`, `cells.tex`,
    `requirements.txt` and `MANIFEST.json`. SVG, PDF and CSV have the same bytes for the same cells
    and library versions, PNG within one environment. Raises ValueError for a run without cells and
    for a name or size that there is not.
    """
    for name in names or ():
        one_of("the figure", name, tuple(FIGURES))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    contents, left_out = _contents(run, names, size)
    manifest = {
        "schema": SCHEMA,
        "size": size,
        "names": None if names is None else list(names),
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
    fresh = {
        name: _sha(content)
        for name, content in _contents(run, told.get("names"), told.get("size", "page"))[0].items()
    }
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


def _contents(
    run: Run, names: Sequence[str] | None, size: str
) -> tuple[dict[str, bytes | str], dict[str, str]]:
    """Every file by name, and why figures were left out."""
    material = Material(run)
    if not material.run.cells:
        raise ValueError(f"{run.path} has no finished cell, so there is nothing to draw.")
    contents: dict[str, bytes | str] = {}
    left_out: dict[str, str] = {}
    captions = ["# Figures\n"]
    for name in FIGURES if names is None else names:
        try:
            with plot.sized(size):
                drawn = FIGURES[name](material)
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


__all__ = [
    "FIGURES",
    "MANIFEST",
    "Checked",
    "Drawn",
    "Material",
    "NothingToDraw",
    "Written",
    "caption",
    "cells_sha",
    "check_figures",
    "latex_table",
    "requirements",
    "write_figures",
]
