"""Decisions on plain numbers: what is accepted, what is kept. No framework, no options."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the draft proposed in one block and what the target said to it."""

    drafted: tuple[int, ...]  # block_size - 1 tokens
    posterior: tuple[int, ...]  # the target's choice after each entry: block_size tokens
    finite: bool = True  # False where the draft's logits were not finite numbers
    odds: tuple[float, ...] = ()  # p / q of each drafted token, for the rejection rule
    draws: tuple[float, ...] = ()  # a number in [0, 1) for each of them, for the same
    draft_prob: tuple[float, ...] | None = None  # of each drafted token, where asked for
    target_prob: tuple[float, ...] | None = None


def matched_prefix(verdict: Verdict) -> int:
    """How many drafted tokens the target would have chosen itself, counted from the anchor."""
    pairs = zip(verdict.drafted, verdict.posterior[:-1], strict=True)  # unequal lengths are a bug
    return next((i for i, (d, p) in enumerate(pairs) if d != p), len(verdict.drafted))


def unrejected_prefix(verdict: Verdict) -> int:
    """How many drafted tokens the rejection rule keeps: each while its draw is below p / q.

    The posterior after them is a draw from what p has above q (dflash.md 3.1).
    """
    rows = zip(verdict.drafted, verdict.odds, verdict.draws, strict=True)
    refused = (i for i, (_, odds, draw) in enumerate(rows) if not draw < odds)
    return next(refused, len(verdict.drafted))


def kept(
    tokens: Sequence[int], stop_tokens: Collection[int], budget: int, unheeded: int = 0
) -> int:
    """How many of a block's tokens the output takes: up to a stop token, within the budget.

    Stop tokens among the first `unheeded` end nothing.
    """
    places = enumerate(tokens, start=1)
    ends = (place for place, token in places if token in stop_tokens and place > unheeded)
    return min(next(ends, len(tokens)), budget)


RULES = {"match": matched_prefix, "rejection": unrejected_prefix}
