"""Does the draft change the text? Our decoding beside the library's own, token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dflash_lab.backends import LIBRARIES
from dflash_lab.config import DecodeConfig
from dflash_lab.decoding import decode
from dflash_lab.load import Pair
from dflash_lab.prompts import Prompt


def first_difference(ours: Sequence[int], reference: Sequence[int]) -> int | None:
    """Index of the first token that differs, a missing one included; None where all are equal."""
    for index, (a, b) in enumerate(zip(ours, reference, strict=False)):
        if a != b:
            return index
    return None if len(ours) == len(reference) else min(len(ours), len(reference))


def check_exactness(
    pair: Pair,
    prompts: Sequence[Prompt],
    config: DecodeConfig,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> dict[str, Any]:
    """Decode the first turn of every prompt twice and compare; a record to store beside a run.

    The reference is the library's own greedy generator, which shares no code with the loop here.
    """
    rows = []
    for number, prompt in enumerate(prompts, start=1):
        trace = decode(pair, prompt.turns[0], config)
        stop_tokens = trace.request.stop_tokens
        reference = pair.models.library_generate(
            trace.prompt_ids, config.max_new_tokens, stop_tokens
        ).tokens
        difference = first_difference(trace.tokens, reference)
        rows.append(
            {
                "prompt_id": prompt.id,
                "equal": difference is None,
                "first_difference": difference,
                "tokens": len(trace.tokens),
                "ours": None if difference is None else list(trace.tokens[difference:][:1]),
                "reference": None if difference is None else list(reference[difference:][:1]),
            }
        )
        progress(number, len(prompts))
    return {
        "dtype": pair.models.dtype,
        "reference": f"{LIBRARIES[pair.spec.backend]} generate",
        "block_size": config.block_size,
        "max_new_tokens": config.max_new_tokens,
        "equal": sum(row["equal"] for row in rows),
        "of": len(rows),
        "prompts": rows,
    }
