"""Which block size and window to run: the choice, how sure it is, and what rules of thumb cost."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from dflash_lab.analyse import (
    OBJECTIVES,
    OWN,
    Arm,
    Choice,
    Contest,
    Drift,
    Setting,
    Speeds,
    comparable,
    contest,
    drafting_cells,
    draw_prompts,
    drift,
    hardware_classes,
    settle,
    trained_block_size,
)
from dflash_lab.checkpoint import draft_fingerprint
from dflash_lab.config import one_of
from dflash_lab.costs import CostTable, measured_blocks, predict, prediction_frame
from dflash_lab.load import DRAFT_FILES, EMBEDDED, resolve
from dflash_lab.replay import AcceptanceMap, replay_frame
from dflash_lab.store import Run

COMFORTABLE, LOW = 0.6, 0.3  # draft rates that users go by
PLATEAU = 0.98  # of the largest tau: from there on it counts as flat


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleOfThumb:
    """A rule that looks at acceptance alone, and what following it would cost."""

    rule: str
    setting: Setting | None  # None where it names no size that was measured
    tokens_per_s: float | None
    loss: float | None  # share of the chosen setting's speed given away; below 0: it is faster
    loss_low: float | None
    loss_high: float | None

    @property
    def sentence(self) -> str:
        if self.setting is None or self.loss is None:
            return f"{self.rule}: no measured size."
        span = "" if self.loss_low is None else _span(100 * self.loss_low, 100 * self.loss_high, 0)
        return f"{self.rule}: {self.setting.label}, {100 * self.loss:.0f} %{span} slower."


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """A setting beside the fastest one measured, on the same prompts."""

    setting: Setting
    best: Setting
    prompts: int
    regret: float  # share of the best one's speed that the setting gives away
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """How far predictions were from measured throughput, over the cells that both know."""

    cells: int
    worst: float  # predicted over measured, less 1, of the cell where it is furthest from 0
    mean_absolute: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """What to run, and everything that speaks for it and against it."""

    choice: Choice
    rules: tuple[RuleOfThumb, ...]
    drift: Drift | None  # None for a prediction
    residual: Residual | None  # None where nothing predicted was measured too
    source: str  # the prompts, which and how many
    notes: tuple[str, ...]

    @property
    def block_size(self) -> int:
        return self.choice.block_size

    @property
    def draft_window(self) -> int | None:
        return self.choice.draft_window

    @property
    def text(self) -> str:
        """The whole answer in plain lines."""
        return "\n".join([self.choice.sentence, *(f"- {line}" for line in _points(self))])


def recommend(
    run: Run | None = None,
    objective: str = "throughput",
    *,
    costs: CostTable | None = None,
    acceptance: AcceptanceMap | pd.DataFrame | None = None,
    prompts: Collection[str] | None = None,
    resamples: int = 2000,
    seed: int = 0,
) -> Recommendation:
    """The block size and draft window to run, from a run's measured cells or by prediction.

    `objective` is "throughput", "latency" (end to end with prefill) or "memory" (least draft cache
    within 2 % of the best throughput). With `costs`, another machine's say, acceptance is taken
    from `acceptance` (an acceptance map, or blocks as `replay_frame` gives them), else from the
    run's own blocks, and speed is predicted. `prompts` takes some of the prompts only. Block size 1
    may be the answer. Raises ValueError where cells of several kinds would be compared.
    """
    one_of("objective", objective, tuple(OBJECTIVES))
    if costs is None and acceptance is not None:
        raise ValueError("acceptance alone says nothing of speed; give a cost table too: costs=.")
    if run is None and acceptance is None:
        raise ValueError("give a run, or acceptance and costs.")
    if costs is not None:
        made, notes = predicted_contest(run, acceptance, costs, objective, prompts)
        moved, residual = None, _residual(run, costs)
    else:
        run = one_kind(run)
        made, notes = contest(run, objective, prompts), ()
        moved, residual = drift(run, resamples, seed), None
    choice = settle(made, resamples, seed)
    return Recommendation(
        choice=choice,
        rules=rules_of_thumb(made, choice, resamples, seed),
        drift=moved,
        residual=residual,
        source=_source(run, len(made.prompts)),
        notes=notes,
    )


def one_kind(run: Run) -> Run:
    """The largest part of a run whose cells compare; hardware classes are never chosen silently."""
    classes = hardware_classes(run)
    if len(classes) > 1:
        raise ValueError(
            f"this run holds cells of several hardware classes: {'; '.join(classes)}. Which one is "
            "meant? Take it by run.select(hardware=...), or --hardware on the command line."
        )
    return comparable(run)


def _source(run: Run | None, count: int) -> str:
    asked = [] if run is None else [cell.request["prompts"]["source"] for cell in run.cells]
    named = " and ".join(dict.fromkeys(asked))
    return f"{count} prompts" + (f" of {named}" if named else "")


# Prediction


def predicted_contest(
    run: Run | None,
    acceptance: AcceptanceMap | pd.DataFrame | None,
    costs: CostTable,
    objective: str = "throughput",
    prompts: Collection[str] | None = None,
) -> tuple[Contest, tuple[str, ...]]:
    """The settings that acceptance and cost table both know, and notes on those left out.

    A size above the trained one is no candidate without a measurement.
    """
    blocks, trained = _acceptance(run, acceptance)
    if trained is None:
        trained = costs.facts.get("trained_block_size")
    blocks, notes = _known(blocks, costs, trained)
    if prompts is not None:
        blocks = blocks[blocks["prompt_id"].isin(list(prompts))]
    keys = ["cell_block_size", "draft_window"]
    sets = [set(group["prompt_id"]) for _, group in blocks.groupby(keys, dropna=False)]
    shared = sorted(set.intersection(*sets)) if sets else []
    if not shared:
        raise ValueError(
            "there is nothing to choose from: no setting is in both acceptance and cost table over "
            f"the same prompts. {' '.join(notes)}"
        )
    blocks = blocks[blocks["prompt_id"].isin(shared)]
    arms = [
        _predicted_arm(int(size), None if pd.isna(window) else int(window), group, costs, objective)
        for (size, window), group in blocks.groupby(keys, dropna=False, sort=False)
        if size > 1
    ]
    plain = _plain_arm(blocks, costs, objective)
    return (
        Contest(
            objective=objective,
            predicted=True,
            hardware=costs.hardware,
            prompts=tuple(shared),
            candidates=(plain, *arms),
            plain=(plain,),
            library=(),
            trained_block_size=trained,
        ),
        notes,
    )


def _acceptance(
    run: Run | None, acceptance: AcceptanceMap | pd.DataFrame | None
) -> tuple[pd.DataFrame, int | None]:
    """Blocks of every setting, and the trained size where it is told."""
    if acceptance is None:
        cells = drafting_cells(comparable(run))  # acceptance is the same on every machine
        blocks = measured_blocks(Run(path=run.path, cells=tuple(cells)))
        return blocks, trained_block_size(cells)
    if isinstance(acceptance, pd.DataFrame):
        return acceptance, None
    return replay_frame(acceptance), acceptance.trained_block_size


def _known(
    blocks: pd.DataFrame, costs: CostTable, trained: int | None
) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """The blocks whose setting may be predicted, and what is left out."""
    priced = {(cost.block_size, cost.draft_window) for cost in costs.costs}
    notes, keep = [], []
    for (size, window), group in blocks.groupby(["cell_block_size", "draft_window"], dropna=False):
        seen = None if pd.isna(window) or size == 1 else int(window)
        label = Setting(cell=None, block_size=int(size), draft_window=seen).label
        if trained is not None and size > trained:
            notes.append(f"{label} is above the trained {trained}: not predicted.")
        elif (size, seen) not in priced:
            notes.append(f"{label} is not in the cost table.")
        else:
            keep.append(group)
    kept = pd.concat(keep) if keep else blocks.iloc[:0]
    return kept, tuple(notes)


def _predicted_arm(
    size: int, window: int | None, blocks: pd.DataFrame, costs: CostTable, objective: str
) -> Arm:
    counted = blocks[~blocks["cut"].astype(bool)]
    drafts = int((counted["rows"] - 1).sum())
    accepted, uncut = int(counted["accepted"].sum()), len(counted)
    return Arm(
        setting=Setting(cell=None, block_size=size, draft_window=window),
        engine=OWN,
        dtype=costs.dtype,
        **_counted(predict(blocks, costs), objective),
        cache_bytes=float(
            costs.at("draft_cache_bytes", size, window, blocks["start"].max()) if size > 1 else 0
        ),
        tau=(accepted + uncut) / uncut if uncut else None,
        draft_rate=accepted / drafts if drafts else None,
    )


def _plain_arm(blocks: pd.DataFrame, costs: CostTable, objective: str) -> Arm:
    """Plain decoding of the same texts: a block a token, from the first token to the last."""
    keys = ["cell_block_size", "draft_window"]
    _, some = next(iter(blocks.groupby(keys, dropna=False, sort=False)))
    texts = [name for name in ("repeat", "prompt_id", "turn") if name in some.columns]
    rows = []
    for key, group in some.groupby(texts, sort=False):
        first, tokens = int(group["start"].min()), int(group["emitted"].sum())
        told = dict(zip(texts, key, strict=True))
        rows += [told | {"index": i, "start": first + i} for i in range(tokens)]
    ones = {"cell_block_size": 1, "block_size": 1, "rows": 1, "accepted": 0, "emitted": 1}
    made = pd.DataFrame(rows).assign(**ones, cut=False, draft_window=pd.NA)
    return _predicted_arm(1, None, made.astype({"draft_window": "Int64"}), costs, objective)


def _counted(predicted: pd.DataFrame, objective: str) -> dict[str, np.ndarray]:
    """Tokens and seconds of each prompt, as the objective counts them."""
    frame = predicted.assign(tokens=predicted["after_first"] + 1)
    above, below = OBJECTIVES[objective]
    sums = frame.groupby("prompt_id")[[above, below]].sum().sort_index()
    return {"tokens": sums[above].to_numpy(float), "seconds": sums[below].to_numpy(float)}


def _residual(run: Run | None, costs: CostTable) -> Residual | None:
    """The residual over what was measured on the table's own kind of machine, if anything was."""
    if run is None:
        return None
    priced = {(cost.block_size, cost.draft_window) for cost in costs.costs}
    cells = [
        cell
        for cell in comparable(run).cells
        if (cell.block_size, None if cell.block_size == 1 else cell.draft_window) in priced
    ]
    frame = prediction_frame(Run(path=run.path, cells=tuple(cells)), costs)
    known = frame["residual"].dropna()
    if known.empty:
        return None
    return Residual(
        cells=len(known),
        worst=float(known.loc[known.abs().idxmax()]),
        mean_absolute=float(known.abs().mean()),
    )


