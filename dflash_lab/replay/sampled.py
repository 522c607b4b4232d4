"""Replay of sampled text: what the rejection rule accepts, drawn or as an exact expectation.

Arithmetic on probabilities that are given; nothing here decodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


def acceptance_chances(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The chance that the rejection rule accepts the text's own token, given that it is emitted.

    `p` [tokens]: the target's probability of each new token, `q` [anchors, slots]: the draft's
    of token n + k in slot k of the block at anchor n, both filtered as they were for sampling.
    The chance is min(1, q / p) (dflash.md 7.4); NaN past the text's end.
    """
    p, q = np.asarray(p, float), np.asarray(q, float)
    if q.ndim != 2 or q.shape[0] != len(p) - 1:
        raise ValueError(
            f"q has the shape {list(q.shape)}; expected [{len(p) - 1}, slots], a row for each "
            f"anchor of a text of {len(p)} tokens."
        )
    at = np.arange(q.shape[0])[:, None] + np.arange(1, q.shape[1] + 1)
    inside = at < len(p)
    of_text = np.where(inside, p[np.minimum(at, len(p) - 1)], np.nan)
    if not (np.all((of_text > 0) | ~inside) and np.all((q >= 0) | ~inside)):
        raise ValueError("p and q are probabilities of emitted tokens: p above 0, q from 0.")
    return np.minimum(1.0, q / of_text)


def draw_accepted(chances: np.ndarray, seed: int) -> np.ndarray:
    """Accepted counts of every anchor, drawn: how many drafts are accepted in a row, from the left.

    Independent draws given the text, so a walk over them is exact in distribution. Static sizes
    and policies that do not look at the drafts may be replayed so (dflash.md 3.2).
    """
    draws = np.random.default_rng(seed).random(chances.shape)
    return np.logical_and.accumulate(draws < chances, axis=1).sum(axis=1, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedBlocks:
    """What blocks of one size come to on average over all draws, the text being given."""

    blocks: float
    cut_blocks: float
    emitted: int  # the text's tokens after the first
    emitted_cut: float  # of them in the cut block

    @property
    def tokens_per_block(self) -> float | None:
        return self.emitted / self.blocks if self.blocks else None

    @property
    def tau(self) -> float | None:
        """Expected tokens over expected blocks, those that were cut left out of both."""
        whole = self.blocks - self.cut_blocks
        return (self.emitted - self.emitted_cut) / whole if whole > 1e-12 else None


def expected_blocks(chances: np.ndarray) -> ExpectedBlocks:
    """The exact expectation for blocks of slots + 1 entries, without a draw (dflash.md 7.4)."""
    anchors, slots = chances.shape
    begins = np.zeros(anchors + 2)  # the chance that a block begins at n; the last: it was cut
    begins[0], emitted_cut = 1.0, 0.0
    for n in range(anchors):
        drafts = min(slots, anchors - n)
        survival = np.concatenate(([1.0], np.cumprod(chances[n, :drafts])))
        begins[n + 1 : n + 1 + drafts] += begins[n] * (survival[:-1] - survival[1:])
        begins[n + 1 + drafts] += begins[n] * survival[-1]
        if n + 1 + drafts == anchors + 1:
            emitted_cut += begins[n] * survival[-1] * (anchors - n)
    return ExpectedBlocks(
        blocks=float(begins[:anchors].sum()),
        cut_blocks=float(begins[anchors + 1]),
        emitted=anchors,
        emitted_cut=emitted_cut,
    )
