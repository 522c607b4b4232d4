"""Two runs beside each other: cells that asked for the same, on the prompts that both hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from dflash_lab.analyse.frames import RATES, paired_figures
from dflash_lab.analyse.resampling import ratio
from dflash_lab.analyse.sums import Sums, prompt_sums
from dflash_lab.store import Cell, Run

# What a cell of one run and one of the other must have in common to be a pair.
PAIRED_BY = (
    *("engine", "backend", "dtype", "block_size", "draft_window", "policy"),
    *("temperature", "sampling", "rule", "proposal"),
)
SHOWN = ("engine", "backend", "dtype", "block_size", "draft_window")
FIGURES = ("tokens_per_s", "tau")  # of a pair; what each is a ratio of, RATES says


def run_pairs(one: Run, other: Run) -> list[tuple[Cell, Cell]]:
    """Cells of both runs that asked for the same, the first of its kind from each, in order."""
    theirs: dict[str, Cell] = {}
    for cell in other.cells:
        theirs.setdefault(cell.asked(PAIRED_BY), cell)
    ours: dict[str, Cell] = {}
    for cell in one.cells:
        ours.setdefault(cell.asked(PAIRED_BY), cell)
    return [(cell, theirs[kind]) for kind, cell in ours.items() if kind in theirs]


def diff_frame(one: Run, other: Run, resamples: int = 2000, seed: int = 0) -> pd.DataFrame:
    """One row a pair of cells: throughput and tau of both, and how the second differs.

    Only prompts with the same id and tokens in both cells count (`prompts`). `speedup` is the
    second's throughput over the first's, `tau_difference` the second's tau less the first's, with
    95 % intervals over the prompts, drawn once for both. Times of cells of different hardware
    classes or timing modes are never put in one ratio: `speedup` is missing there.
    """
    ours, theirs = prompt_sums(one), prompt_sums(other)
    texts = _prompt_texts(one), _prompt_texts(other)
    rows = []
    for cell, mate in run_pairs(one, other):
        shared = sorted(
            name
            for name in texts[0].get(cell.id, {}).keys() & texts[1].get(mate.id, {}).keys()
            if texts[0][cell.id][name] == texts[1][mate.id][name]
        )
        sums = _of(ours, cell, shared), _of(theirs, mate, shared)
        rows.append(_row(cell, mate, sums, len(shared), resamples, seed))
    names = ["cell", "other_cell", *SHOWN, "hardware", "other_hardware", "prompts", *_columns()]
    return pd.DataFrame(rows, columns=names).astype({"draft_window": "Int64"})


def _columns() -> list[str]:
    figures = [f"{side}{name}" for name in FIGURES for side in ("", "other_")]
    differences = [
        f"{name}{end}" for name in ("speedup", "tau_difference") for end in ("", "_low", "_high")
    ]
    return figures + differences


def _prompt_texts(run: Run) -> dict[str, dict[str, tuple[Any, ...]]]:
    """Of each cell, the prompt tokens of every turn by prompt id."""
    found: dict[str, dict[str, tuple[Any, ...]]] = {}
    table = run.prompts(("cell", "prompt_id", "turn", "repeat", "prompt_ids"))
    for row in sorted(table.to_pylist(), key=lambda row: (row["turn"], row["repeat"])):
        texts = found.setdefault(row["cell"], {})
        texts[row["prompt_id"]] = (*texts.get(row["prompt_id"], ()), tuple(row["prompt_ids"]))
    return found


def _of(sums: Sums, cell: Cell, prompts: list[str]) -> dict[str, np.ndarray]:
    """What one cell sums up to on each of these prompts."""
    place = next(place for place, known in enumerate(sums.cells) if known.id == cell.id)
    columns = [sums.prompts.index(name) for name in prompts]
    return {name: values[place, columns] for name, values in sums.by_name.items()}


def _row(
    cell: Cell,
    mate: Cell,
    sums: tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]],
    count: int,
    resamples: int,
    seed: int,
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "cell": cell.id,
        "other_cell": mate.id,
        **{name: cell.request.get(name) for name in SHOWN},
        "hardware": cell.hardware,
        "other_hardware": mate.hardware,
        "prompts": count,
    }
    for name in FIGURES:
        above, below = RATES[name]
        for side, mine in zip(("", "other_"), sums, strict=True):
            row[f"{side}{name}"] = float(ratio(mine[above].sum(), mine[below].sum()))

    differences = paired_figures(sums[1], sums[0], resamples, seed)
    same_clock = (cell.hardware, cell.request["timing"]) == (mate.hardware, mate.request["timing"])
    for name, value in differences.items():
        known = count > 0 and (same_clock or not name.startswith("speedup"))
        row[name] = value if known else None
    return row


def run_differences(one: Run, other: Run) -> dict[str, tuple[str, str]]:
    """Settings whose values differ between two runs, by name: those of one and of the other.

    What makes a pair is no difference; neither are lists of prompt ids, which a hash stands for.
    """
    ours, theirs = _settings(one), _settings(other)
    names = [name for name in dict.fromkeys((*ours, *theirs)) if name not in PAIRED_BY]
    return {
        name: (ours.get(name, "none"), theirs.get(name, "none"))
        for name in names
        if ours.get(name) != theirs.get(name)
    }


def _settings(run: Run) -> dict[str, str]:
    found: dict[str, set[str]] = {}
    for cell in run.cells:
        flat = dict(cell.request)
        prompts = flat.pop("prompts", None) or {}
        flat |= {"prompts": f"{prompts.get('count')} of {prompts.get('source')}"}
        flat |= {"prompt set": prompts.get("set_sha"), "commit": _commit(cell)}
        for name, value in (flat | cell.provenance.get("versions", {})).items():
            found.setdefault(name, set()).add(str(value))
    return {name: " and ".join(sorted(values)) for name, values in found.items()}


def _commit(cell: Cell) -> str:
    return str((cell.provenance.get("code") or {}).get("commit"))[:12]
