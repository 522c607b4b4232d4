"""The kinds of cells and of prompts that a run holds, and a run of some of its prompts alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dflash_lab.analyse import COMPARABLE, OWN
from dflash_lab.store import Cell, FailedCell, Run

SAME = (
    *("engine", "backend", "dtype", "device", "hardware", "attention"),
    *("target", "target_sha", "template_sha", "chat", "thinking"),
    *("prompts", "temperature", "sampling", "max_new_tokens", "timing", "repeats"),
)  # of a request: what the cells of one grid have in common, beside the draft
PROPERTIES = {
    "hardware": ("hardware",),
    "pair": ("target", "draft"),
    "backend": ("backend",),
    "device": ("device",),
    "dtype": ("dtype",),
    "timing": ("timing",),
    "temperature": ("temperature",),
}  # what grids are told apart by, and the parts of a request that say it
OTHERWISE = "cells"  # tells apart those that have all of these in common
SHORT = 256  # tokens: below lie the shortest prompts, above each band reaches four times as far


# Kinds of cells


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The cells of one grid: a drafting one of them, and what tells them from other kinds."""

    cell: Cell
    told: Mapping[str, str]  # by property, the same ones in every kind of a run


def alike(cell: Cell | FailedCell, like: Cell) -> bool:
    """Whether two cells belong in one grid; plain decoding has no draft and fits any."""
    ours, theirs = cell.request.get("draft_sha"), like.request.get("draft_sha")
    return (ours == theirs or ours is None or theirs is None) and all(
        cell.request.get(name) == like.request.get(name) for name in SAME
    )


def kinds(run: Run) -> tuple[Kind, ...]:
    """A kind for each grid of a run, the largest grid first."""
    own = [cell for cell in run.cells if cell.engine == OWN and cell.block_size > 1]
    own = [cell for cell in own if cell.request.get("policy") is None]
    first: dict[frozenset[str], Cell] = {}
    for cell in own:
        first.setdefault(frozenset(other.id for other in own if alike(other, cell)), cell)
    found = [first[names] for names in sorted(first, key=len, reverse=True)]
    told = {cell.id: {name: _said(cell, name) for name in PROPERTIES} for cell in found}
    if len({tuple(values.values()) for values in told.values()}) < len(found):
        for cell in found:
            told[cell.id][OTHERWISE] = _otherwise(cell, found)
    names = [name for name in told[found[0].id] if _differs(told.values(), name)] if found else []
    return tuple(Kind(cell=c, told={name: told[c.id][name] for name in names}) for c in found)


def _said(cell: Cell, name: str) -> str:
    return " with ".join(str(cell.request.get(part)) for part in PROPERTIES[name])


def _otherwise(cell: Cell, others: Sequence[Cell]) -> str:
    """In which further parts of its request it differs from the others; its id makes it its own."""
    known = [part for parts in PROPERTIES.values() for part in parts]
    parts = [name for name in ("draft_sha", *SAME) if name not in known]
    differing = [name for name in parts if _differs([c.request for c in others], name)]
    words = [f"{name} {_short(cell.request.get(name))}" for name in differing]
    return ", ".join([*words, f"like {cell.id}"])


def _differs(told: Any, name: str) -> bool:
    return len({str(values.get(name)) for values in told}) > 1


def _short(value: Any) -> str:
    """A value of a request in a few words."""
    if isinstance(value, Mapping) and "source" in value:
        return f"{value['count']} of {value['source']}"
    return str(value)


def values(found: Sequence[Kind], name: str) -> list[str]:
    """The values of one property, in order."""
    return sorted({kind.told[name] for kind in found}, key=_order)


def _order(text: str) -> tuple[bool, float, str]:
    number = text.replace(".", "", 1).isdigit()
    return (not number, float(text) if number else 0.0, text)


def nearest(found: Sequence[Kind], wanted: Mapping[str, str], moved: str) -> Kind:
    """The kind that has what `moved` wants, and of the rest as much as any that does."""
    fit = [kind for kind in found if kind.told[moved] == wanted[moved]]
    return max(fit, key=lambda kind: sum(kind.told[name] == wanted[name] for name in wanted))


def like(run: Run, cell: Cell) -> Run:
    """The cells that one figure may hold beside `cell`."""

    def fits(other: Cell | FailedCell) -> bool:
        asked, own = other.request, cell.request
        if asked.get("policy") is not None:
            return False
        return asked.get("draft_sha") in (None, own.get("draft_sha")) and all(
            asked.get(name) == own.get(name) for name in COMPARABLE
        )

    kept, failed = tuple(filter(fits, run.cells)), tuple(filter(fits, run.failed))
    return replace(run, cells=kept, failed=failed)


# Kinds of prompts


class NoPrompts(ValueError):
    """No prompt is of the task and the length asked for; the message names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfPrompts(Run):
    """A run as if these prompts were all it held."""

    ids: frozenset[str]

    def blocks(self, columns: Sequence[str] | None = None) -> pa.Table:
        return self._mine(Run.blocks(self), columns)

    def prompts(self, columns: Sequence[str] | None = None) -> pa.Table:
        return self._mine(Run.prompts(self), columns)

    def _mine(self, table: pa.Table, columns: Sequence[str] | None) -> pa.Table:
        kept = table.filter(pc.is_in(table["prompt_id"], pa.array(sorted(self.ids))))
        return kept if columns is None else kept.select(list(columns))


def tasks(run: Run) -> list[str]:
    """The tasks that the prompts of a run name."""
    return sorted({task for _, task, _ in _prompts(run) if task})


def lengths(run: Run) -> list[str]:
    """The bands of length that the prompts of a run fall in, the shortest first."""
    return list(dict.fromkeys(band(tokens) for tokens in sorted({n for *_, n in _prompts(run)})))


def band(tokens: int) -> str:
    """The name of the band that a prompt of that length falls in."""
    if tokens < SHORT:
        return f"under {SHORT} tokens"
    low = SHORT
    while tokens >= 4 * low:
        low *= 4
    return f"{low:,} to {4 * low - 1:,} tokens"


def some_prompts(run: Run, task: str | None, length: str | None) -> frozenset[str]:
    """Ids of the prompts of a task and a band of length; None takes any."""
    kept = frozenset(
        key
        for key, named, tokens in _prompts(run)
        if task in (None, named) and length in (None, band(tokens))
    )
    if not kept:
        raise NoPrompts(f"No prompt of these cells is {prompts_said(task, length)}.")
    return kept


def prompts_said(task: str | None, length: str | None) -> str:
    """A task and a length in words, as in "of task code and 256 to 1,023 tokens long"."""
    told = [] if task is None else [f"of task {task}"]
    return " and ".join(told if length is None else [*told, f"{length} long"])


def _prompts(run: Run) -> list[tuple[str, str | None, int]]:
    """Id, task and tokens of the prompts of each cell; of several turns the first counts."""
    table = run.prompts(("cell", "prompt_id", "task", "prompt_ids"))
    table = table.append_column("tokens", pc.list_value_length(table["prompt_ids"]))
    made = table.group_by(["cell", "prompt_id", "task"]).aggregate([("tokens", "min")])
    names = ("prompt_id", "task", "tokens_min")
    return list(zip(*(made[name].to_pylist() for name in names), strict=True))
