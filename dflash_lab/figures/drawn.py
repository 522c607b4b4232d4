"""What can be drawn of a run, by name: each figure with the rows that it shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pandas as pd
import pyarrow.compute as pc

from dflash_lab import plot
from dflash_lab.analyse import (
    COMPARABLE,
    OWN,
    Choice,
    audit_frame,
    break_even_frame,
    cell_frame,
    choose,
    comparable,
    depth_frame,
    length_frame,
    prompt_pairs,
    published_points,
    speedup_frame,
    stage_frame,
    survival_frame,
    task_frame,
    timeline_frame,
)
from dflash_lab.costs import BESIDE, CostTable, costs_beside, prediction_frame
from dflash_lab.replay import AcceptanceMap, clip_frame, load_map, policy_frame
from dflash_lab.store import Run, map_names


class NothingToDraw(ValueError):
    """The run does not hold what a figure is made of; the message says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A figure and the rows that it shows."""

    figure: plot.Picture
    table: pd.DataFrame
    of: tuple[str, ...] = ()  # ids of its cells, where the rows do not tell

    @property
    def cells(self) -> tuple[str, ...]:
        """Ids of the cells whose rows it shows."""
        if self.of or "cell" not in self.table:
            return self.of
        return tuple(self.table["cell"].dropna().unique())


class Material:
    """What figures are drawn from: the frames of a run, each made when it is first asked for."""

    def __init__(self, run: Run):
        self.whole, self.run = run, comparable(run)

    @cached_property
    def cells(self) -> pd.DataFrame:
        return cell_frame(self.run)

    @cached_property
    def drafting(self) -> pd.DataFrame:
        """The cells of our own loop that draft, in the one dtype that the choice is about."""
        own = self.cells[(self.cells["engine"] == OWN) & (self.cells["block_size"] > 1)]
        if own.empty:
            raise NothingToDraw("no cell drafts anything")
        return own[own["dtype"] == own["dtype"].mode()[0]]

    @cached_property
    def chosen(self) -> Choice | None:
        return choose(self.run) if self.cells["draft_rate"].notna().any() else None

    @cached_property
    def costs(self) -> CostTable:
        """The cost table that lies in the run's folder."""
        table = costs_beside(self.run.path)
        if table is None:
            raise NothingToDraw(
                f"the run holds no {BESIDE}; dflash-lab costs --out RUN/{BESIDE} makes it"
            )
        return table

    @cached_property
    def acceptance(self) -> AcceptanceMap:
        """The acceptance map that lies beside the run."""
        if not map_names(self.run.path):
            raise NothingToDraw("no acceptance map is stored; make one with recommend --map")
        try:
            return load_map(self.run)
        except ValueError as error:  # there are several
            raise NothingToDraw(str(error)) from error

    @cached_property
    def survival(self) -> pd.DataFrame:
        return survival_frame(self.run)

    @property
    def drafting_and_plain(self) -> pd.DataFrame:
        """The drafting cells, and plain decoding in any dtype."""
        own = self.cells[self.cells["engine"] == OWN]
        return pd.concat([self.drafting, own[own["block_size"] == 1]])

    @property
    def steered(self) -> pd.DataFrame:
        """Cells that ran under a policy beside those of a fixed size; empty without a policy."""
        kind = self.run.cells[0].asked(COMPARABLE)
        cells = [
            cell
            for cell in self.whole.cells
            if cell.policy is not None and cell.asked(COMPARABLE) == kind
        ]
        if not cells:
            return pd.DataFrame()
        dtypes = {cell.dtype for cell in cells}
        fixed = self.drafting[
            self.drafting["draft_window"].isna() & self.drafting["dtype"].isin(dtypes)
        ]
        names = [f"block size {size}" for size in fixed["block_size"]]
        under = cell_frame(replace(self.whole, cells=tuple(cells)))
        windows = under["draft_window"].astype("string")
        under["policy"] += (", window " + windows).fillna("")
        return pd.concat([fixed.assign(policy=names), under]).assign(bound=None)

    @property
    def setting(self) -> tuple[int, int | None] | None:
        """Block size and window of the choice, where it drafts."""
        chosen = self.chosen
        drafts = chosen is not None and chosen.block_size > 1
        return (chosen.block_size, chosen.draft_window) if drafts else None

    @property
    def pair(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The drafting cell to look at closely, and plain decoding in the same dtype."""
        drafting = self.drafting.sort_values("tokens_per_s", ascending=False)
        best = drafting.iloc[0]
        plain = self.cells[
            (self.cells["engine"] == OWN)
            & (self.cells["block_size"] == 1)
            & (self.cells["dtype"] == best["dtype"])
        ]
        if plain.empty:
            raise NothingToDraw(f"plain decoding in {best['dtype']} was not measured")
        return best.to_dict(), plain.iloc[0].to_dict()


def _throughput(m: Material) -> Drawn:
    return Drawn(figure=plot.throughput(m.cells, m.chosen), table=m.cells)


def _acceptance(m: Material) -> Drawn:
    return Drawn(figure=plot.acceptance(m.cells), table=m.drafting)


def _survival(m: Material) -> Drawn:
    return Drawn(figure=plot.survival(m.survival), table=m.survival)


def _conditional(m: Material) -> Drawn:
    return Drawn(figure=plot.conditional(m.survival), table=m.survival)


def _lengths(m: Material) -> Drawn:
    table = length_frame(m.run)
    return Drawn(figure=plot.lengths(table, m.setting), table=table)


def _cost(m: Material) -> Drawn:
    return Drawn(figure=plot.cost(m.cells), table=m.cells)


def _stages(m: Material) -> Drawn:
    table = stage_frame(m.run)
    if table.empty:
        raise NothingToDraw("no cell was timed by stages; sweep with timing = stages")
    return Drawn(figure=plot.stages(table), table=table)


def _break_even(m: Material) -> Drawn:
    table = break_even_frame(m.cells)
    if table.empty:
        raise NothingToDraw("plain decoding or drafting was not measured")
    return Drawn(figure=plot.break_even(table), table=table)


def _heatmap(m: Material) -> Drawn:
    if m.drafting["draft_window"].nunique(dropna=False) < 2:
        raise NothingToDraw("one draft window alone was measured")
    return Drawn(figure=plot.heatmap(m.drafting, m.chosen), table=m.drafting)


def _memory(m: Material) -> Drawn:
    return Drawn(figure=plot.memory(m.drafting), table=m.drafting)


def _tasks(m: Material) -> Drawn:
    dtype = m.drafting["dtype"].iloc[0]
    table = task_frame(m.run)
    table = table[table["dtype"] == dtype]
    if table["task"].nunique() < 2:
        raise NothingToDraw("the prompts are of one task")
    full = table[table["draft_window"].isna()]
    return Drawn(figure=plot.tasks(full), table=full)


def _pairs(m: Material) -> Drawn:
    best, plain = m.pair
    table = prompt_pairs(m.run, best["cell"], plain["cell"])
    name = f"block size {best['block_size']}"
    figure = plot.pairs(table, name, "plain decoding")
    return Drawn(figure=figure, table=table, of=(best["cell"], plain["cell"]))


def _depth(m: Material) -> Drawn:
    dtype = m.drafting["dtype"].iloc[0]
    table = depth_frame(m.run)
    table = table[table["dtype"] == dtype]
    return Drawn(figure=plot.depth(table), table=table)


def _timeline(m: Material) -> Drawn:
    best, _ = m.pair
    prompt = _first_prompt(m.run)
    table = timeline_frame(m.run, best["cell"], prompt)
    name = f"{prompt}, block size {best['block_size']}"
    return Drawn(figure=plot.timeline(table, name), table=table, of=(best["cell"],))


def _race(m: Material) -> Drawn:
    best, plain = m.pair
    prompt = _first_prompt(m.run)
    ways = {f"block size {best['block_size']}": best, "plain decoding": plain}
    frames = {name: timeline_frame(m.run, row["cell"], prompt) for name, row in ways.items()}
    table = pd.concat([frame.assign(way=name) for name, frame in frames.items()])
    return Drawn(figure=plot.race(frames), table=table, of=(best["cell"], plain["cell"]))


def _clipped(m: Material) -> Drawn:
    table = clip_frame(m.acceptance)
    if table.empty:
        raise NothingToDraw("the acceptance map has no size between 1 and its largest")
    return Drawn(figure=plot.clipped(table), table=table)


def _predicted(m: Material) -> Drawn:
    try:
        made = prediction_frame(m.run, m.costs)
    except ValueError as error:  # a size or window that the table does not hold
        raise NothingToDraw(str(error)) from error
    made = made[["cell", "predicted_tokens_per_s"]]
    table = m.cells.merge(made[made["predicted_tokens_per_s"].notna()], on="cell")
    if table.empty:
        raise NothingToDraw("the cost table is of another dtype or hardware class than the cells")
    return Drawn(figure=plot.predicted(table), table=table)


def _published(m: Material) -> Drawn:
    table = speedup_frame(m.run, m.drafting_and_plain)
    if table.empty:
        raise NothingToDraw("plain decoding or drafting was not measured")
    points = published_points()
    figure = plot.published(table, points)
    both = pd.concat([points, table.assign(source="this run")])
    return Drawn(figure=figure, table=both[["source", "setup", *table.columns]])


def _margins(m: Material) -> Drawn:
    table = audit_frame(m.run)
    if table.empty:
        raise NothingToDraw("no audit was made of this run; see dflash-lab audit")
    return Drawn(figure=plot.margins(table), table=table)


def _policies(m: Material) -> Drawn:
    table = _replayed(m) if m.steered.empty else m.steered
    return Drawn(figure=plot.policies(table), table=table)


def _replayed(m: Material) -> pd.DataFrame:
    """What fixed sizes and bounds come to on the texts of the stored map, at measured costs."""
    if not map_names(m.run.path):
        raise NothingToDraw("no cell ran under a policy, and no acceptance map is stored")
    acceptance = m.acceptance
    try:
        return policy_frame(acceptance, m.costs.by_rows(None, _context(m.run)))
    except ValueError as error:  # a size or window that map or table does not hold
        raise NothingToDraw(str(error)) from error


def _context(run: Run) -> int:
    """Where blocks of a run begin on average: the context that their costs are looked up at."""
    return round(pc.mean(run.blocks(("start",))["start"]).as_py())


def _first_prompt(run: Run) -> str:
    return min(run.prompts(("prompt_id",))["prompt_id"].to_pylist())


FIGURES: dict[str, Callable[[Material], Drawn]] = {
    "throughput": _throughput,
    "acceptance": _acceptance,
    "survival": _survival,
    "conditional": _conditional,
    "lengths": _lengths,
    "cost": _cost,
    "stages": _stages,
    "break-even": _break_even,
    "heatmap": _heatmap,
    "memory": _memory,
    "tasks": _tasks,
    "pairs": _pairs,
    "depth": _depth,
    "timeline": _timeline,
    "race": _race,
    "clipped": _clipped,
    "predicted": _predicted,
    "published": _published,
    "margins": _margins,
    "policies": _policies,
}
