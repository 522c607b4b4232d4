"""A grid of block sizes and windows over a set of prompts, filled cell by cell into a run."""

from __future__ import annotations

import hashlib
import itertools
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from dflash_lab.backends import LIBRARIES, LOOKUP, LOOKUP_TOKENS
from dflash_lab.config import SAMPLING, DecodeConfig, PairSpec, SweepConfig
from dflash_lab.decoding import (
    AcceptanceWarning,
    BlockSizeWarning,
    check_prompt,
    decode,
    finish_reason,
    library_decode,
    resolve_request,
    silence,
)
from dflash_lab.exactness import check_greedy, keep_audit
from dflash_lab.lease import Leases, is_leased, remove_dead
from dflash_lab.load import Pair, PromptLike, load_spec, pair_spec
from dflash_lab.policies import describe_policy, policy_label, read_policy
from dflash_lab.prompts import Prompt, load_prompts
from dflash_lab.provenance import hardware, provenance, short_name, utc_now
from dflash_lab.store import (
    CELL,
    PART,
    SCHEMA,
    Part,
    Run,
    cell_id,
    clear_when_full,
    decode_line,
    fail_cell,
    finish_cell,
    open_part,
    open_run,
    tidy,
)

OWN = "dflash_lab"  # the engine that is our own loop; the others are the libraries' generators


class CellInUseWarning(UserWarning):
    """Another process is filling cells that this sweep wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepProgress:
    """How far a sweep is, in decodes."""

    done: int
    total: int
    seconds_left: float | None  # from the pace of this process; None before its first decode
    label: str  # what is going on


class ProgressLines:
    """Says how far a sweep is in a dozen lines, the last one n of n: for a notebook or a log.

    Pass it as `progress`. Lines go to `say`.
    """

    STEP = 10  # per cent

    def __init__(self, say: Callable[[str], None] = print):
        self.say = say
        self.next = 0
        self.last = ""

    def __call__(self, at: SweepProgress) -> None:
        if not at.total:  # still loading: only the label says something
            self._say(at.label)
            return
        share = 100 * at.done // at.total
        if share >= self.next:
            left = "" if at.seconds_left is None else f", {at.seconds_left / 60:.1f} min left"
            self._say(f"{at.done} of {at.total} decodes{left}")
            self.next = min(100, (share // self.STEP + 1) * self.STEP)

    def _say(self, line: str) -> None:
        if line != self.last:
            self.say(line)
            self.last = line


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One cell to be: its request, and how a prompt is decoded in it."""

    id: str
    request: dict[str, Any]
    requested_block_sizes: tuple[int, ...]
    decode: DecodeConfig

    @property
    def engine(self) -> str:
        return self.request["engine"]

    def part_header(self, decodes: int) -> dict[str, Any]:
        """What the part file says of the cell before its first decode."""
        return {
            "id": self.id,
            "request": self.request,
            "requested_block_sizes": self.requested_block_sizes,
            "decodes": decodes,
        }

    @property
    def label(self) -> str:
        size, window = self.request["block_size"], self.request["draft_window"]
        library = f"the library's generator{', prompt lookup' * (self.engine == LOOKUP)}"
        what = f"block size {size}" if self.engine == OWN else library
        seen = "" if window is None else f", window {window}"
        steered = policy_label(self.request.get("policy"))
        by = "" if steered is None else f", policy {steered}"
        return f"{what}{seen}{by}, {self.request['dtype']}"


@dataclass(slots=True, kw_only=True)
class Filling:
    """A cell while this process fills it."""

    plan: Plan
    part: Part
    warm_ups: int = 0
    contributed: bool = False  # whether this process is among those of the cell
    spent_s: float = 0.0
    spent: int = 0  # decodes made here

    @property
    def missing(self) -> int:
        return self.part.cell["decodes"] - len(self.part.decodes)


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
    `audit` compares the text with the library's own in each dtype and keeps that beside the run.
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
        with _Sweep(config, out, prompts, pairs, plans, show, should_stop) as work:
            work.run()
    work.warn()
    if audit and not should_stop():
        audit_run(open_run(out), config, pairs, prompts, show)
    return open_run(out)


