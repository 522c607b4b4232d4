"""Long frames: a row a block, a prompt, a cell, a draft position or a length.

Nothing is drawn here. Cut blocks are left out of tau, rates and survival; tokens per block and
throughput count every block. Where nothing was drafted a rate is missing, never 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from dflash_lab.analyse.resampling import counting, draw_prompts, ends, intervals, ratio
from dflash_lab.analyse.sums import Places, Sums, prompt_sums
from dflash_lab.backends import OWN
from dflash_lab.store import Cell, Run

REQUEST_COLUMNS = (
    "engine",
    "backend",
    "dtype",
    "device",
    "draft_window",
    "hardware",
    "temperature",
    "max_new_tokens",
    "timing",
)


class HardwareWarning(UserWarning):
    """The run holds cells of several hardware classes, whose times do not compare."""


# Frames of what is stored


def block_frame(run: Run) -> pd.DataFrame:
    """One row a block: the stored columns and the main settings of its cell.

    `block_size` is the block's own, which is below the cell's where the context ended.
    """
    return _with_settings(run, run.blocks(), REQUEST_COLUMNS)


def prompt_frame(run: Run) -> pd.DataFrame:
    """One row a decoded prompt: the stored columns and the main settings of its cell."""
    return _with_settings(run, run.prompts(), (*REQUEST_COLUMNS, "block_size"))


def _with_settings(run: Run, table: pa.Table, names: Sequence[str]) -> pd.DataFrame:
    place = pc.index_in(table["cell"], pa.array([cell.id for cell in run.cells], pa.string()))
    settings = pa.table(
        {name: pa.array([cell.request[name] for cell in run.cells]) for name in names}
    ).take(place.combine_chunks())
    for name in names:
        table = table.append_column(name, settings[name])
    return _nullable(table.to_pandas(types_mapper=_LISTS.get))


# Lists of tokens stay as they are stored: a million small arrays would take seconds to make.
_LISTS = {kind: pd.ArrowDtype(kind) for kind in (pa.list_(pa.int32()), pa.list_(pa.float32()))}


def _nullable(frame: pd.DataFrame) -> pd.DataFrame:
    """Whole numbers that may be missing, kept whole."""
    names = {"draft_window", "peak_bytes", "draft_cache_bytes"} & set(frame.columns)
    return frame.astype(dict.fromkeys(names, "Int64"))


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows as plain Python values, None where a value is missing."""
    rows = frame.to_dict("records")
    return [{name: _plain(value) for name, value in row.items()} for row in rows]


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | list | tuple):
        return [_plain(entry) for entry in value]
    if value is None or pd.isna(value):
        return None
    return value.item() if isinstance(value, np.generic) else value


# A row a cell


def cell_frame(
    run: Run, resamples: int = 2000, seed: int = 0, loop_free: bool = False
) -> pd.DataFrame:
    """One row a cell: throughput, acceptance and memory, `_low` and `_high` the 95 % interval.

    Intervals are over prompts, the same resamples for every cell, a ratio of sums inside each; with
    one prompt (`single_prompt`) there is none. `looped` counts the prompts whose output loops;
    `loop_free` leaves them out of all cells. `draft_rate` is accepted over drafted, `draft_share`
    accepted over emitted, both over blocks that were not cut. Warns where hardware classes are
    mixed: their rows stand side by side, and no figure here joins them.
    """
    _warn_of_mixed_hardware(run)
    sums = prompt_sums(run, loop_free)
    draws = draw_prompts(len(sums.prompts), resamples, seed)
    frame = pd.DataFrame(
        {
            **_settings(sums.cells),
            **_totals(sums),
            **_rates(sums, draws),
            **_acceptance(sums),
            **_extremes(run, sums),
        }
    )
    return _in_order(_nullable(frame))


def _settings(cells: Sequence[Cell]) -> dict[str, list[Any]]:
    names = (*REQUEST_COLUMNS, "block_size", "beyond_trained")
    return {
        "cell": [cell.id for cell in cells],
        **{name: [cell.request[name] for cell in cells] for name in names},
        "policy": [cell.policy for cell in cells],
    }


