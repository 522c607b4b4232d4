"""Frames of one question each: where the time goes, tasks, pairs, depth, one prompt, audits."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import numpy as np
import pandas as pd

from dflash_lab.analyse import frames
from dflash_lab.analyse.frames import OWN, block_frame, prompt_frame
from dflash_lab.analyse.resampling import draw_prompts, intervals, ratio
from dflash_lab.analyse.sums import prompt_sums
from dflash_lab.exactness import AuditedPrompt, read_audits
from dflash_lab.store import Cell, Run

DEPTHS = 6  # parts of a run's positions in `depth_frame`
SETTINGS = (*frames.SETTINGS, "timing", "beyond_trained")
STAGES = ("draft_s", "verify_s", "commit_s")


def _setting_of(cell: Cell) -> dict[str, Any]:
    return {"cell": cell.id, **{name: cell.request[name] for name in SETTINGS}}


def _windows(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.astype({"draft_window": "Int64"})


def stage_frame(run: Run) -> pd.DataFrame:
    """One row a cell timed by stages: mean seconds of a block, split into its parts.

    `other_s` is what the stages leave of the whole: deciding and waiting. Cells of timing mode
    `whole` know no stages and are left out.
    """
    blocks = block_frame(run)
    blocks = blocks[(blocks["engine"] == OWN) & (blocks["timing"] == "stages")]
    rows = []
    for cell in run.cells:
        mine = blocks[blocks["cell"] == cell.id]
        if len(mine):
            means = {name: float(mine[name].mean()) for name in (*STAGES, "total_s")}
            other = means["total_s"] - sum(means[name] for name in STAGES)
            rows.append({**_setting_of(cell), "blocks": len(mine), **means, "other_s": other})
    names = ("cell", *SETTINGS, "blocks", *STAGES, "total_s", "other_s")
    return _windows(pd.DataFrame(rows, columns=names))


def break_even_frame(cells: pd.DataFrame) -> pd.DataFrame:
    """One row a drafting cell: its tau beside its round cost, in tokens.

    `cells` as from `cell_frame`, of one hardware class. `round_cost` is the time of its blocks in
    steps of plain decoding, by our own loop in the fastest dtype that the cells hold: the tau above
    which a block pays for itself (dflash.md 6.1). Empty without such a cell.
    """
    own = cells[cells["engine"] == OWN]
    plain = own[own["block_size"] == 1]["seconds_per_block"].min()
    drafting = own[own["block_size"] > 1].copy()
    if pd.isna(plain):
        return drafting.iloc[:0].assign(round_cost=pd.Series(dtype=float))
    for end in ("", "_low", "_high"):
        drafting[f"round_cost{end}"] = drafting[f"seconds_per_block{end}"] / plain
    return drafting.reset_index(drop=True)


def speedup_frame(run: Run, cells: pd.DataFrame) -> pd.DataFrame:
    """One row a drafting cell: that of `cells`, and its speed-up over plain decoding with ends.

    `cells` as from `cell_frame`. Plain decoding is our own loop's in the fastest dtype that the run
    holds; the intervals are paired, over the prompts of both. Empty without such a cell.
    """
    own = cells[cells["engine"] == OWN]
    plain = own[own["block_size"] == 1].sort_values("tokens_per_s")
    drafting = own[own["block_size"] > 1]
    names = ["speedup", "speedup_low", "speedup_high"]
    if plain.empty or drafting.empty:
        return drafting.iloc[:0].assign(**dict.fromkeys(names, pd.Series(dtype=float)))
    pairs = frames.paired_frame(run, plain["cell"].iloc[-1])[["cell", *names]]
    pairs[names] = pairs[names].astype(float)  # ends are None where there is one prompt
    return drafting.merge(pairs, on="cell").reset_index(drop=True)


def task_frame(run: Run, resamples: int = 2000, seed: int = 0) -> pd.DataFrame:
    """One row a cell of our own loop and task: throughput and tau of that task's prompts alone."""
    tasks = _task_of(run)
    sums = prompt_sums(run)
    names = np.array([tasks[prompt] for prompt in sums.prompts])
    rows = []
    for task in sorted(set(tasks.values())):
        mine = names == task
        draws = draw_prompts(int(mine.sum()), resamples, seed)
        figures = {}
        for name, above, below in (
            ("tokens_per_s", "after_first", "decode_s"),
            ("tau", "lengths", "whole_blocks"),
        ):
            parts = sums[above][:, mine], sums[below][:, mine]
            low, high = intervals(draws, *parts)
            value = ratio(*(part.sum(axis=1) for part in parts))
            figures |= {name: value, f"{name}_low": low, f"{name}_high": high}
        counts = (sums["outputs"][:, mine] > 0).sum(axis=1)
        rows += [
            {
                **_setting_of(cell),
                "task": task,
                "prompts": int(counts[place]),
                **{name: float(values[place]) for name, values in figures.items()},
            }
            for place, cell in enumerate(sums.cells)
            if cell.engine == OWN and counts[place]
        ]
    return _windows(pd.DataFrame(rows))


