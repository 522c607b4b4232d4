"""What was imported as long frames, with the columns of the lab's own; what is not told is missing.

`draft_window` is missing where a source tells none, `index` where it tells no order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pandas as pd

from dflash_lab.imports.quantities import tau_of_counts
from dflash_lab.imports.records import Counters, Request

WHOLE = "Int64"  # a whole number that may be missing
BLOCK_COLUMNS = {
    "prompt_id": "string",
    "turn": WHOLE,
    "task": "string",
    "cell_block_size": WHOLE,  # the setting; block_size is the block's own
    "draft_window": WHOLE,
    "index": WHOLE,
    "start": WHOLE,
    "block_size": WHOLE,
    "rows": WHOLE,
    "accepted": WHOLE,
    "emitted": WHOLE,
    "cut": "boolean",
    "proposer": "string",  # "draft", or "ngram" for blocks that the draft had no part in
    "draft_s": "Float64",
    "verify_s": "Float64",
    "total_s": "Float64",
}
PROMPT_COLUMNS = {
    "prompt_id": "string",
    "turn": WHOLE,
    "task": "string",
    "cell_block_size": WHOLE,
    "draft_window": WHOLE,
    "tokens": WHOLE,
    "blocks": WHOLE,
    "drafted": WHOLE,
    "accepted": WHOLE,
    "ttft_s": "Float64",
    "total_s": "Float64",
}
LENGTH_COLUMNS = {
    "accepted": WHOLE,
    "blocks": WHOLE,
    "share": "Float64",
    "censored": "boolean",  # all drafts accepted: how far the draft would have gone is not known
    "cut_blocks": "boolean",  # whether blocks that were cut may be among them
}
SURVIVAL_COLUMNS = {
    "draft_position": WHOLE,
    "survival": "Float64",
    "at_risk": WHOLE,
    "conditional": "Float64",
    "conditional_at_risk": WHOLE,
    "cut_blocks": "boolean",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Imported:
    """A file of another system in this project's terms.

    `facts` say where it is from. A source that tells which blocks were cut has them left out of
    tau, lengths and survival; in another one they are in it, and `cut_blocks` says so.
    """

    form: str
    engine: str
    requests: tuple[Request, ...] = ()
    counters: Counters | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def blocks(self) -> pd.DataFrame:
        """One row a block; those of a histogram have no index."""
        rows = [row for one in self.requests for row in block_rows(one)]
        return _frame(rows, BLOCK_COLUMNS)

    @property
    def prompts(self) -> pd.DataFrame:
        """One row an output: its totals as far as they are told."""
        return _frame([_prompt_row(one) for one in self.requests], PROMPT_COLUMNS)

    @property
    def lengths(self) -> pd.DataFrame:
        """One row a block size and number of accepted tokens: how many blocks, and what share."""
        if self.counters is not None:
            return _frame(_counted_lengths(self.counters), LENGTH_COLUMNS)
        rows, cut_blocks = self._judged()
        made = []
        for size, group in rows.groupby("cell_block_size", dropna=False):
            counted = group["accepted"].value_counts()
            made += [
                {
                    "cell_block_size": size,
                    "accepted": accepted,
                    "blocks": int(counted.get(accepted, 0)),
                    "share": counted.get(accepted, 0) / len(group),
                    "censored": pd.NA if pd.isna(size) else accepted == size - 1,
                    "cut_blocks": cut_blocks,
                }
                for accepted in range(int(group["accepted"].max()) + 1)
            ]
        return _frame(made, {"cell_block_size": WHOLE, **LENGTH_COLUMNS})

    @property
    def survival(self) -> pd.DataFrame:
        """One row a block size and draft position: how many blocks were accepted so far."""
        if self.counters is not None:
            return _frame(_counted_survival(self.counters), SURVIVAL_COLUMNS)
        rows, cut_blocks = self._judged()
        rows = rows[rows["rows"].notna()]
        made = []
        for size, group in rows.groupby("cell_block_size", dropna=False):
            for k in range(1, int(group["rows"].max())):
                drafting = group[group["rows"] > k]
                before, after = (int((drafting["accepted"] >= n).sum()) for n in (k - 1, k))
                about = {"cell_block_size": size, "draft_position": k, "cut_blocks": cut_blocks}
                made.append(about | _survived(after, len(drafting), before))
        return _frame(made, {"cell_block_size": WHOLE, **SURVIVAL_COLUMNS})

    @property
    def figures(self) -> dict[str, Any]:
        """Named quantities over all outputs; None is what the source does not tell.

        `tau` is over blocks known not to be cut, `tau_cut_blocks` over all; `unknown_cut` counts
        the blocks of which it is not known, and which `tau` leaves out.
        """
        if self.counters is not None:
            return _counted_figures(self.counters)
        blocks = self.blocks
        blocks = blocks[blocks["proposer"] == "draft"]
        whole = blocks[(~blocks["cut"]).fillna(False)]
        prompts = self.prompts
        return {
            "prompts": len(prompts),
            "blocks": _sum(prompts["blocks"]),
            "tokens": _sum(prompts["tokens"]),
            "unknown_cut": int(blocks["cut"].isna().sum()),
            "tau": tau_of_counts(int(whole["accepted"].sum()), len(whole)),
            "tau_cut_blocks": _pooled_tau(prompts),
            "tokens_per_block": self._tokens_per_block(),
            "draft_rate": _ratio(prompts["accepted"], prompts["drafted"]),
        }

    def _tokens_per_block(self) -> float | None:
        """All emitted over all blocks, n-gram ones included; the prefill's token is no block's."""
        emitted = _sum(self.prompts["tokens"] - 1)
        every = [one.blocks if one.steps is None else len(one.steps) for one in self.requests]
        if emitted is None or None in every or not sum(every):
            return None
        return emitted / sum(every)

    def _judged(self) -> tuple[pd.DataFrame, bool]:
        """The blocks that figures of acceptance are made of, and whether cut ones may be in it."""
        rows = self.blocks
        rows = rows[(rows["proposer"] == "draft") & rows["accepted"].notna()]
        if rows["cut"].isna().all():
            return rows, True
        return rows[(~rows["cut"]).fillna(False)], False


def block_rows(one: Request) -> list[dict[str, Any]]:
    """The blocks of an output as rows, in order where the source tells it."""
    about = {
        "prompt_id": one.prompt_id,
        "turn": one.turn,
        "task": one.task,
        "cell_block_size": one.block_size,
        "draft_window": one.draft_window,
    }
    if one.steps is not None:
        return [about | row for row in _step_rows(one)]
    size = one.block_size
    uncut = _all_whole(one)
    return [
        about
        | {"block_size": size, "rows": size, "accepted": accepted, "proposer": "draft"}
        | ({"emitted": accepted + 1, "cut": False} if uncut else {})
        for accepted, blocks in enumerate(one.histogram or ())
        for _ in range(blocks)
    ]


def _all_whole(one: Request) -> bool:
    """Whether the blocks of a histogram, none of them cut, emit exactly the tokens told."""
    emitted = sum((accepted + 1) * blocks for accepted, blocks in enumerate(one.histogram or ()))
    return one.tokens is not None and emitted == one.tokens - 1


def _step_rows(one: Request) -> list[dict[str, Any]]:
    start = None if one.prompt_ids is None else len(one.prompt_ids)
    rows = []
    for index, step in enumerate(one.steps or ()):
        rows.append(
            {
                "index": index,
                "start": start,
                "block_size": step.block_size,
                "rows": None if step.drafted is None else step.drafted + 1,
                "cut": step.cut,
                **{name: getattr(step, name) for name in _AS_TOLD},
            }
        )
        start = None if None in (start, step.emitted) else start + step.emitted
    return rows


_AS_TOLD = ("accepted", "emitted", "proposer", "draft_s", "verify_s", "total_s")


def _prompt_row(one: Request) -> dict[str, Any]:
    names = [name for name in PROMPT_COLUMNS if name != "cell_block_size"]
    return {name: getattr(one, name) for name in names} | {"cell_block_size": one.block_size}


def _frame(rows: Sequence[dict[str, Any]], columns: dict[str, str]) -> pd.DataFrame:
    made = {
        name: pd.array([row.get(name, pd.NA) for row in rows], kind)
        for name, kind in columns.items()
    }
    return pd.DataFrame(made)


def _survived(survived: int, at_risk: int, conditional_at_risk: int) -> dict[str, Any]:
    return {
        "survival": survived / at_risk if at_risk else pd.NA,
        "at_risk": at_risk,
        "conditional": survived / conditional_at_risk if conditional_at_risk else pd.NA,
        "conditional_at_risk": conditional_at_risk,
    }


def _sum(values: pd.Series) -> int | None:
    """The sum; None where one of them is missing."""
    return None if values.isna().any() or not len(values) else int(values.sum())


def _ratio(above: pd.Series, below: pd.Series) -> float | None:
    over, under = _sum(above), _sum(below)
    return None if over is None or not under else over / under


def _pooled_tau(prompts: pd.DataFrame) -> float | None:
    accepted, blocks = _sum(prompts["accepted"]), _sum(prompts["blocks"])
    return None if accepted is None or not blocks else tau_of_counts(accepted, blocks)


# Counters of a whole server: no prompts, and cut blocks are in it


def _counted_lengths(told: Counters) -> list[dict[str, Any]]:
    at_least = (told.blocks, *told.accepted_per_position, 0)
    exactly = [here - further for here, further in pairwise(at_least)]
    return [
        {
            "accepted": accepted,
            "blocks": blocks,
            "share": blocks / told.blocks if told.blocks else pd.NA,
            "censored": accepted == len(exactly) - 1,
            "cut_blocks": True,
        }
        for accepted, blocks in enumerate(exactly)
        if told.accepted_per_position
    ]


def _counted_survival(told: Counters) -> list[dict[str, Any]]:
    """Every block is at risk at every position, which holds where all have one size."""
    at_least = (told.blocks, *told.accepted_per_position)
    return [
        {
            "draft_position": k,
            "cut_blocks": True,
            **_survived(at_least[k], told.blocks, at_least[k - 1]),
        }
        for k in range(1, len(at_least))
    ]


def _counted_figures(told: Counters) -> dict[str, Any]:
    tau = tau_of_counts(told.accepted, told.blocks)
    return {
        "prompts": None,
        "blocks": told.blocks,
        "tokens": None,
        "unknown_cut": told.blocks,
        "tau": None,
        "tau_cut_blocks": tau,
        "tokens_per_block": None,
        "draft_rate": told.accepted / told.drafted if told.drafted else None,
    }
