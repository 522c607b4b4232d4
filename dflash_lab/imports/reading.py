"""Files as JSON objects, and single values out of them, each checked where it is read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_lab.imports.records import ImportFault, Step, count, counts

Record = Mapping[str, Any]


def records_of(path: Path) -> list[Record]:
    """The JSON objects of a file; ImportFault names the line that is torn."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ImportFault(f"{path.name} is no text in UTF-8 ({error.reason}).") from error
    lines = [(i, line) for i, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if not lines:
        return []
    if len(lines) > 1 and lines[0][1].rstrip().endswith("}"):
        found = [_parsed(path, line, i) for i, line in lines]
    else:
        whole = _parsed(path, text, 1)
        found = whole if isinstance(whole, list) else [whole]
    for place, record in enumerate(found):
        if not isinstance(record, dict):
            kind = type(record).__name__
            raise ImportFault(f"{path.name}, record {place} is a {kind}; expected an object.")
    return found


def _parsed(path: Path, text: str, line: int) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        at = line - 1 + getattr(error, "lineno", 1)
        raise ImportFault(
            f"{path.name} is torn, or no JSON, at line {at}: {error}. Take a whole copy; nothing "
            "was imported."
        ) from error


IDS = ("prompt_id", "request_id", "sample_id", "id")


def first(record: Record, *names: str) -> Any:
    """The value of the first name that a record has; None without any."""
    return next((record[name] for name in names if record.get(name) is not None), None)


def about(record: Record, where: str) -> dict[str, Any]:
    """Id, turn, task and window, where a record tells them."""
    named = first(record, *IDS)
    return {
        "prompt_id": "" if named is None else str(named),
        "turn": count(record.get("turn"), "turn", where) or 0,
        "task": record.get("task"),
        "draft_window": count(record.get("draft_window"), "draft_window", where),
    }


def ids_of(values: Any, name: str, where: str) -> tuple[int, ...] | None:
    """A list of token ids; None where it is not told."""
    found = counts(values, name, where)
    if found is not None and None in found:
        raise ImportFault(f"{where}: {name} lacks a token id.")
    return found


def seconds(record: Record, name: str, where: str) -> float | None:
    """A time named NAME_s, or NAME_ms in thousandths."""
    whole, thousandths = (number_of(record, f"{name}_{unit}", where) for unit in ("s", "ms"))
    return thousandths / 1000 if whole is None and thousandths is not None else whole


def number_of(record: Record, name: str, where: str) -> float | None:
    """A number from 0, or None where it is not told."""
    value = record.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ImportFault(f"{where}: {name} is {value!r}; expected a number from 0.")
    return float(value)


def needed(value: Any, what: str, where: str) -> Any:
    """The value, or an ImportFault where it is not told."""
    if value is None:
        raise ImportFault(f"{where} has no {what}; that is the least this form needs.")
    return value


def sums_of(steps: Sequence[Step] | None) -> dict[str, int | None]:
    """Blocks, drafted and accepted of steps, a sum being None where one of them is not told."""
    if steps is None:
        return {}
    of_draft = [step for step in steps if step.proposer == "draft"]
    told = {name: [getattr(step, name) for step in of_draft] for name in ("drafted", "accepted")}
    sums = {name: None if None in each else sum(each) for name, each in told.items()}
    return {"blocks": len(of_draft), **sums}
