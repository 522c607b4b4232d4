"""The stored run: cells on disk, written so that a kill at any moment loses one prompt at most.

A finished cell is a folder with `cell.json`, written last, beside `prompts.parquet`,
`blocks.parquet` and `texts.json`. While it is filled there is a `part.jsonl` instead.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import errno
import hashlib
import io
import json
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dflash_lab.trace import BlockRecord, Trace

SCHEMA = 1
SCHEMA_KEY = b"dflash_lab.schema"
_METADATA = {SCHEMA_KEY: str(SCHEMA).encode()}

_KEYS = [
    ("cell", pa.string()),
    ("prompt_id", pa.string()),
    ("turn", pa.int32()),
    ("repeat", pa.int32()),
]
BLOCKS = pa.schema(
    [
        *_KEYS,
        ("index", pa.int32()),
        ("start", pa.int32()),
        ("anchor", pa.int32()),
        ("block_size", pa.int32()),
        ("drafted", pa.list_(pa.int32())),
        ("posterior", pa.list_(pa.int32())),
        ("accepted", pa.int32()),
        ("emitted", pa.int32()),
        ("cut", pa.bool_()),
        ("draft_cache_tokens", pa.int64()),
        ("draft_cache_bytes", pa.int64()),
        ("draft_s", pa.float64()),  # stage seconds are null in timing mode "whole"
        ("verify_s", pa.float64()),
        ("commit_s", pa.float64()),
        ("total_s", pa.float64()),
        ("draft_prob", pa.list_(pa.float32())),
        ("target_prob", pa.list_(pa.float32())),
    ],
    metadata=_METADATA,
)
PROMPTS = pa.schema(
    [
        *_KEYS,
        ("task", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("new_ids", pa.list_(pa.int32())),
        ("text", pa.string()),
        ("finish_reason", pa.string()),
        ("ttft_s", pa.float64()),
        ("decode_s", pa.float64()),
        ("total_s", pa.float64()),
        ("peak_bytes", pa.int64()),
        ("order", pa.int64()),  # place of this decode in the run's whole sequence
    ],
    metadata=_METADATA,
)

CELL, FAILED, PART, TEXTS = "cell.json", "failed.json", "part.jsonl", "texts.json"
BLOCK_FILE, PROMPT_FILE = "blocks.parquet", "prompts.parquet"

# An acceptance map beside a run: maps/<id>/. One row a text, and one a text, block size and window.
MAPS, MAP, TEXT_FILE, ACCEPTED_FILE = "maps", "map.json", "texts.parquet", "accepted.parquet"
MAP_TEXTS = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("turn", pa.int32()),
        ("task", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("new_ids", pa.list_(pa.int32())),
        ("finite", pa.bool_()),
    ],
    metadata=_METADATA,
)
MAP_ACCEPTED = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("turn", pa.int32()),
        ("block_size", pa.int32()),
        ("draft_window", pa.int32()),
        ("accepted", pa.list_(pa.int32())),  # an anchor each
        ("drafted", pa.list_(pa.int32())),  # anchors times slots of the largest size; -1 is none
        ("confidences", pa.list_(pa.float32())),  # the same shape; NaN is none
    ],
    metadata=_METADATA,
)


class RunError(ValueError):
    """A run folder that cannot be read as it is; the message names the file and the way out."""


class NotARun(RunError):
    """A folder that holds no run."""


class DamagedCell(RunError):
    """A file of a cell that is not what was written."""


class NewerSchema(RunError):
    """Written by a later version than this one."""


class DiskFull(OSError):
    """No space left; what was finished is kept."""


class TornLineWarning(UserWarning):
    """The end of a part file was lost in a crash; its prompt is decoded again."""


# --- JSON ---------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """`value` in what strict JSON knows: a number that is not finite is null.

    Takes dataclasses, paths, times, sets, and arrays or scalars of numpy and torch.
    Raises TypeError for anything else, ValueError where two keys of a mapping become one.
    """
    if value is None or isinstance(value, str | bool | int):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return _plain_mapping(value)
    if isinstance(value, set | frozenset):
        return sorted(plain(item) for item in value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, dt.datetime | dt.date):
        return value.isoformat()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):  # numpy and torch: a scalar gives a number, an array lists
        return plain(value.tolist())
    raise TypeError(f"a {type(value).__name__} has no place in JSON: {value!r}")


def _plain_mapping(value: Mapping[Any, Any]) -> dict[str, Any]:
    made = {str(key): plain(item) for key, item in value.items()}
    if len(made) != len(value):
        raise ValueError(f"keys {sorted(map(repr, value))} are not different as text")
    return made


def to_json(value: Any, indent: int | None = None) -> str:
    """Strict JSON of anything `plain` takes; keys keep their order."""
    return json.dumps(plain(value), allow_nan=False, ensure_ascii=False, indent=indent)


def canonical(value: Any) -> str:
    """The one JSON text of a value: keys sorted, no spaces."""
    return json.dumps(
        plain(value), allow_nan=False, ensure_ascii=False, sort_keys=True, separators=(",", ":")
    )


def cell_id(request: Mapping[str, Any]) -> str:
    """The name of a cell: a hash of its request, so of everything that determines the result."""
    return hashlib.sha256(canonical(request).encode()).hexdigest()[:16]


# --- writing ------------------------------------------------------------------------------------


@contextmanager
def clear_when_full(path: Path) -> Iterator[None]:
    """Turn a full disk into `DiskFull`, which says what is kept and what to do."""
    try:
        yield
    except OSError as error:
        if isinstance(error, DiskFull) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DiskFull(
            error.errno,
            "no space left on the disk. Finished cells and decoded prompts are kept: free some "
            "space and give the same call again, it goes on from there. Not written",
            str(path),
        ) from error


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write a file whole or not at all, and on the disk before the old one is gone."""
    data = content.encode() if isinstance(content, str) else content
    beside = path.with_name(f"{path.name}.tmp.{os.getpid()}")
    try:
        with clear_when_full(path):
            _write_synced(beside, data)
            os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, value: Any) -> None:
    """Strict JSON, indented, atomically."""
    write_atomic(path, to_json(value, indent=1) + "\n")


