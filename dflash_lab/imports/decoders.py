"""What other decoders of DFlash write: upstream in both of its states, and results of rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dflash_lab.imports.reading import (
    Record,
    about,
    first,
    ids_of,
    needed,
    number_of,
    seconds,
    sums_of,
)
from dflash_lab.imports.records import ImportFault, Request, Step, count, counts, settled

# Upstream, in both of its states


def _upstream(record: Record, where: str, lengths: Sequence[int], exact: bool) -> Request:
    """Lengths of the blocks: accepted + 1 throughout (`exact`), or what each of them emitted."""
    size = count(record.get("block_size"), "block_size", where)
    tokens = count(first(record, "num_output_tokens", "tokens"), "num_output_tokens", where)
    new_ids = ids_of(record.get("new_ids"), "new_ids", where)
    tokens = len(new_ids) if tokens is None and new_ids is not None else tokens
    for place, length in enumerate(lengths):
        if not length:
            raise ImportFault(f"{where}, block {place}: a block gives one token at least.")
    if exact:
        steps = [Step(block_size=size, drafted=_drafts(size), accepted=n - 1) for n in lengths]
    else:
        steps = [Step(block_size=size, drafted=_drafts(size), emitted=n) for n in lengths]
        if steps and lengths[-1] != size:  # the last one is narrowed where the limit is near
            steps[-1] = Step(emitted=lengths[-1])
            _check_emitted(lengths[-1], size, where)
    made = settled(steps, tokens)
    return Request(
        **about(record, where),
        block_size=size,
        tokens=tokens,
        steps=made,
        **sums_of(made),
        prompt_ids=ids_of(record.get("prompt_ids"), "prompt_ids", where),
        new_ids=new_ids,
        ttft_s=number_of(record, "time_to_first_token", where),
    )


def _drafts(block_size: int | None) -> int | None:
    return None if block_size is None else block_size - 1


def _check_emitted(emitted: int, block_size: int | None, where: str) -> None:
    if block_size is not None and emitted > block_size:
        raise ImportFault(f"{where}: a block emits {emitted}, above its {block_size} entries.")


def _lengths(record: Record, name: str, where: str) -> tuple[int | None, ...]:
    return needed(counts(record.get(name), name, where), name, where)


def upstream_torch(record: Record, where: str) -> Request:
    """`acceptance_lengths` of the package 0.1.0: emitted tokens, the last block cut."""
    return _upstream(record, where, _lengths(record, "acceptance_lengths", where), exact=False)


def upstream_torch_april(record: Record, where: str) -> Request:
    """`acceptance_lengths` of the state of April: accepted + 1, the last block's too."""
    return _upstream(record, where, _lengths(record, "acceptance_lengths", where), exact=True)


def upstream_mlx(record: Record, where: str) -> Request:
    """`accepted` of each response of the package 0.1.0: bonus included, null for what is no block.

    The first response is the prefill's token, the last one only closes.
    """
    told = _lengths(record, "accepted", where)
    return _upstream(record, where, [n for n in told if n is not None], exact=False)


def upstream_mlx_april(record: Record, where: str) -> Request:
    """The same of the state of April, where the prefill's response says 1 and the last one 0."""
    told = _lengths(record, "accepted", where)
    if len(told) < 2 or (told[0], told[-1]) != (1, 0):
        raise ImportFault(
            f"{where}: accepted begins with {told[:1]} and ends with {told[-1:]}; in this state it "
            "begins with 1, the prefill's token, and ends with 0. With null there it is the form "
            "upstream-mlx."
        )
    return _upstream(record, where, told[1:-1], exact=False)


# Rounds of others