def draft_folder(run: Run, named: str | None = None) -> Path:
    """The folder of the draft that a run measured: the one named, else that of an embedded pair.

    Raises ValueError where it cannot be told, or where the folder holds another draft.
    """
    cells = [cell for cell in run.cells if cell.request["draft_sha"]]
    pairs = {cell.request["pair"] for cell in cells}
    if named is not None:
        folder = resolve(named, None, "draft", DRAFT_FILES)
    elif len(pairs) == 1 and (pair := pairs.pop()) in EMBEDDED:
        folder = EMBEDDED[pair]
    else:
        raise ValueError("which draft? Name its folder: --draft-model.")
    sha = draft_fingerprint(folder)
    if not any(cell.request["draft_sha"].startswith(sha) for cell in cells):
        raise ValueError(f"the draft in {folder} is not the one that this run measured.")
    return folder


# Rules of thumb


def rules_of_thumb(
    made: Contest, choice: Choice, resamples: int = 2000, seed: int = 0
) -> tuple[RuleOfThumb, ...]:
    """What the field's rules would have chosen at the full window, or else at the chosen one."""
    speeds = Speeds(made, draw_prompts(len(made.prompts), resamples, seed))
    known = [arm for arm in made.candidates if arm in speeds.known]
    chosen = next(arm for arm in known if _is(arm, choice))
    window = None
    if not any(arm.block_size > 1 and arm.setting.draft_window is None for arm in known):
        window = choice.draft_window
    row = [arm for arm in known if arm.block_size == 1 or arm.setting.draft_window == window]
    row.sort(key=lambda arm: arm.block_size)
    named = {
        f"a draft rate above {100 * COMFORTABLE:.0f} % (the largest such size)": _above(
            row, COMFORTABLE
        ),
        f"never a draft rate below {100 * LOW:.0f} % (the largest such size)": _above(row, LOW),
        "where tau stops growing (the smallest size within 2 % of the largest tau)": _flat(row),
    }
    return tuple(_judged(rule, arm, chosen, speeds) for rule, arm in named.items())


