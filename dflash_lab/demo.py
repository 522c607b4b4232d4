"""The demo: the embedded pair, one sweep, an audit, figures and the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dflash_lab.analyse import Choice, choose
from dflash_lab.config import SweepConfig
from dflash_lab.figures import write_figures
from dflash_lab.reports import report
from dflash_lab.store import Run
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
    say("sweep: 7 block sizes at the full window, 3 of them at windows 64 and 16, 12 prompts")
    run = sweep(SWEEP, out, progress=progress, audit=True)
    if run.failed:
        raise RuntimeError(
            f"{len(run.failed)} cells failed; see failed.json in {out / 'cells'}, then run again."
        )
    say("figures and report")
    write_figures(run, out / "figures")
    path = report(run)
    return DemoResult(run=run, choice=choose(run), report=path)
