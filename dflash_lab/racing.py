"""One prompt decoded in several ways at once, on one thread: who is behind by its own clock moves.

Each way's clock counts its own seconds alone, so the ways do not slow each other down on paper,
whatever they share of the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from threading import Event

from dflash_lab.config import DecodeConfig
from dflash_lab.decoding import (
    check_prompt,
    complaints,
    finish_reason,
    resolve_request,
    run_session,
)
from dflash_lab.load import Encoded, Pair
from dflash_lab.texts import is_stopped, output_text
from dflash_lab.trace import BlockRecord, PrefillRecord, Trace


class Lane:
    """One way of decoding a prompt: its records so far."""

    def __init__(self, pair: Pair, prompt: Encoded, config: DecodeConfig):
        check_prompt(pair, prompt.ids)
        self.pair, self.prompt = pair, prompt
        self.request = resolve_request(pair, config)
        self.records = run_session(pair, prompt.ids, self.request)
        self.prefill: PrefillRecord | None = None
        self.blocks: list[BlockRecord] = []
        self.ended = False

    @property
    def seconds(self) -> float:
        """This way's own clock."""
        prefill = 0.0 if self.prefill is None else self.prefill.seconds
        return prefill + sum(block.seconds.total for block in self.blocks)

    def step(self) -> None:
        """The prefill or one block more, where there is one."""
        record = next(self.records, None)
        if isinstance(record, PrefillRecord):
            self.prefill = record
        elif record is not None:
            self.blocks.append(record)
        self.ended = record is None

    def close(self) -> None:
        self.records.close()

    def trace(self) -> Trace:
        """What was decoded so far; its finish reason is "cancelled" where it has not ended."""
        drafted = [token for block in self.blocks for token in block.tokens]
        tokens = drafted if self.prefill is None else [self.prefill.token, *drafted]
        stopped = is_stopped(self.pair, tokens, self.request)
        ended = tokens and finish_reason(tokens, len(self.prompt.ids), self.request, stopped)
        return Trace(
            request=self.request,
            prompt_ids=self.prompt.ids,
            prefill=self.prefill,
            blocks=tuple(self.blocks),
            text=output_text(self.pair, tokens, self.request),
            finish_reason=ended or "cancelled",
            total_s=self.seconds,
            peak_bytes=None,
            thinking=self.prompt.thinking,
            warnings=complaints(self.blocks),
        )


def run_race(lanes: Sequence[Lane], stop: Event, tell: Callable[[], None]) -> None:
    """Run every lane to its end, or until `stop`, which is looked at before each block.

    `tell` is called after each. The sessions are closed whatever happens.
    """
    with ExitStack() as stack:
        for lane in lanes:
            stack.enter_context(closing(lane))
        while not stop.is_set() and (running := [lane for lane in lanes if not lane.ended]):
            min(running, key=lambda lane: lane.seconds).step()
            tell()
