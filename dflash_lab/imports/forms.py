"""The forms that can be imported: who writes each, and what is read from it.

vLLM, SGLang and upstream are read as they write. Where a form is nowhere laid down (dflash_mlx,
mlx_dspark, AtharvRN) the least that says something is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dflash_lab.imports.decoders import (
    atharvrn,
    dflash_mlx,
    mlx_dspark,
    upstream_mlx,
    upstream_mlx_april,
    upstream_torch,
    upstream_torch_april,
)
from dflash_lab.imports.reading import IDS, Record, first, records_of
from dflash_lab.imports.records import ImportFault, Request, check_request
from dflash_lab.imports.servers import sglang, vllm


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One kind of file: who writes it, what is read from it, and how."""

    engine: str
    told: str
    read: Callable[[Record, str], Request]


COUNTER_FORM = "vllm-counters"
FORMS = {
    "vllm": Form(
        engine="vllm",
        told="responses with metrics.speculative_decoding, per step where detailed",
        read=vllm,
    ),
    "sglang": Form(
        engine="sglang",
        told="responses with meta_info: spec_verify_ct and the histogram of accepted drafts",
        read=sglang,
    ),
    "upstream-torch": Form(
        engine="upstream",
        told="acceptance_lengths of dflash 0.1.0, with block_size and num_output_tokens",
        read=upstream_torch,
    ),
    "upstream-torch-april": Form(
        engine="upstream",
        told="acceptance_lengths of the April state: the last block is not cut",
        read=upstream_torch_april,
    ),
    "upstream-mlx": Form(
        engine="upstream",
        told="accepted of each response of dflash 0.1.0, null for prefill and end",
        read=upstream_mlx,
    ),
    "upstream-mlx-april": Form(
        engine="upstream",
        told="accepted of each response of the April state: 1 for the prefill, 0 for the end",
        read=upstream_mlx_april,
    ),
    "dflash_mlx": Form(
        engine="dflash_mlx",
        told="block_tokens, verify_len_cap, generation_tokens, rounds (a number, or with accepted)",
        read=dflash_mlx,
    ),
    "mlx_dspark": Form(
        engine="mlx_dspark",
        told="block_size, tokens, rounds (a number with ngram_rounds, or a list; kind: ngram)",
        read=mlx_dspark,
    ),
    "atharvrn": Form(
        engine="atharvrn",
        told="a line a cycle: prompt_id, block_size, accepted or acceptance_length",
        read=atharvrn,
    ),
}


def read_requests(form: str, path: Path) -> tuple[Request, ...]:
    """The requests of a file: one JSON object, a list of them, or one a line."""
    made, seen = [], {}
    for place, record in enumerate(_group(form, records_of(path))):
        where = f"{path.name}, record {place}"
        one = FORMS[form].read(record, where)
        key = (one.prompt_id or f"request-{place}", one.turn)
        if key in seen:
            raise ImportFault(f"{where}: {key[0]!r} is in record {seen[key]} already; ids name.")
        seen[key] = place
        made.append(check_request(replace(one, prompt_id=key[0]), where))
    if not made:
        raise ImportFault(f"{path.name} holds no record.")
    return tuple(made)


def _group(form: str, records: Sequence[Record]) -> Sequence[Record]:
    """Records as they stand, but cycles of one prompt together, in the order of the file."""
    if form != "atharvrn":
        return records
    by_prompt: dict[Any, list[Record]] = {}
    for record in records:
        by_prompt.setdefault(first(record, *IDS), []).append(record)
    return [{"prompt_id": key, "cycles": cycles} for key, cycles in by_prompt.items()]
