"""What a source tells of requests and blocks, checked: counts that cannot be are an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


class ImportFault(ValueError):
    """A file that cannot be what it is said to be; the message names the place and the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One block as a source tells it; None is what it does not tell."""

    block_size: int | None = None  # entries drafted, the anchor among them
    drafted: int | None = None  # tokens that were judged: rows verified, less the anchor's
    accepted: int | None = None  # by the rule, the bonus token left out
    emitted: int | None = None
    drafted_ids: tuple[int, ...] | None = None
    target_ids: tuple[int, ...] | None = None  # the target's choice after each entry
    proposer: str = "draft"  # or "ngram": such blocks say nothing of the draft
    draft_s: float | None = None
    verify_s: float | None = None
    total_s: float | None = None

    @property
    def cut(self) -> bool | None:
        """Whether the output ended inside the block; None where that cannot be told."""
        if self.accepted is None or self.emitted is None:
            return None
        return self.emitted < self.accepted + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One output as a source tells it; None is what it does not tell."""

    prompt_id: str
    turn: int = 0
    task: str | None = None
    block_size: int | None = None  # the setting, in entries
    draft_window: int | None = None
    tokens: int | None = None  # new tokens, that of the prefill among them
    steps: tuple[Step, ...] | None = None  # in order
    histogram: tuple[int, ...] | None = None  # blocks by accepted tokens, in no order
    blocks: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    prompt_ids: tuple[int, ...] | None = None
    new_ids: tuple[int, ...] | None = None
    ttft_s: float | None = None
    total_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """What a whole server counted between two readings."""

    blocks: int
    drafted: int
    accepted: int
    accepted_per_position: tuple[int, ...]  # blocks whose draft at position 1, 2, ... was accepted


def count(value: Any, name: str, where: str) -> int | None:
    """A number of things, or None where it is not told; ImportFault for anything else."""
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ImportFault(f"{where}: {name} is {value!r}; expected a whole number from 0.")
    return value


def counts(values: Any, name: str, where: str) -> tuple[int | None, ...] | None:
    """A list of numbers of things, an entry of it perhaps None; None where it is not told."""
    if values is None:
        return None
    if not isinstance(values, list):
        raise ImportFault(f"{where}: {name} is {values!r}; expected a list.")
    return tuple(count(value, f"{name}[{i}]", where) for i, value in enumerate(values))


def settled(steps: Sequence[Step], tokens: int | None) -> tuple[Step, ...]:
    """The steps of one output with what follows from the others: every block but the last is whole.

    So of accepted and emitted one tells the other, and the last block emits what is left of
    `tokens`, those after the prefill's. Nothing else is filled in.
    """
    made: list[Step] = []
    for step in steps[:-1]:
        accepted, emitted = step.accepted, step.emitted
        if emitted is None and accepted is not None:
            emitted = accepted + 1
        if accepted is None and emitted is not None:
            accepted = emitted - 1
        made.append(replace(step, accepted=accepted, emitted=emitted))
    return (*made, *(_last(step, [one.emitted for one in made], tokens) for step in steps[-1:]))


def _last(step: Step, before: Sequence[int | None], tokens: int | None) -> Step:
    accepted, emitted = step.accepted, step.emitted
    if emitted is None and tokens is not None and None not in before:
        emitted = tokens - 1 - sum(before)
    if accepted is None and emitted is not None and emitted == step.block_size:
        accepted = emitted - 1  # a block that was emitted whole was accepted whole
    return replace(step, accepted=accepted, emitted=emitted)


def check_request(one: Request, where: str) -> Request:
    """The request, or an ImportFault that names the first count that cannot be."""
    for place, step in enumerate(one.steps or ()):
        _check_step(step, place == len(one.steps or ()) - 1, f"{where}, block {place}")
    told = [step.emitted for step in one.steps or ()]
    if one.tokens is not None and told and None not in told and sum(told) + 1 != one.tokens:
        raise ImportFault(
            f"{where}: the blocks emit {sum(told)} tokens, which with the prefill's is "
            f"{sum(told) + 1}, but {one.tokens} new tokens are told. Is it another form or state?"
        )
    if one.histogram is not None:
        _check_histogram(one, where)
    _within("accepted", one.accepted, "drafted", one.drafted, where)
    if one.new_ids is not None and one.tokens not in (None, len(one.new_ids)):
        raise ImportFault(f"{where}: {len(one.new_ids)} token ids, but {one.tokens} new tokens.")
    return one


def _check_step(step: Step, last: bool, where: str) -> None:
    drafts = None if step.block_size is None else step.block_size - 1
    _within("drafted", step.drafted, "block_size - 1", drafts, where)
    _within("accepted", step.accepted, "drafted", step.drafted, where)
    _within("accepted", step.accepted, "block_size - 1", drafts, where)
    if step.emitted is None or step.accepted is None:
        return
    if not 1 <= step.emitted <= step.accepted + 1:
        raise ImportFault(
            f"{where}: emitted is {step.emitted} with {step.accepted} accepted; expected 1 to "
            f"{step.accepted + 1}, the target's own token included. Is it another form or state?"
        )
    if step.cut and not last:
        raise ImportFault(f"{where} is cut, but only the last block of an output can be.")


def _check_histogram(one: Request, where: str) -> None:
    histogram = one.histogram or ()
    _within("blocks of the histogram", sum(histogram), "blocks", one.blocks, where)
    if one.block_size is not None and any(histogram[one.block_size :]):
        raise ImportFault(
            f"{where}: the histogram has blocks with {len(histogram) - 1} accepted, but a block of "
            f"{one.block_size} drafts {one.block_size - 1}."
        )
    found = sum(accepted * blocks for accepted, blocks in enumerate(histogram))
    if one.accepted is not None and one.accepted != found:
        raise ImportFault(
            f"{where}: the histogram adds up to {found} accepted, but {one.accepted} are told."
        )


def check_counters(told: Counters, where: str) -> Counters:
    """The counters, or an ImportFault: at each position no more blocks than at the one before."""
    before, name = told.blocks, "blocks"
    for place, value in enumerate(told.accepted_per_position, start=1):
        _within(f"accepted at position {place}", value, name, before, where)
        before, name = value, f"accepted at position {place}"
    _within("accepted", told.accepted, "drafted", told.drafted, where)
    if told.accepted_per_position and sum(told.accepted_per_position) != told.accepted:
        raise ImportFault(
            f"{where}: the positions add up to {sum(told.accepted_per_position)} accepted, but "
            f"{told.accepted} are told."
        )
    return told


def _within(name: str, value: int | None, limit: str, most: int | None, where: str) -> None:
    if value is not None and most is not None and value > most:
        raise ImportFault(
            f"{where}: {name} is {value}, above {limit}, which is {most}. Is it another form or "
            "another block size?"
        )
    if value is not None and value < 0:
        raise ImportFault(f"{where}: {name} is {value}; expected a number from 0.")
