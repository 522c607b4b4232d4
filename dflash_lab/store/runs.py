"""A run that is read: its cells, and their rows as tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from dflash_lab.store.files import (
    REMEDY,
    DamagedCell,
    NotARun,
    read_json,
    read_stored,
    refuse_newer,
    write_json,
)
from dflash_lab.store.parts import (
    BLOCK_FILE,
    CELL,
    FAILED,
    PART,
    PROMPT_FILE,
    TEXTS,
    whole_lines,
)
from dflash_lab.store.schema import BLOCKS, PROMPTS, SCHEMA
from dflash_lab.store.strict_json import canonical


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One finished configuration over a prompt set."""

    id: str
    folder: Path
    request: dict[str, Any]
    provenance: dict[str, Any]
    summary: dict[str, Any]
    requested_block_sizes: tuple[int, ...]  # more than one where several were lowered to one

    @property
    def engine(self) -> str:
        return self.request["engine"]

    @property
    def dtype(self) -> str:
        return self.request["dtype"]

    @property
    def block_size(self) -> int:
        return self.request["block_size"]

    @property
    def draft_window(self) -> int | None:
        return self.request["draft_window"]

    @property
    def hardware(self) -> str:
        return self.request["hardware"]

    @property
    def policy(self) -> str | None:
        """Name and version of the policy; None where every block was alike."""
        told = self.request.get("policy")
        return None if told is None else f"{told['name']} {told['version']}"

    def asked(self, names: Iterable[str]) -> str:
        """What it asked for under these names, as one text: the same for cells that are alike."""
        return canonical([self.request.get(name) for name in names])


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedCell:
    """A configuration that raised; the next sweep with the same request tries it again."""

    id: str
    folder: Path
    request: dict[str, Any]
    error: str
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedCell:
    """A configuration that is being filled, or was when its process ended."""

    id: str
    folder: Path
    request: dict[str, Any]  # empty where the crash left not even that
    done: int  # decodes on the disk
    decodes: int | None  # how many there will be


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A results folder: its cells, and their rows as tables."""

    path: Path
    cells: tuple[Cell, ...]
    failed: tuple[FailedCell, ...] = ()
    unfinished: tuple[UnfinishedCell, ...] = ()
    # What finished cells hold never changes, so their files are read once.
    _tables: dict[str, pa.Table] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def select(self, **equals: Any) -> Run:
        """The cells whose request has these values; a tuple stands for any of its members.

        Raises ValueError for a name that no request has.
        """
        every = (*self.cells, *self.failed, *self.unfinished)
        known = sorted({key for cell in every for key in cell.request})
        for key in equals:
            if every and key not in known:
                raise ValueError(f"no cell has a setting {key!r}; there are: {', '.join(known)}.")

        def keep(cell: Cell | FailedCell | UnfinishedCell) -> bool:
            return all(_is(cell.request.get(key), wanted) for key, wanted in equals.items())

        return Run(
            path=self.path,
            cells=tuple(filter(keep, self.cells)),
            failed=tuple(filter(keep, self.failed)),
            unfinished=tuple(filter(keep, self.unfinished)),
        )

    def cell(self, name: str) -> Cell:
        """The finished cell of that id."""
        for cell in self.cells:
            if cell.id == name:
                return cell
        raise ValueError(f"there is no finished cell {name!r} in {self.path}.")

    def blocks(self, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of all blocks, cell after cell; of `columns` alone where they are named."""
        return self._rows(BLOCK_FILE, BLOCKS, columns)

    def prompts(self, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of all decodes, cell after cell; of `columns` alone where they are named."""
        return self._rows(PROMPT_FILE, PROMPTS, columns)

    def texts(self, cell_id: str) -> dict[str, Any]:
        """`pieces` by "prompt id|turn|repeat", and `tokens` by id."""
        return read_json(self.cell(cell_id).folder / TEXTS)

    def check(self, name: str) -> dict[str, Any] | None:
        """The result of a check made on this run; None where it was not made."""
        path = self.path / "checks" / f"{name}.json"
        return read_json(path) if path.is_file() else None

    def write_check(self, name: str, result: Mapping[str, Any]) -> None:
        folder = self.path / "checks"
        folder.mkdir(exist_ok=True)
        write_json(folder / f"{name}.json", result)

    def _rows(self, file: str, schema: pa.Schema, columns: Sequence[str] | None) -> pa.Table:
        if file not in self._tables:
            paths = [cell.folder / file for cell in self.cells]
            with _system_memory(), ThreadPoolExecutor() as pool:
                tables = list(pool.map(partial(read_stored, schema=schema), paths))
            whole = pa.concat_tables(tables).cast(schema) if tables else schema.empty_table()
            self._tables[file] = whole
        table = self._tables[file]
        return table if columns is None else table.select(list(columns))


@contextmanager
def _system_memory() -> Iterator[None]:
    """Take memory from the system: of a thousand small tables that is twice as fast as Arrow's."""
    before = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())
    try:
        yield
    finally:
        pa.set_memory_pool(before)


