"""Stored runs made up from a seed, for tests that need results and no model.

`write_run` has the shape of the demo's run; `write_cell` stores what a test made by hand.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash_lab.exactness import Audit, AuditedPrompt, write_audit
from dflash_lab.store import Part, cell_id, decode_key, finish_cell, open_run

HARDWARE = "2-core x86-64 Intel Xeon, AMX, 24 GB"
PAIR, TARGET, DRAFT = "smollm2", "SmolLM2-135M-Instruct", "smollm2-135m-dflash-b16"
TRAINED = 16
END = 2  # the end token: in the new ids, not in the text
NEW_TOKENS = 48
EASE = {"math": 0.46, "code": 0.48, "chat": 0.32, "rewrite": 0.38, "extract": 0.42}

SAMPLE = """A baker sells 9 rolls in the morning and 7 in the afternoon, so 24 - 16 = 8 are left.
def is_even(n):
    return n % 2 == 0  # True for 0, 2, 4

Dear neighbour, your dog barks every night. Could you please keep it inside after 10?
1. **Sleep**: the café is naïve (x ≤ 3 → y). Maria met Tom at the station; they walked home.
"""
WORDS = sorted(set(re.findall(r" ?\w+|\s+|[^\w\s]", SAMPLE)))
HOSTILE = (
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "$x$",
    "$$",
    "a$b$c",
    "\\frac{",
    "_x^",
    "%",
    "</td>",
    "&amp;",
    "<think>",
    "a<b<c",
    "\t",
    "\n\n\n",
    "",
    "\u05e9\u05dc\u05d5\u05dd",  # right to left
    "\u202eabc\u202c",  # turns the direction round
    "\U0001f469\u200d\U0001f4bb\U0001f389",  # emoji, the first two joined
    "\ufffd",
    "x" * 500,
)
BASE = 100  # id of the first word
VOCABULARY = {BASE + i: text for i, text in enumerate((*WORDS, *HOSTILE))}
VOCABULARY[END] = "<|im_end|>"
PLAIN_IDS = np.arange(BASE, BASE + len(WORDS))
HOSTILE_IDS = np.arange(BASE + len(WORDS), BASE + len(WORDS) + len(HOSTILE))

# Cells made by hand


def request_of(ids: Sequence[str], **settings: Any) -> dict[str, Any]:
    """What a cell was asked to do; `settings` replace the demo's, such as block_size or dtype."""
    made = {
        "schema": 1,
        "engine": "dflash_lab",
        "backend": "torch",
        "dtype": "bfloat16",
        "device": "cpu",
        "pair": PAIR,
        "target": TARGET,
        "draft": DRAFT,
        "target_sha": "a" * 16,
        "draft_sha": "b" * 16,
        "template_sha": "c" * 16,
        "prompts": {
            "source": "mini",
            "set_sha": hashlib.sha256("|".join(ids).encode()).hexdigest()[:16],
            "count": len(ids),
            "ids": list(ids),
        },
        "block_size": 4,
        "beyond_trained": False,
        "draft_window": None,
        "window_rule": "per_block",
        "rule": "match",
        "proposal": "argmax",
        "temperature": 0.0,
        "max_new_tokens": NEW_TOKENS,
        "chat": True,
        "thinking": None,
        "timing": "whole",
        "repeats": 1,
        "attention": "sdpa",
        "hardware": HARDWARE,
    } | settings
    if made["block_size"] == 1 or made["engine"] != "dflash_lab":
        made |= {"draft": None, "draft_sha": None}
    return made


def block(accepted: int, block_size: int = 4, **columns: Any) -> dict[str, Any]:
    """One row of blocks.parquet; a block with `emitted` below accepted + 1 is a cut one."""
    made = {
        "prompt_id": "p0",
        "turn": 0,
        "repeat": 0,
        "index": 0,
        "start": 10,
        "anchor": BASE,
        "block_size": block_size,
        "drafted": [BASE] * (block_size - 1),
        "posterior": [BASE] * block_size,
        "accepted": accepted,
        "emitted": accepted + 1,
        "draft_cache_tokens": 0,
        "draft_cache_bytes": 0,
        "draft_s": None,
        "verify_s": None,
        "commit_s": None,
        "total_s": 0.05,
        "draft_prob": None,
        "target_prob": None,
    } | columns
    return made | {"cut": made["emitted"] < accepted + 1}


