"""The one thread that loads a pair and decodes with it, and the requests that wait for it.

One, because MLX's streams belong to threads, and because two decodes on one device would only take
turns.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from dflash_lab.decoding import Record, complaints, finish_reason, run_session
from dflash_lab.load import Pair
from dflash_lab.texts import TextStream
from dflash_lab.trace import BlockRecord, DecodeRequest

log = logging.getLogger(__name__)


class QueueFull(RuntimeError):
    """As many requests wait as may."""


class Cancelled(RuntimeError):
    """Nobody waits for this output any more, or the server stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one turn of the loop adds to the text."""

    text: str
    finish_reason: str | None  # "stop", "length" or "context" in the last piece


@dataclass(slots=True, kw_only=True)
class Totals:
    """What was drafted and accepted since the start, in all blocks of all outputs."""

    blocks: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)  # by place among the drafted, from 0

    def add(self, block: BlockRecord) -> None:
        if not block.drafted:
            return
        self.blocks += 1
        self.drafted += len(block.drafted)
        self.accepted += block.accepted
        self.accepted_at += [0] * (len(block.drafted) - len(self.accepted_at))
        for place in range(block.accepted):
            self.accepted_at[place] += 1


class Job:
    """One output on its way: what is asked for, and what has been made of it."""

    def __init__(
        self,
        ids: Sequence[int],
        request: DecodeRequest,
        tell: Callable[[Piece | Exception], None],
    ):
        self.ids, self.request = ids, request
        self.tell = tell  # called on the worker's thread; an exception is the last it is told
        self.records: list[Record] = []
        self.given_up: str | None = None  # why nobody waits for it any more
        self.asked = time.perf_counter()
        self.began = self.asked  # when the thread took it up

    @property
    def blocks(self) -> list[BlockRecord]:
        return [record for record in self.records if isinstance(record, BlockRecord)]

    @property
    def tokens(self) -> list[int]:
        """The new tokens so far, the one that ended them included."""
        return [token for record in self.records for token in new_tokens(record)]

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is wrong with the draft although the text is right."""
        return complaints(self.blocks)


class Worker:
    """Loads the pair when made, then takes jobs up in the order in which they came.

    `room` jobs may wait for the one that runs.
    """

    def __init__(self, load: Callable[[], Pair], room: int):
        self.load, self.room = load, room
        self.totals = Totals()
        self.running: Job | None = None
        self.waiting: deque[Job] = deque()
        self._pair: Pair | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="dflash-lab decode", daemon=True)
        self._thread.start()

    def pair(self) -> Pair:
        """The pair, once it is loaded; raises what loading raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._pair or self._failure)
        if self._failure is not None:
            raise self._failure
        return self._pair

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, job: Job) -> None:
        """Put a job into the queue. Raises QueueFull, and Cancelled where the server stops."""
        with self._changed:
            if self._closed:
                raise Cancelled("the server is stopping")
            if len(self.waiting) >= self.room:
                raise QueueFull(f"{self.room} requests wait already; try again later")
            self.waiting.append(job)
            self._changed.notify_all()

    def cancel(self, job: Job, why: str = "the client has gone") -> None:
        """Give a job up: at once where it waits, after its present block where it runs."""
        with self._changed:
            job.given_up = why
            if job not in self.waiting:
                return
            self.waiting.remove(job)
        job.tell(Cancelled(why))

    def close(self) -> None:
        """Give up everything and end the thread; returns when the present block is over.

        Where the pair is still being loaded, the thread ends after that and nobody waits for it.
        """
        with self._changed:
            self._closed = True
            left = [*self.waiting, *([self.running] if self.running else [])]
            self._changed.notify_all()
        for job in left:
            self.cancel(job, "the server is stopping")
        if self._pair is not None:
            self._thread.join()

    def _work(self) -> None:
        try:
            pair = self.load()
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            return
        with self._changed:
            self._pair = pair
            self._changed.notify_all()
        while (job := self._next()) is not None:
            try:
                decode_job(pair, job, self.totals)
            except Cancelled as error:
                job.tell(error)
            except Exception as error:
                log.exception("a request failed after %d tokens", len(job.tokens))
                job.tell(error)

    def _next(self) -> Job | None:
        with self._changed:
            self.running = None
            self._changed.wait_for(lambda: self.waiting or self._closed)
            if self._closed:
                return None
            self.running = self.waiting.popleft()
            return self.running


def decode_job(pair: Pair, job: Job, totals: Totals) -> None:
    """Decode a job, telling each piece. Raises Cancelled within a block of its being cancelled."""
    job.began = time.perf_counter()
    text = TextStream(pair, job.request)
    with closing(run_session(pair, job.ids, job.request)) as records:
        for record in records:
            if job.given_up is not None:
                raise Cancelled(job.given_up)
            job.records.append(record)
            if isinstance(record, BlockRecord):
                totals.add(record)
            text.add(new_tokens(record))
            ended = finish_reason(text.tokens, len(job.ids), job.request, stopped=text.stopped)
            job.tell(Piece(text=text.piece(ended is not None), finish_reason=ended))


def new_tokens(record: Record) -> Sequence[int]:
    return record.tokens if isinstance(record, BlockRecord) else (record.token,)
