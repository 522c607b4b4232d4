"""The chosen setting of a run: which block size and window win, by how much, and how surely.

What competes are arms: tokens and seconds of one setting over the same prompts, measured or
predicted. The winner is chosen again in each resample of the prompts and scored on those left out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dflash_lab.analyse.frames import OWN
from dflash_lab.analyse.resampling import draw_prompts, ends, ratio
from dflash_lab.analyse.sums import Sums, prompt_sums
from dflash_lab.backends import LOOKUP
from dflash_lab.config import one_of
from dflash_lab.store import Cell, Run

# What two cells must have in common before one may be called faster than the other.
COMPARABLE = (
    *("hardware", "backend", "device", "target_sha", "template_sha", "chat", "thinking"),
    *("prompts", "temperature", "sampling", "max_new_tokens", "min_new_tokens"),
    *("timing", "repeats"),
)
NEAR = 0.98  # of the best throughput: closer than that is as good
# What each objective counts above the line and below it.
OBJECTIVES = {
    "throughput": ("after_first", "decode_s"),
    "latency": ("tokens", "total_s"),  # end to end, prefill included
    "memory": ("after_first", "decode_s"),  # least draft cache within 2 % of the best throughput
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a user would set, and the cell that measured it."""

    cell: str | None  # None where it was predicted
    block_size: int
    draft_window: int | None

    @property
    def label(self) -> str:
        if self.block_size == 1:
            return "block size 1"
        window = "the full window" if self.draft_window is None else f"window {self.draft_window}"
        return f"block size {self.block_size} with {window}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NearEqual(Setting):
    """A setting within 2 % of the best throughput."""

    tokens_per_s: float
    p_near: float  # share of resamples in which it is within 2 % of that one's best


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The best block size and window of a run, and whether speculation pays at all.

    Ends of intervals are 95 % over prompts, None with one prompt; speedups are None where the arm
    they compare with was not measured. All figures are over the prompts that every cell holds; an
    output that ended with its first token has no decode throughput and is left out. With the
    objective "latency" tokens/s, speedups and gains are end to end, prefill included.
    """

    objective: str
    predicted: bool  # from acceptance and a cost table, not measured
    cell: str | None
    block_size: int
    draft_window: int | None
    dtype: str
    hardware: str
    prompts: int
    tokens_per_s: float
    low: float | None
    high: float | None
    p_best: float  # share of resamples in which this setting is chosen
    regret: float  # share of the best throughput that this setting gives away, mean over resamples
    near: tuple[NearEqual, ...]  # others within 2 % of the best throughput
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
    trained_block_size: int | None  # None where the run does not tell
    trained_tokens_per_s: float | None  # of that size at the full window
    speedup_trained: float | None
    speedup_trained_low: float | None
    speedup_trained_high: float | None
    gain_held_out_trained: float | None  # as gain_held_out, over the trained size
    verdict: str  # "speculate", "do not speculate", "not distinguishable" or "no baseline"

    @property
    def setting(self) -> Setting:
        return Setting(cell=self.cell, block_size=self.block_size, draft_window=self.draft_window)

    @property
    def unit(self) -> str:
        """What the figures of speed are."""
        told = "predicted tokens/s" if self.predicted else "tokens/s"
        return f"{told} with prefill" if self.objective == "latency" else told

    @property
    def sentence(self) -> str:
        """The answer in one line of plain English."""
        return _sentence(self)


def choose(
    run: Run,
    resamples: int = 2000,
    seed: int = 0,
    *,
    objective: str = "throughput",
    prompts: Collection[str] | None = None,
) -> Choice:
    """The best (block size, draft window) in the dtype the run drafted in, plain decoding too.

    `objective` is "throughput"; "latency", end to end with prefill; or "memory", the least draft
    cache within 2 % of the best throughput. The winner is chosen again inside each resample of the
    prompts. The baseline is the fastest plain decoding of our own loop in any dtype, on the same
    prompts. `prompts` takes some of them only. Raises ValueError where cells of several kinds would
    be compared, such as two hardware classes, or where there is nothing to.
    """
    return settle(contest(run, objective, prompts), resamples, seed)


# What competes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arm:
    """One setting over the prompts of a contest."""

    setting: Setting
    engine: str
    dtype: str
    tokens: np.ndarray  # [prompts], as the objective counts them
    seconds: np.ndarray  # [prompts]
    cache_bytes: float  # most that the draft's cache took; 0 where nothing is drafted
    tau: float | None
    draft_rate: float | None

    @property
    def block_size(self) -> int:
        return self.setting.block_size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contest:
    """The arms that may be chosen and those that they are compared with."""

    objective: str
    predicted: bool
    hardware: str
    prompts: tuple[str, ...]
    candidates: tuple[Arm, ...]  # our loop in the dtype that drafts, block size 1 included
    plain: tuple[Arm, ...]  # our loop at block size 1, any dtype
    library: tuple[Arm, ...]  # the library's generator, any dtype
    trained_block_size: int | None

    @property
    def trained(self) -> tuple[Arm, ...]:
        """The draft as it comes: its trained size at the full window."""
        return tuple(
            arm
            for arm in self.candidates
            if arm.block_size == self.trained_block_size and arm.setting.draft_window is None
        )


def contest(
    run: Run, objective: str = "throughput", prompts: Collection[str] | None = None
) -> Contest:
    """The cells of a run that compete, over the prompts that all of them hold and that tell."""
    one_of("objective", objective, tuple(OBJECTIVES))
    drafting = drafting_cells(run)
    kind = drafting[0].asked(COMPARABLE)
    mates = [cell for cell in run.cells if cell.block_size == 1 and cell.asked(COMPARABLE) == kind]
    plain = [cell for cell in mates if cell.engine == OWN]
    same = [cell for cell in plain if cell.dtype == drafting[0].dtype]
    library = [cell for cell in mates if cell.engine not in (OWN, LOOKUP)]
    taking_part = {cell.id: cell for cell in (*same, *drafting, *plain, *library)}
    sums = _shared(prompt_sums(run), tuple(taking_part), prompts, OBJECTIVES[objective][1])
    cached = _cache_bytes(run)
    arms = {
        cell.id: _arm(cell, sums, place, OBJECTIVES[objective], cached.get(cell.id, 0.0))
        for place, cell in enumerate(sums.cells)
    }
    return Contest(
        objective=objective,
        predicted=False,
        hardware=drafting[0].hardware,
        prompts=sums.prompts,
        candidates=tuple(arms[cell.id] for cell in (*same, *drafting)),
        plain=tuple(arms[cell.id] for cell in plain),
        library=tuple(arms[cell.id] for cell in library),
        trained_block_size=trained_block_size(drafting),
    )


def drafting_cells(run: Run) -> list[Cell]:
    """The cells of our own loop that draft, all of one kind; raises ValueError otherwise."""
    own = [cell for cell in run.cells if cell.engine == OWN and cell.policy is None]
    drafting = [cell for cell in own if cell.block_size > 1]
    if not drafting:
        raise ValueError(
            "there is nothing to choose from: this run has no finished cell with a block size "
            "above 1. Sweep some, such as block_sizes=(1, 2, 4, 8, 16)."
        )
    _check_one_kind(own, ("hardware",))
    _check_one_kind(drafting, ("dtype", "draft_sha", *COMPARABLE))
    return drafting


def trained_block_size(cells: Sequence[Cell]) -> int | None:
    """The size that the draft was trained with, where the cells tell."""
    told = (cell.provenance.get("trained_block_size") for cell in cells)
    return next((size for size in told if size is not None), None)


def _arm(cell: Cell, sums: Sums, place: int, counted: tuple[str, str], cache_bytes: float) -> Arm:
    total = {name: values[place].sum() for name, values in sums.by_name.items()}
    return Arm(
        setting=Setting(cell=cell.id, block_size=cell.block_size, draft_window=cell.draft_window),
        engine=cell.engine,
        dtype=cell.dtype,
        tokens=sums[counted[0]][place],
        seconds=sums[counted[1]][place],
        cache_bytes=cache_bytes,
        tau=_share(total["lengths"], total["whole_blocks"]),
        draft_rate=_share(total["accepted"], total["drafts"]),
    )


def _share(above: float, below: float) -> float | None:
    return float(above / below) if below else None


def _cache_bytes(run: Run) -> dict[str, float]:
    """The largest draft cache of each cell; a block of size 1 has none."""
    blocks = run.blocks(("cell", "block_size", "draft_cache_bytes")).to_pandas()
    drafting = blocks[blocks["block_size"] > 1]
    return drafting.groupby("cell")["draft_cache_bytes"].max().astype(float).to_dict()


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
    value = cell.request.get(name)
    return f"{value['count']} of {value['source']}" if name == "prompts" else str(value)


def comparable(run: Run) -> Run:
    """The largest part of a run whose cells may stand in one figure.

    They differ in engine, dtype, block size and window alone; plain decoding has no draft and fits
    any. Cells of a policy, an experiment, are in no part. Of parts with equally many cells it is
    the one with more decodes, then more tokens.
    """
    alike: dict[str, dict[str | None, list[Cell]]] = {}
    for cell in run.cells:
        if cell.policy is not None:
            continue
        by_draft = alike.setdefault(cell.asked(COMPARABLE), {})
        by_draft.setdefault(cell.request["draft_sha"], []).append(cell)
    parts = [
        {cell.id for cell in (*cells, *by_draft.get(None, ()))}
        for by_draft in alike.values()
        for cells in by_draft.values()
    ]
    known = {cell.id: cell for cell in run.cells}
    largest = max(parts, key=lambda part: _weight([known[name] for name in part]), default=set())
    return replace(run, cells=tuple(cell for cell in run.cells if cell.id in largest))


def _weight(part: Sequence[Cell]) -> tuple[int, int, int]:
    decodes, tokens = (sum(cell.summary[name] for cell in part) for name in ("decodes", "tokens"))
    return len(part), decodes, tokens


def _shared(sums: Sums, ids: Collection[str], only: Collection[str] | None, seconds: str) -> Sums:
    """Sums of the cells that take part, over the prompts that all hold and any was timed in.

    An output that ended at once says nothing of speed, and would count as a prompt in intervals.
    """
    if only is not None and (unknown := sorted(set(only) - set(sums.prompts))):
        raise ValueError(f"no prompt {', '.join(unknown)} in this run; it has {sums.prompts}.")
    rows = [place for place, cell in enumerate(sums.cells) if cell.id in ids]
    shared = (sums["outputs"][rows] > 0).all(axis=0) & (sums[seconds][rows] > 0).any(axis=0)
    if only is not None:
        shared &= np.isin(sums.prompts, list(only))
    return Sums(
        cells=tuple(sums.cells[row] for row in rows),
        prompts=tuple(n for n, kept in zip(sums.prompts, shared, strict=True) if kept),
        by_name={name: values[rows][:, shared] for name, values in sums.by_name.items()},
    )


# Who wins


def settle(made: Contest, resamples: int = 2000, seed: int = 0) -> Choice:
    """The winner of a contest, compared with plain decoding, the library and the trained size."""
    speeds = Speeds(made, draw_prompts(len(made.prompts), resamples, seed))
    candidates = [arm for arm in made.candidates if arm in speeds.known]
    if not candidates:
        raise ValueError("no cell emitted more than one token; ask for longer outputs.")
    winners = speeds.winners(candidates)
    best = candidates[speeds.winner(candidates)]
    plain, library = speeds.fastest(made.plain), speeds.fastest(made.library)
    trained = speeds.fastest(made.trained)
    speedup, library_speedup = speeds.over(best, plain), speeds.over(best, library)
    trained_speedup = speeds.over(best, trained)
    low, high = speeds.interval(best)
    return Choice(
        objective=made.objective,
        predicted=made.predicted,
        cell=best.setting.cell,
        block_size=best.block_size,
        draft_window=best.setting.draft_window,
        dtype=best.dtype,
        hardware=made.hardware,
        prompts=len(made.prompts),
        tokens_per_s=speeds.mean[best],
        low=low,
        high=high,
        p_best=float(np.mean(winners == candidates.index(best))),
        regret=speeds.regret(best, candidates),
        near=_near(best, candidates, speeds),
        gain_held_out=speeds.held_out(candidates, winners, plain),
        plain_dtype=plain and plain.dtype,
        plain_tokens_per_s=plain and speeds.mean[plain],
        speedup=speedup.mean,
        speedup_low=speedup.low,
        speedup_high=speedup.high,
        library_dtype=library and library.dtype,
        library_tokens_per_s=library and speeds.mean[library],
        speedup_library=library_speedup.mean,
        speedup_library_low=library_speedup.low,
        speedup_library_high=library_speedup.high,
        trained_block_size=made.trained_block_size,
        trained_tokens_per_s=trained and speeds.mean[trained],
        speedup_trained=trained_speedup.mean,
        speedup_trained_low=trained_speedup.low,
        speedup_trained_high=trained_speedup.high,
        gain_held_out_trained=speeds.held_out(candidates, winners, trained),
        verdict=_verdict(best, speedup),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A figure with the ends of its interval."""

    mean: float | None
    low: float | None
    high: float | None


