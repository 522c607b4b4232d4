"""The demo: the embedded pair, one sweep, an audit, figures and the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from dflash_lab.analyse import Choice, choose
from dflash_lab.backends import OWN
from dflash_lab.config import SweepConfig
from dflash_lab.costs import measure_costs
from dflash_lab.figures import write_figures
from dflash_lab.load import load_pair
from dflash_lab.reports import report
from dflash_lab.store import Run, open_run
from dflash_lab.sweeps import SweepProgress, sweep

SWEEP = SweepConfig(
    pair="smollm2",
    dtype="bfloat16",
    block_sizes=(1, 2, 4, 6, 8, 12, 16),
    draft_windows=(None, 64, 16),
    windowed_block_sizes=(4, 8, 16),
    plain_dtypes=("float32",),
    library_baseline=True,
    max_prompts=12,
    max_new_tokens=48,
)
# A processor without bfloat16 units multiplies it by hand, and the demo would take a quarter of an
# hour and show nothing but that. Beyond this ratio the drafting cells are in the other dtype.
SLOWEST = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """What the demo made."""

    run: Run
    choice: Choice
    report: Path


def run_demo(
    out: Path,
    say: Callable[[str], None] = lambda line: None,
    progress: Callable[[SweepProgress], None] | None = None,
) -> DemoResult:
    """Measure the embedded pair into `out`; what an earlier run finished is not done again."""
    config = demo_sweep(out, say)
    say(
        "sweep: 7 block sizes at the full window, 3 of them at windows 64 and 16, 12 prompts, "
        f"in {config.dtype}"
    )
    run = sweep(config, out, progress=progress, audit=True)
    if run.failed:
        raise RuntimeError(
            f"{len(run.failed)} cells failed; see failed.json in {out / 'cells'}, then run again."
        )
    say("figures and report")
    write_figures(run, out / "figures")
    path = report(run)
    return DemoResult(run=run, choice=choose(run), report=path)


def demo_sweep(out: Path, say: Callable[[str], None]) -> SweepConfig:
    """The demo's sweep in the dtype that an earlier run into `out` took, else in a measured one."""
    (other,) = SWEEP.plain_dtypes
    swapped = replace(SWEEP, dtype=other, plain_dtypes=(SWEEP.dtype,))
    begun = _begun(out)
    if begun:
        return SWEEP if SWEEP.dtype in begun else swapped
    say(f"timing a block in {SWEEP.dtype} and {other}")
    seconds = {dtype: block_seconds(dtype) for dtype in (SWEEP.dtype, other)}
    if seconds[SWEEP.dtype] <= SLOWEST * seconds[other]:
        return SWEEP
    told = " and ".join(f"{1000 * each:.0f} ms in {dtype}" for dtype, each in seconds.items())
    say(f"a block of {max(SWEEP.block_sizes)} takes {told} here: throughput is measured in {other}")
    return swapped


def _begun(out: Path) -> set[str]:
    """Dtypes in which a demo in this folder drafted, cells that are not finished included."""
    if not (out / "cells").is_dir():
        return set()
    run = open_run(out)
    requests = [cell.request for cell in (*run.cells, *run.unfinished) if cell.request]
    own = [request for request in requests if request["engine"] == OWN]
    return {request["dtype"] for request in own if request["block_size"] > 1}


def block_seconds(dtype: str) -> float:
    """Median seconds of the demo's widest block in this dtype."""
    pair, width = load_pair(SWEEP.pair, dtype=dtype), max(SWEEP.block_sizes)
    costs = measure_costs(pair, (width,), contexts=(64,), repeats=3)
    return next(cost.total_s for cost in costs.costs if cost.block_size == width)
