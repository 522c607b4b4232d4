"""One decode of a cell, as a line that the store keeps."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dflash_lab.backends import OWN
from dflash_lab.config import SweepConfig
from dflash_lab.decoding import (
    AcceptanceWarning,
    BlockSizeWarning,
    check_prompt,
    decode,
    finish_reason,
    library_decode,
    resolve_request,
)
from dflash_lab.load import Pair, PromptLike
from dflash_lab.store import decode_line
from dflash_lab.sweeps.planning import Plan
from dflash_lab.texts import output_pieces, output_text


class Cancelled(Exception):
    """The caller asked to stop in the middle of a decode."""


def warm_up(pair: Pair, plan: Plan, ids: Sequence[int]) -> None:
    """A prefill and two blocks of the cell's shape; the figures are thrown away."""
    if plan.engine != OWN:
        few = min(3, plan.decode.max_new_tokens)
        pair.models.library_generate(ids, few, frozenset(), lookup=plan.request.get("lookup"))
        return
    records = itertools.count(1)
    decode(pair, ids, replace(plan.decode, ignore_end=True), should_stop=lambda: next(records) > 2)


def own_line(
    pair: Pair,
    plan: Plan,
    prompt: PromptLike,
    keys: Mapping[str, Any],
    config: SweepConfig,
    names: dict[int, str],
    should_stop: Callable[[], bool],
) -> dict[str, Any]:
    """One decode by our loop, as the part file keeps it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AcceptanceWarning)  # said once, at the end
        warnings.simplefilter("ignore", BlockSizeWarning)
        seed = plan.decode.seed + keys["repeat"]
        trace = decode(
            pair,
            prompt,
            replace(plan.decode, seed=seed),
            chat=config.chat,
            thinking=config.thinking,
            should_stop=should_stop,
        )
    if trace.finish_reason == "cancelled":
        raise Cancelled
    used = {token for block in trace.blocks for token in (*block.drafted, *block.posterior)}
    texts = token_texts(pair, used | set(trace.tokens), names)
    return decode_line(trace, keys, output_pieces(pair, trace.tokens, trace.request), texts)


def library_line(
    pair: Pair,
    plan: Plan,
    prompt: PromptLike,
    keys: Mapping[str, Any],
    config: SweepConfig,
    names: dict[int, str],
) -> dict[str, Any]:
    """One decode by the library's own generator; there are no blocks to tell of."""
    request = resolve_request(pair, plan.decode)
    ids = pair.encode(prompt, config.chat, config.thinking).ids
    check_prompt(pair, ids)
    pair.models.peak_bytes()
    made = library_decode(pair, ids, request, plan.request.get("lookup"))
    return {
        "prompt": {
            **keys,
            "prompt_ids": ids,
            "new_ids": made.tokens,
            "text": output_text(pair, made.tokens, request),
            "finish_reason": finish_reason(made.tokens, len(ids), request),
            "ttft_s": made.ttft_s,
            "decode_s": made.total_s - made.ttft_s if len(made.tokens) > 1 else 0.0,
            "total_s": made.total_s,
            "peak_bytes": pair.models.peak_bytes(),
        },
        "blocks": [],
        "pieces": output_pieces(pair, made.tokens, request),
        "tokens": token_texts(pair, set(made.tokens), names),
        "warnings": [],
    }


def token_texts(pair: Pair, tokens: Iterable[int], names: dict[int, str]) -> dict[int, str]:
    """The text of each token by itself; `names` remembers those already asked for."""
    chosen = sorted(tokens)
    for token in chosen:
        if token not in names:
            names[token] = pair.text_so_far([token])
    return {token: names[token] for token in chosen}