def _is(arm: Arm, choice: Choice) -> bool:
    return arm.setting == choice.setting and arm.dtype == choice.dtype


def _above(row: Sequence[Arm], rate: float) -> Arm | None:
    """The largest size whose draft rate is above; else plain decoding, where it was measured."""
    high = [arm for arm in row if arm.draft_rate is not None and arm.draft_rate > rate]
    return high[-1] if high else next((arm for arm in row if arm.block_size == 1), None)


def _flat(row: Sequence[Arm]) -> Arm | None:
    drafting = [arm for arm in row if arm.block_size > 1 and arm.tau is not None]
    limit = PLATEAU * max((arm.tau for arm in drafting), default=0.0)
    return next((arm for arm in drafting if arm.tau >= limit), None)


def _judged(rule: str, arm: Arm | None, chosen: Arm, speeds: Speeds) -> RuleOfThumb:
    if arm is None:
        return RuleOfThumb(
            rule=rule, setting=None, tokens_per_s=None, loss=None, loss_low=None, loss_high=None
        )
    share = speeds.over(arm, chosen)
    return RuleOfThumb(
        rule=rule,
        setting=arm.setting,
        tokens_per_s=speeds.mean[arm],
        loss=1 - share.mean,
        loss_low=None if share.high is None else 1 - share.high,
        loss_high=None if share.low is None else 1 - share.low,
    )