def prompt(prompt_id: str = "p0", **columns: Any) -> dict[str, Any]:
    """One row of prompts.parquet; an output of four tokens in 0.1 s after 0.2 s of prefill."""
    made = {
        "prompt_id": prompt_id,
        "turn": 0,
        "repeat": 0,
        "task": "chat",
        "prompt_ids": [BASE] * 10,
        "new_ids": [BASE, BASE + 1, BASE + 2, BASE + 3],
        "text": " the a of to",
        "finish_reason": "length",
        "ttft_s": 0.2,
        "decode_s": 0.1,
        "peak_bytes": 600_000_000,
        "order": 0,
    } | columns
    return {"total_s": made["ttft_s"] + made["decode_s"]} | made


def write_cell(
    run: Path,
    request: Mapping[str, Any],
    prompts: Sequence[Mapping[str, Any]],
    blocks: Sequence[Mapping[str, Any]] = (),
    pieces: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """Store one finished cell of a run and return its id; `pieces` by "prompt id|turn|repeat"."""
    name = cell_id(request)
    folder = Path(run) / "cells" / name
    folder.mkdir(parents=True, exist_ok=True)
    lines = [_line(row, blocks, pieces or {}) for row in prompts]
    part = Part(
        folder=folder,
        cell={
            "id": name,
            "request": dict(request),
            "requested_block_sizes": [request["block_size"]],
            "decodes": len(lines),
        },
        processes=[provenance(request)],
        decodes={decode_key(line): line for line in lines},
    )
    finish_cell(part, [row["prompt_id"] for row in prompts], "2026-01-05T12:10:00+00:00")
    return name


KEYS = ("prompt_id", "turn", "repeat")


def _line(
    row: Mapping[str, Any], blocks: Sequence[Mapping[str, Any]], pieces: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    """One decode as the store keeps it: its row, its blocks and its texts."""
    key = tuple(row[name] for name in KEYS)
    mine = [block for block in blocks if tuple(block[name] for name in KEYS) == key]
    used = {token for block in mine for token in (*block["drafted"], *block["posterior"])}
    return {
        "prompt": dict(row),
        "blocks": [{k: v for k, v in block.items() if k not in KEYS} for block in mine],
        "pieces": list(pieces.get("|".join(map(str, key)), ())),
        "tokens": {str(token): VOCABULARY.get(token, f"[{token}]") for token in sorted(used)},
        "warnings": [],
    }


def provenance(request: Mapping[str, Any]) -> dict[str, Any]:
    """What a process says of itself; made up, as everything here."""
    return {
        "dflash_lab": "0.1.0",
        "started_utc": "2026-01-05T12:00:00+00:00",
        "hardware": request["hardware"],
        "versions": {
            "python": "3.11.0",
            "dflash_lab": "0.1.0",
            "torch": "2.13.0+cpu",
            "transformers": "5.20.0",
            "numpy": "2.4.6",
            "mlx": None,
        },
        "threads": 2,
    }


# A whole run from a seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The target's own text for one prompt, the same in every cell, and how hard it is to draft."""

    prompt_id: str
    task: str
    prompt_ids: tuple[int, ...]
    tokens: tuple[int, ...]
    beyond: tuple[int, ...]  # what the target would have said after its last token
    luck: np.ndarray  # per token: below the hazard where a draft gets it right
    pace: float  # this prompt's seconds over the mean prompt's

    @property
    def pieces(self) -> list[str]:
        """What each token adds to the text; the end token adds nothing."""
        last = len(self.tokens) - 1
        ended = self.tokens[-1] == END
        return [
            "" if ended and i == last else VOCABULARY[token] for i, token in enumerate(self.tokens)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One cell to be: what differs between the cells of a run."""

    engine: str = "dflash_lab"
    dtype: str = "bfloat16"
    block_size: int = 1
    draft_window: int | None = None

    @property
    def block_s(self) -> float:
        """Mean seconds of a block, or of a token where nothing is drafted."""
        if self.block_size == 1:
            plain = {"float32": 0.0385, "bfloat16": 0.0580}[self.dtype]
            return plain * (1.06 if self.engine == "transformers" else 1.0)
        return 0.0595 + 0.0016 * (self.block_size - 1)

    def hazard(self, task: str, draft_position: int) -> float:
        """Chance that a draft is right where all before it were."""
        short = 0.93 if self.draft_window is not None and self.draft_window < 32 else 1.0
        return min(0.97, EASE.get(task, 0.42) * short * (1.0 + 0.06 * (draft_position - 1)))


def arms(
    block_sizes: Sequence[int], windows: Sequence[int], windowed: Sequence[int]
) -> tuple[Arm, ...]:
    """The demo's cells: a grid in bfloat16, plain decoding and the library's generator in both."""
    return (
        *(Arm(block_size=size) for size in block_sizes),
        *(Arm(block_size=size, draft_window=w) for w in windows for size in windowed),
        Arm(dtype="float32"),
        Arm(engine="transformers"),
        Arm(engine="transformers", dtype="float32"),
    )


def write_run(
    path: str | Path,
    *,
    seed: int = 0,
    prompts: int = 12,
    block_sizes: Sequence[int] = (1, 2, 4, 6, 8, 12, 16),
    windows: Sequence[int] = (64, 16),
    windowed: Sequence[int] = (4, 8, 16),
    hostile: bool = False,
) -> Path:
    """Write a run of the demo's shape whose numbers are made up; tau is about 1.6.

    `hostile` puts markup, mathematics, right-to-left text and a 500-character token into the texts,
    markup into one prompt's id and task, and makes the last prompt loop on one token.
    """
    rng = np.random.default_rng(seed)
    outputs = [_output(index, rng, hostile, index == prompts - 1) for index in range(prompts)]
    cells = arms(block_sizes, windows, windowed)
    for place, arm in enumerate(cells):
        _write_arm(Path(path), arm, place, len(cells), outputs, seed)
    _write_audit(Path(path), outputs)
    return Path(path)


def _output(index: int, rng: np.random.Generator, hostile: bool, last: bool) -> Output:
    task = list(EASE)[index % len(EASE)]
    prompt_id = f"{task}-{index // len(EASE) + 1:02d}"
    count = NEW_TOKENS if index % 5 != 3 else int(rng.integers(24, NEW_TOKENS - 4))
    tokens = rng.choice(PLAIN_IDS, count)
    luck = rng.random(count + TRAINED)
    if hostile:
        strange = rng.random(count) < 0.25
        tokens[strange] = rng.choice(HOSTILE_IDS, int(strange.sum()))
        if index == 0:
            tokens[1 : 1 + len(HOSTILE_IDS)] = HOSTILE_IDS
        if index == 2:
            prompt_id, task = "chat-01 <b>$x$</b>", "<i>chat</i> $y$"
        if last:
            tokens[4:], luck[4:] = tokens[4], 0.0
    if count < NEW_TOKENS:
        tokens[-1] = END
    return Output(
        prompt_id=prompt_id,
        task=task,
        prompt_ids=tuple(rng.choice(PLAIN_IDS, int(rng.integers(30, 90))).tolist()),
        tokens=tuple(tokens.tolist()),
        beyond=tuple(rng.choice(PLAIN_IDS, TRAINED).tolist()),
        luck=luck,
        pace=math.exp(0.03 * rng.standard_normal()),
    )


def _write_arm(
    run: Path, arm: Arm, place: int, arms_in_all: int, outputs: Sequence[Output], seed: int
) -> None:
    rng = np.random.default_rng([seed, place])
    prompt_rows, block_rows, pieces = [], [], {}
    for turn_of, output in enumerate(outputs):
        blocks = list(_blocks(arm, output, rng))
        ttft = 0.0009 * len(output.prompt_ids) * output.pace * math.exp(0.05 * rng.normal())
        decode = sum(row["total_s"] for row in blocks)
        order = turn_of * arms_in_all + (place + turn_of) % arms_in_all
        prompt_rows.append(_prompt_row(output, ttft, decode, order))
        block_rows += blocks if arm.engine == "dflash_lab" else []
        pieces[f"{output.prompt_id}|0|0"] = output.pieces
    request = request_of(
        [output.prompt_id for output in outputs],
        engine=arm.engine,
        dtype=arm.dtype,
        block_size=arm.block_size,
        draft_window=arm.draft_window,
    )
    write_cell(run, request, prompt_rows, block_rows, pieces)


def _prompt_row(output: Output, ttft: float, decode: float, order: int) -> dict[str, Any]:
    return prompt(
        output.prompt_id,
        task=output.task,
        prompt_ids=list(output.prompt_ids),
        new_ids=list(output.tokens),
        text="".join(output.pieces),
        finish_reason="stop" if output.tokens[-1] == END else "length",
        ttft_s=ttft,
        decode_s=decode,
        total_s=ttft + decode + 0.0004,
        peak_bytes=620_000_000 + 1000 * order,
        order=order,
    )


def _blocks(arm: Arm, output: Output, rng: np.random.Generator):
    """The rows of one prompt's blocks, walking its text as the decoder would."""
    said = (*output.tokens, *output.beyond)
    at = index = 0  # place of the anchor among the new tokens
    while (left := len(output.tokens) - 1 - at) > 0:
        ahead = said[at + 1 : at + arm.block_size + 1]
        accepted = 0
        while accepted < arm.block_size - 1 and _right(arm, output, at, accepted + 1, rng):
            accepted += 1
        drafted = list(ahead[:-1])
        drafted[accepted:] = rng.choice(PLAIN_IDS, len(drafted) - accepted).tolist()
        if accepted < len(drafted) and drafted[accepted] == ahead[accepted]:
            drafted[accepted] += 1 if drafted[accepted] < PLAIN_IDS[-1] else -1
        rest = rng.choice(PLAIN_IDS, arm.block_size - accepted - 1).tolist()
        committed = len(output.prompt_ids) + at
        seen = 0 if arm.block_size == 1 else min(committed, arm.draft_window or committed)
        emitted = min(accepted + 1, left)
        yield block(
            accepted,
            arm.block_size,
            prompt_id=output.prompt_id,
            index=index,
            start=committed,
            anchor=said[at],
            drafted=drafted,
            posterior=[*ahead[: accepted + 1], *rest],
            emitted=emitted,
            draft_cache_tokens=seen,
            draft_cache_bytes=seen * 2 * 2 * 3 * 64 * 2,  # keys and values, layers, heads, bf16
            total_s=arm.block_s * output.pace * math.exp(0.05 * rng.standard_normal()),
        )
        at, index = at + emitted, index + 1


def _right(
    arm: Arm, output: Output, at: int, draft_position: int, rng: np.random.Generator
) -> bool:
    """Mostly a matter of the token drafted, so that cells of one prompt resemble each other."""
    own, shared = rng.random(2)
    luck = output.luck[at + draft_position] if own < 0.8 else shared
    return bool(luck < arm.hazard(output.task, draft_position))


def _write_audit(run: Path, outputs: Sequence[Output]) -> None:
    made = Audit(
        dtype="float32",
        reference="transformers generate",
        block_size=8,
        draft_window=None,
        max_new_tokens=NEW_TOKENS,
        tolerance=None,
        prompts=tuple(
            AuditedPrompt(
                prompt_id=output.prompt_id,
                label="equal",
                tokens=len(output.tokens),
                smallest_margin=0.5,
            )
            for output in outputs
        ),
    )
    write_audit(open_run(run), made)
