"""Policies: how wide a block is drafted, and how many of its rows are verified.

A policy is any object with a `name`, a `version` and one hook or both. `width(history)` is asked
before a block is drafted, `rows(confidences)` after it; None leaves the choice as it is. A hook
sees what is handed to it and nothing else, so a policy decides the same in `decode` and in
`replay`. Experiments, never the default: the text is the same under every policy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, overload

from dflash_lab.config import check_block_size, check_policy, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class PastBlock:
    """What a policy may know of a block that is over."""

    block_size: int  # entries drafted, the anchor among them
    rows: int  # of them verified
    accepted: int


class Confidences(Sequence[float]):
    """The draft's highest probability at each draft position of the block at hand, from the left.

    They are asked of the device at the first look, so a policy that takes the length alone is not
    charged for them.
    """

    def __init__(self, count: int, read: Callable[[], Sequence[float]]):
        self._count, self._read = count, read
        self._values: tuple[float, ...] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> float: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[float, ...]: ...
    def __getitem__(self, place: int | slice) -> Any:
        if self._values is None:
            self._values = tuple(self._read())
        return self._values[place]


class Steering:
    """What a policy says in the course of one text, checked; without one, every block alike."""

    def __init__(self, policy: Any, block_size: int):
        self.policy, self.block_size = policy, block_size
        self.history: list[PastBlock] = []

    @property
    def reads_drafts(self) -> bool:
        """Whether the policy is asked after drafting, too."""
        return has_hook(self.policy, "rows")

    def width(self) -> int:
        """The size of the next block, no larger than the decode's own."""
        if not has_hook(self.policy, "width"):
            return self.block_size
        size = self.policy.width(tuple(self.history))
        if size is None:
            return self.block_size
        hint = "The decode's block_size is the largest that its policy may ask for."
        return self._checked("width", size, self.block_size, hint)

    def rows(self, block_size: int, read: Callable[[], Sequence[float]]) -> int | None:
        """How many rows of a drafted block are verified; None is all of them."""
        if not self.reads_drafts or block_size == 1:
            return None
        rows = self.policy.rows(Confidences(block_size - 1, read))
        if rows is None:
            return None
        return self._checked("rows", rows, block_size, "The anchor's row counts: 1 at least.")

    def note(self, block_size: int, rows: int, accepted: int) -> None:
        """Add a block to what the policy may know."""
        self.history.append(PastBlock(block_size=block_size, rows=rows, accepted=accepted))

    def _checked(self, hook: str, value: Any, most: int, hint: str) -> int:
        what = f"{hook}() of the policy {self.policy.name!r}"
        number = whole(what, value, 1, hint)
        if number > most:
            raise ValueError(f"{what} is {number}; expected 1 to {most}. {hint}")
        return number


def has_hook(policy: Any, hook: str) -> bool:
    """Whether a policy has that hook, `width` or `rows`."""
    return callable(getattr(policy, hook, None))


def describe_policy(policy: Any) -> dict[str, Any] | None:
    """Name, version and settings of a policy, for a record; None without one."""
    if policy is None:
        return None
    named = dataclasses.is_dataclass(policy)
    fields = dataclasses.fields(policy) if named else ()
    settings = {field.name: getattr(policy, field.name) for field in fields}
    return {"name": policy.name, "version": policy.version, "settings": settings}