def _totals(sums: Sums) -> dict[str, np.ndarray]:
    measured = (sums["outputs"] > 0).sum(axis=1)
    counts = {name: sums[name].sum(axis=1).astype(int) for name in ("tokens", "blocks")}
    return {
        "prompts": measured,
        "single_prompt": measured == 1,
        "looped": (sums["looped"] > 0).sum(axis=1),
        **counts,
        "cut_blocks": sums["cut_blocks"].sum(axis=1).astype(int),
        "decode_s": sums["decode_s"].sum(axis=1),
    }


# Of each figure with an interval: what is summed above the line and below it.
RATES = {
    "tokens_per_s": ("after_first", "decode_s"),
    "tau": ("lengths", "whole_blocks"),
    "draft_rate": ("accepted", "drafts"),
    "seconds_per_block": ("block_s", "blocks"),
}


def _rates(sums: Sums, draws: np.ndarray) -> dict[str, np.ndarray]:
    found = {}
    for name, (above, below) in RATES.items():
        found[name] = _pooled(sums, above, below)
        low, high = intervals(draws, sums[above], sums[below])
        found |= {f"{name}_low": low, f"{name}_high": high}
    return found


def _acceptance(sums: Sums) -> dict[str, np.ndarray]:
    drafted = sums["drafts"].sum(axis=1) > 0
    share = _pooled(sums, "accepted", "whole_emitted")
    return {
        "end_to_end_per_s": _pooled(sums, "tokens", "total_s"),
        "tau_by_prompt": _mean_of_rows(ratio(sums["lengths"], sums["whole_blocks"])),
        "draft_share": np.where(drafted, share, np.nan),
        "tokens_per_block": _pooled(sums, "emitted", "blocks"),
        "full_block_share": _pooled(sums, "full_blocks", "drafting_blocks"),
    }


def _pooled(sums: Sums, above: str, below: str) -> np.ndarray:
    return ratio(sums[above].sum(axis=1), sums[below].sum(axis=1))


def _mean_of_rows(values: np.ndarray) -> np.ndarray:
    known = ~np.isnan(values)
    return ratio(np.where(known, values, 0).sum(axis=1), known.sum(axis=1))


def _extremes(run: Run, sums: Sums) -> dict[str, pd.Series]:
    """What is no ratio of sums: the median wait for the first token, the most memory."""
    ids, kept = [cell.id for cell in sums.cells], pa.array(sums.prompts, pa.string())
    prompts, blocks = (
        table.filter(pc.is_in(table["prompt_id"], kept)).drop_columns("prompt_id").to_pandas()
        for table in (
            run.prompts(("cell", "prompt_id", "ttft_s", "peak_bytes")),
            run.blocks(("cell", "prompt_id", "draft_cache_bytes", "block_size")),
        )
    )
    by_cell = prompts.groupby("cell")
    cached = blocks[blocks["block_size"] > 1].groupby("cell")["draft_cache_bytes"].max()
    return {
        "ttft_s": by_cell["ttft_s"].median().reindex(ids).array,
        "peak_bytes": by_cell["peak_bytes"].max().reindex(ids).array,
        "draft_cache_bytes": cached.reindex(ids).array,
    }


def _in_order(frame: pd.DataFrame, *last: str) -> pd.DataFrame:
    """Our own loop first, then by dtype, window from none to the smallest, and block size."""
    keys = frame.assign(
        engine=frame["engine"] != OWN, draft_window=-frame["draft_window"].fillna(1 << 30)
    )
    names = ["hardware", "backend", "engine", "dtype", "draft_window", "block_size", "cell", *last]
    return frame.loc[keys.sort_values(names).index].reset_index(drop=True)


def hardware_classes(run: Run) -> tuple[str, ...]:
    """The kinds of machine this run's cells were measured on."""
    return tuple(sorted({cell.hardware for cell in run.cells}))


def _warn_of_mixed_hardware(run: Run) -> None:
    classes = hardware_classes(run)
    if len(classes) > 1:
        warnings.warn(
            f"this run holds cells of {len(classes)} hardware classes: {'; '.join(classes)}. Their "
            "times do not compare; take one by run.select(hardware=...).",
            HardwareWarning,
            stacklevel=3,
        )


# A row a draft position, a row a length


