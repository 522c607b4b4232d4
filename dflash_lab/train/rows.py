"""Training rows: prompt and answer as token ids, loops cut, evaluation prompts kept out."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dflash_lab.load import flat_ids

NGRAM = 13  # words; the usual length for calling two texts the same
NGRAM_BYTES = 5  # of a run's hash
LOOP_SPAN = 64  # tokens looked at together
LOOP_SHARE = 0.5  # different 4-grams in such a span, below which it is a loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One prompt and the answer that the target gave to it."""

    prompt: str  # empty where only ids are known
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class RowCounts:
    """What became of the rows that were read."""

    read: int = 0
    used: int = 0
    loops_cut: int = 0
    too_short: int = 0
    duplicates: int = 0
    overlapping: int = 0
    answer_tokens: int = 0
    ngrams: set[bytes] = field(default_factory=set, repr=False)  # of the prompts used


def words(text: str) -> list[str]:
    """Lower-case words and numbers, everything else left out."""
    return re.findall(r"[a-z0-9]+", text.lower())


def ngram_hashes(text: str) -> set[bytes]:
    """Five-byte hashes of the runs of 13 words in a text."""
    parts = words(text)
    runs = (" ".join(parts[i : i + NGRAM]) for i in range(len(parts) - NGRAM + 1))
    return {hashlib.sha256(run.encode()).digest()[:NGRAM_BYTES] for run in runs}


def loop_start(ids: Sequence[int]) -> int | None:
    """Where a repetition loop begins: the first span of tokens with few different 4-grams."""
    for end in range(LOOP_SPAN, len(ids) + 1):
        span = ids[end - LOOP_SPAN : end]
        grams = {tuple(span[i : i + 4]) for i in range(LOOP_SPAN - 3)}
        if len(grams) < LOOP_SHARE * (LOOP_SPAN - 3):
            return end - LOOP_SPAN // 2
    return None


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file, gzipped or not; ValueError names the first line that is none."""
    opener = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            for line in file:
                number += 1
                if line.strip():
                    row = json.loads(line)
                    if not isinstance(row, dict):
                        raise ValueError(f"found {type(row).__name__}")
                    yield row
    except (ValueError, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(
            f"{path}, line {max(1, number)}: expected one JSON object a line ({error})."
        ) from error


def imported_rows(path: Path, tokenizer: Any, vocabulary: int) -> Iterator[Row]:
    """Rows of a JSONL file with `prompt` and `response_ids`, as the target answered elsewhere."""
    number = 0
    for number, raw in enumerate(read_jsonl(path), start=1):
        prompt, answer = raw.get("prompt"), raw.get("response_ids")
        if not isinstance(prompt, str) or not isinstance(answer, list):
            raise ValueError(
                f"{path}, row {number}: expected `prompt` (text) and `response_ids` (token ids)."
            )
        wrong = [
            token for token in answer if type(token) is not int or token not in range(vocabulary)
        ]
        if wrong:
            raise ValueError(
                f"{path}, row {number}: {wrong[0]!r} is no token of this target, whose ids go from "
                f"0 to {vocabulary - 1}. The answers must be this target's own."
            )
        yield Row(prompt=prompt, prompt_ids=prompt_ids(tokenizer, prompt), answer_ids=tuple(answer))
    if not number:
        raise ValueError(f"{path} holds no rows.")


def usable(
    rows: Iterable[Row], tokenizer: Any, forbidden: Iterable[str], shortest: int = 16
) -> tuple[list[Row], RowCounts]:
    """The rows to train on, and what was cut or dropped on the way.

    A loop ends its answer. A row whose prompt or answer shares a run of 13 words with a `forbidden`
    text is dropped, and so is a prompt that was there before.
    """
    closed = set().union(*(ngram_hashes(text) for text in forbidden))
    counts, kept, seen = RowCounts(), [], set()
    for row in rows:
        counts.read += 1
        start = loop_start(row.answer_ids)
        answer = row.answer_ids[:start]
        counts.loops_cut += start is not None
        said = tuple(words(row.prompt))
        name = said if len(said) > 2 else (row.prompt, row.prompt_ids)
        grams = ngram_hashes(row.prompt)
        if len(answer) < shortest:
            counts.too_short += 1
        elif name in seen:
            counts.duplicates += 1
        elif closed and closed & (grams | ngram_hashes(tokenizer.decode(answer))):
            counts.overlapping += 1
        else:
            seen.add(name)
            kept.append(replace(row, answer_ids=answer))
            counts.used += 1
            counts.answer_tokens += len(answer)
            counts.ngrams |= grams
    return kept, counts


def prompt_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Token ids of a user's turn, ready to be answered."""
    if not getattr(tokenizer, "chat_template", None):
        return flat_ids(tokenizer(text))
    message = [{"role": "user", "content": text}]
    return flat_ids(
        tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
    )


def split(rows: Sequence[Row], held_out: int) -> tuple[list[Row], list[Row]]:
    """Training and held-out rows, by a hash of the prompt: the same split in every run."""
    order = sorted(rows, key=lambda row: hashlib.sha256(repr(row.prompt_ids).encode()).digest())
    return order[held_out:], order[:held_out]
