"""What a block costs: seconds measured by block size, window and context, and what they predict.

Measured, never fitted: a kernel may make one more row dear and the next one free, and a line drawn
through the points would hide it. Acceptance comes from elsewhere, a run or a replay.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from dflash_lab.analyse import OWN, ratio
from dflash_lab.backends import Models, Session
from dflash_lab.checkpoint import DraftConfig
from dflash_lab.config import check_block_size, check_window, listed, whole
from dflash_lab.decoding import Stopwatch
from dflash_lab.load import Pair
from dflash_lab.provenance import hardware, pair_names, short_name, utc_now, versions
from dflash_lab.store import Run, plain, to_json, write_atomic
from dflash_lab.trace import StageSeconds

SCHEMA = 1
CONTEXTS = (64, 256, 1024)
WARM_UPS = 2  # blocks of each shape whose times are thrown away
SPREAD = (0.25, 0.75)  # quartiles: single blocks are waited for by other programs too


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Median seconds of a block at one block size, window and context; `_low`, `_high` quartiles.

    The stages are waited for one by one, the total is of other blocks, waited for once at the end;
    so the stages may add up to more.
    """

    block_size: int
    draft_window: int | None
    context: int  # committed positions before the block, mean of those measured
    blocks: int  # measured for each of the two
    draft_s: float
    verify_s: float
    other_s: float  # what is left of a block: deciding, taking back, waiting
    total_s: float
    total_s_low: float
    total_s_high: float
    first_draft_s: float  # of a prompt's first draft pass, which reads all of its features
    prefill_s: float  # of the target over as many positions
    draft_cache_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Measured costs of one pair on one kind of machine, and the circumstances."""

    costs: tuple[Cost, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)  # pair, device, dtype, threads, hardware

    @property
    def block_sizes(self) -> tuple[int, ...]:
        return tuple(sorted({cost.block_size for cost in self.costs}))

    @property
    def draft_windows(self) -> tuple[int | None, ...]:
        """The windows measured, no window first."""
        windows = {cost.draft_window for cost in self.costs if cost.block_size > 1}
        return tuple(sorted(windows, key=lambda window: (window is not None, -(window or 0))))

    def at(self, name: str, block_size: int, draft_window: int | None, contexts: Any) -> np.ndarray:
        """One figure at these contexts: between those measured on a line, beyond them the last.

        Block sizes are never interpolated. Raises ValueError naming what was measured.
        """
        window = None if block_size == 1 else draft_window
        rows = [c for c in self.costs if (c.block_size, c.draft_window) == (block_size, window)]
        if not rows:
            sizes = ", ".join(map(str, self.block_sizes))
            raise ValueError(
                f"this cost table has no block size {block_size} with window {window or 'full'}; "
                f"it has sizes {sizes} and windows {_names(self.draft_windows)}. Measure it: "
                "dflash-lab costs."
            )
        rows.sort(key=lambda cost: cost.context)
        known = [cost.context for cost in rows]
        return np.interp(contexts, known, [getattr(cost, name) for cost in rows])

    def seconds(
        self, block_size: int, draft_window: int | None, contexts: Any, rows: int | None = None
    ) -> np.ndarray:
        """Seconds of a block at these contexts, of which `rows` rows are verified, else all."""
        total = self.at("total_s", block_size, draft_window, contexts)
        if rows is None or rows == block_size:
            return total
        saved = self.at("verify_s", block_size, draft_window, contexts) - self.at(
            "verify_s", rows, draft_window, contexts
        )
        return total - saved

    def by_rows(self, draft_window: int | None, context: float) -> dict[tuple[int, int], float]:
        """Seconds by (block size, rows verified) at one context, as policies take them.

        Rows are those that were measured as a block size: measure every size for a whole table.
        """
        sizes = {c.block_size for c in self.costs if c.draft_window == draft_window} | {1}
        return {
            (size, rows): float(self.seconds(size, draft_window, context, rows))
            for size in sorted(sizes)
            for rows in sorted(sizes)
            if rows <= size
        }

    def frame(self) -> pd.DataFrame:
        """One row a measured cost, with `round_cost`: the tau at which the block breaks even.

        It is the block's seconds in plain decoding steps at the same context.
        """
        rows = pd.DataFrame([asdict(cost) for cost in self.costs])
        plain_s = [float(self.seconds(1, None, cost.context)) for cost in self.costs]
        rows["round_cost"] = rows["total_s"] / plain_s
        return rows.astype({"draft_window": "Int64"})

    def break_even(self, block_size: int, draft_window: int | None, context: float) -> float:
        """The tau at which a block pays for itself: its seconds in plain decoding steps."""
        block = self.seconds(block_size, draft_window, context)
        return float(block / self.seconds(1, None, context))

    @property
    def hardware(self) -> str:
        return str(self.facts.get("hardware", "unknown hardware"))

    @property
    def dtype(self) -> str:
        return str(self.facts.get("dtype", "unknown dtype"))


def _names(windows: Sequence[int | None]) -> str:
    return ", ".join("full" if window is None else str(window) for window in windows) or "none"


# Measuring


def measure_costs(
    pair: Pair | Models,
    block_sizes: Sequence[int],
    draft_windows: Sequence[int | None] = (None,),
    contexts: Sequence[int] = CONTEXTS,
    *,
    repeats: int = 10,
    seed: int = 0,
    facts: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> CostTable:
    """Measure what blocks cost on this machine; block size 1 is always among them.

    Prompts are random ids and one draft of a block is kept, whatever the target says: seconds
    depend on shapes alone, so random weights do as well. Shapes are warmed up and their order is
    rotated from repeat to repeat. Raises ValueError for a context that the target cannot hold.
    """
    models = pair.models if isinstance(pair, Pair) else pair
    sizes = _checked_sizes(block_sizes)
    listed("draft_windows", draft_windows)
    windows = tuple(dict.fromkeys(check_window(window) for window in draft_windows))
    whole("repeats", repeats, 1, "10 give a steady median.")
    listed("contexts", contexts)
    shapes = [(1, None), *((size, w) for w in windows for size in sizes if size > 1)]
    for context in contexts:
        _check_context(context, shapes, models)
    found = []
    for place, context in enumerate(contexts):
        found += _Depth(models, shapes, context, seed).measure(repeats)
        progress(place + 1, len(contexts))
    return CostTable(costs=tuple(found), facts=plain(describe(pair, facts or {})))


def usual_sizes(trained_block_size: int) -> tuple[int, ...]:
    """Every size up to the trained one: a cost that is not measured is not known."""
    return tuple(range(1, trained_block_size + 1))


def _checked_sizes(block_sizes: Sequence[int]) -> tuple[int, ...]:
    listed("block_sizes", block_sizes)
    return tuple(sorted({1, *(check_block_size(size) for size in block_sizes)}))


def _check_context(context: int, shapes: Sequence[tuple[int, Any]], models: Models) -> None:
    whole("contexts", context, 1, "They are committed positions.")
    room = models.context_limit - _reach(context) - 2 * max(size for size, _ in shapes)
    if context > room:
        raise ValueError(
            f"context {context} does not fit: this target holds {models.context_limit} positions, "
            f"blocks included. Use {max(room, 1)} at most."
        )


def _reach(context: int) -> int:
    """How far a session may run past its context before it is opened again."""
    return max(16, context // 8)


def describe(pair: Pair | Models, told: Mapping[str, Any]) -> dict[str, Any]:
    """The circumstances of a table; `told` are those that a pair of random weights cannot tell."""
    models = pair.models if isinstance(pair, Pair) else pair
    facts = models.describe()
    own: dict[str, Any] = {}
    if isinstance(pair, Pair):
        own = {
            **pair_names(pair),
            "trained_block_size": pair.draft_config.trained_block_size,
        }
    return {
        **own,
        "device": models.device,
        "dtype": models.dtype,
        "threads": facts.get("threads"),
        "attention": facts.get("attention"),
        "hardware": hardware(facts.get("gpu"))["class"],
        "versions": versions(),
        "measured_utc": utc_now(),
        **told,
    }


@dataclass(slots=True)
class _Times:
    """What was measured of one shape."""

    stages: list[tuple[float, float, float]] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)
    first_draft_s: list[float] = field(default_factory=list)
    prefill_s: list[float] = field(default_factory=list)
    cache_bytes: int = 0


class _Opened:
    """A session at a depth, opened again where it has run too far past it."""

    def __init__(self, models: Models, window: int | None, speculate: bool, prompt: list[int]):
        self.models, self.window, self.speculate = models, window, speculate
        self.prompt, self.session, self.at = prompt, None, 0

    def near(self, block_size: int, times: _Times) -> Session:
        if self.session is None or self.at - len(self.prompt) > _reach(len(self.prompt)):
            self._open(block_size, times)
        return self.session

    def _open(self, block_size: int, times: _Times) -> None:
        """Prefill, and a first block by itself: its draft pass reads the features of all of it."""
        self.close()
        self.session = self.models.session(self.window, speculate=self.speculate)
        watch = Stopwatch(self.session.synchronize, stages=True)
        watch.restart()
        self.session.prefill(self.prompt)
        times.prefill_s.append(watch.total())
        self.at = len(self.prompt)
        first = self.block(block_size, stages=True)
        times.first_draft_s.append(first.draft)

    def block(self, block_size: int, stages: bool) -> StageSeconds:
        """One block, of which one draft is kept, right or wrong."""
        watch = Stopwatch(self.session.synchronize, stages=stages)
        kept = min(2, block_size)
        watch.restart()
        block = self.session.draft(self.prompt[0], block_size)
        watch.lap("draft")
        self.session.verify(block)
        watch.lap("verify")
        self.session.commit(kept - 1)
        watch.lap("commit")
        self.at += kept
        return watch.read()

    def close(self) -> None:
        if self.session is not None:
            self.session.close()
            self.session = None


class _Depth:
    """Every shape at one context, in turn."""

    def __init__(
        self, models: Models, shapes: Sequence[tuple[int, int | None]], context: int, seed: int
    ):
        rng = np.random.default_rng(seed)
        self.prompt = rng.integers(0, models.vocabulary, context).tolist()
        self.models, self.shapes = models, list(shapes)
        self.times = {shape: _Times() for shape in shapes}

    def measure(self, repeats: int) -> list[Cost]:
        keys = dict.fromkeys((window, size > 1) for size, window in self.shapes)
        with ExitStack() as stack:
            opened = {
                key: stack.enter_context(closing(_Opened(self.models, *key, self.prompt)))
                for key in keys
            }
            for repeat in range(-WARM_UPS, repeats):
                first = repeat % len(self.shapes)
                for shape in (*self.shapes[first:], *self.shapes[:first]):
                    self._turn(opened[shape[1], shape[0] > 1], shape, keep=repeat >= 0)
        prefill = [s for times in self.times.values() for s in times.prefill_s]
        return [self._cost(shape, times, prefill) for shape, times in self.times.items()]

    def _turn(self, opened: _Opened, shape: tuple[int, int | None], keep: bool) -> None:
        """One block by stages and one as a whole."""
        times = self.times[shape]
        for stages in (True, False):
            session, at = opened.near(shape[0], times), opened.at
            seconds = opened.block(shape[0], stages)
            times.cache_bytes = max(times.cache_bytes, session.draft_cache_bytes)
            if keep and stages:
                rest = seconds.total - seconds.draft - seconds.verify
                times.stages.append((seconds.draft, seconds.verify, rest))
            elif keep:
                times.totals.append(seconds.total)
                times.contexts.append(at)

    def _cost(self, shape: tuple[int, int | None], times: _Times, prefill: Sequence[float]) -> Cost:
        draft, verify, other = np.median(times.stages, axis=0).tolist()
        low, high = np.quantile(times.totals, SPREAD).tolist()
        firsts = times.first_draft_s or self._firsts(shape[1])
        return Cost(
            block_size=shape[0],
            draft_window=shape[1],
            context=round(float(np.mean(times.contexts))),
            blocks=len(times.totals),
            draft_s=draft,
            verify_s=verify,
            other_s=other,
            total_s=float(np.median(times.totals)),
            total_s_low=low,
            total_s_high=high,
            first_draft_s=float(np.median(firsts)) if shape[0] > 1 else draft,
            prefill_s=float(np.median(prefill)),
            draft_cache_bytes=times.cache_bytes if shape[0] > 1 else 0,
        )

    def _firsts(self, window: int | None) -> list[float]:
        """First draft passes of other sizes at that window: what they read first is the same."""
        return [
            seconds
            for (_, seen), times in self.times.items()
            if seen == window
            for seconds in times.first_draft_s
        ]


def measure_shape(
    target: str | Path,
    draft: DraftConfig,
    block_sizes: Sequence[int],
    draft_windows: Sequence[int | None] = (None,),
    contexts: Sequence[int] = CONTEXTS,
    *,
    dtype: str = "auto",
    device: str = "auto",
    **settings: Any,
) -> CostTable:
    """As `measure_costs`, with random weights: `target` is a config.json or its folder, torch only.

    Nothing is downloaded; a table of a pair that is not here, measured on this machine.
    """
    from dflash_lab.backends.torch_shapes import random_models

    models = random_models(Path(target), draft, dtype, device)
    told = {"backend": "torch", "target": f"random weights of {short_name(str(target))}"}
    told["trained_block_size"] = draft.trained_block_size
    return measure_costs(models, block_sizes, draft_windows, contexts, facts=told, **settings)


# Files

BESIDE = "costs.json"  # in a run's folder: a cost table of the machine that measured it


def write_costs(table: CostTable, path: str | Path) -> Path:
    """Write a table as .json or .parquet."""
    path = Path(path)
    check_file(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [asdict(cost) for cost in table.costs]
    if path.suffix == ".json":
        content = {"schema": SCHEMA, "facts": table.facts, "costs": rows}
        write_atomic(path, to_json(content, indent=1) + "\n")
        return path
    sink = pa.BufferOutputStream()
    told = {"dflash_lab.costs": to_json({"schema": SCHEMA, "facts": table.facts})}
    pq.write_table(pa.Table.from_pylist(rows).replace_schema_metadata(told), sink)
    write_atomic(path, sink.getvalue().to_pybytes())
    return path


def costs_beside(run: Path) -> CostTable | None:
    """The table in the folder of a run; None where there is none."""
    return read_costs(run / BESIDE) if (run / BESIDE).is_file() else None


def read_costs(path: str | Path) -> CostTable:
    """The table in a .json or .parquet file; raises ValueError naming the file where it is none."""
    path = Path(path)
    check_file(path)
    try:
        if path.suffix == ".json":
            raw = json.loads(path.read_bytes())
        else:
            stored = pq.read_table(path)
            raw = json.loads((stored.schema.metadata or {})[b"dflash_lab.costs"])
            raw["costs"] = stored.to_pylist()
        if raw["schema"] > SCHEMA:
            raise ValueError(f"schema {raw['schema']} is of a later version; update dflash_lab")
        known = {item.name for item in fields(Cost)}
        costs = tuple(Cost(**{k: row[k] for k in known}) for row in raw["costs"])
        if not costs:
            raise ValueError("it holds no costs")
        return CostTable(costs=costs, facts=raw["facts"])
    except (ValueError, KeyError, TypeError, AttributeError, pa.ArrowInvalid) as error:
        raise ValueError(
            f"{path} is no cost table ({error}). dflash-lab costs --out FILE makes one."
        ) from error


def check_file(path: Path) -> None:
    """Raise ValueError unless a table can have that name."""
    if path.suffix not in (".json", ".parquet"):
        raise ValueError(f"the cost table is {str(path)!r}; expected a .json or .parquet file.")


# Predicting

# What a prediction needs of each block, as `replay_frame` gives it: the prompt and the cell that it
# belongs to, the positions committed before it, its size, the rows verified, the tokens emitted.
BLOCK_COLUMNS = (
    "prompt_id",
    "turn",
    "cell_block_size",
    "draft_window",
    "index",
    "start",
    "block_size",
    "rows",
    "accepted",
    "emitted",
    "cut",
)


def measured_blocks(run: Run) -> pd.DataFrame:
    """The blocks of a run's own loop in the columns that a prediction needs, and their cell."""
    own = [cell for cell in run.cells if cell.engine == OWN]
    names = ("cell", "prompt_id", "turn", "repeat", "index", "start", "block_size")
    table = run.blocks((*names, "drafted", "accepted", "emitted", "cut"))
    rows = table.drop_columns("drafted").to_pandas()
    rows["rows"] = 1 + table["drafted"].combine_chunks().value_lengths().to_numpy()
    sizes = {cell.id: cell.block_size for cell in own}
    rows = rows[rows["cell"].isin(list(sizes))]
    windows = {cell.id: cell.draft_window for cell in own}
    return rows.assign(
        cell_block_size=rows["cell"].map(sizes),
        draft_window=rows["cell"].map(windows).astype("Int64"),
    )


