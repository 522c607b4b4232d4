"""Prompts drawn again: ratios of sums over them, and the ends of 95 % intervals.

Blocks of one prompt are alike, so prompts are what is drawn, the same ones for every cell.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from dflash_lab.config import whole

LEVEL = 0.95  # of every interval


def draw_prompts(prompts: int, resamples: int, seed: int) -> np.ndarray:
    """How often each resample holds each prompt: [resamples, prompts], one draw for all cells."""
    whole("resamples", resamples, 1, "2,000 or more give a steady interval.")
    rng = np.random.default_rng(seed)
    if not prompts:
        return np.zeros((resamples, 0), dtype=np.int64)
    return rng.multinomial(prompts, np.full(prompts, 1 / prompts), size=resamples)


def ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Above over below, missing (NaN) where below is 0."""
    above, below = np.broadcast_arrays(np.asarray(above, float), np.asarray(below, float))
    return np.divide(above, below, out=np.full(above.shape, np.nan), where=below > 0)


@lru_cache
def shares(prompts: int) -> tuple[float, float]:
    """The shares of resamples that lie below the two ends of an interval over so many prompts.

    A plain percentile interval takes 2.5 % and 97.5 % and is too narrow for tens of prompts, by
    sqrt((n - 1) / n) and by the step from Student's t to the normal. The expanded percentile
    interval (T. Hesterberg, "What Teachers Should Know About the Bootstrap", 2015) moves both
    shares outwards by as much. Simulated with known survival, 1,000 runs each, tau and throughput
    ratio: at 12, 24 and 48 prompts it covered the truth in 93.5 to 95.1, 94.0 to 95.7 and 93.1 to
    96.2 %, the plain one in 89.9 to 92.6, 91.9 to 94.2 and 91.9 to 95.2 %. BCa gained less than 2
    points on that at 24, and studentised ratios were too wide (97.3 and 97.4 % at 24 and 48).
    """
    normal = NormalDist()
    z, df = normal.inv_cdf((1 + LEVEL) / 2), prompts - 1
    t = (
        z
        + (z**3 + z) / (4 * df)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * df**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * df**3)
    )  # Student's, by Cornish and Fisher; with under 5 prompts the extremes are the ends anyway
    below = normal.cdf(-t * math.sqrt(prompts / df))
    return below, 1 - below


def counting(*below: np.ndarray) -> int:
    """How many prompts count in each of several ratios, the least; `below` are summed in them."""
    return min(int((values > 0).sum()) for values in below)


def ends(drawn: np.ndarray, prompts: int) -> tuple[float | None, float | None]:
    """Ends of the interval of a figure with these values in the resamples, over so many prompts.

    None with one prompt, which says nothing about others, and where no resample has a value.
    """
    known = drawn[~np.isnan(drawn)]
    if prompts < 2 or not len(known):
        return None, None
    low, high = np.quantile(known, shares(prompts))
    return float(low), float(high)


def intervals(
    draws: np.ndarray, above: np.ndarray, below: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Ends of the 95 % interval of sum(above) / sum(below), one for each cell; see `shares`.

    Both are [cells, prompts]. Missing where fewer than two prompts count.
    """
    found = np.full((2, len(above)), np.nan)
    counting, weights = (below > 0).sum(axis=1), draws.T.astype(float)
    for prompts in np.unique(counting[counting > 1]).tolist():
        rows = np.flatnonzero(counting == prompts)
        drawn = ratio(above[rows] @ weights, below[rows] @ weights)
        found[:, rows] = np.quantile(drawn, shares(prompts), axis=1)
        for row in np.flatnonzero(np.isnan(drawn).any(axis=1)):  # a resample without any of it
            found[:, rows[row]] = ends(drawn[row], prompts)
    return found[0], found[1]