# Confirmation


def confirm(
    run: Run,
    block_size: int,
    draft_window: int | None = None,
    *,
    prompts: Collection[str] | None = None,
    resamples: int = 2000,
    seed: int = 0,
) -> Confirmation:
    """How much a setting gives away to the fastest measured cell, on prompts it was not chosen on.

    The interval is paired. Raises ValueError for a setting that this run did not measure.
    """
    made = contest(one_kind(run), "throughput", prompts)
    draws = draw_prompts(len(made.prompts), resamples, seed)
    speeds = Speeds(made, draws)
    window = None if block_size == 1 else draft_window
    wanted = [
        arm
        for arm in made.candidates
        if (arm.block_size, arm.setting.draft_window) == (block_size, window)
    ]
    if not wanted or wanted[0] not in speeds.known:
        label = Setting(cell=None, block_size=block_size, draft_window=window).label
        raise ValueError(f"{label} was not measured in {run.path}; sweep it there first.")
    best = speeds.fastest(made.candidates)
    share = speeds.over(wanted[0], best)
    return Confirmation(
        setting=wanted[0].setting,
        best=best.setting,
        prompts=len(made.prompts),
        regret=1 - share.mean,
        low=None if share.high is None else 1 - share.high,
        high=None if share.low is None else 1 - share.low,
    )


# Words


def _points(made: Recommendation) -> list[str]:
    choice = made.choice
    return [
        *_near_points(choice),
        *_trained_points(choice),
        *_certainty_points(choice, made.source),
        *_held_out_points(choice),
        *(f"Rule of thumb, {rule.sentence}" for rule in made.rules),
        *([] if made.drift is None else [made.drift.sentence]),
        *_residual_points(made),
        *made.notes,
    ]


def _near_points(choice: Choice) -> list[str]:
    """As good within 2 %; plain decoding and the trained size are said first."""
    if not choice.near:
        return ["Nothing else is within 2 % of the best throughput."]
    plainest = (1, choice.trained_block_size)
    near = sorted(choice.near, key=lambda other: other.block_size not in plainest)
    words = []
    for other in near:
        trained = ", the trained size" if other.block_size == choice.trained_block_size else ""
        words.append(
            f"{other.label}{trained} ({other.tokens_per_s:.1f} {choice.unit}; within 2 % in "
            f"{100 * other.p_near:.0f} % of the resamples)"
        )
    return [f"As good, within 2 %: {'; '.join(words)}."]


def _trained_points(choice: Choice) -> list[str]:
    if choice.trained_block_size is None:
        return ["The size that the draft was trained with is not recorded here."]
    named = f"the trained default, block size {choice.trained_block_size} with the full window"
    if choice.speedup_trained is None:
        return [f"Against {named}: not measured."]
    span = _span(choice.speedup_trained_low, choice.speedup_trained_high, 2)
    return [f"Against {named}: {choice.speedup_trained:.2f}x{span}."]


def _certainty_points(choice: Choice, source: str) -> list[str]:
    if choice.prompts == 1:
        return [f"Over {source}: one prompt stands for no other."]
    return [
        f"Over {source}: chosen in {100 * choice.p_best:.0f} % of the resamples; expected regret "
        f"{100 * choice.regret:.1f} % of the best throughput."
    ]


def _held_out_points(choice: Choice) -> list[str]:
    gains = (
        (choice.gain_held_out, "plain decoding"),
        (choice.gain_held_out_trained, "the trained default"),
    )
    told = [f"{gain:.2f}x of {name}" for gain, name in gains if gain is not None]
    if not told:
        return []
    return [f"Chosen on some prompts and tried on those left out: {' and '.join(told)}."]


def _residual_points(made: Recommendation) -> list[str]:
    if made.residual is None:
        told = "nothing predicted was measured on that machine; confirm it there."
        return [f"Prediction: {told}"] if made.choice.predicted else []
    return [
        f"Prediction beside {made.residual.cells} measured cells: off by "
        f"{100 * made.residual.mean_absolute:.1f} % on average, by "
        f"{100 * made.residual.worst:+.1f} % at worst."
    ]


def _span(low: float | None, high: float | None, digits: int) -> str:
    return "" if low is None or high is None else f" [{low:.{digits}f}, {high:.{digits}f}]"
