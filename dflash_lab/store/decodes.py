"""One decode as a line, and the lines of a cell as its tables, texts and sums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from dflash_lab.store.schema import BLOCKS, PROMPTS
from dflash_lab.trace import BlockRecord, Trace


def decode_line(
    trace: Trace, keys: Mapping[str, Any], pieces: Sequence[str], texts: Mapping[int, str]
) -> dict[str, Any]:
    """What the part file keeps of a decode. `keys`: prompt_id, turn, repeat, task and order."""
    return {
        "prompt": {
            **keys,
            "prompt_ids": trace.prompt_ids,
            "new_ids": trace.tokens,
            "text": trace.text,
            "finish_reason": trace.finish_reason,
            "ttft_s": trace.ttft_s,
            "decode_s": trace.decode_s,
            "total_s": trace.total_s,
            "peak_bytes": trace.peak_bytes,
        },
        "blocks": [block_row(block) for block in trace.blocks],
        "pieces": pieces,
        "tokens": texts,
        "warnings": trace.warnings,
    }


def block_row(block: BlockRecord) -> dict[str, Any]:
    """The columns of `blocks.parquet` that a record knows."""
    return {
        "index": block.index,
        "start": block.start,
        "anchor": block.anchor,
        "block_size": block.block_size,
        "drafted": block.drafted,
        "posterior": block.posterior,
        "accepted": block.accepted,
        "emitted": block.emitted,
        "cut": block.cut,
        "draft_cache_tokens": block.draft_cache_tokens,
        "draft_cache_bytes": block.draft_cache_bytes,
        "draft_s": block.seconds.draft,
        "verify_s": block.seconds.verify,
        "commit_s": block.seconds.commit,
        "total_s": block.seconds.total,
        "draft_prob": block.draft_prob,
        "target_prob": block.target_prob,
    }


DecodeKey = tuple[str, int, int]  # prompt id, turn, repeat


def decode_key(line: Mapping[str, Any]) -> DecodeKey:
    """Which decode of its cell a line is."""
    prompt = line["prompt"]
    return prompt["prompt_id"], prompt["turn"], prompt["repeat"]


def prompt_table(cell: str, lines: Iterable[Mapping[str, Any]]) -> pa.Table:
    """`prompts.parquet` of a cell."""
    rows = [{"cell": cell, **line["prompt"]} for line in lines]
    return pa.Table.from_pylist(rows, schema=PROMPTS)


def block_table(cell: str, lines: Iterable[Mapping[str, Any]]) -> pa.Table:
    """`blocks.parquet` of a cell; no rows where nothing was decoded in blocks."""
    rows = []
    for line in lines:
        prompt_id, turn, repeat = decode_key(line)
        keys = {"cell": cell, "prompt_id": prompt_id, "turn": turn, "repeat": repeat}
        rows += [{**keys, **block} for block in line["blocks"]]
    return pa.Table.from_pylist(rows, schema=BLOCKS)


def cell_texts(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """`texts.json`: the piece of text of each new token, and single tokens by id."""
    pieces: dict[str, Any] = {}
    tokens: dict[str, str] = {}
    for line in lines:
        pieces["|".join(map(str, decode_key(line)))] = line["pieces"]
        tokens |= line["tokens"]
    return {"pieces": pieces, "tokens": tokens}


def summarise(lines: Sequence[Mapping[str, Any]], complaints: Sequence[str] = ()) -> dict[str, Any]:
    """Plain sums over a cell; every ratio is made from these or from the tables, elsewhere."""
    prompts = [line["prompt"] for line in lines]
    blocks = [block for line in lines for block in line["blocks"]]
    counted = [block for block in blocks if not block["cut"]]
    reasons = [prompt["finish_reason"] for prompt in prompts if prompt["finish_reason"]]
    orders = [prompt["order"] for prompt in prompts if prompt["order"] is not None]
    return {
        "prompts": len({prompt["prompt_id"] for prompt in prompts}),
        "decodes": len(prompts),
        "prompt_tokens": sum(len(prompt["prompt_ids"] or ()) for prompt in prompts),
        "tokens": sum(len(prompt["new_ids"]) for prompt in prompts),
        "tokens_after_first": sum(max(0, len(prompt["new_ids"]) - 1) for prompt in prompts),
        "blocks": len(blocks),
        "cut_blocks": len(blocks) - len(counted),
        "drafted": sum(len(block["drafted"]) for block in blocks),
        "accepted": sum(block["accepted"] for block in blocks),
        "emitted": sum(block["emitted"] for block in blocks),
        "drafted_uncut": sum(len(block["drafted"]) for block in counted),
        "accepted_uncut": sum(block["accepted"] for block in counted),
        "ttft_s": _total(prompt["ttft_s"] for prompt in prompts),
        "decode_s": _total(prompt["decode_s"] for prompt in prompts),
        "total_s": _total(prompt["total_s"] for prompt in prompts),
        "peak_bytes": max((p["peak_bytes"] for p in prompts if p["peak_bytes"]), default=None),
        "finish_reasons": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
        "first_order": min(orders, default=None),
        "last_order": max(orders, default=None),
        "warnings": sorted({w for line in lines for w in line["warnings"]} | set(complaints)),
    }


def _total(values: Iterable[float | None]) -> float | None:
    """The sum; None where one is missing, as in what was imported."""
    known = list(values)
    return None if None in known else sum(known)
