"""Sums per cell and prompt, which every figure is made of, and outputs that repeat themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dflash_lab.store import Cell, Run

# Outputs that repeat themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class Repetition:
    """How far an output repeats itself: a loop is easy to draft, and its figures look splendid."""

    longest_run: int  # of one token
    distinct_share: float | None  # distinct tokens over tokens; None for an empty output
    loop_share: float  # of the tokens, those in the longest stretch said four times or more

    @property
    def looped(self) -> bool:
        """Whether a third of the output, 16 tokens at least, is one stretch again and again."""
        return self.loop_share >= 1 / 3


LONGEST_PERIOD = 32  # a loop longer than that is not looked for
SHORTEST_LOOP = 16  # a row of dashes is no loop


def repetition(tokens: Sequence[int]) -> Repetition:
    """Measure how far an output repeats itself."""
    ids = np.asarray(tokens, dtype=np.int64)
    if not len(ids):
        return Repetition(longest_run=0, distinct_share=None, loop_share=0.0)
    looping = 0
    for period in range(1, min(LONGEST_PERIOD, len(ids) // 4) + 1):
        stretch = period + _longest_true(ids[period:] == ids[:-period])
        if stretch >= max(4 * period, SHORTEST_LOOP):
            looping = max(looping, stretch)
    return Repetition(
        longest_run=1 + _longest_true(ids[1:] == ids[:-1]),
        distinct_share=len(np.unique(ids)) / len(ids),
        loop_share=looping / len(ids),
    )


def _longest_true(flags: np.ndarray) -> int:
    """Length of the longest stretch of True."""
    ends = np.flatnonzero(~np.concatenate(([False], flags, [False])))
    return int(np.diff(ends).max()) - 1


# Sums per cell and prompt


COUNTED_OF_PROMPTS = ("cell", "prompt_id", "new_ids", "decode_s", "total_s")
COUNTED_OF_BLOCKS = ("cell", "prompt_id", "drafted", "accepted", "emitted", "cut", "total_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """What each cell counted for each prompt; zero in a cell that lacks the prompt."""

    cells: tuple[Cell, ...]
    prompts: tuple[str, ...]
    by_name: dict[str, np.ndarray]  # each [cells, prompts]

    def __getitem__(self, name: str) -> np.ndarray:
        return self.by_name[name]


def prompt_sums(run: Run, loop_free: bool = False) -> Sums:
    """Every count and time that a cell's figures are made of, summed per prompt.

    `loop_free` leaves out the prompts whose output loops in any of the cells, in all of them.
    """
    prompts, blocks = run.prompts(COUNTED_OF_PROMPTS), run.blocks(COUNTED_OF_BLOCKS)
    names = pc.unique(prompts["prompt_id"]).to_pylist()
    place = Places(run.cells, sorted(names))
    sums = place.sums(place.of(prompts), _prompt_counts(prompts))
    sums |= place.sums(place.of(blocks), _block_counts(blocks))
    if loop_free:
        keep = ~(sums["looped"] > 0).any(axis=0)
        sums = {name: values[:, keep] for name, values in sums.items()}
        names = [name for name, kept in zip(sorted(names), keep, strict=True) if kept]
    return Sums(cells=tuple(run.cells), prompts=tuple(sorted(names)), by_name=sums)


class Places:
    """Where a row's counts go: one place for each cell and prompt."""

    def __init__(self, cells: Sequence[Cell], prompts: Sequence[str]) -> None:
        self.shape = (len(cells), len(prompts))
        self.cells = pa.array([cell.id for cell in cells], pa.string())
        self.prompts = pa.array(prompts, pa.string())

    def of(self, table: pa.Table) -> np.ndarray:
        """The place of each row."""
        cell = pc.index_in(table["cell"], self.cells).to_numpy()
        prompt = pc.index_in(table["prompt_id"], self.prompts).to_numpy()
        return cell * self.shape[1] + prompt

    def sums(self, places: np.ndarray, counts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Counts of rows added up where they belong, each [cells, prompts]."""
        size = self.shape[0] * self.shape[1]
        return {
            name: np.bincount(places, values, size).reshape(self.shape)
            for name, values in counts.items()
        }

    def counts(self, places: np.ndarray, values: np.ndarray, width: int) -> np.ndarray:
        """How many rows of each place have each value below `width`: [cells, prompts, width]."""
        size = self.shape[0] * self.shape[1] * width
        return np.bincount(places * width + values, minlength=size).reshape(*self.shape, width)


def numbers(table: pa.Table, name: str) -> np.ndarray:
    return table[name].to_numpy().astype(float)


def lengths(table: pa.Table, name: str) -> np.ndarray:
    return pc.list_value_length(table[name]).to_numpy().astype(float)


def _prompt_counts(table: pa.Table) -> dict[str, np.ndarray]:
    tokens = lengths(table, "new_ids")
    return {
        "outputs": np.ones(len(tokens)),
        "tokens": tokens,
        "after_first": np.maximum(tokens - 1, 0),
        "decode_s": numbers(table, "decode_s"),
        "total_s": numbers(table, "total_s"),
        "looped": _looped(table["new_ids"]),
    }


def _looped(outputs: pa.ChunkedArray) -> np.ndarray:
    """1.0 for each output that loops; cells mostly hold the same texts, so each is judged once."""
    known: dict[bytes, bool] = {}
    flags = []
    for output in outputs.combine_chunks().to_numpy(zero_copy_only=False):
        key = output.tobytes()
        if key not in known:
            known[key] = repetition(output).looped
        flags.append(known[key])
    return np.asarray(flags, dtype=float)


def _block_counts(table: pa.Table) -> dict[str, np.ndarray]:
    drafts = lengths(table, "drafted")
    accepted, emitted = numbers(table, "accepted"), numbers(table, "emitted")
    whole_block = ~table["cut"].to_numpy().astype(bool)
    drafting = whole_block & (drafts > 0)
    return {
        "blocks": np.ones(len(drafts)),
        "cut_blocks": (~whole_block).astype(float),
        "emitted": emitted,
        "block_s": numbers(table, "total_s"),
        "whole_blocks": whole_block.astype(float),
        "lengths": np.where(whole_block, accepted + 1, 0),
        "accepted": np.where(drafting, accepted, 0),
        "drafts": np.where(drafting, drafts, 0),
        "drafting_blocks": drafting.astype(float),
        "whole_emitted": np.where(whole_block, emitted, 0),
        "full_blocks": (drafting & (accepted == drafts)).astype(float),
    }