def survival_frame(run: Run, resamples: int = 2000, seed: int = 0) -> pd.DataFrame:
    """One row a cell and draft position: the share of blocks accepted so far, and on from there.

    `survival` is the share of blocks with `accepted >= k` among the `at_risk` that drafted so far;
    `conditional` the share among the `conditional_at_risk` that were accepted up to k - 1. Blocks
    that were cut are left out. Intervals are those of `cell_frame`.
    """
    blocks = _whole_blocks(run)
    names = sorted(pc.unique(run.prompts(("prompt_id",))["prompt_id"]).to_pylist())
    place, draws = Places(run.cells, names), draw_prompts(len(names), resamples, seed)
    accepted = blocks["accepted"].to_numpy()
    drafts = pc.list_value_length(blocks["drafted"]).to_numpy()
    places, width = place.of(blocks), 1 + int(drafts.max(initial=0))
    full = accepted == drafts  # the accepted ones of these are at risk no further
    survived, at_risk = (
        _at_least(place.counts(places, values, width)) for values in (accepted, drafts)
    )
    ended = place.counts(places[full], drafts[full], width)
    rows = []
    for k in range(1, width):
        sums = {
            "survived": survived[..., k],
            "at_risk": at_risk[..., k],
            "conditional_at_risk": survived[..., k - 1] - ended[..., k - 1],
        }
        rows += _survival_rows(run.cells, k, sums, draws)
    return _rows_frame(rows, SURVIVAL_COLUMNS)


def _at_least(counts: np.ndarray) -> np.ndarray:
    """From how many have each value to how many have at least that, along the last axis."""
    return np.flip(np.cumsum(np.flip(counts, axis=-1), axis=-1), axis=-1)


SETTINGS = ("engine", "backend", "dtype", "hardware", "block_size", "draft_window")
SURVIVAL_COLUMNS = (
    "draft_position",
    "prompts",
    "survival",
    "low",
    "high",
    "conditional",
    "at_risk",
    "conditional_at_risk",
)


def _setting_of(cell: Cell) -> dict[str, Any]:
    return {"cell": cell.id, **{name: cell.request[name] for name in SETTINGS}}


def _rows_frame(rows: list[dict[str, Any]], names: Sequence[str]) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=["cell", *SETTINGS, *names])
    return _in_order(_nullable(frame), names[0])


def _whole_blocks(run: Run) -> pa.Table:
    blocks = run.blocks(("cell", "prompt_id", "drafted", "accepted", "cut"))
    return blocks.filter(pc.invert(blocks["cut"]))


def _survival_rows(
    cells: Sequence[Cell], k: int, sums: dict[str, np.ndarray], draws: np.ndarray
) -> list[dict[str, Any]]:
    survived, at_risk = sums["survived"], sums["at_risk"]
    low, high = intervals(draws, survived, at_risk)
    total = {name: values.sum(axis=1) for name, values in sums.items()}
    survival = ratio(total["survived"], total["at_risk"])
    conditional = ratio(total["survived"], total["conditional_at_risk"])
    return [
        {
            **_setting_of(cell),
            "draft_position": k,
            "prompts": int((at_risk[i] > 0).sum()),
            "survival": survival[i],
            "low": low[i],
            "high": high[i],
            "conditional": conditional[i],
            "at_risk": int(total["at_risk"][i]),
            "conditional_at_risk": int(total["conditional_at_risk"][i]),
        }
        for i, cell in enumerate(cells)
        if total["at_risk"][i]
    ]


def length_frame(run: Run) -> pd.DataFrame:
    """One row a cell and number of accepted drafts: how many blocks, and what share of them.

    `censored` marks the last, where all drafts were accepted: how far the draft would have gone is
    not known. Blocks that were cut or drafted nothing are left out. One that the context's end or a
    policy made narrower stands at what it accepted, all of its drafts or not.
    """
    blocks = _whole_blocks(run)
    blocks = blocks.filter(pc.greater(pc.list_value_length(blocks["drafted"]), 0))
    cell_of = pc.index_in(blocks["cell"], pa.array([cell.id for cell in run.cells], pa.string()))
    width = max((cell.block_size for cell in run.cells), default=1)
    places = cell_of.to_numpy() * width + blocks["accepted"].to_numpy()
    counts = np.bincount(places, minlength=len(run.cells) * width).reshape(-1, width)
    rows = []
    for cell, mine in zip(run.cells, counts, strict=True):
        if mine.any():
            rows += _length_rows(cell, mine[: cell.block_size])
    return _rows_frame(rows, ("accepted", "blocks", "share", "censored"))


