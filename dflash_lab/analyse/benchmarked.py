"""A benchmark's table: every figure of every cell with its interval, against which baseline.

Cells stand together where they compare (`kinds`); no figure joins two kinds. Baselines are cells of
the run: plain decoding by our own loop, by the library's generator, and by its prompt lookup.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from dflash_lab.analyse.choice import COMPARABLE
from dflash_lab.analyse.frames import OWN, cell_frame, paired_frame, records
from dflash_lab.analyse.resampling import draw_prompts, ends, intervals, ratio
from dflash_lab.analyse.sums import Sums, prompt_sums
from dflash_lab.backends import LIBRARIES, LOOKUP
from dflash_lab.scoring import CHECK, right_of
from dflash_lab.store import Cell, Run

# Of figures that `cell_frame` gives without an interval: what is summed above the line and below.
MORE_RATES = {
    "tokens_per_block": ("emitted", "blocks"),
    "end_to_end_per_s": ("tokens", "total_s"),
    "tpot_s": ("decode_s", "after_first"),
    "accuracy": ("right", "scored"),
}
# Columns of speed-ups, each named after what it is against.
BASELINES: Mapping[str, tuple[str, ...]] = {
    "speedup": (OWN,),
    "speedup_library": tuple(LIBRARIES.values()),
    "speedup_lookup": (LOOKUP,),
}


def kinds(run: Run) -> list[Run]:
    """The run in parts whose cells compare: same prompts, limits, sampling, machine and target."""
    parts: dict[str, list[Cell]] = {}
    for cell in run.cells:
        parts.setdefault(cell.asked(COMPARABLE), []).append(cell)
    return [replace(run, cells=tuple(cells)) for cells in parts.values()]


def benchmark_frame(run: Run, resamples: int = 2000, seed: int = 0) -> pd.DataFrame:
    """One row a cell of one kind: the columns of `cell_frame`, and more of them with intervals.

    `_low` and `_high` are 95 % over prompts, missing with one prompt. `ttft_s` is the median over
    decodes; `peak_bytes` the largest, its ends the smallest and the largest. `tpot_s` is seconds a
    token after the first. `speedup`, `speedup_library` and `speedup_lookup` are throughput over
    that of the baseline in the same dtype on the same prompts: below 1 it is a slow-down.
    `accuracy` is the share of right outputs, where they were judged. What was not measured is
    missing.
    """
    frame = cell_frame(run, resamples, seed).set_index("cell")
    counted = prompt_sums(run)
    sums = _judged(run, counted)
    draws = draw_prompts(len(sums.prompts), resamples, seed)
    ids = [cell.id for cell in sums.cells]
    for name, (above, below) in MORE_RATES.items():
        low, high = intervals(draws, sums[above], sums[below])
        value = ratio(sums[above].sum(axis=1), sums[below].sum(axis=1))
        for column, values in ((name, value), (f"{name}_low", low), (f"{name}_high", high)):
            frame[column] = pd.Series(values, ids)
    frame["scored"] = pd.Series(sums["scored"].sum(axis=1).astype(int), ids)
    for column, values in _waits_and_peaks(run, sums, draws).items():
        frame[column] = pd.Series(values, ids)
    for column, engines in BASELINES.items():
        _add_speedups(frame, run, counted, column, engines, resamples, seed)
    return frame.reset_index()


def _judged(run: Run, sums: Sums) -> Sums:
    """The sums and, where outputs were judged, how many were right and of how many."""
    check = run.check(CHECK)
    judged = [right_of(check, cell.id) for cell in sums.cells]
    counts = [[one.get(name, (0, 0)) for name in sums.prompts] for one in judged]
    pairs = np.array(counts, dtype=float).reshape(len(sums.cells), len(sums.prompts), 2)
    more = {"right": pairs[..., 0], "scored": pairs[..., 1]}
    return replace(sums, by_name={**sums.by_name, **more})


def _waits_and_peaks(run: Run, sums: Sums, draws: np.ndarray) -> dict[str, list[float | None]]:
    """Ends of the median wait for the first token, and the span of peak memory, cell by cell."""
    rows = run.prompts(("cell", "prompt_id", "ttft_s", "peak_bytes")).to_pandas()
    names = ("ttft_s_low", "ttft_s_high", "peak_bytes_low", "peak_bytes_high")
    found: dict[str, list[float | None]] = {name: [] for name in names}
    place = {name: index for index, name in enumerate(sums.prompts)}
    by_cell = dict(list(rows.groupby("cell")))
    for cell in sums.cells:
        mine = by_cell.get(cell.id, rows[:0])
        waits = mine.dropna(subset="ttft_s")
        drawn = resampled_medians(
            waits["ttft_s"].to_numpy(), draws[:, waits["prompt_id"].map(place).to_numpy(int)]
        )
        peaks = mine["peak_bytes"].dropna()
        span = (peaks.min(), peaks.max()) if len(peaks) else (None, None)
        told = (*ends(drawn, waits["prompt_id"].nunique()), *span)
        for name, value in zip(names, told, strict=True):
            found[name].append(value)
    return found


def resampled_medians(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The median of `values` [n] counted as often as each row of `weights` [resamples, n] says.

    Missing (NaN) where a row counts nothing.
    """
    if not len(values):
        return np.full(len(weights), np.nan)
    order = np.argsort(values)
    ranked, below = values[order], np.cumsum(weights[:, order], axis=1)
    half = below[:, -1:] / 2
    last = len(values) - 1
    lower = np.minimum((below < half).sum(axis=1), last)
    upper = np.minimum((below <= half).sum(axis=1), last)
    return np.where(half[:, 0] > 0, (ranked[lower] + ranked[upper]) / 2, np.nan)


