"""What if drafting, verifying or the rest took longer or shorter: another machine, another engine.

Throughput is tokens over seconds, and seconds are a sum of parts; so parts are added up once for
each setting, and a scale is a factor on each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd

from dflash_lab.analyse import OWN, block_frame, ratio
from dflash_lab.costs import Cost, CostTable, measured_blocks, predict
from dflash_lab.store import Run

PARTS = ("draft", "verify", "other")
SETTING = ["block_size", "draft_window"]


class NoParts(ValueError):
    """Nothing says how a block's time divides into parts; the message says what would."""


def cost_parts(run: Run, table: CostTable | None = None) -> pd.DataFrame:
    """One row a setting of our own loop: tokens after the first, and seconds of each part.

    From a cost table, priced over the run's own blocks; without one, from the cells of the run that
    were timed by stages. Columns block_size, draft_window, after_first, and `PARTS` in seconds.
    Raises `NoParts` where there is neither.
    """
    found = _staged(run) if table is None else _priced(run, table)
    if found.empty:
        raise NoParts(
            "no cell here was timed by stages, and no cost table knows its block sizes. Pass one: "
            "costs=dl.measure_costs(pair, block_sizes), or sweep with timing='stages'."
        )
    return found.groupby(SETTING, dropna=False, as_index=False)[["after_first", *PARTS]].sum()


def _staged(run: Run) -> pd.DataFrame:
    blocks = block_frame(run)
    blocks = blocks[(blocks["engine"] == OWN) & (blocks["timing"] == "stages")]
    sizes = {cell.id: cell.block_size for cell in run.cells}
    return pd.DataFrame(
        {
            "block_size": blocks["cell"].map(sizes),
            "draft_window": blocks["draft_window"],
            "after_first": blocks["emitted"],
            "draft": blocks["draft_s"],
            "verify": blocks["verify_s"],
            "other": blocks["total_s"] - blocks["draft_s"] - blocks["verify_s"],
        }
    )


def _priced(run: Run, table: CostTable) -> pd.DataFrame:
    known = {(cost.block_size, cost.draft_window) for cost in table.costs}
    cells = [
        cell
        for cell in run.cells
        if cell.engine == OWN and (cell.block_size, cell.draft_window) in known
    ]
    if not cells:
        return pd.DataFrame()
    blocks = measured_blocks(Run(path=run.path, cells=tuple(cells)))
    made = predict(blocks, only(table, "draft"))[[*SETTING, "after_first"]]
    return made.assign(**{part: predict(blocks, only(table, part))["decode_s"] for part in PARTS})


def only(table: CostTable, part: str) -> CostTable:
    """The table of one part alone: the three of them add up to the whole.

    A block's measured seconds are divided as its stages are, which were measured one by one.
    """
    return replace(table, costs=tuple(_only(cost, part) for cost in table.costs))


def _only(cost: Cost, part: str) -> Cost:
    stages = {name: getattr(cost, f"{name}_s") for name in PARTS}
    share = float(ratio(stages[part], sum(stages.values())))
    drafting = part == "draft"
    return replace(
        cost,
        **{f"{name}_s": seconds if name == part else 0.0 for name, seconds in stages.items()},
        total_s=cost.total_s * share,
        total_s_low=cost.total_s_low * share,
        total_s_high=cost.total_s_high * share,
        first_draft_s=cost.first_draft_s if drafting else 0.0,
        prefill_s=cost.prefill_s if part == "verify" else 0.0,
    )


def scaled_frame(parts: pd.DataFrame, scale: Mapping[str, float]) -> pd.DataFrame:
    """One row a setting: tokens a second as things are, and with each part scaled.

    `parts` as from `cost_parts`; a part that `scale` does not name stays as it is. `best` marks the
    fastest setting with the scale, `best_now` the fastest without.
    """
    if unknown := sorted(set(scale) - set(PARTS)):
        raise ValueError(f"{', '.join(unknown)} is no part; there are {', '.join(PARTS)}.")
    if any(not factor >= 0 for factor in scale.values()):
        raise ValueError(f"the scale is {dict(scale)}; expected factors of 0 and more.")
    now = sum(parts[part] for part in PARTS)
    then = sum(parts[part] * scale.get(part, 1.0) for part in PARTS)
    made = parts[SETTING].assign(
        now_per_s=ratio(parts["after_first"], now), tokens_per_s=ratio(parts["after_first"], then)
    )
    return made.assign(best=_largest(made["tokens_per_s"]), best_now=_largest(made["now_per_s"]))


def _largest(values: pd.Series) -> np.ndarray:
    """True at the first of the largest, nowhere where none is known."""
    known = values.to_numpy(dtype=float)
    marks = np.zeros(len(known), dtype=bool)
    if not np.isnan(known).all():
        marks[np.nanargmax(known)] = True
    return marks