def _is(value: Any, wanted: Any) -> bool:
    return value in wanted if isinstance(wanted, tuple | list | range) else value == wanted


def open_run(path: str | Path) -> Run:
    """The run in a folder.

    Raises `NotARun` for a folder without cells/, `DamagedCell` for a file that cannot be read,
    `NewerSchema` for one that a later version wrote.
    """
    path = Path(path)
    if not (path / "cells").is_dir():
        why = "it has no folder cells/" if path.is_dir() else "there is no such folder"
        raise NotARun(f"{path} is not a run: {why}. A sweep makes one.")
    finished: list[Cell] = []
    failed: list[FailedCell] = []
    unfinished: list[UnfinishedCell] = []
    for folder in sorted(path.joinpath("cells").iterdir()):
        if (folder / CELL).is_file():
            finished.append(_read_cell(folder))
        elif (folder / FAILED).is_file():
            failed.append(_read_failed(folder))
        elif (folder / PART).is_file():
            unfinished.append(_read_unfinished(folder))
    return Run(
        path=path,
        cells=tuple(sorted(finished, key=_grid_order)),
        failed=tuple(sorted(failed, key=_grid_order)),
        unfinished=tuple(sorted(unfinished, key=_grid_order)),
    )


def _grid_order(cell: Cell | FailedCell | UnfinishedCell) -> tuple[Any, ...]:
    ask = cell.request.get
    window = ask("draft_window")
    return (
        ask("engine") or "",
        ask("dtype") or "",
        ask("block_size") or 0,
        window is not None,  # the full window first
        -(window or 0),
        cell.id,
    )


def _read_cell(folder: Path) -> Cell:
    raw = read_json(folder / CELL)
    schema = raw.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        refuse_newer(folder / CELL, schema)
    try:
        return Cell(
            id=raw["id"],
            folder=folder,
            request=raw["request"],
            provenance=raw["provenance"],
            summary=raw["summary"],
            requested_block_sizes=tuple(raw["requested_block_sizes"]),
        )
    except (KeyError, TypeError) as error:
        raise DamagedCell(f"{folder / CELL} lacks {error}. {REMEDY}") from error


def _read_failed(folder: Path) -> FailedCell:
    raw = read_json(folder / FAILED)
    return FailedCell(
        id=folder.name,
        folder=folder,
        request=raw.get("request") or {},
        error=str(raw.get("error")),
        traceback=str(raw.get("traceback")),
    )


def _read_unfinished(folder: Path) -> UnfinishedCell:
    with (folder / PART).open("rb") as file:
        lines, _ = whole_lines(file.readline())
        done = sum(line.startswith(b'{"decode"') and line.endswith(b"\n") for line in file)
    cell = lines[0].get("cell", {}) if lines else {}
    return UnfinishedCell(
        id=folder.name,
        folder=folder,
        request=cell.get("request", {}),
        done=done,
        decodes=cell.get("decodes"),
    )
