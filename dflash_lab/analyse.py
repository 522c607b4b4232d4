"""From stored cells to frames: a row a block, a prompt or a cell, with intervals over prompts.

Nothing is drawn here. Cut blocks are left out of tau, rates and survival; tokens per block and
throughput count every block. Where nothing was drafted a rate is missing, never 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from dflash_lab.config import whole
from dflash_lab.store import Cell, Run

OWN = "dflash_lab"  # the engine that is our own loop; any other is a library's generator
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
# What two cells must have in common before one may be called faster than the other.
COMPARABLE = (
    *("hardware", "backend", "device", "target_sha", "template_sha", "chat", "thinking"),
    *("prompts", "temperature", "max_new_tokens", "timing", "repeats"),
)
NEAR = 0.98  # of the best throughput: closer than that is as good
LEVEL = (0.025, 0.975)  # ends of every interval


class HardwareWarning(UserWarning):
    """The run holds cells of several hardware classes, whose times do not compare."""


# Frames of what is stored


def block_frame(run: Run) -> pd.DataFrame:
    """One row a block: the stored columns and the main settings of its cell.

    `block_size` is the block's own, which is below the cell's where the context ended.
    """
    return _with_settings(run, run.blocks().to_pandas(), REQUEST_COLUMNS)


def prompt_frame(run: Run) -> pd.DataFrame:
    """One row a decoded prompt: the stored columns and the main settings of its cell."""
    return _with_settings(run, run.prompts().to_pandas(), (*REQUEST_COLUMNS, "block_size"))


def _with_settings(run: Run, frame: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    settings = pd.DataFrame(
        [{"cell": cell.id, **{name: cell.request[name] for name in names}} for cell in run.cells],
        columns=["cell", *names],
    )
    return _nullable(frame.merge(settings, on="cell", how="left", validate="many_to_one"))


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


# Repetition


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


# Sums per cell and prompt, and intervals over prompts


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
    prompts, blocks = run.prompts(), run.blocks()
    names = pc.unique(prompts["prompt_id"]).to_pylist()
    place = _Places(run.cells, sorted(names))
    sums = place.sums(prompts, _prompt_counts(prompts)) | place.sums(blocks, _block_counts(blocks))
    if loop_free:
        keep = ~(sums["looped"] > 0).any(axis=0)
        sums = {name: values[:, keep] for name, values in sums.items()}
        names = [name for name, kept in zip(sorted(names), keep, strict=True) if kept]
    return Sums(cells=tuple(run.cells), prompts=tuple(sorted(names)), by_name=sums)


class _Places:
    """Where a row's counts go: one place for each cell and prompt."""

    def __init__(self, cells: Sequence[Cell], prompts: Sequence[str]) -> None:
        self.shape = (len(cells), len(prompts))
        self.cells = pa.array([cell.id for cell in cells], pa.string())
        self.prompts = pa.array(prompts, pa.string())

    def of(self, table: pa.Table) -> np.ndarray:
        cell = pc.index_in(table["cell"], self.cells).to_numpy()
        prompt = pc.index_in(table["prompt_id"], self.prompts).to_numpy()
        return cell * self.shape[1] + prompt

    def sums(self, table: pa.Table, counts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        place, size = self.of(table), self.shape[0] * self.shape[1]
        return {
            name: np.bincount(place, values, size).reshape(self.shape)
            for name, values in counts.items()
        }


def _numbers(table: pa.Table, name: str) -> np.ndarray:
    return table[name].to_numpy().astype(float)


def _lengths(table: pa.Table, name: str) -> np.ndarray:
    return pc.list_value_length(table[name]).to_numpy().astype(float)


def _prompt_counts(table: pa.Table) -> dict[str, np.ndarray]:
    tokens = _lengths(table, "new_ids")
    return {
        "outputs": np.ones(len(tokens)),
        "tokens": tokens,
        "after_first": np.maximum(tokens - 1, 0),
        "decode_s": _numbers(table, "decode_s"),
        "total_s": _numbers(table, "total_s"),
        "looped": _looped(table["new_ids"]),
    }


def _looped(outputs: pa.ChunkedArray) -> np.ndarray:
    """1.0 for each output that loops; cells mostly hold the same texts, so each is judged once."""
    known: dict[tuple[int, ...], bool] = {}
    flags = []
    for output in outputs.to_pylist():
        key = tuple(output)
        if key not in known:
            known[key] = repetition(key).looped
        flags.append(known[key])
    return np.asarray(flags, dtype=float)


def _block_counts(table: pa.Table) -> dict[str, np.ndarray]:
    drafts = _lengths(table, "drafted")
    accepted, emitted = _numbers(table, "accepted"), _numbers(table, "emitted")
    whole_block = ~table["cut"].to_numpy().astype(bool)
    drafting = whole_block & (drafts > 0)
    return {
        "blocks": np.ones(len(drafts)),
        "cut_blocks": (~whole_block).astype(float),
        "emitted": emitted,
        "block_s": _numbers(table, "total_s"),
        "whole_blocks": whole_block.astype(float),
        "lengths": np.where(whole_block, accepted + 1, 0),
        "accepted": np.where(drafting, accepted, 0),
        "drafts": np.where(drafting, drafts, 0),
        "drafting_blocks": drafting.astype(float),
        "whole_emitted": np.where(whole_block, emitted, 0),
        "full_blocks": (drafting & (accepted == drafts)).astype(float),
    }


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


def intervals(
    draws: np.ndarray, above: np.ndarray, below: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Ends of the 95 % percentile interval of sum(above) / sum(below), one for each cell.

    Both are [cells, prompts]. Missing where fewer than two prompts count: one prompt says nothing
    about others.
    """
    drawn = ratio(draws @ above.T, draws @ below.T)
    ends = np.full((2, len(above)), np.nan)
    for row in np.flatnonzero((below > 0).sum(axis=1) > 1):
        known = drawn[:, row][~np.isnan(drawn[:, row])]
        ends[:, row] = np.quantile(known, LEVEL)
    return ends[0], ends[1]


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
        table.filter(pc.is_in(table["prompt_id"], kept)).select(["cell", *names]).to_pandas()
        for table, names in (
            (run.prompts(), ("ttft_s", "peak_bytes")),
            (run.blocks(), ("draft_cache_bytes", "block_size")),
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
    prompts, blocks = run.prompts(), _whole_blocks(run)
    names = sorted(pc.unique(prompts["prompt_id"]).to_pylist())
    place, draws = _Places(run.cells, names), draw_prompts(len(names), resamples, seed)
    accepted, drafts = _numbers(blocks, "accepted"), _lengths(blocks, "drafted")
    rows = []
    for k in range(1, int(drafts.max(initial=0)) + 1):
        flags = {
            "survived": accepted >= k,
            "at_risk": drafts >= k,
            "conditional_at_risk": (accepted >= k - 1) & (drafts >= k),
        }
        rows += _survival_rows(run.cells, k, place.sums(blocks, flags), draws)
    return _rows_frame(rows, SURVIVAL_COLUMNS)


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
    blocks = run.blocks().select(["cell", "prompt_id", "drafted", "accepted", "cut"])
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
    not known. Blocks that were cut are left out, cells that drafted nothing too.
    """
    blocks = _whole_blocks(run)
    cell_of = pc.index_in(blocks["cell"], pa.array([cell.id for cell in run.cells], pa.string()))
    cell_of, accepted = cell_of.to_numpy(), blocks["accepted"].to_numpy()
    rows = []
    for place, cell in enumerate(run.cells):
        counts = np.bincount(accepted[cell_of == place], minlength=cell.block_size)
        if cell.block_size > 1 and counts.sum():
            rows += _length_rows(cell, counts)
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


# The choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One cell of the grid, named by what a user would set."""

    cell: str
    block_size: int
    draft_window: int | None

    @property
    def label(self) -> str:
        if self.block_size == 1:
            return "block size 1"
        window = "the full window" if self.draft_window is None else f"window {self.draft_window}"
        return f"block size {self.block_size} with {window}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The fastest block size and window of a run, and whether speculation pays at all.

    Ends of intervals are 95 % over prompts, None with one prompt; speedups are None where the arm
    they compare with was not measured. All figures are over the prompts that every cell holds.
    """

    cell: str
    block_size: int
    draft_window: int | None
    dtype: str
    hardware: str
    prompts: int
    tokens_per_s: float
    low: float | None
    high: float | None
    p_best: float  # share of resamples in which this setting is the fastest
    near: tuple[Setting, ...]  # others within 2 % of it
    gain_held_out: float | None  # speedup of each resample's winner on the prompts left out, mean
    plain_dtype: str | None  # of the fastest plain decoding in our own loop
    plain_tokens_per_s: float | None
    speedup: float | None
    speedup_low: float | None
    speedup_high: float | None
    library_dtype: str | None  # of the fastest library generator
    library_tokens_per_s: float | None
    speedup_library: float | None
    speedup_library_low: float | None
    speedup_library_high: float | None
    verdict: str  # "speculate", "do not speculate", "not distinguishable" or "no baseline"

    @property
    def setting(self) -> Setting:
        return Setting(cell=self.cell, block_size=self.block_size, draft_window=self.draft_window)

    @property
    def sentence(self) -> str:
        """The answer in one line of plain English."""
        return _sentence(self)


def choose(run: Run, resamples: int = 2000, seed: int = 0) -> Choice:
    """The fastest (block size, draft window) in the dtype the run drafted in, plain decoding too.

    The winner is chosen again inside each resample of the prompts. The baseline is the fastest
    plain decoding of our own loop in any dtype, on the same prompts. Raises ValueError where cells
    of several kinds would be compared, such as two hardware classes, or where there is nothing to.
    """
    arms = _arms(run)
    sums = _shared(prompt_sums(run), arms)
    draws = draw_prompts(len(sums.prompts), resamples, seed)
    speeds = _Speeds(sums, draws)
    candidates = [cell for cell in arms.candidates if cell.id in speeds.known]
    if not candidates:
        raise ValueError("no cell emitted more than one token; ask for longer outputs.")
    best = max(candidates, key=lambda cell: speeds.mean[cell.id])
    plain, library = speeds.fastest(arms.plain), speeds.fastest(arms.library)
    winners = speeds.winners(candidates)
    speedup, library_speedup = speeds.over(best, plain), speeds.over(best, library)
    low, high = speeds.interval(best)
    return Choice(
        cell=best.id,
        block_size=best.block_size,
        draft_window=best.draft_window,
        dtype=best.dtype,
        hardware=best.hardware,
        prompts=len(sums.prompts),
        tokens_per_s=speeds.mean[best.id],
        low=low,
        high=high,
        p_best=float(np.mean(winners == candidates.index(best))),
        near=_near(best, candidates, speeds),
        gain_held_out=speeds.held_out(candidates, winners, plain),
        plain_dtype=plain and plain.dtype,
        plain_tokens_per_s=plain and speeds.mean[plain.id],
        speedup=speedup.mean,
        speedup_low=speedup.low,
        speedup_high=speedup.high,
        library_dtype=library and library.dtype,
        library_tokens_per_s=library and speeds.mean[library.id],
        speedup_library=library_speedup.mean,
        speedup_library_low=library_speedup.low,
        speedup_library_high=library_speedup.high,
        verdict=_verdict(best, speedup),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arms:
    """The cells that take part in a choice."""

    candidates: tuple[Cell, ...]  # our loop in the dtype that drafts, block size 1 included
    plain: tuple[Cell, ...]  # our loop at block size 1, any dtype
    library: tuple[Cell, ...]  # the library's generator, any dtype

    @property
    def all(self) -> tuple[Cell, ...]:
        return tuple(
            {cell.id: cell for cell in (*self.candidates, *self.plain, *self.library)}.values()
        )


def _arms(run: Run) -> _Arms:
    own = [cell for cell in run.cells if cell.engine == OWN]
    drafting = [cell for cell in own if cell.block_size > 1]
    if not drafting:
        raise ValueError(
            "there is nothing to choose from: this run has no finished cell with a block size "
            "above 1. Sweep some, such as block_sizes=(1, 2, 4, 8, 16)."
        )
    _check_one_kind(own, ("hardware",))
    _check_one_kind(drafting, ("dtype", "draft_sha", *COMPARABLE))
    plain = [cell for cell in own if cell.block_size == 1 and _compare(cell, drafting[0])]
    library = [cell for cell in run.cells if cell.engine != OWN and _compare(cell, drafting[0])]
    same = [cell for cell in plain if cell.dtype == drafting[0].dtype]
    return _Arms(candidates=(*same, *drafting), plain=tuple(plain), library=tuple(library))


def _check_one_kind(cells: Sequence[Cell], names: Sequence[str]) -> None:
    for name in names:
        values = sorted({_value(cell, name) for cell in cells})
        if len(values) > 1:
            way = "" if name == "prompts" else f"take one by run.select({name}=...), or "
            raise ValueError(
                f"cells of several kinds do not compare: {name} is {' and '.join(values)}. "
                f"To compare, {way}sweep each kind into a folder of its own."
            )


def _value(cell: Cell, name: str) -> str:
    value = cell.request[name]
    return f"{value['count']} of {value['source']}" if name == "prompts" else str(value)


def _compare(cell: Cell, other: Cell) -> bool:
    return all(cell.request[name] == other.request[name] for name in COMPARABLE)


def comparable(run: Run) -> Run:
    """The largest part of a run whose cells may stand in one figure.

    They differ in engine, dtype, block size and window alone; plain decoding has no draft and fits
    any. Of parts with equally many cells it is the one with more decodes, then more tokens.
    """
    parts = []
    for like in run.cells:
        draft = like.request["draft_sha"]
        part = [
            cell
            for cell in run.cells
            if _compare(cell, like) and cell.request["draft_sha"] in (draft, None)
        ]
        parts.append(part)
    return replace(run, cells=tuple(max(parts, key=_weight, default=())))


def _weight(part: Sequence[Cell]) -> tuple[int, int, int]:
    decodes, tokens = (sum(cell.summary[name] for cell in part) for name in ("decodes", "tokens"))
    return len(part), decodes, tokens


def _shared(sums: Sums, arms: _Arms) -> Sums:
    """Sums of the cells that take part, over their prompts."""
    ids = {cell.id for cell in arms.all}
    rows = [place for place, cell in enumerate(sums.cells) if cell.id in ids]
    shared = (sums["outputs"][rows] > 0).all(axis=0)
    return Sums(
        cells=tuple(sums.cells[row] for row in rows),
        prompts=tuple(n for n, kept in zip(sums.prompts, shared, strict=True) if kept),
        by_name={name: values[rows][:, shared] for name, values in sums.by_name.items()},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ratio:
    mean: float | None
    low: float | None
    high: float | None


class _Speeds:
    """Decode tokens per second of each cell, over all prompts, drawn prompts and those left out."""

    def __init__(self, sums: Sums, draws: np.ndarray) -> None:
        self.place = {cell.id: place for place, cell in enumerate(sums.cells)}
        self.single = len(sums.prompts) < 2
        tokens, seconds = sums["after_first"], sums["decode_s"]
        mean = ratio(tokens.sum(axis=1), seconds.sum(axis=1))
        self.mean = {cell: float(mean[place]) for cell, place in self.place.items()}
        self.known = {cell for cell, speed in self.mean.items() if not np.isnan(speed)}
        self.drawn = ratio(draws @ tokens.T, draws @ seconds.T)
        left_out = (draws == 0).astype(float)
        self.left_out = ratio(left_out @ tokens.T, left_out @ seconds.T)

    def fastest(self, cells: Sequence[Cell]) -> Cell | None:
        known = [cell for cell in cells if cell.id in self.known]
        return max(known, key=lambda cell: self.mean[cell.id], default=None)

    def interval(self, cell: Cell) -> tuple[float | None, float | None]:
        return self._ends(self.drawn[:, self.place[cell.id]])

    def over(self, cell: Cell, other: Cell | None) -> _Ratio:
        """How many times faster than another cell on the same prompts."""
        if other is None:
            return _Ratio(mean=None, low=None, high=None)
        drawn = self.drawn[:, self.place[cell.id]] / self.drawn[:, self.place[other.id]]
        low, high = self._ends(drawn)
        return _Ratio(mean=self.mean[cell.id] / self.mean[other.id], low=low, high=high)

    def winners(self, cells: Sequence[Cell]) -> np.ndarray:
        """Place among `cells` of the fastest in each resample."""
        drawn = self.drawn[:, [self.place[cell.id] for cell in cells]]
        return np.where(np.isnan(drawn), -np.inf, drawn).argmax(axis=1)

    def held_out(
        self, cells: Sequence[Cell], winners: np.ndarray, plain: Cell | None
    ) -> float | None:
        if plain is None or self.single:
            return None
        columns = np.array([self.place[cell.id] for cell in cells])[winners]
        theirs = self.left_out[np.arange(len(winners)), columns]
        gains = theirs / self.left_out[:, self.place[plain.id]]
        known = gains[~np.isnan(gains)]
        return float(known.mean()) if len(known) else None

    def _ends(self, drawn: np.ndarray) -> tuple[float | None, float | None]:
        known = drawn[~np.isnan(drawn)]
        if self.single or not len(known):
            return None, None
        low, high = np.quantile(known, LEVEL)
        return float(low), float(high)


def _near(best: Cell, candidates: Sequence[Cell], speeds: _Speeds) -> tuple[Setting, ...]:
    limit = NEAR * speeds.mean[best.id]
    others = [c for c in candidates if c is not best and speeds.mean[c.id] >= limit]
    return tuple(
        Setting(cell=cell.id, block_size=cell.block_size, draft_window=cell.draft_window)
        for cell in sorted(others, key=lambda cell: -speeds.mean[cell.id])
    )


def _verdict(best: Cell, speedup: _Ratio) -> str:
    if best.block_size == 1:
        return "do not speculate"
    if speedup.mean is None:
        return "no baseline"
    if speedup.low is None or speedup.low <= 1 <= speedup.high:
        return "not distinguishable"
    return "speculate" if speedup.low > 1 else "do not speculate"


def _sentence(choice: Choice) -> str:
    speed = f"{choice.tokens_per_s:.1f} tokens/s{_ends(choice.low, choice.high, 1)} {_over(choice)}"
    name = choice.setting.label
    plain = f"plain decoding in {choice.plain_dtype}"
    if choice.block_size == 1:
        answer = f"Do not speculate: plain decoding is fastest in {choice.dtype}, {speed}"
        if choice.plain_dtype in (None, choice.dtype):
            return f"{answer}."
        return f"{answer}; {plain} is faster still, {choice.plain_tokens_per_s:.1f} tokens/s."
    if choice.speedup is None:
        return f"{_capital(name)} is fastest: {speed}; plain decoding was not measured."
    times = f"{choice.speedup:.2f}x{_ends(choice.speedup_low, choice.speedup_high, 2)} of {plain}"
    if choice.verdict == "do not speculate":
        return (
            f"Do not speculate: {name} is the fastest that drafts, with {speed}, but that is "
            f"{times} ({choice.plain_tokens_per_s:.1f} tokens/s)."
        )
    answer = f"{_capital(name)} is fastest: {speed}, {times}"
    if choice.speedup_low is None:
        return f"{answer}; not distinguishable, one prompt stands for no other."
    if choice.verdict == "speculate":
        return f"{answer}; speculation pays."
    return f"{answer}; not distinguishable, plain decoding is as good."


def _over(choice: Choice) -> str:
    if choice.prompts == 1:
        return "over 1 prompt, too few for an interval"
    return f"over {choice.prompts} prompts"


def _ends(low: float | None, high: float | None, digits: int) -> str:
    return "" if low is None or high is None else f" [{low:.{digits}f}, {high:.{digits}f}]"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
