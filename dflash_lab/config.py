"""What a user asks for: a pair, a decode, a sweep. Frozen, checked on construction."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BACKENDS = ("torch",)
DTYPES = ("auto", "float32", "bfloat16", "float16")
TIMINGS = ("whole", "stages")
RULES = ("match",)
PROPOSALS = ("argmax",)


def whole(name: str, value: Any, low: int, hint: str) -> int:
    """`value` as an int of at least `low`, or a ValueError that names the setting."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < low:
        raise ValueError(f"{name} is {value!r}; expected a whole number from {low}. {hint}")
    return number


def one_of(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Raise a ValueError that lists what is allowed, unless `value` is among it."""
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(allowed)}.")


def listed(name: str, value: Any) -> None:
    """Raise a ValueError unless `value` is a list or a tuple."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} is {value!r}; expected a list, such as ({value!r},).")


def check_block_size(value: Any) -> int:
    """A block size counts the anchor, so it starts at 1."""
    return whole("block_size", value, 1, "It counts the anchor: 1 is plain decoding.")


def check_window(value: Any) -> int | None:
    """A draft window in tokens, or None for no limit."""
    if value is None:
        return None
    return whole("draft_window", value, 1, "None lets the draft see everything committed.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSpec:
    """Which target, which draft, and what runs them."""

    target: str  # "smollm2", a model folder or a hub id
    draft: str  # a draft folder or a hub id
    target_revision: str | None = None  # hub commit, tag or branch
    draft_revision: str | None = None
    name: str | None = None  # of a pair that comes with the project
    backend: str = "torch"
    dtype: str = "auto"  # "auto": bfloat16 on a GPU, float32 on a CPU
    device: str = "auto"  # "auto": cuda, else mps, else cpu

    def __post_init__(self) -> None:
        one_of("backend", self.backend, BACKENDS)
        one_of("dtype", self.dtype, DTYPES)
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", self.device):
            raise ValueError(
                f"device is {self.device!r}; expected auto, cpu, mps, cuda or cuda:NUMBER."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """How one prompt is decoded."""

    block_size: int | None = None  # anchor included; None takes the draft's own
    block_size_source: str | None = None  # who chose it, where that was not the caller's argument
    draft_window: int | None = None  # committed positions the draft may see
    max_new_tokens: int = 128
    stop_tokens: tuple[int, ...] = ()  # in addition to the target's own
    ignore_end: bool = False  # go on past the target's own end tokens
    temperature: float = 0.0
    rule: str = "match"
    proposal: str = "argmax"
    timing: str = "whole"  # "stages" synchronises the device between stages
    beyond_trained: bool = False  # insist on a block size above the trained one

    def __post_init__(self) -> None:
        if self.block_size is not None:
            object.__setattr__(self, "block_size", check_block_size(self.block_size))
        object.__setattr__(self, "draft_window", check_window(self.draft_window))
        limit = whole("max_new_tokens", self.max_new_tokens, 1, "Ask for one token at least.")
        object.__setattr__(self, "max_new_tokens", limit)
        listed("stop_tokens", self.stop_tokens)
        stops = tuple(whole("stop_tokens", stop, 0, "They are ids.") for stop in self.stop_tokens)
        object.__setattr__(self, "stop_tokens", stops)
        if self.temperature != 0:
            raise ValueError(f"temperature is {self.temperature}; this version is greedy: use 0.")
        one_of("rule", self.rule, RULES)
        one_of("proposal", self.proposal, PROPOSALS)
        one_of("timing", self.timing, TIMINGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepConfig:
    """A grid of block sizes and draft windows over one set of prompts."""

    pair: str | PairSpec = "smollm2"
    backend: str = "torch"  # backend, dtype and device hold where `pair` is a name
    dtype: str = "auto"
    device: str = "auto"
    block_sizes: tuple[int, ...] = (1, 2, 4, 6, 8, 12, 16)
    draft_windows: tuple[int | None, ...] = (None,)
    windowed_block_sizes: tuple[int, ...] | None = None  # sizes for windows other than the first
    plain_dtypes: tuple[str, ...] = ()  # plain decoding in these dtypes too, interleaved
    library_baseline: bool = False  # the library's own generator, interleaved
    prompts: str = "mini"  # bundled set, or a .jsonl file
    categories: tuple[str, ...] | None = None
    max_prompts: int | None = None
    max_new_tokens: int = 96
    chat: bool = True
    thinking: bool | None = None
    timing: str = "whole"
    repeats: int = 1
    warm_up: bool = True
    beyond_trained: bool = False

    def __post_init__(self) -> None:
        for name in ("block_sizes", "draft_windows", "plain_dtypes"):
            listed(name, getattr(self, name))
        if not self.block_sizes:
            raise ValueError("block_sizes is empty; name one size at least, 1 is plain decoding.")
        for size in (*self.block_sizes, *(self.windowed_block_sizes or ())):
            check_block_size(size)
        if not self.draft_windows:
            raise ValueError("draft_windows is empty; use (None,) for no window.")
        for window in self.draft_windows:
            check_window(window)
        whole("max_new_tokens", self.max_new_tokens, 1, "Ask for one token at least.")
        whole("repeats", self.repeats, 1, "Every prompt is decoded that many times a cell.")
        if self.max_prompts is not None:
            whole("max_prompts", self.max_prompts, 1, "None takes every prompt of the set.")
        one_of("backend", self.backend, BACKENDS)
        one_of("timing", self.timing, TIMINGS)
        for dtype in (self.dtype, *self.plain_dtypes):
            one_of("dtype", dtype, DTYPES)
        if self.categories is not None and not self.categories:
            raise ValueError("categories is empty; None takes every category.")
        if self.library_baseline and self.timing == "stages":
            raise ValueError(
                "the library's generator has no stages to time; sweep with timing='whole', or "
                "without library_baseline."
            )
        if isinstance(self.pair, PairSpec):
            defaults = ("torch", "auto", "auto")
            if (self.backend, self.dtype, self.device) != defaults:
                raise ValueError(
                    "backend, dtype and device stand in the PairSpec; give them there alone."
                )