def prompts_of(config: SweepConfig) -> list[Prompt]:
    """The prompts that a sweep decodes, in order."""
    return load_prompts(
        config.prompts,
        config.categories,
        config.max_prompts,
        random_state=config.random_state,
        template=config.template,
    )


def audit_run(
    run: Run,
    config: SweepConfig,
    pairs: Pairs,
    prompts: Sequence[Prompt],
    show: Callable[[SweepProgress], None],
) -> None:
    """Audit the run's largest block size in each of its dtypes, unless it holds just that."""
    size, trained = max(config.block_sizes), pairs.first.draft_config.trained_block_size
    largest = DecodeConfig(
        block_size=size if config.beyond_trained else min(size, trained),
        block_size_source=config.block_size_source,
        draft_window=config.draft_windows[0],
        max_new_tokens=config.max_new_tokens,
        min_new_tokens=config.min_new_tokens,
        beyond_trained=config.beyond_trained,
    )
    for dtype in dict.fromkeys((pairs.dtype, *map(pairs.effective, config.plain_dtypes))):
        pair = pairs.get(dtype)
        of = shared_request(config, pair, pair.models.describe())
        of |= {"prompts": describe_prompts(config, prompts), "thinking": config.thinking}

        def told(done: int, total: int, label: str = f"audit: {dtype}") -> None:
            show(SweepProgress(done=done, total=total, seconds_left=None, label=label))

        keep_audit(run, pair, prompts, largest, of, config.chat, config.thinking, told)


# --- pairs --------------------------------------------------------------------------------------


class Pairs:
    """The pair of a sweep, loaded once for each dtype that has something to decode."""

    def __init__(
        self, config: SweepConfig, pair: Pair | None, show: Callable[[SweepProgress], None]
    ):
        self._say = lambda text: show(SweepProgress(done=0, total=0, seconds_left=None, label=text))
        self.first = pair or load_spec(_spec(config), self._say)
        self.dtype = self.first.models.dtype
        self._asked = config.dtype if isinstance(config.pair, str) else config.pair.dtype
        if pair is not None and config.dtype not in ("auto", self.dtype):
            raise ValueError(
                f"dtype is {config.dtype!r}, but the pair given was loaded in {self.dtype}. "
                "Leave dtype out, or load the pair in that one."
            )
        self._loaded = {self.dtype: self.first}

    def effective(self, dtype: str) -> str:
        """The name of what is loaded where `dtype` is asked for."""
        if dtype == self._asked:
            return self.dtype
        if dtype == "auto":
            pair = load_spec(replace(self.first.spec, dtype=dtype), self._say)
            return self._loaded.setdefault(pair.models.dtype, pair).models.dtype
        return dtype

    def get(self, dtype: str) -> Pair:
        """The pair in an effective dtype."""
        if dtype not in self._loaded:
            spec = replace(self.first.spec, dtype=dtype)
            self._loaded[dtype] = load_spec(spec, self._say)
        return self._loaded[dtype]


def _spec(config: SweepConfig) -> PairSpec:
    if isinstance(config.pair, PairSpec):
        return config.pair
    return pair_spec(config.pair, backend=config.backend, dtype=config.dtype, device=config.device)


# --- planning -----------------------------------------------------------------------------------


# Engine, dtype, block size, draft window, and which of the policies: what tells cells apart.
Key = tuple[str, str, int, int | None, int | None]