class Speeds:
    """Tokens per second of each arm, over all prompts, drawn prompts and those left out."""

    def __init__(self, made: Contest, draws: np.ndarray) -> None:
        arms = list(dict.fromkeys((*made.candidates, *made.plain, *made.library)))
        self.place = {arm: place for place, arm in enumerate(arms)}
        self.prompts, self.memory = len(made.prompts), made.objective == "memory"
        shape = (len(arms), self.prompts)
        tokens = np.array([arm.tokens for arm in arms]).reshape(shape)
        seconds = np.array([arm.seconds for arm in arms]).reshape(shape)
        mean = ratio(tokens.sum(axis=1), seconds.sum(axis=1))
        self.mean = {arm: float(mean[place]) for arm, place in self.place.items()}
        self.known = {arm for arm, speed in self.mean.items() if not np.isnan(speed)}
        self.drawn = ratio(draws @ tokens.T, draws @ seconds.T)
        left_out = (draws == 0).astype(float)
        self.left_out = ratio(left_out @ tokens.T, left_out @ seconds.T)

    def fastest(self, arms: Sequence[Arm]) -> Arm | None:
        known = [arm for arm in arms if arm in self.known]
        return max(known, key=self.mean.__getitem__, default=None)

    def interval(self, arm: Arm) -> tuple[float | None, float | None]:
        return ends(self.drawn[:, self.place[arm]], self.prompts)

    def over(self, arm: Arm, other: Arm | None) -> Ratio:
        """How many times faster than another arm on the same prompts."""
        if other is None:
            return Ratio(mean=None, low=None, high=None)
        drawn = self.drawn[:, self.place[arm]] / self.drawn[:, self.place[other]]
        low, high = ends(drawn, self.prompts)
        return Ratio(mean=self.mean[arm] / self.mean[other], low=low, high=high)

    def winner(self, arms: Sequence[Arm]) -> int:
        """Place among `arms` of the best over all prompts."""
        return int(self._best(arms, np.array([[self.mean[arm] for arm in arms]]))[0])

    def winners(self, arms: Sequence[Arm]) -> np.ndarray:
        """Place among `arms` of the best in each resample, by the same rule."""
        return self._best(arms, self._drawn(arms))

    def regret(self, arm: Arm, arms: Sequence[Arm]) -> float:
        """The share of each resample's best throughput that an arm gives away, mean."""
        best = self._drawn(arms).max(axis=1)
        lost = 1 - self.drawn[:, self.place[arm]] / best
        return float(np.nanmean(np.where(np.isfinite(lost), lost, np.nan)))

    def p_near(self, arm: Arm, arms: Sequence[Arm]) -> float:
        best = self._drawn(arms).max(axis=1)
        return float(np.mean(self.drawn[:, self.place[arm]] >= NEAR * best))

    def held_out(self, arms: Sequence[Arm], winners: np.ndarray, other: Arm | None) -> float | None:
        """Speedup of each resample's winner over another arm on the prompts left out, mean."""
        if other is None or self.prompts < 2:
            return None
        columns = np.array([self.place[arm] for arm in arms])[winners]
        theirs = self.left_out[np.arange(len(winners)), columns]
        gains = theirs / self.left_out[:, self.place[other]]
        known = gains[~np.isnan(gains)]
        return float(known.mean()) if len(known) else None

    def _drawn(self, arms: Sequence[Arm]) -> np.ndarray:
        drawn = self.drawn[:, [self.place[arm] for arm in arms]]
        return np.where(np.isnan(drawn), -np.inf, drawn)

    def _best(self, arms: Sequence[Arm], speeds: np.ndarray) -> np.ndarray:
        if not self.memory:
            return speeds.argmax(axis=1)
        near = speeds >= NEAR * speeds.max(axis=1, keepdims=True)
        taken = np.where(near, [arm.cache_bytes for arm in arms], np.inf)
        least = near & (taken == taken.min(axis=1, keepdims=True))
        return np.where(least, speeds, -np.inf).argmax(axis=1)


