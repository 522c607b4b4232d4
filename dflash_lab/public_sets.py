"""Public data sets by name: rows of the hub, fetched once and kept as JSONL in the cache."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_lab.cache import cache_dir

TIMEOUT_S = 10  # for the hub's first answer


class DataSetUnavailable(ValueError):
    """A data set that is not in the cache and cannot be fetched; the message says the ways out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicSet:
    """Where a set lies on the hub, and how a row of it is asked."""

    hub: str
    split: str
    config: str | None = None
    template: str | None = None  # None: the row's own text or turns
    category: str = "none"  # of rows that name none


BOXED = "Please reason step by step, and put your final answer within \\boxed{{}}."
# The instructions are those of upstream's benchmark, so that acceptance compares with published
# figures (z-lab/dflash, dflash 0.1.0, benchmark).
CODE = "Write a solution to the following problem and make sure that it passes the tests:"
SETS: Mapping[str, PublicSet] = {
    "gsm8k": PublicSet(
        hub="openai/gsm8k",
        config="main",
        split="test",
        template=f"{{question}}\n{BOXED}",
        category="maths",
    ),
    "math500": PublicSet(
        hub="HuggingFaceH4/MATH-500",
        split="test",
        template=f"{{problem}}\n{BOXED}",
        category="maths",
    ),
    "humaneval": PublicSet(
        hub="openai/openai_humaneval",
        split="test",
        template=f"{CODE}\n```python\n{{prompt}}\n```",
        category="code",
    ),
    "mbpp": PublicSet(
        hub="google-research-datasets/mbpp", config="sanitized", split="test", category="code"
    ),
    "mt-bench": PublicSet(hub="HuggingFaceH4/mt_bench_prompts", split="train", category="chat"),
}
# hf:org/name, hf:org/name:config, hf:org/name:config:split, each with or without @revision
HUB_NAME = re.compile(
    r"hf:(?P<hub>[^:@]+)(:(?P<config>[^:@]*))?(:(?P<split>[^:@]+))?(@(?P<rev>.+))?"
)


def find_set(source: str) -> tuple[PublicSet, str | None] | None:
    """The set that a name stands for, and the revision it asks for; None for any other text.

    `gsm8k`, `gsm8k@REVISION`, or `hf:org/name:config:split@revision` for any other set.
    """
    name, _, revision = source.partition("@")
    if name in SETS:
        return SETS[name], revision or None
    if not source.startswith("hf:"):
        return None
    found = HUB_NAME.fullmatch(source)
    if found is None:
        raise ValueError(
            f"data set {source!r}; expected hf:org/name:config:split@revision, of which all but "
            "org/name may be left out."
        )
    part = found.groupdict()
    made = PublicSet(hub=part["hub"], config=part["config"] or None, split=part["split"] or "test")
    return made, part["rev"]


def fetch(public: PublicSet, revision: str | None = None) -> Path:
    """The set's rows as a JSONL file in the cache, fetched where they are not there yet.

    Without `revision` the one fetched first stays. Raises `DataSetUnavailable` at once where the
    hub cannot be reached or HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set, unless the libraries'
    own cache holds the set.
    """
    folder = cache_dir() / "datasets"
    stem = "--".join((*public.hub.strip("/").split("/")[-2:], public.config or "", public.split))
    kept = sorted(folder.glob(f"{stem}@{revision or '*'}.jsonl"), key=os.path.getmtime)
    if kept:
        return kept[0]
    pinned = revision or _newest(public)
    rows = _rows(public, pinned)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}@{pinned or 'cached'}.jsonl"
    text = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    fresh = path.with_name(f"{path.name}.tmp.{os.getpid()}")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)
    return path


def _newest(public: PublicSet) -> str | None:
    """The commit that the hub holds now; None offline, where a cache may still have the set."""
    if Path(public.hub).is_dir():
        return "local"
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    if _offline():
        return None
    try:
        return HfApi().dataset_info(public.hub, timeout=TIMEOUT_S).sha
    except OfflineModeIsEnabled:
        return None
    except Exception as error:  # every kind of network fault, a set that is gone, a missing login
        raise _unavailable(public, error) from error


def _offline() -> bool:
    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    return any(os.environ.get(name, "").lower() in ("1", "true", "yes", "on") for name in names)


def _rows(public: PublicSet, revision: str | None) -> Iterator[dict[str, Any]]:
    from datasets import load_dataset

    pin = None if revision == "local" else revision
    try:
        loaded = load_dataset(public.hub, public.config, split=public.split, revision=pin)
    except Exception as error:  # the library raises a kind of its own for each sort of fault
        raise _unavailable(public, error) from error
    return iter(loaded)


def _unavailable(public: PublicSet, error: Exception) -> DataSetUnavailable:
    lines = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return DataSetUnavailable(
        f"the data set {public.hub} is not in the cache and cannot be fetched ({said}). Fetch it "
        "once with network, or name a local .jsonl, .parquet or .csv file with its rows."
    )
