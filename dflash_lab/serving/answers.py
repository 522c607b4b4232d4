"""What is said to a client, in OpenAI's words; how the blocks went, in vLLM's.

Every answer and every event of a stream names the block size used and where it came from.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_lab.serving.worker import Job
from dflash_lab.trace import BlockRecord, DecodeRequest

ENDS = {"stop": "stop", "length": "length", "context": "length"}  # ours, and OpenAI's names
DONE = "data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How a route words what it says."""

    prefix: str  # of ids
    whole: str  # the object of an answer
    part: str  # and of an event
    is_chat: bool

    def text(self, text: str) -> dict[str, Any]:
        """All of the text."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"message": message} if self.is_chat else {"text": text}

    def piece(self, text: str) -> dict[str, Any]:
        """What is added to it."""
        delta = {"content": text} if text else {}
        return {"delta": delta} if self.is_chat else {"text": text}


CHAT = Form(prefix="chatcmpl", whole="chat.completion", part="chat.completion.chunk", is_chat=True)
COMPLETION = Form(prefix="cmpl", whole="text_completion", part="text_completion", is_chat=False)


class Answer:
    """One answer, whole or in events: all of it bears one id, model and time."""

    def __init__(self, form: Form, model: str, job: Job, usage: bool = False):
        self.form, self.job, self.usage = form, job, usage
        self.same = {
            "id": f"{form.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            **block_size_of(job.request),
        }

    def whole(self, text: str, ended: str) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        choice = self._choice(self.form.text(text), ended)
        return {
            **self.same,
            "object": self.form.whole,
            "choices": [choice],
            "usage": usage(self.job),
            **self._told(),
        }

    def opening(self) -> str:
        """The event before the text, which only chats have."""
        if not self.form.is_chat:
            return ""
        return self._event([self._choice({"delta": {"role": "assistant", "content": ""}}, None)])

    def piece(self, text: str) -> str:
        """The event of some text; none where there is none."""
        return self._event([self._choice(self.form.piece(text), None)]) if text else ""

    def ending(self, ended: str) -> str:
        """The events after the text: why it ended, the usage where asked for, the end itself."""
        last = [self._choice(self.form.piece(""), ended)]
        events = self._event(last, **self._told())
        if self.usage:
            events += self._event([], usage=usage(self.job), metrics=metrics(self.job))
        return events + DONE

    def _choice(self, said: dict[str, Any], ended: str | None) -> dict[str, Any]:
        reason = None if ended is None else ENDS[ended]
        return {"index": 0, **said, "finish_reason": reason, "logprobs": None}

    def _told(self) -> dict[str, Any]:
        told: dict[str, Any] = {"metrics": metrics(self.job)}
        return told | ({"warnings": list(self.job.warnings)} if self.job.warnings else {})

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> str:
        empty = {"usage": None} if self.usage else {}
        said = {**self.same, "object": self.form.part, "choices": choices, **empty, **more}
        return event(said)


def event(said: Mapping[str, Any]) -> str:
    """One event of a stream."""
    return f"data: {json.dumps(said, allow_nan=False)}\n\n"


def error_of(
    message: str, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """An error in OpenAI's form; what a client sent may hold halves of characters."""
    said = {"message": message, "type": kind, "param": param, "code": code}
    return {"error": {name: value and plain(value) for name, value in said.items()}}


def plain(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def block_size_of(request: DecodeRequest) -> dict[str, Any]:
    return {"block_size": request.block_size, "block_size_source": request.block_size_source}


def usage(job: Job) -> dict[str, int]:
    """Tokens read and written; the one that ended the text is counted."""
    read, written = len(job.ids), len(job.tokens)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def metrics(job: Job) -> dict[str, Any]:
    """How the request went, by vLLM's names; times in milliseconds."""
    first, blocks = job.records[0].seconds, job.blocks
    rest = sum(block.seconds.total for block in blocks)
    after_first = len(job.tokens) - 1
    return {
        "time_to_first_token_ms": 1000 * first,
        "generation_time_ms": 1000 * rest,
        "queue_time_ms": 1000 * (job.began - job.asked),
        "mean_itl_ms": 1000 * rest / after_first if after_first else None,
        "tokens_per_second": after_first / rest if rest > 0 else None,
        "speculative_decoding": speculation(blocks, job.request.block_size),
    }


def speculation(blocks: list[BlockRecord], block_size: int) -> dict[str, Any] | None:
    """Acceptance, cut blocks in it, the bonus token in the mean; None in plain decoding."""
    if block_size == 1 or not blocks:
        return None
    accepted = [block.accepted for block in blocks]
    drafted = [len(block.drafted) for block in blocks]
    return {
        "mean_acceptance_length": 1 + sum(accepted) / len(blocks),
        "draft_acceptance_rate": sum(accepted) / sum(drafted) if any(drafted) else None,
        "acceptance_histogram": [accepted.count(number) for number in range(block_size)],
        "num_spec_steps": len(blocks),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "num_spec_tokens": block_size - 1,
        "per_step_accepted": accepted,
        "per_step_drafted": drafted,
    }
