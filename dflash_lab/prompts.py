"""Prompts: the bundled set or a local file, as one list of `Prompt`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parent
_INSIDE = _PACKAGE / "_data"  # there in an installed wheel; a clone has `data` beside the package
DATA = _INSIDE if _INSIDE.is_dir() else _PACKAGE.parent / "data"
BUNDLED = ("mini",)
FILES = (".jsonl", ".parquet")
# Columns of the public sets: what the user says, what names a row. The first that is there counts.
TEXTS, IDS = ("turns", "prompt", "question", "problem"), ("id", "question_id", "task_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One conversation to decode."""

    id: str
    turns: tuple[str, ...]  # the user's turns; the model answers each
    category: str
    source: str

    @property
    def sha(self) -> str:
        """A short hash of the text, so that a stored run knows what it ran."""
        return hashlib.sha256(json.dumps(self.turns).encode()).hexdigest()[:16]


def load_prompts(
    source: str = "mini",
    categories: Sequence[str] | None = None,
    limit: int | None = None,
) -> list[Prompt]:
    """Prompts of the bundled set `mini`, or of a local `.jsonl` or `.parquet` file, in file order.

    A row has `turns` (list of text) or one of `prompt`, `question` and `problem`, as the public
    sets have, and optionally an `id` (or `question_id`, `task_id`) and a `category`. Without
    `categories` the bundled set leaves its long prompts out.
    Raises ValueError naming file and row for anything else; FileNotFoundError for no file.
    """
    prompts = _read(_path(source), source)
    if categories is not None:
        known = sorted({prompt.category for prompt in prompts})
        unknown = sorted(set(categories) - set(known))
        if unknown:
            raise ValueError(f"no category {', '.join(unknown)} in {source}; it has {known}.")
        prompts = [prompt for prompt in prompts if prompt.category in categories]
    elif source in BUNDLED:
        prompts = [prompt for prompt in prompts if prompt.category != "long"]
    if limit is not None and limit > len(prompts):
        raise ValueError(
            f"asked for {limit} prompts, but {source} has {len(prompts)} of that kind."
        )
    return prompts[:limit]


def _path(source: str) -> Path:
    if source in BUNDLED:
        return DATA / "prompts" / f"{source}.jsonl"
    path = Path(source)
    if path.suffix not in FILES:
        raise ValueError(
            f"prompts are {source!r}; expected {BUNDLED[0]!r} or a {' or '.join(FILES)} file. "
            "No set is fetched from the hub: download its file and name that."
        )
    if not path.is_file():
        raise FileNotFoundError(f"there is no prompt file {path}.")
    return path


def _read(path: Path, source: str) -> list[Prompt]:
    rows = _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)
    prompts = [_prompt(raw, where, number, source) for number, where, raw in rows]
    if not prompts:
        raise ValueError(f"{path} holds no prompts.")
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise ValueError(f"{path} has the id {prompt.id!r} twice; ids name results, so no two.")
        seen.add(prompt.id)
    return prompts


def _json_rows(path: Path) -> Iterator[tuple[int, str, Any]]:
    """Number, place and content of each line that is not blank."""
    try:
        # not splitlines(): it also splits at characters that may stand inside a JSON string
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        if line.strip():
            try:
                yield number, where, json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where}: not JSON: {error}") from error


def _parquet_rows(path: Path) -> Iterator[tuple[int, str, Any]]:
    """Number, place and content of each row, empty columns left out."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(path).to_pylist()
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is no parquet file: {error}") from error
    for number, row in enumerate(rows, start=1):
        filled = {name: value for name, value in row.items() if value is not None}
        yield number, f"{path}, row {number}", filled


def _prompt(raw: Any, where: str, number: int, source: str) -> Prompt:
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: a {type(raw).__name__}, expected a JSON object.")
    said = next((raw[name] for name in TEXTS if name in raw), None)
    turns = [said] if isinstance(said, str) else said
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t for t in turns):
        raise ValueError(f"{where}: expected `prompt` (text) or `turns` (a list of text).")
    return Prompt(
        id=str(next((raw[name] for name in IDS if name in raw), f"row-{number}")),
        turns=tuple(turns),
        category=str(raw.get("category", "none")),
        source=source,
    )