def _length_rows(cell: Cell, counts: np.ndarray) -> list[dict[str, Any]]:
    return [
        {
            **_setting_of(cell),
            "accepted": accepted,
            "blocks": int(count),
            "share": count / counts.sum(),
            "censored": accepted == cell.block_size - 1,
        }
        for accepted, count in enumerate(counts)
    ]


# A row a pair of cells


def paired_frame(
    run: Run,
    against: str | None = None,
    resamples: int = 2000,
    seed: int = 0,
    sums: Sums | None = None,
) -> pd.DataFrame:
    """One row a cell: how it differs from another one on the prompts that both hold.

    `speedup` is the ratio of the two decode throughputs, `tau_difference` this tau less the other
    one's; both inside the same resamples, which takes away most of what prompts differ by.
    `against` is a cell's id, else the first plain cell of our own loop; `sums` are the run's where
    they are at hand. Raises ValueError where hardware classes or timing modes would be mixed.
    """
    names = sorted({(cell.hardware, cell.request["timing"]) for cell in run.cells})
    if len(names) > 1:
        told = "; ".join(f"{hardware} in timing mode {timing}" for hardware, timing in names)
        raise ValueError(f"times of several kinds do not compare: {told}. Take one by run.select.")
    other = _baseline(run) if against is None else run.cell(against)
    sums = prompt_sums(run) if sums is None else sums
    base = next(place for place, cell in enumerate(sums.cells) if cell.id == other.id)
    rows = [_paired_row(sums, place, base, resamples, seed) for place in range(len(sums.cells))]
    return _rows_frame(rows, PAIRED_COLUMNS)


PAIRED_COLUMNS = (
    "against",
    "prompts",
    "speedup",
    "speedup_low",
    "speedup_high",
    "tau_difference",
    "tau_difference_low",
    "tau_difference_high",
)


def _baseline(run: Run) -> Cell:
    plain = [cell for cell in run.cells if cell.engine == OWN and cell.block_size == 1]
    if not plain:
        raise ValueError("this run has no plain decoding to compare with; name a cell: against=.")
    return plain[0]


def _paired_row(sums: Sums, place: int, base: int, resamples: int, seed: int) -> dict[str, Any]:
    shared = (sums["outputs"][[place, base]] > 0).all(axis=0)
    mine, others = (
        {name: values[row, shared] for name, values in sums.by_name.items()}
        for row in (place, base)
    )
    return {
        **_setting_of(sums.cells[place]),
        "against": sums.cells[base].id,
        "prompts": int(shared.sum()),
        **paired_figures(mine, others, resamples, seed),
    }


def paired_figures(
    mine: Mapping[str, np.ndarray], others: Mapping[str, np.ndarray], resamples: int, seed: int
) -> dict[str, float | None]:
    """How much faster, and by how much tau differs, with the ends of both intervals.

    Both hold the sums of one cell by name, over the same prompts. NaN where nothing is divided.
    """
    speed, tau = RATES["tokens_per_s"], RATES["tau"]
    count = len(mine["outputs"])

    def rates(weights: np.ndarray, above: str, below: str) -> list[np.ndarray]:
        return [ratio(weights @ one[above], weights @ one[below]) for one in (mine, others)]

    def figures(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return ratio(*rates(weights, *speed)), np.subtract(*rates(weights, *tau))

    found: dict[str, float | None] = {}
    drawn = figures(draw_prompts(count, resamples, seed))
    whole = figures(np.ones((1, count)))
    for name, (_, below), value, draws in zip(
        ("speedup", "tau_difference"), (speed, tau), whole, drawn, strict=True
    ):
        low, high = ends(draws, counting(mine[below], others[below]))
        found |= {name: float(value[0]), f"{name}_low": low, f"{name}_high": high}
    return found
