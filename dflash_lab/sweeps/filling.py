"""Filling the cells of a sweep, prompt by prompt; a failed one stands aside, the others go on."""

from __future__ import annotations

import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dflash_lab.backends import OWN
from dflash_lab.config import SweepConfig
from dflash_lab.decoding import AcceptanceWarning, silence
from dflash_lab.lease import Leases, remove_dead
from dflash_lab.load import Pair, PromptLike
from dflash_lab.prompts import Prompt
from dflash_lab.provenance import provenance, short_name, utc_now
from dflash_lab.store import (
    CELL,
    PART,
    Part,
    Run,
    fail_cell,
    finish_cell,
    open_part,
    open_run,
    tidy,
)
from dflash_lab.sweeps.decodes import Cancelled, library_line, own_line, warm_up
from dflash_lab.sweeps.pairs import Pairs
from dflash_lab.sweeps.planning import Plan, described
from dflash_lab.sweeps.progress import SweepProgress


class CellInUseWarning(UserWarning):
    """Another process is filling cells that this sweep wanted."""


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


class Filler:
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

    def __enter__(self) -> Filler:
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
        except Cancelled:
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
                raise Cancelled
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
            raise Cancelled
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
        except Cancelled:
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


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _trace_of(error: Exception) -> str:
    return "".join(traceback.format_exception(error))


def without_paths(text: str) -> str:
    """The text with files named by their last two parts and the home folder as ~."""
    short = re.sub(r'File "(?:[^"]*/)?([^"/]+/[^"/]+)"', r'File "\1"', text)
    return short.replace(str(Path.home()), "~")