def _parquet(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


# --- one decode as rows -------------------------------------------------------------------------


def decode_line(
    trace: Trace, keys: Mapping[str, Any], pieces: Sequence[str], texts: Mapping[int, str]
) -> dict[str, Any]:
    """What the part file keeps of a decode. `keys`: prompt_id, turn, repeat, task and order."""
    return {
        "prompt": {
            **keys,
            "prompt_ids": trace.prompt_ids,
            "new_ids": trace.tokens,
            "text": trace.text,
            "finish_reason": trace.finish_reason,
            "ttft_s": trace.ttft_s,
            "decode_s": trace.decode_s,
            "total_s": trace.total_s,
            "peak_bytes": trace.peak_bytes,
        },
        "blocks": [block_row(block) for block in trace.blocks],
        "pieces": pieces,
        "tokens": texts,
        "warnings": trace.warnings,
    }


def block_row(block: BlockRecord) -> dict[str, Any]:
    """The columns of `blocks.parquet` that a record knows."""
    return {
        "index": block.index,
        "start": block.start,
        "anchor": block.anchor,
        "block_size": block.block_size,
        "drafted": block.drafted,
        "posterior": block.posterior,
        "accepted": block.accepted,
        "emitted": block.emitted,
        "cut": block.cut,
        "draft_cache_tokens": block.draft_cache_tokens,
        "draft_cache_bytes": block.draft_cache_bytes,
        "draft_s": block.seconds.draft,
        "verify_s": block.seconds.verify,
        "commit_s": block.seconds.commit,
        "total_s": block.seconds.total,
        "draft_prob": block.draft_prob,
        "target_prob": block.target_prob,
    }


DecodeKey = tuple[str, int, int]  # prompt id, turn, repeat


def decode_key(line: Mapping[str, Any]) -> DecodeKey:
    """Which decode of its cell a line is."""
    prompt = line["prompt"]
    return prompt["prompt_id"], prompt["turn"], prompt["repeat"]


# --- a cell that is being filled ----------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Part:
    """What a part file holds: the cell's description, the processes and the decodes so far."""

    folder: Path
    cell: dict[str, Any]  # id, request, requested_block_sizes, decodes (how many there will be)
    processes: list[dict[str, Any]]  # provenance of each process that decoded for this cell
    decodes: dict[DecodeKey, dict[str, Any]]

    def add_process(self, provenance: Mapping[str, Any]) -> None:
        self.processes.append(self._append("process", provenance))

    def add_decode(self, line: Mapping[str, Any]) -> None:
        """Keep one decode; it is on the disk when this returns."""
        self.decodes[decode_key(line)] = self._append("decode", line)

    def _append(self, kind: str, value: Any) -> dict[str, Any]:
        text = to_json({kind: value}) + "\n"
        append_synced(self.folder / PART, text.encode())
        return json.loads(text)[kind]


def append_synced(path: Path, data: bytes) -> None:
    """Add to a file; on the disk when this returns, and as before where there was no space."""
    with clear_when_full(path), path.open("ab", buffering=0) as file:
        before, rest = file.tell(), memoryview(data)
        try:
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                file.truncate(before)
            raise


def open_part(folder: Path, cell: Mapping[str, Any]) -> Part:
    """The part file of a cell: begun, or read where it was left; a torn end is cut off.

    `cell`: id, request, requested_block_sizes and decodes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    part = read_part(folder)
    if part is not None:
        return part
    part = Part(folder=folder, cell=plain(cell), processes=[], decodes={})
    write_atomic(folder / PART, to_json({"cell": cell}) + "\n")
    return part


def read_part(folder: Path) -> Part | None:
    """The part file of a folder, repaired; None where there is none or nothing of it is left."""
    path = folder / PART
    if not path.is_file():
        return None
    data = path.read_bytes()
    lines, good = _whole_lines(data)
    if good < len(data):
        os.truncate(path, good)
        warnings.warn(
            f"the last line of cells/{folder.name}/{PART} is torn; its prompt is decoded again.",
            TornLineWarning,
            stacklevel=2,
        )
    if not lines or "cell" not in lines[0]:
        return None
    decodes = [line["decode"] for line in lines if "decode" in line]
    return Part(
        folder=folder,
        cell=lines[0]["cell"],
        processes=[line["process"] for line in lines if "process" in line],
        decodes={decode_key(line): line for line in decodes},
    )


def _whole_lines(data: bytes) -> tuple[list[dict[str, Any]], int]:
    """The objects up to the first line that is not whole, and how many bytes they take."""
    lines, good = [], 0
    for raw in data.splitlines(keepends=True):
        try:
            line = json.loads(raw) if raw.endswith(b"\n") else None
        except ValueError:
            line = None
        if not isinstance(line, dict):
            break
        lines.append(line)
        good += len(raw)
    return lines, good


def finish_cell(
    part: Part, prompt_order: Sequence[str], ended: str, complaints: Sequence[str] = ()
) -> None:
    """Write the cell's final files from its part file, `cell.json` last, and drop the part.

    `complaints` are warnings over the whole cell, beside those of single decodes.
    """
    place = {prompt: index for index, prompt in enumerate(prompt_order)}
    lines = sorted(part.decodes.values(), key=lambda line: _sequence(line, place))
    folder, name = part.folder, part.cell["id"]
    write_atomic(folder / PROMPT_FILE, _parquet(prompt_table(name, lines)))
    write_atomic(folder / BLOCK_FILE, _parquet(block_table(name, lines)))
    write_atomic(folder / TEXTS, to_json(cell_texts(lines)))
    write_json(
        folder / CELL,
        {
            "schema": SCHEMA,
            "id": name,
            "request": part.cell["request"],
            "requested_block_sizes": part.cell["requested_block_sizes"],
            "provenance": joined(part.processes) | {"ended_utc": ended},
            "summary": summarise(lines, complaints),
        },
    )
    (folder / FAILED).unlink(missing_ok=True)
    (folder / PART).unlink(missing_ok=True)


def joined(processes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Provenance of the last process, how many there were, and the unlike ones before it."""
    if not processes:
        return {"processes": 0}
    last = processes[-1]
    alike = ("code", "versions", "models")
    others = [one for one in processes if any(one.get(key) != last.get(key) for key in alike)]
    return {
        **last,
        "started_utc": processes[0].get("started_utc"),
        "processes": len(processes),
        "unlike": others,  # those that ran with other code or other versions
    }


def _sequence(line: Mapping[str, Any], place: Mapping[str, int]) -> tuple[int, int, int]:
    prompt, turn, repeat = decode_key(line)
    return repeat, place[prompt], turn


def prompt_table(cell: str, lines: Iterable[Mapping[str, Any]]) -> pa.Table:
    """`prompts.parquet` of a cell."""
    rows = [{"cell": cell, **line["prompt"]} for line in lines]
    return pa.Table.from_pylist(rows, schema=PROMPTS)


def block_table(cell: str, lines: Iterable[Mapping[str, Any]]) -> pa.Table:
    """`blocks.parquet` of a cell; no rows where nothing was decoded in blocks."""
    rows = []
    for line in lines:
        prompt_id, turn, repeat = decode_key(line)
        keys = {"cell": cell, "prompt_id": prompt_id, "turn": turn, "repeat": repeat}
        rows += [{**keys, **block} for block in line["blocks"]]
    return pa.Table.from_pylist(rows, schema=BLOCKS)


def cell_texts(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """`texts.json`: the piece of text of each new token, and single tokens by id."""
    pieces: dict[str, Any] = {}
    tokens: dict[str, str] = {}
    for line in lines:
        pieces["|".join(map(str, decode_key(line)))] = line["pieces"]
        tokens |= line["tokens"]
    return {"pieces": pieces, "tokens": tokens}


def summarise(lines: Sequence[Mapping[str, Any]], complaints: Sequence[str] = ()) -> dict[str, Any]:
    """Plain sums over a cell; every ratio is made from these or from the tables, elsewhere."""
    prompts = [line["prompt"] for line in lines]
    blocks = [block for line in lines for block in line["blocks"]]
    counted = [block for block in blocks if not block["cut"]]
    reasons = [prompt["finish_reason"] for prompt in prompts if prompt["finish_reason"]]
    orders = [prompt["order"] for prompt in prompts if prompt["order"] is not None]
    return {
        "prompts": len({prompt["prompt_id"] for prompt in prompts}),
        "decodes": len(prompts),
        "prompt_tokens": sum(len(prompt["prompt_ids"] or ()) for prompt in prompts),
        "tokens": sum(len(prompt["new_ids"]) for prompt in prompts),
        "tokens_after_first": sum(max(0, len(prompt["new_ids"]) - 1) for prompt in prompts),
        "blocks": len(blocks),
        "cut_blocks": len(blocks) - len(counted),
        "drafted": sum(len(block["drafted"]) for block in blocks),
        "accepted": sum(block["accepted"] for block in blocks),
        "emitted": sum(block["emitted"] for block in blocks),
        "drafted_uncut": sum(len(block["drafted"]) for block in counted),
        "accepted_uncut": sum(block["accepted"] for block in counted),
        "ttft_s": _total(prompt["ttft_s"] for prompt in prompts),
        "decode_s": _total(prompt["decode_s"] for prompt in prompts),
        "total_s": _total(prompt["total_s"] for prompt in prompts),
        "peak_bytes": max((p["peak_bytes"] for p in prompts if p["peak_bytes"]), default=None),
        "finish_reasons": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
        "first_order": min(orders, default=None),
        "last_order": max(orders, default=None),
        "warnings": sorted({w for line in lines for w in line["warnings"]} | set(complaints)),
    }


def _total(values: Iterable[float | None]) -> float | None:
    """The sum; None where one is missing, as in what was imported."""
    known = list(values)
    return None if None in known else sum(known)


def write_map(
    run: Path,
    header: Mapping[str, Any],
    texts: Sequence[Mapping[str, Any]],
    accepted: Sequence[Mapping[str, Any]],
) -> None:
    """Store an acceptance map under the name header["id"]; it is there once `map.json` is."""
    folder = run / MAPS / header["id"]
    folder.mkdir(parents=True, exist_ok=True)
    tables = {
        TEXT_FILE: pa.Table.from_pylist(list(texts), schema=MAP_TEXTS),
        ACCEPTED_FILE: pa.Table.from_pylist(list(accepted), schema=MAP_ACCEPTED),
    }
    for file, table in tables.items():
        write_atomic(folder / file, _parquet(table))
    write_json(folder / MAP, {"schema": SCHEMA, **header})


def tidy(folder: Path) -> None:
    """Remove what dead processes left: files half written, and the mark of a failure."""
    for path in (*folder.glob("*.tmp.*"), folder / FAILED):
        path.unlink(missing_ok=True)


def fail_cell(part: Part, error: str, traceback: str) -> None:
    """Mark a cell as failed, with the reason; its decodes stay for another try."""
    request = part.cell["request"]
    write_json(part.folder / FAILED, {"error": error, "traceback": traceback, "request": request})


# --- reading ------------------------------------------------------------------------------------


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
        return _read_json(self.cell(cell_id).folder / TEXTS)

    def check(self, name: str) -> dict[str, Any] | None:
        """The result of a check made on this run; None where it was not made."""
        path = self.path / "checks" / f"{name}.json"
        return _read_json(path) if path.is_file() else None

    def write_check(self, name: str, result: Mapping[str, Any]) -> None:
        folder = self.path / "checks"
        folder.mkdir(exist_ok=True)
        write_json(folder / f"{name}.json", result)

    def _rows(self, file: str, schema: pa.Schema, columns: Sequence[str] | None) -> pa.Table:
        if file not in self._tables:
            paths = [cell.folder / file for cell in self.cells]
            with _system_memory(), ThreadPoolExecutor() as pool:
                tables = list(pool.map(partial(_read_stored, schema=schema), paths))
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


def map_names(run: Path) -> list[str]:
    """The acceptance maps stored beside a run, those whose writing was finished."""
    return sorted(path.parent.name for path in (run / MAPS).glob(f"*/{MAP}"))


def read_map(
    run: Path, name: str
) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """Header, texts and accepted counts of a stored map, as `write_map` took them."""
    folder = run / MAPS / name
    if not (folder / MAP).is_file():
        raise ValueError(
            f"there is no acceptance map {name!r} in {run}; there are {map_names(run)}."
        )
    header = _read_json(folder / MAP)
    if header.get("schema", 0) > SCHEMA:
        _refuse_newer(folder / MAP, header["schema"])
    texts = read_table(folder / TEXT_FILE, MAP_TEXTS)
    accepted = read_table(folder / ACCEPTED_FILE, MAP_ACCEPTED)
    return header, texts.to_pylist(), accepted.to_pylist()


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
    raw = _read_json(folder / CELL)
    schema = raw.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        _refuse_newer(folder / CELL, schema)
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
        raise DamagedCell(f"{folder / CELL} lacks {error}. {_REMEDY}") from error


def _read_failed(folder: Path) -> FailedCell:
    raw = _read_json(folder / FAILED)
    return FailedCell(
        id=folder.name,
        folder=folder,
        request=raw.get("request") or {},
        error=str(raw.get("error")),
        traceback=str(raw.get("traceback")),
    )


def _read_unfinished(folder: Path) -> UnfinishedCell:
    with (folder / PART).open("rb") as file:
        lines, _ = _whole_lines(file.readline())
        done = sum(line.startswith(b'{"decode"') and line.endswith(b"\n") for line in file)
    cell = lines[0].get("cell", {}) if lines else {}
    return UnfinishedCell(
        id=folder.name,
        folder=folder,
        request=cell.get("request", {}),
        done=done,
        decodes=cell.get("decodes"),
    )


_REMEDY = "Remove its folder; the next run makes it again."


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise DamagedCell(f"{path} is missing. {_REMEDY}") from error
    except ValueError as error:
        raise DamagedCell(f"{path} is not valid JSON ({error}). {_REMEDY}") from error
    if not isinstance(raw, dict):
        raise DamagedCell(f"{path} holds a {type(raw).__name__}, expected an object. {_REMEDY}")
    return raw


def _refuse_newer(path: Path, schema: int) -> None:
    raise NewerSchema(
        f"{path} has schema {schema}, and this version reads up to {SCHEMA}. Update dflash_lab."
    )


def read_table(path: Path, schema: pa.Schema) -> pa.Table:
    """One parquet file of a cell with the columns of `schema`."""
    return _read_stored(path, schema).cast(schema)


def _read_stored(path: Path, schema: pa.Schema) -> pa.Table:
    """As `read_table`, its types as the file has them: many tables are cast at once, not each."""
    try:
        with pq.ParquetFile(path) as file:
            found = file.schema_arrow.metadata or {}
            written = int(found.get(SCHEMA_KEY, b"0"))
            if written > SCHEMA:
                _refuse_newer(path, written)
            if file.schema_arrow.names != schema.names:
                raise DamagedCell(f"{path} has columns {file.schema_arrow.names}. {_REMEDY}")
            table = file.read(use_threads=False)
    except (FileNotFoundError, pa.ArrowInvalid) as error:
        raise DamagedCell(f"{path} cannot be read ({error}). {_REMEDY}") from error
    return table
