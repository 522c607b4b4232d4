"""What was imported, on disk: `imports/<id>/` in a run, and cells where the source tells enough.

A cell needs every block's accepted, emitted and drafted counts, and the token ids of the output.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dflash_lab import __version__
from dflash_lab.imports.forms import COUNTER_FORM, FORMS, read_requests
from dflash_lab.imports.frames import Imported
from dflash_lab.imports.records import Request, Step
from dflash_lab.imports.servers import read_counters
from dflash_lab.provenance import utc_now
from dflash_lab.store import (
    SCHEMA,
    Run,
    cell_id,
    finish_cell,
    open_part,
    open_run,
    write_atomic,
    write_json,
)

FOLDER, HEADER, TABLES = "imports", "import.json", ("blocks", "prompts", "lengths", "survival")


def import_traces(form: str, path: str | Path, before: str | Path | None = None) -> Imported:
    """Read a file of another system into this project's frames; see `FORMS` for the forms.

    `before` is an earlier reading of the same server, for "vllm-counters" alone. Raises ValueError
    for an unknown form, a torn file and counts that cannot be.
    """
    known = (*FORMS, COUNTER_FORM)
    if form not in known:
        raise ValueError(f"the form is {form!r}; expected one of {', '.join(known)}.")
    if before is not None and form != COUNTER_FORM:
        raise ValueError(f"before is an earlier reading of {COUNTER_FORM}; {form} has none.")
    path = Path(path)
    facts = {"file": path.name, "sha": _sha(path)}
    if form == COUNTER_FORM:
        earlier = None if before is None else Path(before)
        facts["before_sha"] = None if earlier is None else _sha(earlier)
        told = read_counters(path, earlier)
        return Imported(form=form, engine="vllm", counters=told, facts=facts)
    requests = read_requests(form, path)
    return Imported(form=form, engine=FORMS[form].engine, requests=requests, facts=facts)


def _sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def save_import(imported: Imported, out: str | Path) -> Run:
    """Store an import in a run folder: its frames, and a cell a block size where that can be.

    The same file has the same names, so importing it twice changes nothing.
    """
    out = Path(out)
    (out / "cells").mkdir(parents=True, exist_ok=True)
    about = {"form": imported.form, "engine": imported.engine, **imported.facts}
    folder = out / FOLDER / cell_id(about)
    folder.mkdir(parents=True, exist_ok=True)
    for name in TABLES:
        buffer = io.BytesIO()
        getattr(imported, name).to_parquet(buffer, index=False)
        write_atomic(folder / f"{name}.parquet", buffer.getvalue())
    cells = [_write_cell(imported, part, out) for part in _storable(imported)]
    told = {"schema": SCHEMA, **about, "figures": imported.figures, "cells": cells}
    if imported.counters is not None:
        told["counters"] = asdict(imported.counters)
    write_json(folder / HEADER, told)
    return open_run(out)


# Cells


def _storable(imported: Imported) -> list[list[Request]]:
    """The outputs of each block size, if all of that size tell enough for a cell."""
    by_size: dict[Any, list[Request]] = {}
    for one in imported.requests:
        by_size.setdefault((one.block_size, one.draft_window), []).append(one)
    return [part for part in by_size.values() if all(map(_complete, part))]


def _complete(one: Request) -> bool:
    if one.block_size is None or one.new_ids is None or not one.steps:
        return False
    return all(
        step.cut is not None and step.drafted is not None and step.proposer == "draft"
        for step in one.steps
    )


def _write_cell(imported: Imported, requests: Sequence[Request], out: Path) -> str:
    request = _request(imported, requests)
    name = cell_id(request)
    folder = out / "cells" / name
    if (folder / "cell.json").is_file():
        return name
    header = {
        "id": name,
        "request": request,
        "requested_block_sizes": [request["block_size"]],
        "decodes": len(requests),
    }
    part = open_part(folder, header)
    now = utc_now()
    part.add_process({"dflash_lab": __version__, "imported": imported.facts, "started_utc": now})
    for one in requests:
        part.add_decode(_line(one))
    finish_cell(part, [one.prompt_id for one in requests], now)
    return name


def _request(imported: Imported, requests: Sequence[Request]) -> dict[str, Any]:
    """The request of a cell as far as the source tells it; its own kind of machine, never ours."""
    unknown = dict.fromkeys(
        (
            *("backend", "dtype", "device", "pair", "target", "target_sha", "draft", "draft_sha"),
            *("template_sha", "temperature", "max_new_tokens", "chat", "thinking", "attention"),
            *("beyond_trained", "window_rule", "rule", "proposal", "timing"),
        )
    )
    ids = list(dict.fromkeys(one.prompt_id for one in requests))
    return {
        "schema": SCHEMA,
        "engine": imported.engine,
        **unknown,
        "block_size": requests[0].block_size,
        "draft_window": requests[0].draft_window,
        "hardware": f"not told by {imported.engine}",
        "repeats": 1,
        "imported": {"form": imported.form, **imported.facts},
        "prompts": {
            "source": imported.facts["file"],
            "set_sha": imported.facts["sha"],
            "count": len(ids),
            "ids": ids,
        },
    }


def _line(one: Request) -> dict[str, Any]:
    """One output as the part file keeps it; token ids that are not told are null."""
    tokens = one.new_ids or ()
    start = None if one.prompt_ids is None else len(one.prompt_ids)
    blocks, at = [], 0
    for index, step in enumerate(one.steps or ()):
        blocks.append(_block(step, index, None if start is None else start + at, tokens[at:]))
        at += step.emitted or 0
    decode_s = None if None in (one.total_s, one.ttft_s) else one.total_s - one.ttft_s
    return {
        "prompt": {
            "prompt_id": one.prompt_id,
            "turn": one.turn,
            "repeat": 0,
            "task": one.task,
            "prompt_ids": one.prompt_ids,
            "new_ids": tokens,
            "text": None,
            "finish_reason": None,
            "ttft_s": one.ttft_s,
            "decode_s": decode_s,
            "total_s": one.total_s,
            "peak_bytes": None,
            "order": None,
        },
        "blocks": blocks,
        "pieces": [],
        "tokens": {},
        "warnings": [],
    }


def _block(step: Step, index: int, start: int | None, text: Sequence[int]) -> dict[str, Any]:
    """A block whose anchor is the first token of `text`; what was accepted stands there, too."""
    kept = text[1 : 1 + min(step.accepted or 0, step.emitted or 0)]
    drafted, entries = step.drafted or 0, (step.drafted or 0) + 1
    said = text[1 : 1 + (step.emitted or 0)]
    return {
        "index": index,
        "start": start,
        "anchor": text[0],
        "block_size": step.block_size or entries,
        "drafted": step.drafted_ids or [*kept, *[None] * (drafted - len(kept))],
        "posterior": step.target_ids or [*said, *[None] * (entries - len(said))],
        "accepted": step.accepted,
        "emitted": step.emitted,
        "cut": step.cut,
        "draft_cache_tokens": None,
        "draft_cache_bytes": None,
        "draft_s": step.draft_s,
        "verify_s": step.verify_s,
        "commit_s": None,
        "total_s": step.total_s,
    }
