"""Prompts: the bundled set, a public set by name, or a local file, as one list of `Prompt`."""

from __future__ import annotations

import csv
import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

from dflash_lab.config import whole
from dflash_lab.public_sets import SETS, PublicSet, fetch, find_set

_PACKAGE = Path(__file__).resolve().parent
_INSIDE = _PACKAGE / "_data"  # there in an installed wheel; a clone has `data` beside the package
DATA = _INSIDE if _INSIDE.is_dir() else _PACKAGE.parent / "data"
BUNDLED = ("mini",)
FILES = (".jsonl", ".parquet", ".csv")
# Columns of the public sets: what the user says, what names a row. The first that is there counts.
TEXTS, IDS = (
    ("turns", "prompt", "question", "problem"),
    ("id", "question_id", "task_id", "prompt_id", "unique_id"),
)
ANSWERS = ("answer", "reference")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One conversation to decode."""

    id: str
    turns: tuple[str, ...]  # the user's turns; the model answers each
    category: str
    source: str
    answer: str | None = None  # what the set gives as the right one, where it does

    @property
    def sha(self) -> str:
        """A short hash of the text, so that a stored run knows what it ran."""
        return hashlib.sha256(json.dumps(self.turns).encode()).hexdigest()[:16]


def load_prompts(
    source: str = "mini",
    categories: Sequence[str] | None = None,
    limit: int | None = None,
    *,
    random_state: int | None = None,
    template: str | None = None,
) -> list[Prompt]:
    """Prompts of the bundled set `mini`, a public set, or a local .jsonl, .parquet or .csv file.

    Public sets are gsm8k, math500, humaneval, mbpp and mt-bench, or any other by
    `hf:org/name:config:split@revision`; `gsm8k=FILE` reads a local file of such rows the same way.
    A row has `turns` (list of text) or one of `prompt`, `question` and `problem`, and optionally an
    `id` (or `question_id`, `task_id`, `prompt_id`, `unique_id`) and a `category`. `template`, as in
    "{question} Be brief.", makes the text of any other columns.

    In file order, or with `random_state` in an order drawn from it alone: the first 10 are those of
    any larger `limit`. Without `categories` the bundled set leaves its long prompts out. Raises
    ValueError naming file and row for anything else; FileNotFoundError for no file.
    """
    path, public = _path(source)
    form = template if template is not None or public is None else public.template
    prompts = _read(path, source, form, "none" if public is None else public.category)
    if categories is not None:
        known = sorted({prompt.category for prompt in prompts})
        unknown = sorted(set(categories) - set(known))
        if unknown:
            raise ValueError(f"no category {', '.join(unknown)} in {source}; it has {known}.")
        prompts = [prompt for prompt in prompts if prompt.category in categories]
    elif source in BUNDLED:
        prompts = [prompt for prompt in prompts if prompt.category != "long"]
    if limit is not None:
        whole("limit", limit, 1, "None takes every prompt.")
        if limit > len(prompts):
            raise ValueError(
                f"asked for {limit} prompts, but {source} has {len(prompts)} of that kind."
            )
    if random_state is not None:
        # A generator of its own: nobody's draws before or between change which prompts these are.
        random.Random(random_state).shuffle(prompts)
    return prompts[:limit]


def _path(source: str) -> tuple[Path, PublicSet | None]:
    """The file of a source, and the public set whose rows it holds."""
    if source in BUNDLED:
        return DATA / "prompts" / f"{source}.jsonl", None
    name, equals, file = source.partition("=")
    public = SETS.get(name) if equals else None
    path = Path(file if public is not None else source)
    if path.suffix not in FILES:
        if (found := find_set(source)) is not None:
            return fetch(*found), found[0]
        raise ValueError(
            f"prompts are {source!r}; expected {BUNDLED[0]}, one of {', '.join(SETS)}, "
            f"hf:org/name:config:split@revision, or a {', '.join(FILES[:-1])} or {FILES[-1]} file."
        )
    if not path.is_file():
        raise FileNotFoundError(f"there is no prompt file {path}.")
    return path, public


def _read(path: Path, source: str, template: str | None, category: str) -> list[Prompt]:
    rows = READERS[path.suffix](path)
    prompts = [
        _prompt(raw, where, number, source, template, category) for number, where, raw in rows
    ]
    if not prompts:
        raise ValueError(f"{path} holds no prompts.")
    check_ids([prompt.id for prompt in prompts], str(path))
    return prompts


def check_ids(ids: Sequence[str], where: str = "the list of prompts") -> None:
    """Raise ValueError for an id that stands twice; `where` says in the error in what."""
    twice = (name for name, count in Counter(ids).items() if count > 1)
    if (name := next(twice, None)) is not None:
        raise ValueError(f"{where} has the id {name!r} twice; ids name results, so no two.")


def _json_rows(path: Path) -> Iterator[tuple[int, str, Any]]:
    """Number, place and content of each line that is not blank."""
    # not splitlines(): it also splits at characters that may stand inside a JSON string
    lines = _text(path).split("\n")
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        if line.strip():
            try:
                yield number, where, json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where}: not JSON: {error}") from error


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error


def _csv_rows(path: Path) -> Iterator[tuple[int, str, Any]]:
    """Number, place and content of each record, empty fields left out; `turns` is a JSON list."""
    _text(path)  # says so where it is not UTF-8
    with path.open(encoding="utf-8-sig", newline="") as file:  # line ends inside quotes stay
        reader = csv.DictReader(file, strict=True)
        try:
            for number, row in enumerate(reader, start=1):
                where = f"{path}, record {number}"
                if None in row or None in row.values():
                    fields = len(reader.fieldnames or ())
                    raise ValueError(
                        f"{where}: more or fewer than the {fields} fields of the head."
                    )
                filled = {name: value for name, value in row.items() if value}
                if filled.get("turns", "").lstrip().startswith("["):
                    filled["turns"] = json.loads(filled["turns"])
                yield number, where, filled
        except (csv.Error, json.JSONDecodeError) as error:
            raise ValueError(f"{path}, near line {reader.line_num}: not CSV: {error}") from error


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


READERS = {".jsonl": _json_rows, ".parquet": _parquet_rows, ".csv": _csv_rows}


def _prompt(
    raw: Any, where: str, number: int, source: str, template: str | None, category: str
) -> Prompt:
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: a {type(raw).__name__}, expected a JSON object.")
    if template is None:
        said = next((raw[name] for name in TEXTS if name in raw), None)
    else:
        said = _filled(template, raw, where)
    turns = [said] if isinstance(said, str) else said
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t for t in turns):
        raise ValueError(f"{where}: expected `prompt` (text) or `turns` (a list of text).")
    answer = next((raw[name] for name in ANSWERS if isinstance(raw.get(name), str)), None)
    return Prompt(
        id=str(next((raw[name] for name in IDS if name in raw), f"row-{number}")),
        turns=tuple(turns),
        category=str(raw.get("category", category)),
        source=source,
        answer=answer,
    )


def _filled(template: str, raw: Mapping[str, Any], where: str) -> str:
    """The template with a row's columns in it."""
    try:
        names = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
    except ValueError as error:
        raise ValueError(f"the template {template!r} cannot be read: {error}.") from error
    if not names or not all(name.isidentifier() for name in names):
        raise ValueError(
            f"the template {template!r} has the fields {sorted(names)}; expected names of columns "
            "in braces, as in '{question} Be brief.', and {{ }} for braces themselves."
        )
    if missing := sorted(names - set(raw)):
        raise ValueError(
            f"{where}: the template asks for {', '.join(missing)}, but the row has "
            f"{', '.join(sorted(map(str, raw)))}."
        )
    return template.format_map({name: raw[name] for name in names})