def predict(blocks: pd.DataFrame, table: CostTable) -> pd.DataFrame:
    """One row a decode and setting: tokens after the first, and the seconds a table says.

    `blocks` has `BLOCK_COLUMNS`; the seconds of blocks add up at their own contexts, and the first
    draft pass of a prompt is dearer. A block made narrow by the end of the context costs what its
    cell's size costs, unless its own was measured. Raises ValueError for a size that was not.
    """
    if missing := sorted(set(BLOCK_COLUMNS) - set(blocks.columns)):
        raise ValueError(f"the blocks lack {', '.join(missing)}; replay_frame(...) has them.")
    blocks = _priced_as(blocks.reset_index(drop=True), table)
    seconds = np.zeros(len(blocks))
    shape = ["block_size", "draft_window", "rows"]
    for (size, window, rows), group in blocks.groupby(shape, dropna=False):
        seen = None if pd.isna(window) else int(window)
        spent = table.seconds(int(size), seen, group["start"], int(rows))
        seconds[group.index] = spent + _first_pass(table, int(size), seen, group)
    blocks = blocks.assign(seconds=seconds)
    keys = [name for name in ("cell", "repeat") if name in blocks.columns]
    keys = [*keys, "cell_block_size", "draft_window", "prompt_id", "turn"]
    made = blocks.groupby(keys, dropna=False, sort=False).agg(
        blocks=("emitted", "size"),
        after_first=("emitted", "sum"),
        decode_s=("seconds", "sum"),
        prompt_length=("start", "min"),
    )
    made = made.reset_index()
    made["total_s"] = made["decode_s"] + table.at("prefill_s", 1, None, made["prompt_length"])
    return made.rename(columns={"cell_block_size": "block_size"})


