"""Files of a run: written whole or not at all, read with one clear error where they are damaged."""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dflash_lab.store.schema import SCHEMA, SCHEMA_KEY
from dflash_lab.store.strict_json import to_json


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


REMEDY = "Remove its folder; the next run makes it again."


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


def write_json(path: Path, value: Any) -> None:
    """Strict JSON, indented, atomically."""
    write_atomic(path, to_json(value, indent=1) + "\n")


def parquet(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise DamagedCell(f"{path} is missing. {REMEDY}") from error
    except ValueError as error:
        raise DamagedCell(f"{path} is not valid JSON ({error}). {REMEDY}") from error
    if not isinstance(raw, dict):
        raise DamagedCell(f"{path} holds a {type(raw).__name__}, expected an object. {REMEDY}")
    return raw


def refuse_newer(path: Path, schema: int) -> None:
    raise NewerSchema(
        f"{path} has schema {schema}, and this version reads up to {SCHEMA}. Update dflash_lab."
    )


def read_table(path: Path, schema: pa.Schema) -> pa.Table:
    """One parquet file of a cell with the columns of `schema`."""
    return read_stored(path, schema).cast(schema)


def read_stored(path: Path, schema: pa.Schema) -> pa.Table:
    """As `read_table`, its types as the file has them: many tables are cast at once, not each."""
    try:
        with pq.ParquetFile(path) as file:
            found = file.schema_arrow.metadata or {}
            written = int(found.get(SCHEMA_KEY, b"0"))
            if written > SCHEMA:
                refuse_newer(path, written)
            if file.schema_arrow.names != schema.names:
                raise DamagedCell(f"{path} has columns {file.schema_arrow.names}. {REMEDY}")
            table = file.read(use_threads=False)
    except (FileNotFoundError, pa.ArrowInvalid) as error:
        raise DamagedCell(f"{path} cannot be read ({error}). {REMEDY}") from error
    return table