def policy_label(policy: Mapping[str, Any] | None) -> str | None:
    """Name and version of what `describe_policy` told; None without a policy."""
    return None if policy is None else f"{policy['name']} {policy['version']}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """The same size for every block, and the same number of rows verified."""

    name: ClassVar[str] = "fixed"
    version: ClassVar[str] = "1"
    block_size: int | None = None  # None is the decode's own
    verify_cap: int | None = None  # rows, the anchor's among them; None verifies all

    def __post_init__(self) -> None:
        for setting in ("block_size", "verify_cap"):
            if getattr(self, setting) is not None:
                check_block_size(getattr(self, setting), setting)

    def width(self, history: Sequence[PastBlock]) -> int | None:
        return self.block_size

    def rows(self, confidences: Sequence[float]) -> int | None:
        return None if self.verify_cap is None else min(self.verify_cap, len(confidences) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfidenceThreshold:
    """Verifies drafted tokens up to the first that the draft itself is less sure of."""

    name: ClassVar[str] = "confidence threshold"
    version: ClassVar[str] = "1"
    threshold: float  # a probability

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold is {self.threshold!r}; expected a probability, 0 to 1.")

    def rows(self, confidences: Sequence[float]) -> int:
        unsure = (k for k, sure in enumerate(confidences, start=1) if not sure >= self.threshold)
        return next(unsure, len(confidences) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalTimesCost:
    """Verifies as many rows as promise the most tokens a second.

    The draft's confidences, multiplied from the left, stand for survival; `costs` are the seconds
    of a whole block by (block_size, rows).
    """

    name: ClassVar[str] = "survival times cost"
    version: ClassVar[str] = "1"
    costs: Mapping[tuple[int, int], float]

    def __post_init__(self) -> None:
        if not self.costs or not all(seconds > 0 for seconds in self.costs.values()):
            raise ValueError("costs need seconds above 0 for every (block_size, rows).")

    def rows(self, confidences: Sequence[float]) -> int:
        size = len(confidences) + 1
        best, best_pace, expected, survival = 1, 0.0, 1.0, 1.0
        for rows in range(1, size + 1):
            if rows > 1:
                survival *= confidences[rows - 2]
                expected += survival
            pace = expected / self._seconds(size, rows)
            if pace > best_pace:
                best, best_pace = rows, pace
        return best

    def _seconds(self, block_size: int, rows: int) -> float:
        try:
            return self.costs[block_size, rows]
        except KeyError as error:
            raise ValueError(
                f"costs have no seconds for block size {block_size} with {rows} rows verified; "
                "give every number of rows from 1 to the block size."
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class BackOff:
    """Smaller blocks where little was accepted of late, larger ones where nearly all was.

    Judged over the last `blocks` blocks, and only once all of them had the present size. The steps
    are those of mlx-vlm (dflash.md 6.6).
    """

    name: ClassVar[str] = "back-off"
    version: ClassVar[str] = "1"
    start: int  # the first size
    ceiling: int  # the largest
    floor: int = 4  # the smallest it backs off to
    blocks: int = 8

    def __post_init__(self) -> None:
        for setting in ("floor", "start", "ceiling", "blocks"):
            check_block_size(getattr(self, setting), setting)
        if not self.floor <= self.start <= self.ceiling:
            raise ValueError(
                f"floor, start and ceiling are {self.floor}, {self.start} and {self.ceiling}; "
                "expected them in ascending order."
            )

    def width(self, history: Sequence[PastBlock]) -> int:
        if not history:
            return self.start
        size, recent = history[-1].block_size, history[-self.blocks :]
        if len(recent) < self.blocks or any(block.block_size != size for block in recent):
            return size
        return min(self.ceiling, max(self.floor, size + self._change(size, recent)))

    def _change(self, size: int, recent: Sequence[PastBlock]) -> int:
        drafted = sum(block.rows - 1 for block in recent)
        accepted = sum(block.accepted for block in recent)
        rate = accepted / drafted if drafted else 0.0
        if rate < 0.30 or accepted / len(recent) < 2:
            return -(size // 2) if size >= 8 else -2
        if rate < 0.50:
            return -2
        full = sum(block.accepted == block.rows - 1 for block in recent)
        return 2 if rate >= 0.85 and full >= 0.75 * len(recent) else 0


# A policy from text

NAMED = {
    "fixed": Fixed,
    "confidence": ConfidenceThreshold,
    "survival": SurvivalTimesCost,
    "back-off": BackOff,
}
FORM = (
    "expected none, fixed, confidence:threshold=0.5, survival, back-off:start=8,ceiling=16, or "
    "your own as MODULE:NAME"
)


def read_policy(text: str, costs: Mapping[tuple[int, int], float] | None = None) -> Any:
    """The policy that a text names, None for "none".

    NAME, or NAME:setting=number,...; anything else before the colon is a module that holds the
    policy, or the class to make it from. `costs` are what "survival" weighs by. Raises ValueError.
    """
    name, _, rest = text.strip().partition(":")
    if name == "none" and not rest:
        return None
    if name in NAMED:
        given = {"costs": costs} if name == "survival" and costs is not None else {}
        return _made(NAMED[name], given | _settings(text, rest), text)
    if not rest:
        raise ValueError(f"the policy is {text!r}; {FORM}.")
    try:
        found = getattr(import_module(name), rest)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"the policy {text!r} cannot be imported: {error}; {FORM}.") from error
    policy = _made(found, {}, text) if isinstance(found, type) else found
    check_policy(policy)
    return policy


def _made(kind: type, settings: Mapping[str, Any], text: str) -> Any:
    try:
        return kind(**settings)
    except TypeError as error:
        needs = " It needs a cost table." if kind is SurvivalTimesCost else ""
        raise ValueError(f"the policy {text!r} cannot be made: {error}.{needs}") from error


def _settings(text: str, rest: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in rest.split(",") if rest else ():
        key, _, value = part.partition("=")
        try:
            found[key.strip()] = int(value) if value.strip().isdigit() else float(value)
        except ValueError as error:
            raise ValueError(f"the policy {text!r} has the setting {part!r}; {FORM}.") from error
    return found