def _priced_as(blocks: pd.DataFrame, table: CostTable) -> pd.DataFrame:
    """The blocks, of the sizes that their costs are looked up by."""
    narrow = ~blocks["block_size"].isin(table.block_sizes)
    size = blocks["block_size"].mask(narrow, blocks["cell_block_size"])
    whole_block = blocks["rows"] == blocks["block_size"]
    return blocks.assign(block_size=size, rows=blocks["rows"].mask(whole_block, size))


def _first_pass(
    table: CostTable, size: int, window: int | None, blocks: pd.DataFrame
) -> np.ndarray:
    """What a prompt's first draft pass takes longer than those to come; 0 in other blocks."""
    if size == 1:
        return np.zeros(len(blocks))
    first, usual = (
        table.at(name, size, window, blocks["start"]) for name in ("first_draft_s", "draft_s")
    )
    return np.where(blocks["index"] == 0, np.maximum(first - usual, 0), 0)


def prediction_frame(run: Run, table: CostTable) -> pd.DataFrame:
    """One row a cell of our own loop: throughput measured and predicted, and the residual.

    `residual` is predicted over measured, less 1. Cells in another dtype or on another hardware
    class than the table's are left out: the table says nothing about them.
    """
    cells = [
        cell
        for cell in run.cells
        if cell.engine == OWN and (cell.dtype, cell.hardware) == (table.dtype, table.hardware)
    ]
    part = Run(path=run.path, cells=tuple(cells))
    made = predict(measured_blocks(part), table).groupby("cell")[["after_first", "decode_s"]].sum()
    spent = part.prompts(("cell", "decode_s")).to_pandas().groupby("cell")["decode_s"].sum()
    rows = []
    for cell in cells:
        tokens, seconds = made.loc[cell.id] if cell.id in made.index else (0, 0)
        predicted = float(ratio(tokens, seconds))
        measured = float(ratio(tokens, spent[cell.id]))
        rows.append(
            {
                "cell": cell.id,
                "block_size": cell.block_size,
                "draft_window": cell.draft_window,
                "tokens_per_s": measured,
                "predicted_tokens_per_s": predicted,
                "residual": predicted / measured - 1 if measured > 0 else np.nan,
            }
        )
    names = ("cell", "block_size", "draft_window", "tokens_per_s", "predicted_tokens_per_s")
    return pd.DataFrame(rows, columns=[*names, "residual"]).astype({"draft_window": "Int64"})


# In whole numbers of rows


def best_block_size(tau: Mapping[int, float], seconds: Mapping[int, float]) -> tuple[int, float]:
    """The block size with the most tokens a second, and its speedup over block size 1.

    Every size is looked at: throughput need not have one peak (dflash.md 6.1). The smaller of
    equals.
    """
    pace = {size: tau[size] / seconds[size] for size in sorted(tau)}
    best = max(pace, key=pace.__getitem__)
    return best, pace[best] / pace[1]


def longer_pays(survival: float, seconds: float, seconds_longer: float, tau: float) -> bool:
    """Whether one row more raises throughput: the marginal rule of dflash.md 6.1.

    `survival` is the share of blocks accepted up to the new draft position. A row that costs
    nothing always pays.
    """
    more = seconds_longer - seconds
    return more <= 0 or survival / more > tau / seconds
