"""A cell that is being filled: a line a decode, and at the end its final files."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_lab.store.decodes import (
    DecodeKey,
    block_table,
    cell_texts,
    decode_key,
    prompt_table,
    summarise,
)
from dflash_lab.store.files import append_synced, parquet, write_atomic, write_json
from dflash_lab.store.schema import SCHEMA
from dflash_lab.store.strict_json import plain, to_json

CELL, FAILED, PART, TEXTS = "cell.json", "failed.json", "part.jsonl", "texts.json"

BLOCK_FILE, PROMPT_FILE = "blocks.parquet", "prompts.parquet"


class TornLineWarning(UserWarning):
    """The end of a part file was lost in a crash; its prompt is decoded again."""


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
    lines, good = whole_lines(data)
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


def whole_lines(data: bytes) -> tuple[list[dict[str, Any]], int]:
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
    write_atomic(folder / PROMPT_FILE, parquet(prompt_table(name, lines)))
    write_atomic(folder / BLOCK_FILE, parquet(block_table(name, lines)))
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


def tidy(folder: Path) -> None:
    """Remove what dead processes left: files half written, and the mark of a failure."""
    for path in (*folder.glob("*.tmp.*"), folder / FAILED):
        path.unlink(missing_ok=True)


def fail_cell(part: Part, error: str, traceback: str) -> None:
    """Mark a cell as failed, with the reason; its decodes stay for another try."""
    request = part.cell["request"]
    write_json(part.folder / FAILED, {"error": error, "traceback": traceback, "request": request})
