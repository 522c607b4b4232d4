"""Strict JSON of anything, and the name of a cell made from it."""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
import json
import math
import os
from collections.abc import Mapping
from typing import Any


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
