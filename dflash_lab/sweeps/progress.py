"""How far a sweep is, and a way to say it in lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


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
