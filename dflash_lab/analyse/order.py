"""Whether the machine grew slower or faster while a run was measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from dflash_lab.analyse.resampling import draw_prompts, ends
from dflash_lab.store import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """How times moved in the course of a run."""

    decodes: int
    rank_correlation: float | None  # of residual time and order; above 0: it grew slower
    again: float | None  # seconds of the first cell measured last, over those of its first time
    again_low: float | None
    again_high: float | None

    @property
    def sentence(self) -> str:
        """Both figures in one line."""
        told = "rank correlation of residual time and order not to be told"
        if self.rank_correlation is not None:
            told = f"rank correlation of residual time and order {self.rank_correlation:+.2f}"
        if self.again is None:
            return f"Drift: {told}; the first cell was not measured again."
        span = "" if self.again_low is None else f" [{self.again_low:.2f}, {self.again_high:.2f}]"
        return (
            f"Drift: {told}; the first cell measured again at the end took {self.again:.2f}x{span}."
        )


def drift(run: Run, resamples: int = 2000, seed: int = 0) -> Drift:
    """How far times drifted with the order of decoding.

    Residual time is the logarithm of a decode's seconds a token, less the means of its cell and of
    its prompt; order too, since a prompt's decodes stand together in it. What drifts from prompt to
    prompt alone is not seen there but in `again`, which needs a sweep with `first_again`. The run's
    cells should be comparable.
    """
    names = ("cell", "prompt_id", "turn", "repeat", "new_ids", "decode_s", "order")
    rows = run.prompts(names).to_pandas()
    rows = rows[(rows["new_ids"].map(len) > 1) & (rows["decode_s"] > 0)]
    again, low, high = _again(run, rows, resamples, seed)
    return Drift(
        decodes=len(rows),
        rank_correlation=_rank_correlation(rows),
        again=again,
        again_low=low,
        again_high=high,
    )


def _rank_correlation(rows: pd.DataFrame) -> float | None:
    """Spearman's; None where nothing is left to rank."""
    if len(rows) < 3:
        return None
    pace = _residual(rows, np.log(rows["decode_s"] / (rows["new_ids"].map(len) - 1)))
    order = _residual(rows, rows["order"].astype(float))
    if np.ptp(pace) < 1e-9 or np.ptp(order) < 1e-9:
        return None
    return float(pace.rank().corr(order.rank()))


def _residual(rows: pd.DataFrame, values: pd.Series) -> pd.Series:
    """What means of cells and of prompts leave; rounded, so that equals stay equal ranks."""
    for key in ("cell", "prompt_id"):
        values = values - values.groupby(rows[key]).transform("mean")
    return values.round(12)


def _again(
    run: Run, rows: pd.DataFrame, resamples: int, seed: int
) -> tuple[float | None, float | None, float | None]:
    check = run.check("first_again")
    if check is None:
        return None, None, None
    second = pd.DataFrame(check["prompts"]).groupby("prompt_id")["decode_s"].sum()
    mine = rows[(rows["cell"] == check["cell"]) & (rows["repeat"] == 0) & (rows["turn"] == 0)]
    first = mine.groupby("prompt_id")["decode_s"].sum()
    both = first.index.intersection(second.index)
    if not len(both):
        return None, None, None
    before, after = first[both].to_numpy(), second[both].to_numpy()
    draws = draw_prompts(len(both), resamples, seed)
    low, high = ends((draws @ after) / (draws @ before), len(both))
    return float(after.sum() / before.sum()), low, high