def baseline(run: Run, engines: tuple[str, ...], dtype: str) -> Cell | None:
    """The run's plain cell of one of these engines in that dtype; None where there is none."""
    found = (
        cell
        for cell in run.cells
        if cell.engine in engines and cell.dtype == dtype and cell.block_size == 1
    )
    return next(found, None)


def _add_speedups(
    frame: pd.DataFrame,
    run: Run,
    sums: Sums,
    column: str,
    engines: tuple[str, ...],
    resamples: int,
    seed: int,
) -> None:
    names = (column, f"{column}_low", f"{column}_high")
    for name in names:
        frame[name] = np.nan
    for dtype in frame["dtype"].unique():
        base = baseline(run, engines, dtype)
        if base is None:
            continue
        paired = paired_frame(run, base.id, resamples, seed, sums).set_index("cell")
        rows = frame.index[frame["dtype"] == dtype]
        for name, source in zip(names, ("speedup", "speedup_low", "speedup_high"), strict=True):
            frame.loc[rows, name] = paired.loc[rows, source].astype(float)


def unknowns(frame: pd.DataFrame) -> list[str]:
    """What a benchmark's figures cannot say, and why, in a sentence each."""
    told: list[str] = []
    rows = records(frame)
    if any(row["single_prompt"] for row in rows):
        told.append("One prompt: no interval can be given, and other prompts may differ.")
    if any(row["tokens_per_s"] is None for row in rows):
        told.append(
            "Outputs of one token: throughput, TPOT and speed-ups cannot be known, since they "
            "count what comes after the first token. Ask for more with --max-new-tokens, or go "
            "past end tokens with --min-new-tokens."
        )
    drafting = [row for row in rows if row["engine"] == OWN and row["block_size"] > 1]
    if sizes := _sizes(row for row in drafting if not row["blocks"]):
        told.append(f"Nothing was drafted at block size {sizes}: acceptance cannot be known.")
    blocks = [row for row in drafting if row["blocks"]]
    if sizes := _sizes(row for row in blocks if row["blocks"] == row["cut_blocks"]):
        told.append(
            f"Every block was cut by the end of the output at block size {sizes}: tau and "
            "acceptance cannot be known."
        )
    return told


def looping(rows: Iterable[Mapping[str, Any]]) -> str:
    """A warning where outputs of `cell_frame` rows repeat themselves; empty where none does."""
    worst = max(rows, key=lambda row: row["looped"])
    if not worst["looped"]:
        return ""
    return (
        f"{worst['looped']} of {worst['prompts']} outputs repeat themselves (cell "
        f"{worst['cell']}). Such text is easy to draft and makes the figures look better than "
        "they are."
    )


def _sizes(rows: Any) -> str:
    return ", ".join(str(size) for size in dict.fromkeys(row["block_size"] for row in rows))
