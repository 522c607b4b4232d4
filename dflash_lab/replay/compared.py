"""Ways to size blocks beside each other: fixed sizes, policies, and the bounds none can reach."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from dflash_lab.analyse import draw_prompts, ends, ratio
from dflash_lab.policies import describe_policy, policy_label
from dflash_lab.replay.maps import AcceptanceMap
from dflash_lab.replay.walks import (
    Costs,
    cost_of,
    per_block_best,
    per_prompt_best,
    replay_traces,
)

Chosen = Sequence[tuple[int, int]]  # block size and rows verified, a block each


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    name: str
    block_size: int | None  # the largest; None where every one of the map was open
    bound: str | None  # why it can only be an upper bound
    chosen: tuple[Chosen, ...]  # of each text


def policy_frame(
    acceptance: AcceptanceMap,
    costs: Costs,
    policies: Sequence[Any] = (),
    *,
    block_size: int | None = None,
    draft_window: int | None = None,
    resamples: int = 2000,
    seed: int = 0,
) -> pd.DataFrame:
    """One row a way to size blocks, on the same texts: each fixed size, each policy, two bounds.

    `costs` are the seconds of a whole block by (block size, rows verified), so `tokens_per_s` is
    predicted. `block_size` is the largest that a policy may ask for; None is the map's largest.
    `speedup` is over the fastest fixed size; intervals are over prompts. The best size of each
    prompt and that of each block are chosen after the fact: `bound` says so, and is missing else.
    """
    ways = list(_ways(acceptance, costs, policies, block_size, draft_window))
    emitted = _by_prompt(acceptance, [len(p.text.tokens) - 1 for p in acceptance.prompts])
    seconds = [
        _by_prompt(acceptance, [sum(cost_of(costs, pair) for pair in one) for one in way.chosen])
        for way in ways
    ]
    fixed = [spent for way, spent in zip(ways, seconds, strict=True) if way.bound is None]
    best = min(fixed[: len(acceptance.block_sizes)], key=lambda spent: spent.sum())
    draws = draw_prompts(len(emitted), resamples, seed)
    rows = [
        _row(way, emitted, spent, best, draws) for way, spent in zip(ways, seconds, strict=True)
    ]
    return pd.DataFrame(rows).astype({"block_size": "Int64", "bound": "string"})


def _ways(
    acceptance: AcceptanceMap,
    costs: Costs,
    policies: Sequence[Any],
    block_size: int | None,
    draft_window: int | None,
) -> Iterator[_Way]:
    def walked(size: int, policy: Any = None) -> tuple[Chosen, ...]:
        traces = replay_traces(acceptance, size, draft_window, policy=policy)
        return tuple([(b.block_size, b.rows) for b in trace.blocks] for trace in traces)

    for size in acceptance.block_sizes:
        yield _Way(name=f"block size {size}", block_size=size, bound=None, chosen=walked(size))
    largest = acceptance.block_sizes[-1] if block_size is None else block_size
    for policy in policies:
        name = policy_label(describe_policy(policy)) or ""
        yield _Way(name=name, block_size=largest, bound=None, chosen=walked(largest, policy))
    for name, best in (("each prompt", per_prompt_best), ("each block", per_block_best)):
        found = best(acceptance, costs, draft_window)
        yield _Way(
            name=f"best block size of {name}",
            block_size=None,
            bound=found[0].label,
            chosen=tuple(one.chosen for one in found),
        )


def _by_prompt(acceptance: AcceptanceMap, values: Sequence[float]) -> np.ndarray:
    """Values of texts added up to those of prompts, whose turns belong together."""
    ids = [entry.text.prompt_id for entry in acceptance.prompts]
    return pd.Series(values, dtype=float).groupby(ids).sum().to_numpy()


def _row(
    way: _Way, emitted: np.ndarray, spent: np.ndarray, best: np.ndarray, draws: np.ndarray
) -> dict[str, Any]:
    blocks = sum(map(len, way.chosen))
    pace = ends(ratio(draws @ emitted, draws @ spent), len(emitted))
    gain = ends(ratio(draws @ best, draws @ spent), len(emitted))
    return {
        "policy": way.name,
        "block_size": way.block_size,
        "bound": way.bound,
        "prompts": len(emitted),
        "blocks": blocks,
        "rows": sum(rows for one in way.chosen for _, rows in one),
        "tokens_per_block": float(ratio(emitted.sum(), blocks)),
        "tokens_per_s": float(ratio(emitted.sum(), spent.sum())),
        "tokens_per_s_low": pace[0],
        "tokens_per_s_high": pace[1],
        "speedup": float(ratio(best.sum(), spent.sum())),
        "speedup_low": gain[0],
        "speedup_high": gain[1],
    }