def plan_cells(config: SweepConfig, pairs: Pairs, prompts: Sequence[Prompt]) -> list[Plan]:
    """The cells of a sweep, each once: sizes lowered to the same one are one cell.

    Warns once for each size that is lowered. Block size 1 drafts nothing, so no window is its own.
    """
    thinking = check_prompts(config, pairs.first, prompts)
    wanted: dict[Key, list[int]] = {}
    lowered = _effective_sizes(config, pairs.first)
    policies = [read_policy(one) if isinstance(one, str) else one for one in config.policies]
    for place, window in enumerate(config.draft_windows):
        for size in _sizes_at(config, place):
            used = lowered[size]
            if used == 1:
                wanted.setdefault((OWN, pairs.dtype, 1, None, None), []).append(size)
                continue
            for which in range(len(policies)):
                wanted.setdefault((OWN, pairs.dtype, used, window, which), []).append(size)
    plain = [pairs.effective(dtype) for dtype in config.plain_dtypes]
    for dtype in plain:
        wanted.setdefault((OWN, dtype, 1, None, None), []).append(1)
    library = LIBRARIES[pairs.first.spec.backend]
    asked = {library: config.library_baseline, LOOKUP: config.lookup_baseline}
    for engine in (name for name, wish in asked.items() if wish):
        for dtype in (pairs.dtype, *plain):
            wanted.setdefault((engine, dtype, 1, None, None), []).append(1)
    facts = pairs.first.models.describe()
    shared = shared_request(config, pairs.first, facts) | {
        "prompts": describe_prompts(config, prompts),
        "thinking": thinking,
    }
    plans = [
        _plan(
            config,
            shared,
            key,
            sizes,
            pairs.first.draft_config.trained_block_size,
            None if key[-1] is None else policies[key[-1]],
        )
        for key, sizes in wanted.items()
    ]
    return list({plan.id: plan for plan in plans}.values())


def _sizes_at(config: SweepConfig, place: int) -> tuple[int, ...]:
    """Block sizes for the window at that place: all of them for the first."""
    if place == 0 or config.windowed_block_sizes is None:
        return config.block_sizes
    return config.windowed_block_sizes


def _effective_sizes(config: SweepConfig, pair: Pair) -> dict[int, int]:
    """The block size used for each one asked for, and one warning for each that is lowered."""
    sizes = dict.fromkeys((*config.block_sizes, *(config.windowed_block_sizes or ())))
    used: dict[int, int] = {}
    for size in sizes:
        ask = DecodeConfig(block_size=size, beyond_trained=config.beyond_trained)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            used[size] = resolve_request(pair, ask).block_size
        for warning in heard:
            warnings.warn(warning.message, warning.category, stacklevel=4)
    return used


def _plan(
    config: SweepConfig,
    shared: Mapping[str, Any],
    key: Key,
    sizes: Sequence[int],
    trained: int,
    policy: Any,
) -> Plan:
    engine, dtype, size, window, _ = key
    drafts, own = size > 1, engine == OWN
    request = {
        **shared,
        "engine": engine,
        "dtype": dtype,
        "draft": shared["draft"] if drafts else None,
        "draft_sha": shared["draft_sha"] if drafts else None,
        "block_size": size,
        "beyond_trained": drafts and size > trained,
        "draft_window": window,
        "window_rule": "per_block" if drafts else None,
        "rule": config.rule if own else None,
        "proposal": config.proposal if own else None,
        "timing": config.timing if own else "whole",
    }
    if engine == LOOKUP:
        request["lookup"] = LOOKUP_TOKENS
    if policy is not None:  # other requests say nothing of it, as before there were policies
        request["policy"] = described(policy)
    return Plan(
        id=cell_id(request),
        request=request,
        requested_block_sizes=tuple(dict.fromkeys(sizes)),
        decode=DecodeConfig(
            block_size=size,
            block_size_source=config.block_size_source,
            draft_window=window,
            max_new_tokens=config.max_new_tokens,
            min_new_tokens=config.min_new_tokens,
            timing=config.timing,
            beyond_trained=config.beyond_trained,
            policy=policy,
            **{name: getattr(config, name) for name in SAMPLING},
        ),
    )


def described(policy: Any) -> dict[str, Any] | None:
    """A policy in what a request may hold; long settings, such as costs, by their hash."""
    told = describe_policy(policy)
    if told is None:
        return None
    settings = {
        name: cell_id(value) if isinstance(value, Mapping) else value
        for name, value in told["settings"].items()
    }
    return told | {"settings": settings}


def drawn_how(config: SweepConfig) -> dict[str, Any]:
    """What a request says of sampling beside the temperature; nothing where all is as usual.

    So that requests made before there were such settings keep their cells.
    """
    usual = {field.name: field.default for field in fields(SweepConfig)}
    other = {
        name: getattr(config, name)
        for name in SAMPLING
        if name not in ("temperature", "seed") and getattr(config, name) != usual[name]
    }
    if config.temperature:
        other["seed"] = config.seed
    return {"sampling": other} if other else {}


