"""Acceptance maps beside a run: a row a text, and one a text, block size and window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from dflash_lab.store.files import (
    parquet,
    read_json,
    read_table,
    refuse_newer,
    write_atomic,
    write_json,
)
from dflash_lab.store.schema import MAP_ACCEPTED, MAP_TEXTS, SCHEMA

# Files of maps/<id>/ in the folder of a run.
MAPS, MAP, TEXT_FILE, ACCEPTED_FILE = "maps", "map.json", "texts.parquet", "accepted.parquet"


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
        write_atomic(folder / file, parquet(table))
    write_json(folder / MAP, {"schema": SCHEMA, **header})


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
    header = read_json(folder / MAP)
    if header.get("schema", 0) > SCHEMA:
        refuse_newer(folder / MAP, header["schema"])
    texts = read_table(folder / TEXT_FILE, MAP_TEXTS)
    accepted = read_table(folder / ACCEPTED_FILE, MAP_ACCEPTED)
    return header, texts.to_pylist(), accepted.to_pylist()