def _near(best: Arm, candidates: Sequence[Arm], speeds: Speeds) -> tuple[NearEqual, ...]:
    limit = NEAR * max(speeds.mean[arm] for arm in candidates)
    others = [arm for arm in candidates if arm is not best and speeds.mean[arm] >= limit]
    return tuple(
        NearEqual(
            cell=arm.setting.cell,
            block_size=arm.block_size,
            draft_window=arm.setting.draft_window,
            tokens_per_s=speeds.mean[arm],
            p_near=speeds.p_near(arm, candidates),
        )
        for arm in sorted(others, key=lambda arm: -speeds.mean[arm])
    )


def _verdict(best: Arm, speedup: Ratio) -> str:
    if best.block_size == 1:
        return "do not speculate"
    if speedup.mean is None:
        return "no baseline"
    if speedup.low is None or speedup.low <= 1 <= speedup.high:
        return "not distinguishable"
    return "speculate" if speedup.low > 1 else "do not speculate"


def _sentence(choice: Choice) -> str:
    unit, interval = choice.unit, _ends(choice.low, choice.high, 1)
    speed = f"{choice.tokens_per_s:.1f} {unit}{interval} {_over(choice)}"
    best = _BEST[choice.objective]
    name = choice.setting.label
    plain = f"plain decoding in {choice.plain_dtype}"
    if choice.block_size == 1:
        answer = f"Do not speculate: plain decoding {best} in {choice.dtype}, {speed}"
        if choice.plain_dtype in (None, choice.dtype):
            return f"{answer}."
        return f"{answer}; {plain} is faster still, {choice.plain_tokens_per_s:.1f} {unit}."
    if choice.speedup is None:
        return f"{_capital(name)} {best}: {speed}; plain decoding was not measured."
    times = f"{choice.speedup:.2f}x{_ends(choice.speedup_low, choice.speedup_high, 2)} of {plain}"
    if choice.verdict == "do not speculate":
        return (
            f"Do not speculate: {name} {best} of those that draft, with {speed}, but that is "
            f"{times} ({choice.plain_tokens_per_s:.1f} {unit})."
        )
    answer = f"{_capital(name)} {best}: {speed}, {times}"
    if choice.speedup_low is None:
        return f"{answer}; not distinguishable, one prompt stands for no other."
    if choice.verdict == "speculate":
        return f"{answer}; speculation pays."
    return f"{answer}; not distinguishable, plain decoding is as good."


_BEST = {
    "throughput": "is fastest",
    "latency": "answers soonest",
    "memory": "takes the least draft cache within 2 % of the fastest",
}


def _over(choice: Choice) -> str:
    if choice.prompts == 1:
        return "over 1 prompt, too few for an interval"
    return f"over {choice.prompts} prompts"


def _ends(low: float | None, high: float | None, digits: int) -> str:
    return "" if low is None or high is None else f" [{low:.{digits}f}, {high:.{digits}f}]"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