def shared_request(config: SweepConfig, pair: Pair, facts: Mapping[str, Any]) -> dict[str, Any]:
    """What the requests of all cells have in common; no path and no host in it."""
    spec, sha = pair.spec, pair.fingerprint
    return {
        "schema": SCHEMA,
        "backend": spec.backend,
        "device": pair.models.device,
        "pair": spec.name,
        "target": short_name(spec.target),
        "target_sha": sha.get("target"),
        "draft": short_name(spec.draft),
        "draft_sha": sha.get("draft"),
        "template_sha": sha.get("template"),
        "temperature": config.temperature,
        **drawn_how(config),
        "max_new_tokens": config.max_new_tokens,
        **({"min_new_tokens": config.min_new_tokens} if config.min_new_tokens else {}),
        "chat": config.chat,
        "repeats": config.repeats,
        "attention": facts.get("attention"),
        "hardware": hardware(facts.get("gpu"))["class"],
    }


def describe_prompts(config: SweepConfig, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Which prompts, by id and by a hash of their texts."""
    texts = "\n".join(f"{prompt.id} {prompt.sha}" for prompt in prompts)
    drawn = {} if config.random_state is None else {"random_state": config.random_state}
    return {
        "source": short_name(config.prompts),
        **drawn,
        "set_sha": hashlib.sha256(texts.encode()).hexdigest()[:16],
        "count": len(prompts),
        "ids": [prompt.id for prompt in prompts],
    }


def check_prompts(config: SweepConfig, pair: Pair, prompts: Sequence[Prompt]) -> str:
    """How the template's thinking switch stands; ValueError names a prompt that does not fit."""
    thinking = ""
    for prompt in prompts:
        if not config.chat and len(prompt.turns) > 1:
            raise ValueError(
                f"prompt {prompt.id!r} has {len(prompt.turns)} turns; chat=False takes one only."
            )
        try:
            encoded = pair.encode(prompt.turns[0], config.chat, config.thinking)
            check_prompt(pair, encoded.ids)
        except ValueError as error:
            raise ValueError(f"prompt {prompt.id!r}: {error}") from error
        thinking = encoded.thinking
    return thinking


# --- filling ------------------------------------------------------------------------------------


class _Cancelled(Exception):
    """The caller asked to stop in the middle of a decode."""


class _Sweep:
    """The cells that this process fills, from the first warm-up to the last decode."""

    def __init__(
        self,
        config: SweepConfig,
        out: Path,
        prompts: Sequence[Prompt],
        pairs: Pairs,
        plans: Sequence[Plan],
        show: Callable[[SweepProgress], None],
        should_stop: Callable[[], bool],
    ):
        self.config, self.prompts, self.pairs, self.plans = config, prompts, pairs, plans
        self.show, self.should_stop = show, should_stop
        self.cells = out / "cells"
        self.decodes = config.repeats * sum(len(prompt.turns) for prompt in prompts)
        self.out = out
        self.order = self.first_order = next_order(open_run(out))
        self.started = utc_now()
        self.settings = settings(config, pairs.first)
        self.origins: dict[str, dict[str, Any]] = {}  # provenance by dtype
        self.names: dict[int, str] = {}  # text of single tokens
        self.open: dict[str, Filling] = {}  # by cell id
        self.finished = 0
        self.taken: list[str] = []  # cells that another process is filling
        self.complaints: dict[str, None] = {}  # warnings for the end, when all is on the disk

    def __enter__(self) -> _Sweep:
        self.leases = Leases(cells=self.cells)
        return self

    def __exit__(self, *error: object) -> None:
        self.leases.close()

    def run(self) -> None:
        """Decode what is missing, prompt by prompt, the first cell another one for each prompt."""
        for plan in self.plans:
            self._begin(plan)
        try:
            self._warm_up()
            rounds = [(r, prompt) for r in range(self.config.repeats) for prompt in self.prompts]
            for place, (repeat, prompt) in enumerate(rounds):
                for plan in rotated(self.plans, place):
                    if plan.id in self.open:
                        self._decode_prompt(self.open[plan.id], prompt, repeat)
            if self.config.first_again and self.order > self.first_order:
                self._decode_first_again()
        except _Cancelled:
            return
        self._tell("left to another process" if self.taken else "finished")

    def _decode_first_again(self) -> None:
        """The first turns of the first cell once more, last of all, kept as a check of the run."""
        plan = self.plans[0]
        if not (self.cells / plan.id / CELL).is_file():  # it failed, or another process has it
            return
        pair, rows = self.pairs.get(plan.request["dtype"]), []
        for prompt in self.prompts:
            self._tell(f"again: {plan.label}")
            keys = {"prompt_id": prompt.id, "turn": 0, "repeat": 0, "order": self.order}
            messages = [{"role": "user", "content": prompt.turns[0]}]
            asked = messages if self.config.chat else prompt.turns[0]
            if plan.engine == OWN:
                more = (self.names, self.should_stop)
                line = own_line(pair, plan, asked, keys, self.config, *more)
            else:
                line = library_line(pair, plan, asked, keys, self.config, self.names)
            names = ("prompt_id", "order", "ttft_s", "decode_s", "total_s")
            rows.append({name: line["prompt"][name] for name in names})
            self.order += 1
        open_run(self.out).write_check("first_again", {"cell": plan.id, "prompts": rows})

    def warn(self) -> None:
        """Say what a reader of the run must know; everything is on the disk by now."""
        if self.taken:
            warnings.warn(
                f"another process is filling {len(self.taken)} of these cells, which were left to "
                f"it: {'; '.join(self.taken)}.",
                CellInUseWarning,
                stacklevel=3,
            )
        for complaint in self.complaints:
            warnings.warn(complaint, AcceptanceWarning, stacklevel=3)

    def _begin(self, plan: Plan) -> None:
        """Open a cell for filling, unless it is finished or another process has it."""
        folder = self.cells / plan.id
        if not (folder / CELL).is_file() and not self.leases.take(folder):
            self.taken.append(plan.label)
            return
        if (folder / CELL).is_file():
            self.finished += 1
            self.leases.give_back(folder)
            remove_dead(folder)
            (folder / PART).unlink(missing_ok=True)  # of a process that died just after the end
            return
        tidy(folder)
        part = open_part(folder, plan.part_header(self.decodes))
        asked = {*part.cell["requested_block_sizes"], *plan.requested_block_sizes}
        part.cell["requested_block_sizes"] = sorted(asked)
        filling = Filling(plan=plan, part=part)
        orders = [line["prompt"]["order"] for line in part.decodes.values()]
        self.order = max(self.order, 1 + max(orders, default=-1))
        self.open[plan.id] = filling
        if not filling.missing:
            self._finish(filling)
        else:
            self._try(filling, self._pair)

    def _pair(self, filling: Filling) -> Pair:
        return self.pairs.get(filling.plan.request["dtype"])

    def _contribute(self, filling: Filling) -> None:
        """Write who decodes for this cell, once a process."""
        dtype = filling.plan.request["dtype"]
        if dtype not in self.origins:
            self.origins[dtype] = provenance(self._pair(filling))
        own = {"sweep": self.settings, "warm_ups": filling.warm_ups, "started_utc": self.started}
        filling.part.add_process(self.origins[dtype] | own)
        filling.contributed = True

    def _warm_up(self) -> None:
        """Every shape of every arm once, so that no arm pays for being the first."""
        for filling in tuple(self.open.values()) if self.config.warm_up else ():
            self._tell(f"warm-up: {filling.plan.label}")
            if self.should_stop():
                raise _Cancelled
            self._try(filling, self._warm_up_one)

    def _warm_up_one(self, filling: Filling) -> None:
        pair, text = self._pair(filling), self.prompts[0].turns[0]
        ids = pair.encode(text, self.config.chat, self.config.thinking).ids
        warm_up(pair, filling.plan, ids)
        filling.warm_ups += 1

    def _decode_prompt(self, filling: Filling, prompt: Prompt, repeat: int) -> None:
        """Every turn of a prompt that is not on the disk yet; the model sees its own answers."""
        messages: list[dict[str, str]] = []
        for turn, text in enumerate(prompt.turns):
            messages.append({"role": "user", "content": text})
            line = filling.part.decodes.get((prompt.id, turn, repeat))
            if line is None:
                keys = {
                    "prompt_id": prompt.id,
                    "turn": turn,
                    "repeat": repeat,
                    "task": prompt.category,
                    "order": self.order,
                }
                line = self._decode(filling, messages if self.config.chat else text, keys)
            if line is None:
                return
            messages.append({"role": "assistant", "content": line["prompt"]["text"]})

    def _decode(
        self, filling: Filling, prompt: PromptLike, keys: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Decode one turn and keep it; None where the cell failed or was lost."""
        if self.should_stop():
            raise _Cancelled
        began = time.perf_counter()
        line = self._try(filling, self._line, prompt, keys)
        if line is None:
            return None
        if not self.leases.holds(filling.part.folder):
            self.taken.append(filling.plan.label)
            del self.open[filling.plan.id]
            return None
        if not filling.contributed:
            self._contribute(filling)
        filling.part.add_decode(line)
        self.order += 1
        filling.spent_s += time.perf_counter() - began
        filling.spent += 1
        self._tell(filling.plan.label)
        if not filling.missing:
            self._finish(filling)
        return line

    def _line(self, filling: Filling, prompt: PromptLike, keys: dict[str, Any]) -> dict[str, Any]:
        pair, plan = self._pair(filling), filling.plan
        if plan.engine != OWN:
            return library_line(pair, plan, prompt, keys, self.config, self.names)
        line = own_line(pair, plan, prompt, keys, self.config, self.names, self.should_stop)
        for warning in line["warnings"]:
            self.complaints[f"{plan.label}: {warning}"] = None
        return line

    def _try(self, filling: Filling, action: Callable[..., Any], *arguments: Any) -> Any:
        """What the action returns; where it raises, its cell fails and the others go on."""
        try:
            return action(filling, *arguments)
        except _Cancelled:
            raise
        except Exception as error:
            folder = filling.part.folder
            fail_cell(filling.part, without_paths(_told(error)), without_paths(_trace_of(error)))
            self.leases.give_back(folder)
            del self.open[filling.plan.id]
            return None

    def _finish(self, filling: Filling) -> None:
        order = [prompt.id for prompt in self.prompts]
        finish_cell(filling.part, order, utc_now(), self._complaints_of_cell(filling))
        self.leases.give_back(filling.part.folder)
        del self.open[filling.plan.id]
        self.finished += 1

    def _complaints_of_cell(self, filling: Filling) -> list[str]:
        """A useless draft shows over a cell, where single outputs are too short for it."""
        lines = filling.part.decodes.values()
        blocks = [block for line in lines for block in line["blocks"] if block["drafted"]]
        complaint = silence(len(blocks), sum(block["accepted"] for block in blocks))
        if complaint is None or any(line["warnings"] for line in lines):
            return []
        self.complaints[f"{filling.plan.label}: {complaint}"] = None
        return [complaint]

    def _tell(self, label: str) -> None:
        filling = self.open.values()
        left = sum(one.missing for one in filling)
        done = self.finished * self.decodes + sum(len(one.part.decodes) for one in filling)
        self.show(
            SweepProgress(
                done=done, total=done + left, seconds_left=seconds_left(filling), label=label
            )
        )


def rotated(plans: Sequence[Plan], place: int) -> Sequence[Plan]:
    """The same cells, the first one another for each prompt."""
    first = place % len(plans)
    return (*plans[first:], *plans[:first])


def seconds_left(fillings: Iterable[Filling]) -> float | None:
    """From each cell's own pace, or the mean pace where a cell has none yet."""
    fillings = tuple(fillings)
    spent = sum(one.spent for one in fillings)
    if not any(one.missing for one in fillings):
        return 0.0
    if not spent:
        return None
    mean = sum(one.spent_s for one in fillings) / spent
    return sum(one.missing * (one.spent_s / one.spent if one.spent else mean) for one in fillings)


def next_order(run: Run) -> int:
    """The place of the next decode in the run's whole sequence."""
    orders = [cell.summary.get("last_order") for cell in run.cells]
    return 1 + max((order for order in orders if order is not None), default=-1)


def settings(config: SweepConfig, pair: Pair) -> dict[str, Any]:
    """The sweep's settings for provenance: no paths."""
    values = {item.name: getattr(config, item.name) for item in fields(config)}
    policies = [one if isinstance(one, str) else described(one) for one in config.policies]
    return values | {
        "pair": pair.spec.name,
        "prompts": short_name(config.prompts),
        "policies": policies,
    }


# --- one decode ---------------------------------------------------------------------------------


def warm_up(pair: Pair, plan: Plan, ids: Sequence[int]) -> None:
    """A prefill and two blocks of the cell's shape; the figures are thrown away."""
    if plan.engine != OWN:
        few = min(3, plan.decode.max_new_tokens)
        pair.models.library_generate(ids, few, frozenset(), lookup=plan.request.get("lookup"))
        return
    records = itertools.count(1)
    decode(pair, ids, replace(plan.decode, ignore_end=True), should_stop=lambda: next(records) > 2)


def own_line(
    pair: Pair,
    plan: Plan,
    prompt: PromptLike,
    keys: Mapping[str, Any],
    config: SweepConfig,
    names: dict[int, str],
    should_stop: Callable[[], bool],
) -> dict[str, Any]:
    """One decode by our loop, as the part file keeps it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AcceptanceWarning)  # said once, at the end
        warnings.simplefilter("ignore", BlockSizeWarning)
        seed = plan.decode.seed + keys["repeat"]
        trace = decode(
            pair,
            prompt,
            replace(plan.decode, seed=seed),
            chat=config.chat,
            thinking=config.thinking,
            should_stop=should_stop,
        )
    if trace.finish_reason == "cancelled":
        raise _Cancelled
    used = {token for block in trace.blocks for token in (*block.drafted, *block.posterior)}
    texts = token_texts(pair, used | set(trace.tokens), names)
    return decode_line(trace, keys, pair.pieces(trace.tokens, trace.request.stop_tokens), texts)


def library_line(
    pair: Pair,
    plan: Plan,
    prompt: PromptLike,
    keys: Mapping[str, Any],
    config: SweepConfig,
    names: dict[int, str],
) -> dict[str, Any]:
    """One decode by the library's own generator; there are no blocks to tell of."""
    request = resolve_request(pair, plan.decode)
    ids = pair.encode(prompt, config.chat, config.thinking).ids
    check_prompt(pair, ids)
    pair.models.peak_bytes()
    made = library_decode(pair, ids, request, plan.request.get("lookup"))
    return {
        "prompt": {
            **keys,
            "prompt_ids": ids,
            "new_ids": made.tokens,
            "text": pair.text(made.tokens, request.stop_tokens),
            "finish_reason": finish_reason(made.tokens, len(ids), request),
            "ttft_s": made.ttft_s,
            "decode_s": made.total_s - made.ttft_s if len(made.tokens) > 1 else 0.0,
            "total_s": made.total_s,
            "peak_bytes": pair.models.peak_bytes(),
        },
        "blocks": [],
        "pieces": pair.pieces(made.tokens, request.stop_tokens),
        "tokens": token_texts(pair, set(made.tokens), names),
        "warnings": [],
    }


def token_texts(pair: Pair, tokens: Iterable[int], names: dict[int, str]) -> dict[int, str]:
    """The text of each token by itself; `names` remembers those already asked for."""
    chosen = sorted(tokens)
    for token in chosen:
        if token not in names:
            names[token] = pair.text_so_far([token])
    return {token: names[token] for token in chosen}


# --- failures and status ------------------------------------------------------------------------


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _trace_of(error: Exception) -> str:
    return "".join(traceback.format_exception(error))


def without_paths(text: str) -> str:
    """The text with files named by their last two parts and the home folder as ~."""
    short = re.sub(r'File "(?:[^"]*/)?([^"/]+/[^"/]+)"', r'File "\1"', text)
    return short.replace(str(Path.home()), "~")


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
