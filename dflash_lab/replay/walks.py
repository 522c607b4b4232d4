"""What decoding would have done: walks over an acceptance map, and what hindsight could do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dflash_lab.config import check_block_size, check_policy
from dflash_lab.policies import Steering, describe_policy
from dflash_lab.replay.maps import NO_TOKEN, AcceptanceMap, PromptMap
from dflash_lab.trace import tau

Costs = Mapping[tuple[int, int], float]  # seconds of a whole block by block size and rows
BOUND = "upper bound: chosen after the fact"  # no policy can reach it


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayBlock:
    """One block as decoding would have made it. What its target said is not in it.

    `accepted` counts no further than the text goes, which changes neither `emitted` nor `cut`.
    """

    index: int
    start: int  # position of the anchor in prompt + output
    anchor: int
    block_size: int  # entries drafted, the anchor among them
    rows: int  # of them verified
    drafted: tuple[int, ...] | None  # those verified; None where the map has not kept them
    accepted: int  # min(accepted, remaining)
    emitted: int

    @property
    def cut(self) -> bool:
        return self.emitted < self.accepted + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTrace:
    """The blocks of one prompt under one setting."""

    prompt_id: str
    turn: int
    task: str
    tokens: tuple[int, ...]
    block_size: int  # the largest, where a policy chooses
    draft_window: int | None
    policy: dict[str, Any] | None  # name, version and settings
    blocks: tuple[ReplayBlock, ...]

    @property
    def tau(self) -> float | None:
        """Mean acceptance length over the blocks that were not cut; None without any."""
        return tau(self.blocks)


def replay_traces(
    acceptance: AcceptanceMap,
    block_size: int | None = None,
    draft_window: int | None = None,
    *,
    policy: Any = None,
    verify_cap: int | None = None,
) -> tuple[ReplayTrace, ...]:
    """What decoding each prompt would have done, block for block.

    `block_size` is, as in decoding, the largest that a policy may ask for; None is the map's
    largest. `verify_cap` is the number of rows verified at most: the draft stays as it was.
    Raises ValueError for a size, window or confidence that the map has not.
    """
    check_policy(policy)
    if verify_cap is not None:
        check_block_size(verify_cap, "verify_cap")
    size = acceptance.block_sizes[-1] if block_size is None else block_size
    acceptance.place(size, draft_window)
    return tuple(
        ReplayTrace(
            prompt_id=entry.text.prompt_id,
            turn=entry.text.turn,
            task=entry.text.task,
            tokens=entry.text.tokens,
            block_size=size,
            draft_window=draft_window,
            policy=describe_policy(policy),
            blocks=tuple(_walk(acceptance, entry, size, draft_window, policy, verify_cap)),
        )
        for entry in acceptance.prompts
    )


def _walk(
    acceptance: AcceptanceMap,
    entry: PromptMap,
    block_size: int,
    draft_window: int | None,
    policy: Any,
    verify_cap: int | None,
) -> Iterator[ReplayBlock]:
    steering, tokens = Steering(policy, block_size), entry.text.tokens
    index, n, last = 0, 0, len(tokens) - 1
    while n < last:
        start, asked = len(entry.text.prompt_ids) + n, steering.width()
        s, w = acceptance.place(asked, draft_window)
        size = min(asked, acceptance.context_limit - start)
        rows = steering.rows(size, partial(_confidences, entry, s, w, n, size)) or size
        rows = min(rows, verify_cap or rows)
        accepted = min(int(entry.accepted[s, w, n]), rows - 1)
        emitted = min(accepted + 1, last - n)
        yield ReplayBlock(
            index=index,
            start=start,
            anchor=tokens[n],
            block_size=size,
            rows=rows,
            drafted=_drafted(entry, s, w, n, rows),
            accepted=accepted,
            emitted=emitted,
        )
        steering.note(size, rows, accepted)
        index, n = index + 1, n + emitted


def _confidences(entry: PromptMap, s: int, w: int, n: int, size: int) -> list[float]:
    if entry.confidences is None:
        raise ValueError(
            "the policy looks at the draft's confidences, which this map does not hold; make it "
            "with confidences=True."
        )
    return entry.confidences[s, w, n, : size - 1].tolist()


def _drafted(entry: PromptMap, s: int, w: int, n: int, rows: int) -> tuple[int, ...] | None:
    if rows == 1:
        return ()
    if entry.drafted is None or entry.drafted[s, w, n, 0] == NO_TOKEN:
        return None
    return tuple(entry.drafted[s, w, n, : rows - 1].tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class Hindsight:
    """The best that could have been chosen for one prompt, once all was known."""

    prompt_id: str
    turn: int
    chosen: tuple[tuple[int, int], ...]  # block size and rows, a block each
    seconds: float  # by the costs given
    label: str = BOUND


def per_prompt_best(
    acceptance: AcceptanceMap,
    costs: Costs,
    draft_window: int | None = None,
) -> tuple[Hindsight, ...]:
    """For each prompt the one block size that would have been fastest: an upper bound."""
    made = []
    for entry in acceptance.prompts:
        every = []
        for size in acceptance.block_sizes:
            blocks = list(_walk(acceptance, entry, size, draft_window, None, None))
            pairs = tuple((block.block_size, block.rows) for block in blocks)
            every.append((sum(cost_of(costs, pair) for pair in pairs), pairs))
        made.append(_hindsight(entry, *min(every)))
    return tuple(made)


def per_block_best(
    acceptance: AcceptanceMap,
    costs: Costs,
    draft_window: int | None = None,
) -> tuple[Hindsight, ...]:
    """For each block the size and the rows that would have been fastest: an upper bound.

    Solved from the text's end (dflash.md 7.3), over the settings that `costs` price.
    """
    _, w = acceptance.place(acceptance.block_sizes[-1], draft_window)
    settings = [(s, rows) for s, rows in sorted(costs) if s in acceptance.block_sizes]
    if not settings:
        raise ValueError("costs price none of the map's block sizes, as (block_size, rows).")
    return tuple(
        _hindsight(entry, *_solve(acceptance, entry, w, settings, costs))
        for entry in acceptance.prompts
    )


def _solve(
    acceptance: AcceptanceMap,
    entry: PromptMap,
    w: int,
    settings: Sequence[tuple[int, int]],
    costs: Costs,
) -> tuple[float, tuple[tuple[int, int], ...]]:
    last, first = len(entry.text.tokens) - 1, len(entry.text.prompt_ids)
    best: list[float] = [0.0] * (last + 1)
    step: list[tuple[int, tuple[int, int]]] = [(0, (0, 0))] * (last + 1)
    for n in reversed(range(last)):
        room = acceptance.context_limit - first - n
        options = []
        for size, rows in settings:
            if size <= room:
                column = entry.accepted[acceptance.block_sizes.index(size), w]
                emitted = min(int(column[n]), rows - 1) + 1
                after = min(n + emitted, last)
                options.append((costs[size, rows] + best[after], after, (size, rows)))
        if not options:
            raise ValueError(
                f"costs price no block of at most {room} entries, where the text ends."
            )
        best[n], after, chosen = min(options)
        step[n] = (after, chosen)
    n, taken = 0, []
    while n < last:
        n, chosen = step[n]
        taken.append(chosen)
    return best[0], tuple(taken)


def _hindsight(entry: PromptMap, seconds: float, chosen: tuple[tuple[int, int], ...]) -> Hindsight:
    text = entry.text
    return Hindsight(prompt_id=text.prompt_id, turn=text.turn, chosen=chosen, seconds=seconds)


def cost_of(costs: Costs, pair: tuple[int, int]) -> float:
    """Seconds of a block by its size and the rows verified; ValueError where it has no price."""
    if pair not in costs:
        raise ValueError(f"costs have no seconds for block size {pair[0]} with {pair[1]} rows.")
    return costs[pair]
