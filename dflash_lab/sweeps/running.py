"""The call that fills a run folder, and how a folder stands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflash_lab.config import DecodeConfig, SweepConfig
from dflash_lab.exactness import check_greedy, keep_audit
from dflash_lab.lease import is_leased
from dflash_lab.load import Pair
from dflash_lab.policies import policy_label
from dflash_lab.prompts import Prompt
from dflash_lab.store import Run, clear_when_full, open_run
from dflash_lab.sweeps.filling import Filler
from dflash_lab.sweeps.pairs import Pairs
from dflash_lab.sweeps.planning import describe_prompts, plan_cells, prompts_of, shared_request
from dflash_lab.sweeps.progress import SweepProgress


def sweep(
    config: SweepConfig,
    out: str | Path,
    progress: Callable[[SweepProgress], None] | None = None,
    pair: Pair | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    audit: bool = False,
) -> Run:
    """Fill a run folder with one cell for every block size and window; returns the run.

    What is finished is skipped and what was interrupted goes on, so the same call ends what a kill
    left. A cell that raises is kept as failed with its reason, and is tried again by the next
    call; the others go on. `pair` replaces `config.pair`. `should_stop` is asked once a block.
    `audit` compares the text with the library's own, in float32 too where plain decoding is
    measured in that, and keeps it beside the run.
    Raises ValueError for prompts that do not fit, `DiskFull` where there is no space left.
    """
    show = progress or (lambda at: None)
    out = Path(out)
    if audit:
        check_greedy(config)
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; a run is a folder. Name another.")
    prompts = prompts_of(config)
    pairs = Pairs(config, pair, show)
    plans = plan_cells(config, pairs, prompts)
    with clear_when_full(out):
        (out / "cells").mkdir(parents=True, exist_ok=True)
        with Filler(config, out, prompts, pairs, plans, show, should_stop) as work:
            work.run()
    work.warn()
    if audit and not should_stop():
        audit_run(open_run(out), config, pairs, prompts, show)
    return open_run(out)


def audit_run(
    run: Run,
    config: SweepConfig,
    pairs: Pairs,
    prompts: Sequence[Prompt],
    show: Callable[[SweepProgress], None],
) -> None:
    """Audit the run's largest block size unless it holds just that.

    In the dtype that drafts, and in float32 where plain decoding is measured in that: how another
    dtype rounds would say nothing of what was drafted.
    """
    size, trained = max(config.block_sizes), pairs.first.draft_config.trained_block_size
    largest = DecodeConfig(
        block_size=size if config.beyond_trained else min(size, trained),
        block_size_source=config.block_size_source,
        draft_window=config.draft_windows[0],
        max_new_tokens=config.max_new_tokens,
        min_new_tokens=config.min_new_tokens,
        beyond_trained=config.beyond_trained,
    )
    plain = {pairs.effective(dtype) for dtype in config.plain_dtypes}
    for dtype in dict.fromkeys((pairs.dtype, *({"float32"} & plain))):
        pair = pairs.get(dtype)
        of = shared_request(config, pair)
        of |= {"prompts": describe_prompts(config, prompts), "thinking": config.thinking}

        def told(done: int, total: int, label: str = f"audit: {dtype}") -> None:
            show(SweepProgress(done=done, total=total, seconds_left=None, label=label))

        keep_audit(run, pair, prompts, largest, of, config.chat, config.thinking, told)


def status(path: str | Path) -> list[dict[str, Any]]:
    """One row a cell of a run: its state, what it is and how many of its decodes are there."""
    run = open_run(path)
    rows = [
        _row(cell, "finished", cell.summary["decodes"], cell.summary["decodes"])
        for cell in run.cells
    ]
    for part in run.unfinished:
        state = "running" if is_leased(part.folder) else "unfinished"
        rows.append(_row(part, state, part.done, part.decodes))
    for cell in run.failed:
        rows.append(_row(cell, "failed", None, None) | {"error": cell.error})
    return rows


def _row(cell: Any, state: str, done: int | None, decodes: int | None) -> dict[str, Any]:
    names = ("engine", "dtype", "block_size", "draft_window")
    about = {name: cell.request.get(name) for name in names}
    about["policy"] = policy_label(cell.request.get("policy"))
    return {"cell": cell.id, "state": state, **about, "done": done, "decodes": decodes}
