"""From the settings of a sweep to its cells, each with a request that says all of it."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from dflash_lab.backends import LIBRARIES, LOOKUP, LOOKUP_TOKENS, OWN
from dflash_lab.config import SAMPLING, DecodeConfig, SweepConfig
from dflash_lab.decoding import check_prompt, resolve_request
from dflash_lab.load import Pair
from dflash_lab.policies import describe_policy, policy_label, read_policy
from dflash_lab.prompts import Prompt, load_prompts
from dflash_lab.provenance import hardware, pair_names, short_name
from dflash_lab.store import SCHEMA, cell_id
from dflash_lab.sweeps.pairs import Pairs


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
    shared = shared_request(config, pairs.first) | {
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


def shared_request(config: SweepConfig, pair: Pair) -> dict[str, Any]:
    """What the requests of all cells have in common; no path and no host in it."""
    facts = pair.models.describe()
    return {
        "schema": SCHEMA,
        **pair_names(pair),
        "device": pair.models.device,
        "template_sha": pair.fingerprint.get("template"),
        "temperature": config.temperature,
        **drawn_how(config),
        "max_new_tokens": config.max_new_tokens,
        **({"min_new_tokens": config.min_new_tokens} if config.min_new_tokens else {}),
        "chat": config.chat,
        "repeats": config.repeats,
        "attention": facts.get("attention"),
        "hardware": hardware(facts.get("gpu"))["class"],
    }


def prompts_of(config: SweepConfig) -> list[Prompt]:
    """The prompts that a sweep decodes, in order."""
    return load_prompts(
        config.prompts,
        config.categories,
        config.max_prompts,
        random_state=config.random_state,
        template=config.template,
    )


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