def _rounds(
    record: Record,
    rounds: Any,
    size: int | None,
    where: str,
    judged: Callable[[int | None], int | None] = lambda size: None,
    **totals: Any,
) -> Request:
    """A request whose blocks are objects with `accepted` or `acceptance_length`.

    `judged` tells from a block's size how many drafted tokens were verified, where it does not.
    """
    new_ids = ids_of(record.get("new_ids"), "new_ids", where)
    tokens = count(first(record, "tokens", "generation_tokens"), "tokens", where)
    tokens = len(new_ids) if tokens is None and new_ids is not None else tokens
    steps = None
    if isinstance(rounds, list):
        told = [_round(one, size, judged, f"{where}, block {i}") for i, one in enumerate(rounds)]
        steps = settled(told, tokens)
    sizes = {step.block_size for step in steps or ()} - {None}
    return Request(
        **about(record, where),
        block_size=max(sizes, default=None) if size is None else size,
        tokens=tokens,
        steps=steps,
        **(sums_of(steps) if steps is not None else totals),
        prompt_ids=ids_of(record.get("prompt_ids"), "prompt_ids", where),
        new_ids=new_ids,
        ttft_s=seconds(record, "ttft", where),
        total_s=seconds(record, "total", where),
    )


def _round(
    raw: Any, size: int | None, judged: Callable[[int | None], int | None], where: str
) -> Step:
    if not isinstance(raw, dict):
        raise ImportFault(f"{where} is {raw!r}; expected an object with accepted.")
    size = count(raw.get("block_size"), "block_size", where) or size
    drafted_ids = ids_of(raw.get("drafted_ids"), "drafted_ids", where)
    drafted = count(raw.get("drafted"), "drafted", where)
    if drafted is None:
        drafted = judged(size) if drafted_ids is None else len(drafted_ids)
    accepted = count(raw.get("accepted"), "accepted", where)
    length = count(first(raw, "acceptance_length", "tau"), "acceptance_length", where)
    if accepted is None and length is not None:
        accepted = length - 1
    return Step(
        block_size=size,
        drafted=drafted,
        accepted=needed(accepted, "accepted, nor acceptance_length", where),
        emitted=count(raw.get("emitted"), "emitted", where),
        drafted_ids=drafted_ids,
        target_ids=ids_of(raw.get("target_ids"), "target_ids", where),
        proposer="ngram" if raw.get("kind") == "ngram" else "draft",
        draft_s=seconds(raw, "draft", where),
        verify_s=seconds(raw, "verify", where),
        total_s=seconds(raw, "total", where),
    )


def atharvrn(record: Record, where: str) -> Request:
    """Cycles of one prompt, a line each."""
    cycles = record["cycles"]
    return _rounds({**cycles[0], **record}, cycles, None, where, judged=_drafts)


def dflash_mlx(record: Record, where: str) -> Request:
    """A result: rounds one by one, or their number beside tokens and accepted ones."""
    size = count(record.get("block_tokens"), "block_tokens", where)
    rounds = needed(first(record, "rounds", "cycles_completed"), "rounds", where)
    totals = {}
    if not isinstance(rounds, list):
        accepted = count(first(record, "accepted", "accepted_from_draft"), "accepted", where)
        totals = {"blocks": count(rounds, "rounds", where), "accepted": accepted}
    if "verify_len_cap" not in record:  # how many rows were verified is not told
        return _rounds(record, rounds, size, where, **totals)
    cap = count(record["verify_len_cap"], "verify_len_cap", where)
    return _rounds(
        record,
        rounds,
        size,
        where,
        judged=lambda size: _drafts(size if cap is None or size is None else min(cap, size)),
        **totals,
    )


def mlx_dspark(record: Record, where: str) -> Request:
    """A result: rounds one by one, n-gram ones marked, or their number with that of n-gram ones."""
    size = count(record.get("block_size"), "block_size", where)
    rounds = needed(record.get("rounds"), "rounds", where)
    ngram = count(record.get("ngram_rounds"), "ngram_rounds", where)
    totals = {}
    if not isinstance(rounds, list):
        every = count(rounds, "rounds", where)
        if ngram is not None and ngram > every:
            raise ImportFault(f"{where}: ngram_rounds is {ngram}, above rounds, which is {every}.")
        totals = {"blocks": None if ngram is None else every - ngram}
    return _rounds(record, rounds, size, where, **totals)