def _task_of(run: Run) -> dict[str, str]:
    table = run.prompts(("prompt_id", "task"))
    told = zip(table["prompt_id"].to_pylist(), table["task"].to_pylist(), strict=True)
    return {prompt: task or "none named" for prompt, task in told}


def prompt_pairs(run: Run, cell: str, against: str) -> pd.DataFrame:
    """One row a prompt that two cells share: the throughput of both, and how they differ.

    Columns prompt_id, task, tokens_per_s, against_per_s and speedup, the slowest first.
    """
    sums, tasks = prompt_sums(run), _task_of(run)
    ids = [each.id for each in sums.cells]
    speeds = ratio(sums["after_first"], sums["decode_s"])
    mine, other = speeds[ids.index(cell)], speeds[ids.index(against)]
    frame = pd.DataFrame(
        {
            "prompt_id": sums.prompts,
            "task": [tasks[prompt] for prompt in sums.prompts],
            "tokens_per_s": mine,
            "against_per_s": other,
            "speedup": mine / other,
        }
    )
    return frame.dropna().sort_values(["speedup", "prompt_id"]).reset_index(drop=True)


def depth_frame(run: Run, depths: int = DEPTHS) -> pd.DataFrame:
    """One row a drafting cell and part of the context: tau and block time where it was so long.

    The positions at which blocks begin are cut into `depths` parts of equally many blocks of the
    whole run, the same for all cells. `context` is the mean position of a part's blocks. Cut
    blocks count for the time and not for tau.
    """
    blocks = block_frame(run)
    blocks = blocks[(blocks["engine"] == OWN) & (blocks["block_size"] > 1)]
    if blocks.empty:
        return pd.DataFrame(columns=["cell", *SETTINGS, "context", "blocks", "tau", "block_s"])
    edges = np.unique(np.quantile(blocks["start"], np.linspace(0, 1, depths + 1)[1:-1]))
    blocks = blocks.assign(part=np.searchsorted(edges, blocks["start"], side="right"))
    rows = []
    for cell in run.cells:
        for _, mine in blocks[blocks["cell"] == cell.id].groupby("part"):
            whole_blocks = mine[~mine["cut"].astype(bool)]
            rows.append(
                {
                    **_setting_of(cell),
                    "context": float(mine["start"].mean()),
                    "blocks": len(mine),
                    "tau": float(whole_blocks["accepted"].mean() + 1),
                    "block_s": float(mine["total_s"].mean()),
                }
            )
    return _windows(pd.DataFrame(rows))


def timeline_frame(
    run: Run, cell: str, prompt_id: str, turn: int = 0, repeat: int = 0
) -> pd.DataFrame:
    """One row a block of one decoded prompt: when it began and ended, and the tokens until then.

    Seconds count from the request, so the first block begins at the time to first token; `tokens`
    are those of the output at the block's end. Stages are missing in timing mode `whole`.
    """
    one = Run(path=run.path, cells=(run.cell(cell),))
    key = {"prompt_id": prompt_id, "turn": turn, "repeat": repeat}
    blocks, prompts = _of_key(block_frame(one), key), _of_key(prompt_frame(one), key)
    if prompts.empty:
        raise ValueError(
            f"cell {cell} holds no prompt {prompt_id!r}, turn {turn}, repeat {repeat}."
        )
    blocks = blocks.sort_values("index")
    end = float(prompts["ttft_s"].iloc[0]) + blocks["total_s"].cumsum()
    return blocks.assign(
        begin_s=end - blocks["total_s"],
        end_s=end,
        tokens=1 + blocks["emitted"].cumsum(),
        drafts=[len(drafted) for drafted in blocks["drafted"]],
    )[["index", "begin_s", "end_s", "tokens", *STAGES, "accepted", "emitted", "drafts", "cut"]]


def audit_frame(run: Run) -> pd.DataFrame:
    """One row a prompt of each audit kept beside a run: its label, and where and how far it parts.

    Columns dtype, reference and block_size of the audit, then the fields of
    `exactness.AuditedPrompt`. Empty where nothing was audited.
    """
    shared = ("dtype", "reference", "block_size")
    rows = [
        {name: getattr(made, name) for name in shared} | asdict(row)
        for made in read_audits(run)
        for row in made.prompts
    ]
    names = (*shared, *(field.name for field in fields(AuditedPrompt)))
    whole = ("first_difference", "ours", "reference_token", "gap_at")
    return pd.DataFrame(rows, columns=names).astype(dict.fromkeys(whole, "Int64"))


def _of_key(frame: pd.DataFrame, key: dict[str, Any]) -> pd.DataFrame:
    for name, value in key.items():
        frame = frame[frame[name] == value]
    return frame
