"""Two runs side by side, as text and as a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from dflash_lab import plot
from dflash_lab.analyse import (
    OWN,
    diff_frame,
    records,
    run_differences,
    timeline_frame,
)
from dflash_lab.panels import Image, place_name, to_image, with_interval, written
from dflash_lab.reports.tables import WINDOW, Table, figure, interval, plainly
from dflash_lab.store import Run, open_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What two runs say about each other."""

    one: str  # names of the runs
    other: str
    frame: pd.DataFrame  # of `diff_frame`
    settings: Mapping[str, tuple[str, str]]  # those that differ
    unpaired: tuple[int, int]  # cells of each that the other has none like
    race: Image | None  # one prompt in both runs, where their times compare

    @property
    def sentences(self) -> tuple[str, ...]:
        """What to know before the table: what is compared, and what cannot be."""
        said = [
            f"{self.other} beside {self.one}: {len(self.frame)} pairs of cells that asked for the "
            f"same; {self.unpaired[0]} cells of {self.one} and {self.unpaired[1]} of {self.other} "
            "have no counterpart."
        ]
        if len(self.frame) and not self.frame["prompts"].all():
            said.append("Pairs without a prompt in common are not compared.")
        apart = self.frame[self.frame["hardware"] != self.frame["other_hardware"]]
        if len(apart):
            classes = sorted({*apart["hardware"]}), sorted({*apart["other_hardware"]})
            said.append(
                f"The runs are of different hardware classes ({', '.join(classes[0])}; "
                f"{', '.join(classes[1])}): their times stand side by side and are in no ratio."
            )
        return tuple(said)

    @property
    def lines(self) -> tuple[str, ...]:
        """Each pair in one line: what it is, how much faster the second run is, tau."""
        return tuple(_line(row) for row in records(self.frame))


def _line(row: Mapping[str, Any]) -> str:
    setting = (
        f"{row['engine']}, {row['dtype']}, {place_name(row['block_size'], row['draft_window'])}"
    )
    if not row["prompts"]:
        return f"{setting}: no prompt in common"
    speeds = f"{written(row['tokens_per_s'])} and {written(row['other_tokens_per_s'])} tokens/s"
    parts = [f"{speeds}, ratio {with_interval(row, 'speedup')}"]
    if row["tau"] is not None and row["other_tau"] is not None:
        parts.append(f"tau {written(row['tau'])} and {written(row['other_tau'])}")
        parts.append(f"difference {with_interval(row, 'tau_difference')}")
    return f"{setting}, {row['prompts']} prompts: {'; '.join(parts)}"


def compare(one: Run | str | Path, other: Run | str | Path) -> Difference:
    """Compare two runs, paired by prompt. Raises ValueError where no cell has a counterpart."""
    runs = [run if isinstance(run, Run) else open_run(run) for run in (one, other)]
    frame = diff_frame(*runs)
    if frame.empty:
        raise ValueError(
            f"{runs[0].path} and {runs[1].path} have no cells that asked for the same (engine, "
            "backend, dtype, block size, window, policy, temperature and rule); there is nothing "
            "to compare."
        )
    names = _names(*runs)
    return Difference(
        one=names[0],
        other=names[1],
        frame=frame,
        settings=run_differences(*runs),
        unpaired=(
            len(runs[0].cells) - frame["cell"].nunique(),
            len(runs[1].cells) - frame["other_cell"].nunique(),
        ),
        race=_race(runs, frame, names),
    )


def _names(one: Run, other: Run) -> tuple[str, str]:
    """The folders' names; the paths where these are the same."""
    names = one.path.resolve().name, other.path.resolve().name
    return names if names[0] != names[1] else (str(one.path), str(other.path))


def _race(runs: list[Run], frame: pd.DataFrame, names: tuple[str, str]) -> Image | None:
    """The fastest pair of drafting cells on the first prompt that both hold."""
    fit = frame[(frame["engine"] == OWN) & frame["speedup"].notna()]
    if fit.empty:
        return None
    row = fit.sort_values("tokens_per_s").iloc[-1]
    cells = row["cell"], row["other_cell"]
    ids = [
        set(
            Run(path=run.path, cells=(run.cell(cell),))
            .prompts(("prompt_id",))["prompt_id"]
            .to_pylist()
        )
        for run, cell in zip(runs, cells, strict=True)
    ]
    prompt = min(ids[0] & ids[1])
    ways = {
        name: timeline_frame(run, cell, prompt)
        for name, run, cell in zip(names, runs, cells, strict=True)
    }
    picture = plot.race(ways, f"{prompt}, block size {row['block_size']}, in both runs")
    return to_image(picture, "race")


COLUMNS = (
    plainly("cell", "cell"),
    plainly("engine", "engine"),
    plainly("dtype", "dtype"),
    plainly("block size", "block_size"),
    WINDOW,
    plainly("prompts", "prompts"),
    figure("tokens/s", "tokens_per_s"),
    figure("tokens/s, other", "other_tokens_per_s"),
    interval("ratio", "speedup"),
    figure("tau", "tau"),
    figure("tau, other", "other_tau"),
    interval("difference of tau", "tau_difference"),
    plainly("other cell", "other_cell"),
)


def difference_content(made: Difference) -> dict[str, Any]:
    """Everything that the page of a comparison shows."""
    return {
        "title": f"{made.one} and {made.other}",
        "one": made.one,
        "other": made.other,
        "sentences": made.sentences,
        "settings": [(name, *values) for name, values in made.settings.items()],
        "made": Table.of(COLUMNS, records(made.frame)),
        "race": made.race,
    }
