"""Throughput that a cost table predicts for the settings of a run, measured or only replayed."""

from __future__ import annotations

import numpy as np
import pandas as pd

from dflash_lab.analyse import OWN, ratio
from dflash_lab.costs import CostTable, measured_blocks, predict
from dflash_lab.replay import AcceptanceMap, load_map, replay_frame
from dflash_lab.store import Cell, Run, map_names

PAIR = ("backend", "target_sha", "draft_sha")
OF_A_MAP = (*PAIR, "dtype", "template_sha", "temperature")


def forecast(run: Run, table: CostTable) -> pd.DataFrame:
    """One row a setting that the table prices, over the blocks of the run's own loop.

    `run` holds cells of one kind. Settings that none of them measured are predicted from an
    acceptance map of the same pair and prompts, where one is stored beside the run. Columns
    block_size, draft_window, dtype and predicted_tokens_per_s, after the first token. Empty where
    the table is of another dtype, hardware class or pair: it says nothing about these cells.
    """
    drafting = [cell for cell in run.cells if cell.engine == OWN and cell.block_size > 1]
    blocks = measured_blocks(run)
    if not drafting or not _is_of(table, drafting[0]):
        blocks = blocks.iloc[:0]
    elif (walked := _replayed(run, drafting[0])) is not None:
        unmeasured = ~_among(walked, set(_settings(blocks)))
        blocks = pd.concat([blocks.drop(columns="cell"), walked[unmeasured]])
    priced = {(cost.block_size, cost.draft_window) for cost in table.costs}
    blocks = blocks[_among(blocks, priced)]
    made = predict(blocks, table).groupby(["block_size", "draft_window"], dropna=False)
    sums = made[["after_first", "decode_s"]].sum().reset_index()
    return sums[["block_size", "draft_window"]].assign(
        dtype=table.dtype, predicted_tokens_per_s=ratio(sums["after_first"], sums["decode_s"])
    )


def _is_of(table: CostTable, cell: Cell) -> bool:
    """Whether a table was measured with what decoded the cell; pairs where the table names one."""
    same = all(table.facts.get(name) in (None, cell.request.get(name)) for name in PAIR)
    return same and (table.dtype, table.hardware) == (cell.dtype, cell.hardware)


def _among(blocks: pd.DataFrame, settings: set[tuple[int, int | None]]) -> np.ndarray:
    return np.array([setting in settings for setting in _settings(blocks)], dtype=bool)


def _settings(blocks: pd.DataFrame) -> list[tuple[int, int | None]]:
    return [
        (size, None if size == 1 or pd.isna(window) else int(window))
        for size, window in zip(blocks["cell_block_size"], blocks["draft_window"], strict=True)
    ]


def _replayed(run: Run, cell: Cell) -> pd.DataFrame | None:
    """The blocks of a stored map of that cell's pair over the run's prompts; None without one."""
    ids = set(run.prompts(("prompt_id",))["prompt_id"].to_pylist())
    for name in map_names(run.path):
        acceptance = load_map(run, name)
        if _fits(acceptance, cell) and ids <= {p.text.prompt_id for p in acceptance.prompts}:
            frame = replay_frame(acceptance.select(ids))
            return frame[frame["cell_block_size"] <= acceptance.trained_block_size]
    return None


def _fits(acceptance: AcceptanceMap, cell: Cell) -> bool:
    return all(acceptance.facts.get(name) == cell.request.get(name) for name in OF_A_MAP)
