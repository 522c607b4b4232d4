"""What a user asks for: a pair, a decode, a sweep. Frozen, checked on construction."""

from __future__ import annotations

import json
import math
import operator
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

BACKENDS = ("torch", "mlx")
DEVICES = {"torch": r"auto|cpu|mps|cuda(:\d+)?", "mlx": "auto|cpu|gpu"}
DRAFT_BITS = (4, 8)
DTYPES = ("auto", "float32", "bfloat16", "float16")
TIMINGS = ("whole", "stages")
RULES = ("match", "rejection")
PROPOSALS = ("argmax", "sample")
# Settings of a decode that say how tokens are drawn; a sweep has them too, alike in all its cells.
SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"),
    *("rule", "proposal", "probabilities"),
)
# Who may name a block size, the highest first; the draft's configuration comes after them, then 16.
BLOCK_SIZE_SOURCES = {
    "argument": "argument",
    "flag": "flag --block-size",
    "variable": "DFLASH_BLOCK_SIZE",
    "sweep": "sweep",
}


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


def number(name: str, value: Any, allowed: str, fits: Callable[[float], bool]) -> float:
    """`value` as a float, or a ValueError that names the setting and says what is allowed."""
    try:
        found = math.nan if isinstance(value, str | bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not (math.isfinite(found) and fits(found)):
        raise ValueError(f"{name} is {value!r}; expected {allowed}.")
    return found


def listed(name: str, value: Any) -> None:
    """Raise a ValueError unless `value` is a list or a tuple."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} is {value!r}; expected a list, such as ({value!r},).")


def check_block_size(value: Any, name: str = "block_size") -> int:
    """A block size counts the anchor, so it starts at 1; `name` says in the error who named it."""
    return whole(name, value, 1, "It counts the anchor: 1 is plain decoding.")


def check_window(value: Any) -> int | None:
    """A draft window in tokens, or None for no limit."""
    if value is None:
        return None
    return whole("draft_window", value, 1, "None lets the draft see everything committed.")


def window_name(window: int | None) -> str:
    """A draft window in words."""
    return "full" if window is None else str(window)


def check_shortest(config: Any) -> None:
    """Raise ValueError for a shortest output that is none or above the longest."""
    shortest = whole("min_new_tokens", config.min_new_tokens, 0, "0 lets an output end anywhere.")
    if shortest > config.max_new_tokens:
        raise ValueError(
            f"min_new_tokens is {shortest}, above the {config.max_new_tokens} of max_new_tokens."
        )


def check_policy(policy: Any) -> None:
    """Raise ValueError unless a policy has a name, a version and a hook (see policies.py)."""
    if policy is None:
        return
    for name in ("name", "version"):
        if not (isinstance(getattr(policy, name, None), str) and getattr(policy, name)):
            raise ValueError(
                f"the policy {policy!r} has no {name}; give it one as text, so that results say "
                "which policy they are of."
            )
    if not any(callable(getattr(policy, hook, None)) for hook in ("width", "rows")):
        raise ValueError(
            f"the policy {policy.name!r} has neither width(history) nor rows(confidences); one of "
            "them decides something."
        )


def check_stop_strings(strings: Any) -> tuple[str, ...]:
    """Stop strings as a tuple; ValueError for what is none and for an empty one."""
    listed("stop_strings", strings)
    for text in strings:
        if not (isinstance(text, str) and text):
            raise ValueError(f"stop_strings has {text!r}; expected text of one character at least.")
    return tuple(strings)


def check_sampling(config: Any) -> dict[str, Any]:
    """The sampling settings as plain numbers; ValueError for one that is out of its range.

    Every rule is exact with every proposal (dflash.md 3.1), but rejection and sampled proposals
    compare and draw probabilities, and a temperature of 0 has none.
    """
    ranges: dict[str, tuple[str, Callable[[float], bool]]] = {
        "temperature": ("a number from 0; 0 is greedy", lambda value: value >= 0),
        "top_p": ("a number above 0 and up to 1; 1 keeps all", lambda value: 0 < value <= 1),
        "min_p": ("a number from 0 to 1; 0 keeps all", lambda value: 0 <= value <= 1),
        "repetition_penalty": ("a number above 0; 1 is no penalty", lambda value: value > 0),
    }
    checked: dict[str, Any] = {
        name: number(name, getattr(config, name), *limits) for name, limits in ranges.items()
    }
    if config.top_k is not None:
        checked["top_k"] = whole("top_k", config.top_k, 1, "None keeps all tokens.")
    if config.seed is not None:
        checked["seed"] = whole("seed", config.seed, 0, "None leaves the draws to chance.")
    one_of("rule", config.rule, RULES)
    one_of("proposal", config.proposal, PROPOSALS)
    for name, greedy in (("rule", "match"), ("proposal", "argmax")):
        asked = getattr(config, name)
        if checked["temperature"] == 0 and asked != greedy:
            raise ValueError(
                f"{name} is {asked!r}, but the temperature is 0, where nothing is drawn. "
                f"Use {name}={greedy!r}, or a temperature above 0."
            )
    if not isinstance(config.probabilities, bool):
        raise ValueError(f"probabilities is {config.probabilities!r}; expected True or False.")
    return checked


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
    device: str = "auto"  # "auto": a GPU if there is one (torch: cuda or mps, mlx: gpu), else cpu
    draft_bits: int | None = None  # 4 or 8 quantises the draft; mlx only

    def __post_init__(self) -> None:
        one_of("backend", self.backend, BACKENDS)
        one_of("dtype", self.dtype, DTYPES)
        if not re.fullmatch(DEVICES[self.backend], self.device):
            raise ValueError(
                f"device is {self.device!r}; with torch expected auto, cpu, mps, cuda or "
                "cuda:NUMBER, with mlx auto, cpu or gpu."
            )
        if self.draft_bits not in (None, *DRAFT_BITS):
            raise ValueError(f"draft_bits is {self.draft_bits!r}; expected 4, 8 or None.")
        if self.draft_bits is not None and self.backend != "mlx":
            raise ValueError(
                f"draft_bits is {self.draft_bits}, but only mlx quantises a draft. Use "
                "backend='mlx', or leave draft_bits out."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """How one prompt is decoded."""

    block_size: int | None = None  # anchor included; None takes the draft's own
    block_size_source: str = "argument"  # who named it, a key of BLOCK_SIZE_SOURCES
    draft_window: int | None = None  # committed positions the draft may see
    max_new_tokens: int = 128
    stop_tokens: tuple[int, ...] = ()  # in addition to the target's own
    stop_strings: tuple[str, ...] = ()  # the text ends before the first that is complete
    ignore_end: bool = False  # go on past the target's own end tokens
    min_new_tokens: int = 0  # go on past every stop token until there are so many
    temperature: float = 0.0  # 0 is greedy: top_k, top_p and min_p always leave the best token
    top_k: int | None = None  # so many of the likeliest tokens
    top_p: float = 1.0  # the likeliest tokens up to this sum, the one that crosses it included
    min_p: float = 0.0  # no token below this share of the likeliest one's probability
    repetition_penalty: float = 1.0  # of tokens seen: logits above 0 over it, the others times it
    seed: int | None = None  # of random draws; None: one is chosen, and the trace says which
    rule: str = "match"  # or "rejection", at temperatures above 0
    proposal: str = "argmax"  # or "sample", at temperatures above 0
    probabilities: bool = False  # record the draft's and the target's of each drafted token
    timing: str = "whole"  # "stages" synchronises the device between stages
    beyond_trained: bool = False  # insist on a block size above the trained one
    policy: Any = None  # chooses sizes up to block_size, and rows to verify: see policies.py

    def __post_init__(self) -> None:
        check_policy(self.policy)
        one_of("block_size_source", self.block_size_source, tuple(BLOCK_SIZE_SOURCES))
        if self.block_size is not None:
            object.__setattr__(self, "block_size", check_block_size(self.block_size))
        object.__setattr__(self, "draft_window", check_window(self.draft_window))
        limit = whole("max_new_tokens", self.max_new_tokens, 1, "Ask for one token at least.")
        object.__setattr__(self, "max_new_tokens", limit)
        check_shortest(self)
        listed("stop_tokens", self.stop_tokens)
        stops = tuple(whole("stop_tokens", stop, 0, "They are ids.") for stop in self.stop_tokens)
        object.__setattr__(self, "stop_tokens", stops)
        object.__setattr__(self, "stop_strings", check_stop_strings(self.stop_strings))
        for name, value in check_sampling(self).items():
            object.__setattr__(self, name, value)
        one_of("timing", self.timing, TIMINGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepConfig:
    """A grid of block sizes and draft windows over one set of prompts."""

    pair: str | PairSpec = "smollm2"
    backend: str = "torch"  # backend, dtype and device hold where `pair` is a name
    dtype: str = "auto"
    device: str = "auto"
    block_sizes: tuple[int, ...] = (1, 2, 4, 6, 8, 12, 16)
    block_size_source: str = "sweep"  # who named them, a key of BLOCK_SIZE_SOURCES
    draft_windows: tuple[int | None, ...] = (None,)
    windowed_block_sizes: tuple[int, ...] | None = None  # sizes for windows other than the first
    policies: tuple[Any, ...] = (None,)  # objects, or text as `policies.read_policy` takes it
    plain_dtypes: tuple[str, ...] = ()  # plain decoding in these dtypes too, interleaved
    library_baseline: bool = False  # the library's own generator, interleaved
    lookup_baseline: bool = False  # that generator with prompt lookup, interleaved; torch only
    prompts: str = "mini"  # bundled set, public set or file, as `load_prompts` takes them
    template: str | None = None  # makes the prompt of a row's columns
    random_state: int | None = None  # draws the order of the prompts; None keeps the file's
    categories: tuple[str, ...] | None = None
    max_prompts: int | None = None
    max_new_tokens: int = 96
    min_new_tokens: int = 0  # as in DecodeConfig
    chat: bool = True
    thinking: bool | None = None
    temperature: float = 0.0  # this and the next ones as in DecodeConfig
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0  # of every prompt's first decode; each repeat has the next one
    rule: str = "match"
    proposal: str = "argmax"
    probabilities: bool = False
    timing: str = "whole"
    repeats: int = 1
    warm_up: bool = True
    first_again: bool = False  # the first cell's prompts once more at the end: did times drift?
    beyond_trained: bool = False

    def __post_init__(self) -> None:
        for name in ("block_sizes", "draft_windows", "plain_dtypes", "policies"):
            listed(name, getattr(self, name))
        one_of("block_size_source", self.block_size_source, tuple(BLOCK_SIZE_SOURCES))
        if not self.block_sizes:
            raise ValueError("block_sizes is empty; name one size at least, 1 is plain decoding.")
        for size in (*self.block_sizes, *(self.windowed_block_sizes or ())):
            check_block_size(size)
        if not self.draft_windows:
            raise ValueError("draft_windows is empty; use (None,) for no window.")
        for window in self.draft_windows:
            check_window(window)
        if not self.policies:
            raise ValueError("policies is empty; use (None,) for blocks of one size throughout.")
        for policy in self.policies:
            if not isinstance(policy, str):
                check_policy(policy)
        whole("max_new_tokens", self.max_new_tokens, 1, "Ask for one token at least.")
        check_shortest(self)
        whole("repeats", self.repeats, 1, "Every prompt is decoded that many times a cell.")
        if self.max_prompts is not None:
            whole("max_prompts", self.max_prompts, 1, "None takes every prompt of the set.")
        if self.random_state is not None:
            whole("random_state", self.random_state, 0, "None keeps the order of the file.")
        one_of("backend", self.backend, BACKENDS)
        one_of("timing", self.timing, TIMINGS)
        if self.seed is None:
            raise ValueError("seed is None; a sweep can be repeated, so name one, 0 for example.")
        for name, value in check_sampling(self).items():
            object.__setattr__(self, name, value)
        libraries = self.library_baseline or self.lookup_baseline
        if libraries and (self.temperature, self.repetition_penalty) != (0, 1):
            raise ValueError(
                "the library's generator is timed greedy and without a penalty; sweep at "
                "temperature 0 with repetition_penalty 1, or without library_baseline and "
                "lookup_baseline."
            )
        for dtype in (self.dtype, *self.plain_dtypes):
            one_of("dtype", dtype, DTYPES)
        if self.categories is not None and not self.categories:
            raise ValueError("categories is empty; None takes every category.")
        if libraries and self.timing == "stages":
            raise ValueError(
                "the library's generator has no stages to time; sweep with timing='whole', or "
                "without library_baseline and lookup_baseline."
            )
        if isinstance(self.pair, PairSpec):
            defaults = ("torch", "auto", "auto")
            if (self.backend, self.dtype, self.device) != defaults:
                raise ValueError(
                    "backend, dtype and device stand in the PairSpec; give them there alone."
                )


def read_sweep(path: str | Path) -> SweepConfig:
    """The sweep that a .toml or .json file describes.

    Its keys are fields of `SweepConfig`; `pair` may be a table of the fields of `PairSpec`, and
    "full" among `draft_windows` is no window. Raises ValueError naming the file, FileNotFoundError.
    """
    path = Path(path)
    reader = {".toml": tomllib.loads, ".json": json.loads}.get(path.suffix)
    if reader is None:
        raise ValueError(f"the sweep file is {str(path)!r}; expected a .toml or .json file.")
    try:
        raw = reader(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds a {type(raw).__name__}; expected a table of settings.")
    known = {item.name for item in fields(SweepConfig)} - {"block_size_source"}
    if unknown := sorted(set(raw) - known):
        listing = ", ".join(sorted(known))
        raise ValueError(f"{path} has unknown settings {', '.join(unknown)}; known are {listing}.")
    if isinstance(raw.get("draft_windows"), list):  # TOML has no word for nothing
        raw["draft_windows"] = [None if w == "full" else w for w in raw["draft_windows"]]
    try:
        if isinstance(raw.get("pair"), dict):
            raw["pair"] = PairSpec(**raw["pair"])
        return SweepConfig(**raw)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
