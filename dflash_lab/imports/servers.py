"""What vLLM and SGLang tell of a request, and vLLM's counters of a whole server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from dflash_lab.imports.quantities import block_size_of
from dflash_lab.imports.reading import (
    Record,
    about,
    first,
    ids_of,
    needed,
    number_of,
    records_of,
    seconds,
    sums_of,
)
from dflash_lab.imports.records import (
    Counters,
    ImportFault,
    Request,
    Step,
    check_counters,
    count,
    counts,
    settled,
)

# vLLM


def vllm(record: Record, where: str) -> Request:
    """A response with `metrics.speculative_decoding`, or that object itself."""
    metrics = record.get("metrics") or {}
    told = metrics.get("speculative_decoding") or record.get("speculative_decoding") or record
    if "num_spec_steps" not in told and "per_step_accepted" not in told:
        raise ImportFault(
            f"{where} has no metrics.speculative_decoding; start the server with "
            "--per-request-spec-decode-metrics detailed."
        )
    number = {
        name: count(told.get(name), name, where)
        for name in (
            *("num_spec_tokens", "num_spec_steps", "num_accepted_draft_tokens"),
            "num_draft_tokens",
        )
    }
    accepted = counts(told.get("per_step_accepted"), "per_step_accepted", where)
    drafted = counts(told.get("per_step_drafted"), "per_step_drafted", where)
    limit = number["num_spec_tokens"]
    size = None if limit is None else block_size_of("vllm", limit)
    choice = next(iter(record.get("choices") or ()), {})
    new_ids = ids_of(choice.get("token_ids"), "token_ids", where)
    tokens = count((record.get("usage") or {}).get("completion_tokens"), "tokens", where)
    tokens = len(new_ids) if tokens is None and new_ids is not None else tokens
    steps = None
    if accepted is not None:
        drafted = drafted or (None,) * len(accepted)
        if len(drafted) != len(accepted):
            raise ImportFault(
                f"{where}: per_step_accepted has {len(accepted)} entries, per_step_drafted "
                f"{len(drafted)}; a step has one of each."
            )
        pairs = zip(accepted, drafted, strict=True)
        steps = settled(
            [
                Step(block_size=None if d is None else d + 1, drafted=d, accepted=a)
                for a, d in pairs
            ],
            tokens,
        )
    totals = {
        "blocks": number["num_spec_steps"],
        "drafted": number["num_draft_tokens"],
        "accepted": number["num_accepted_draft_tokens"],
    }
    return Request(
        **about(record, where),
        block_size=size,
        tokens=tokens,
        steps=steps,
        histogram=counts(told.get("acceptance_histogram"), "acceptance_histogram", where),
        **_agreeing(totals, sums_of(steps), where),
        prompt_ids=ids_of(first(choice, "prompt_token_ids"), "prompt_token_ids", where)
        or ids_of(record.get("prompt_token_ids"), "prompt_token_ids", where),
        new_ids=new_ids,
        ttft_s=seconds(metrics, "time_to_first_token", where),
    )


def _agreeing(told: Record, found: Record, where: str) -> dict[str, Any]:
    """Totals as told, else as found in the steps; ImportFault where the two differ."""
    for name, value in found.items():
        if None not in (told[name], value) and told[name] != value:
            raise ImportFault(f"{where}: {told[name]} {name} are told, but the steps have {value}.")
    return {name: found.get(name) if told[name] is None else told[name] for name in told}


COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
PER_POSITION = "num_accepted_tokens_per_pos"
_SAMPLE = re.compile(r"^vllm:spec_decode_(\w+?)(?:_total)?(?:\{([^}]*)\})?\s+(\S+)")


def read_counters(path: Path, before: Path | None = None) -> Counters:
    """vLLM's counters of a whole server: a /metrics page, or JSON of their names.

    They count from the server's start, so `before` is an earlier reading to be taken away.
    """
    now, first = _reading(path), _reading(before) if before else {}
    where = path.name if before is None else f"{path.name} less {before.name}"
    fallen = [name for name, value in first.items() if value > now.get(name, 0)]
    if fallen:
        raise ImportFault(
            f"{where}: {fallen[0]} fell from {first[fallen[0]]} to {now.get(fallen[0], 0)}. Are "
            "the two files in the right order, and was the server restarted between them?"
        )
    gone = {name: value - first.get(name, 0) for name, value in now.items()}
    blocks, drafted, accepted = (needed(gone.get(name), name, where) for name in COUNTERS)
    positions = sorted(int(name[len(PER_POSITION) :]) for name in gone if PER_POSITION in name)
    if positions != list(range(len(positions))):
        raise ImportFault(f"{where}: positions {positions} of {PER_POSITION}; expected 0, 1, ...")
    told = Counters(
        blocks=blocks,
        drafted=drafted,
        accepted=accepted,
        accepted_per_position=tuple(gone[f"{PER_POSITION}{place}"] for place in positions),
    )
    return check_counters(told, where)


def _reading(path: Path) -> dict[str, int]:
    """Counters by name, those of a position with its number after it; engines are added up."""
    text = path.read_text(encoding="utf-8")
    if text.lstrip()[:1] == "{":
        raw = records_of(path)[0]
        per_position = counts(raw.get(PER_POSITION), PER_POSITION, path.name) or ()
        values = {name: count(raw.get(name), name, path.name) for name in COUNTERS}
        values |= {f"{PER_POSITION}{place}": value for place, value in enumerate(per_position)}
        return {name: value for name, value in values.items() if value is not None}
    found: dict[str, int] = {}
    for line in text.splitlines():
        if sample := _SAMPLE.match(line):
            name, labels, value = sample.groups()
            place = re.search(r'position="(\d+)"', labels or "")
            key = name + (place[1] if place else "")
            found[key] = found.get(key, 0) + (count(float(value), key, path.name) or 0)
    if not found:
        raise ImportFault(f"{path.name} has no vllm:spec_decode_ counter.")
    return found


# SGLang


def sglang(record: Record, where: str) -> Request:
    """A response with `meta_info` or `sglext.spec_tokens_details`, or that object itself.

    Three generations of names; a histogram of accepted drafts, in no order.
    """
    choice = next(iter(record.get("choices") or ()), {})
    details = (record.get("sglext") or {}).get("spec_tokens_details")
    told = record.get("meta_info") or choice.get("meta_info") or details or record

    def number(*names: str) -> int | None:
        return count(first(told, *names), names[-1], where)

    names = ("spec_correct_drafts_histogram", "spec_accept_histogram")
    histogram = counts(first(told, *names), names[0], where)
    blocks = number("spec_verify_ct")
    if histogram is None and blocks is None:
        raise ImportFault(f"{where} has neither {names[0]} nor spec_verify_ct in its meta_info.")
    size = count(first(record, "block_size"), "block_size", where)
    if size is None and histogram is not None:
        size = len(histogram)  # SGLang's has an entry for 0 to block_size - 1
    tokens = number("completion_tokens")
    usage = record.get("usage") or {}
    new_ids = ids_of(record.get("output_ids"), "output_ids", where)
    return Request(
        **about({**told, **record}, where),
        block_size=size,
        tokens=count(usage.get("completion_tokens"), "tokens", where) if tokens is None else tokens,
        histogram=histogram,
        blocks=sum(histogram) if blocks is None and histogram is not None else blocks,
        drafted=number("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num"),
        accepted=number("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num"),
        new_ids=new_ids,
        total_s=number_of(told, "e2e_latency", where),
    )
