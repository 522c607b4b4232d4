"""The target in MLX: logits and features of new tokens, a cache, and taking tokens back.

A target's family shows in five places only: where its layers and its head are (`MlxTarget`), what
it makes of its embedding (`scaled_embedding`), what each layer keeps of a text (`layer_memories`),
what cannot be decoded in blocks (`refuse_by_name`, and `self_test` for what no name tells), and how
mlx-lm wants its configuration spelled (`spelled_for_mlx`).
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import (
    ArraysCache,
    KVCache,
    RotatingKVCache,
    create_attention_mask,
    make_prompt_cache,
    trim_prompt_cache,
)
from mlx_lm.utils import load_model

from dflash_lab.backends import TargetNotFinite, TargetNotReversible, UnsupportedTarget
from dflash_lab.backends.mlx_recurrent import RecurrentCache, has_delta_net

Array = mx.array
Parts = list[KVCache | RecurrentCache]  # a part a layer
DECODABLE = (
    "Targets of the Llama, Qwen2, Qwen3 (dense and MoE), Qwen3-Next, Qwen3.5, Gemma 2 and 3 "
    "(text) and gpt-oss kinds can be decoded."
)
# Rows of a cached step and how many of them stay: 28 tokens, in steps below and above NARROW.
STEPS = ((5, 5), (6, 2), (9, 9), (8, 3), (1, 1), (20, 4), (1, 1), (3, 3))
NARROW = 8  # window of sliding layers in the self-test, so that a short text is past it
# How far the logits of cached steps may be from those of reading the text at once, on average and
# relative to how much they vary. Rounding makes 0.05 of bfloat16 in 30 layers; one wrong row of the
# cache makes 0.3 and more.
TOLERANCE = {mx.float32: 1e-3}
TOLERANCE_16 = 0.2


class MlxTarget:
    """A causal language model of mlx-lm, loaded once and shared by many sessions.

    Its weights are in memory, so any thread may open sessions on it; each session keeps to one.
    Raises `UnsupportedTarget` or `TargetNotReversible` for a model that cannot be decoded in
    blocks: a few cached steps on random tokens are compared with reading the text at once.
    """

    def __init__(
        self, model: nn.Module, config: Mapping[str, Any], dtype: mx.Dtype, device: mx.DeviceType
    ):
        self.model = model
        self.config = config.get("text_config") or config
        self.dtype, self.device = dtype, device  # what is computed in; weights may be quantised
        parts = [part for _, part in model.named_modules()]
        body = next((part for part in parts if {"layers", "embed_tokens"} <= part.keys()), None)
        if body is None:
            raise UnsupportedTarget(
                f"mlx-lm's {kind(model)} has no decoder layers or no embedding where a causal "
                f"language model has them. {DECODABLE}"
            )
        self.layers: list[nn.Module] = body.layers
        heads = [part.lm_head for part in parts if "lm_head" in part]
        self.head: Callable[[Array], Array] = heads[0] if heads else body.embed_tokens.as_linear
        refuse_by_name(model)
        self.windows, self.recurrent = layer_memories(model, self.layers)
        self.lock = threading.Lock()  # a watched layer sees every pass, so passes go one at a time
        for key in ("hidden_size", "max_position_embeddings"):
            if key not in self.config:
                raise UnsupportedTarget(
                    f"the configuration of mlx-lm's {kind(model)} has no {key}."
                )
        self.hidden_size: int = self.config["hidden_size"]
        self.context_limit: int = self.config["max_position_embeddings"]
        if not any(self.windows) and (window := unheeded_window(self.config)) is not None:
            self.context_limit = min(self.context_limit, window)
        with mx.stream(device):
            self.embedding = scaled_embedding(model, body)
            self_test(self)

    def new_cache(self) -> Parts:
        """An empty cache for one text, a part a layer; the session that asks owns it."""
        parts: Parts = [KVCache() if size is None else WindowCache(size) for size in self.windows]
        for number, (layer, states) in self.recurrent.items():
            parts[number] = RecurrentCache(layer, states)
        return parts

    def logits(self, ids: Array, cache: Parts, taps: Sequence[int]) -> tuple[Array, Array | None]:
        """Logits [seq, new, vocab] of new tokens and their features [seq, new, taps * hidden].

        Features are None where no taps are asked for. Nothing is computed until it is asked for:
        rows of logits that nobody reads cost nothing where the cache alone is evaluated.
        """
        with (
            self.lock,
            captured(self.layers, taps) as features,
            remembered(self.layers, cache),
        ):
            out = self.model(ids, cache=cache)
            return out, features() if taps else None


class Watched:
    """A layer that shows what went in and what came out; in all else it is the layer."""

    def __init__(self, layer: nn.Module | Watched, show: Callable[[Array, Any], None]):
        self._layer, self._show = layer, show

    def __call__(self, x: Array, *args: Any, **settings: Any) -> Any:
        output = self._layer(x, *args, **settings)
        self._show(x, output)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


@contextmanager
def watched(
    layers: list[nn.Module | Watched], shows: Mapping[int, Callable[[Array, Any], None]]
) -> Iterator[None]:
    """Watch some layers of a list during one pass, again too; afterwards it is as it was."""
    before = list(layers)
    for number, show in shows.items():
        layers[number] = Watched(layers[number], show)
    try:
        yield
    finally:
        layers[:] = before


@contextmanager
def captured(layers: list[nn.Module], taps: Sequence[int]) -> Iterator[Any]:
    """Read the output of the tapped layers during one pass; no watched layer outlives it.

    Tap `i` is the residual stream after the 0-based layer `i`, before any final norm.
    """
    outputs: dict[int, Array] = {}

    with watched(layers, {tap: partial(_keep, outputs, tap) for tap in taps}):
        yield lambda: mx.concatenate([outputs[tap] for tap in taps], axis=-1)


def _keep(outputs: dict[int, Array], tap: int, x: Array, output: Any) -> None:
    outputs[tap] = output[0] if isinstance(output, tuple) else output


@contextmanager
def remembered(layers: list[nn.Module | Watched], cache: Parts) -> Iterator[None]:
    """Let the recurrent parts of a cache know how their step begins."""
    parts = {n: part for n, part in enumerate(cache) if isinstance(part, RecurrentCache)}
    shows = {n: partial(_begin, part, list(part.cache)) for n, part in parts.items()}
    with watched(layers, shows):
        yield


def _begin(part: RecurrentCache, before: list[Any], x: Array, output: Any) -> None:
    part.begin(x, before)


def let_stay(cache: Parts) -> None:
    """Forget how the last step began: a prompt's rows stay and need not be held in memory.

    Called before anything is computed, it spares them altogether.
    """
    for part in cache:
        if isinstance(part, RecurrentCache):
            part.begin(None, [])


class WindowCache(KVCache):
    """Keys and values of a layer with a window, those that a row to come may still see.

    mlx-lm's own rotates in place: past its window the rows that a draft wrote over are lost, and
    after a long step it holds more than its window. Here the last step can always be taken back.
    """

    def __init__(self, window: int):
        super().__init__()
        self.window = window
        self.first = 0  # position of the first row that is held

    def update_and_fetch(self, keys: Array, values: Array) -> tuple[Array, Array]:
        """Add rows [seq, heads, new, dim]; what they may see, themselves included."""
        seen = self._seen_from(self.offset)
        if self.keys is not None:
            part = slice(seen - self.first, self.offset - self.first)
            keys = mx.concatenate((self.keys[:, :, part], keys), axis=2)
            values = mx.concatenate((self.values[:, :, part], values), axis=2)
        self.keys, self.values, self.first = keys, values, seen
        self.offset = seen + keys.shape[2]
        return keys, values

    def trim(self, n: int) -> int:
        """Remove the last rows; none where their windows reach before what is still held."""
        if n > self.offset or self._seen_from(self.offset - n) < self.first:
            return 0
        self.offset -= n
        return n

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> Any:  # called with these names; the window is the layer's own
        before = self.offset - self._seen_from(self.offset)
        window = self.window if before + N > self.window else None
        return create_attention_mask(N, before, return_array, window)

    def _seen_from(self, position: int) -> int:
        """The first position that a row at `position` sees."""
        return max(0, position - self.window + 1)


def take_back(cache: Parts, tokens: int) -> None:
    """Remove the last `tokens` positions from a cache, all of them or an error.

    What recurrent layers must compute for it is begun at once: it is a part of taking back.
    """
    before = cache[0].offset
    if not 0 <= tokens <= before:
        raise ValueError(f"cannot take {tokens} tokens back from a cache that holds {before}.")
    if tokens:
        trim_prompt_cache(cache, tokens)
        mx.async_eval([part.cache for part in cache if isinstance(part, RecurrentCache)])
    for number, part in enumerate(cache):
        if part.offset != before - tokens:
            raise TargetNotReversible(
                f"layer {number} holds {part.offset} positions after {tokens} of {before} were "
                "taken back; decoding would go on from rejected tokens."
            )


def layer_memories(
    model: nn.Module, layers: list[nn.Module]
) -> tuple[tuple[int | None, ...], dict[int, tuple[nn.Module, int]]]:
    """How many positions each layer sees, and by number the recurrent ones: layer and states.

    A row's own position is among those it sees; None is all. Raises `TargetNotReversible` naming
    the first kind of state that cannot be taken back.
    """
    parts = make_prompt_cache(model)
    windows: list[int | None] = [None] * len(parts)
    recurrent: dict[int, tuple[nn.Module, int]] = {}
    for number, part in enumerate(parts):
        if type(part) is RotatingKVCache and part.keep == 0:
            windows[number] = part.max_size
        elif type(part) is ArraysCache and has_delta_net(layers[number]):
            recurrent[number] = layers[number], len(part.cache)
        elif type(part) is not KVCache:
            raise _irreversible(model, f"{type(part).__name__} state")
    return tuple(windows), recurrent


def unheeded_window(config: Mapping[str, Any]) -> int | None:
    """The window of a target whose layers all see everything in mlx-lm's code, though some slide.

    Up to that length the two are the same; beyond it mlx-lm's text would be another one.
    """
    kinds = config.get("layer_types")
    slides = "sliding_attention" in kinds if kinds else config.get("use_sliding_window", True)
    return config.get("sliding_window") if slides else None


def refuse_by_name(model: nn.Module) -> None:
    """Raise `TargetNotReversible` for what a short text would not show.

    Past its original length, a dynamic rope turns a whole pass by other frequencies: keys of
    rejected and of earlier rows would depend on where a block ended.
    """
    if any(type(part).__name__ == "DynamicNTKScalingRoPE" for _, part in model.named_modules()):
        raise _irreversible(model, "a rope (dynamic) that depends on where a pass ends")


def not_finite(dtype: mx.Dtype) -> TargetNotFinite:
    """The error for logits that are not finite, with the way out in that dtype."""
    ways = {
        mx.float16: "Its numbers overflow: load it with dtype='bfloat16' or 'float32'.",
        mx.bfloat16: "Load it with dtype='float32'; if that does not help, take a new copy.",
    }
    way = ways.get(dtype, "Its weights are damaged: take a new copy of its folder.")
    return TargetNotFinite(f"the target's logits are not finite numbers in {_name(dtype)}. {way}")


def out_of_memory(error: Exception) -> bool:
    """Whether MLX says, in one of its ways, that there is no memory left.

    Its CPU build says nothing: there the system ends the process.
    """
    return bool(re.search(r"allocate|insufficient memory|out ?of ?memory", str(error), re.I))


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")


def kind(model: nn.Module) -> str:
    """What mlx-lm calls a model: the name of its file."""
    return type(model).__module__.rpartition(".")[2]


def _irreversible(model: nn.Module, what: str) -> TargetNotReversible:
    return TargetNotReversible(
        f"mlx-lm's {kind(model)} has {what}, and tokens cannot be taken back from it. {DECODABLE}"
    )


class ScaledEmbedding(nn.Module):
    """An embedding that its model multiplies only after looking it up (Gemma)."""

    def __init__(self, embedding: nn.Module, scale: float):
        super().__init__()
        self.embedding, self.scale = embedding, scale

    @property
    def weight(self) -> Array:
        return self.embedding.weight

    def __call__(self, ids: Array) -> Array:
        return self.embedding(ids) * self.scale


def scaled_embedding(model: nn.Module, body: nn.Module) -> nn.Module:
    """What turns ids into the input of the model's first layer, its family's scale included once.

    The scale is measured, so no family is asked for by name. Raises `UnsupportedTarget` where that
    input is not a multiple of the embedding: a draft could not be fed.
    """
    embedding, seen = body.embed_tokens, []
    ids = _random_ids(embedding, 16)
    with watched(body.layers, {0: lambda x, output: seen.append(x)}):
        model(ids)
    found, wanted = embedding(ids).astype(mx.float32), seen[0].astype(mx.float32)
    scale = ((found * wanted).sum() / mx.square(found).sum()).item()
    if not (mx.linalg.norm(wanted - scale * found) < 0.02 * mx.linalg.norm(wanted)).item():
        raise UnsupportedTarget(
            f"the first layer of mlx-lm's {kind(model)} reads something else than a multiple of "
            f"the embedding, and a draft borrows the embedding alone. {DECODABLE}"
        )
    return embedding if abs(scale - 1) < 1e-3 else ScaledEmbedding(embedding, scale)


def _random_ids(embedding: nn.Module, count: int) -> Array:
    return mx.random.randint(0, embedding.weight.shape[0], (1, count), key=mx.random.key(0))


def self_test(target: MlxTarget) -> None:
    """Raise `TargetNotReversible` unless cached steps say what reading the text at once says.

    Steps of one and of many tokens, tokens taken back, and text past a sliding window, which is
    made narrow for the while.
    """
    try:
        with narrowed(target, NARROW):
            _compare_steps(target)
    except (UnsupportedTarget, TargetNotReversible, TargetNotFinite):
        raise
    except Exception as error:  # whatever the installed model code makes of a cached step
        if out_of_memory(error):
            raise
        raise TargetNotReversible(
            f"mlx-lm's {kind(target.model)} cannot be decoded in blocks: a cached step of it "
            f"fails with {type(error).__name__}: {error} {DECODABLE}"
        ) from error


def _compare_steps(target: MlxTarget) -> None:
    ids = _random_ids(target.embedding, 40)
    wanted = target.model(ids)[0].astype(mx.float32)
    cache, start = target.new_cache(), 0
    apart: list[tuple[float, int, int]] = []
    for rows, kept in STEPS:
        step = ids[:, start : start + rows]
        wrong = (step[:, kept:] + 1) % target.embedding.weight.shape[0]
        logits, _ = target.logits(mx.concatenate((step[:, :kept], wrong), axis=1), cache, ())
        take_back(cache, rows - kept)
        found = distance(logits[0, :kept].astype(mx.float32), wanted[start : start + kept])
        apart.append((found, rows, start))
        start += kept
    mean, allowed = sum(found for found, *_ in apart) / len(apart), _tolerance(target.dtype)
    if not mean < float("inf"):
        raise not_finite(target.dtype)
    if mean > allowed:
        worst, rows, start = max(apart)
        raise TargetNotReversible(
            f"mlx-lm's {kind(target.model)} cannot be decoded in blocks by its installed code: "
            f"cached steps say other than reading the text at once ({mean:.2g} apart on average, "
            f"{allowed:g} allowed in {_name(target.dtype)}; {worst:.2g} in a step of {rows} tokens "
            f"at position {start}). {DECODABLE}"
        )


def _tolerance(dtype: mx.Dtype) -> float:
    return TOLERANCE.get(dtype, TOLERANCE_16)


def distance(found: Array, wanted: Array) -> float:
    """Mean distance of rows of logits, relative to how much the wanted ones vary."""
    spread = mx.linalg.norm(wanted - wanted.mean(axis=-1, keepdims=True), axis=-1)
    apart = mx.linalg.norm(found - wanted, axis=-1)
    return (apart / mx.maximum(spread, 1e-30)).mean().item()


@contextmanager
def narrowed(target: MlxTarget, window: int) -> Iterator[None]:
    """The target with sliding windows of at most that size: in its masks and in new caches."""
    wide = target.windows
    holders = [
        (part, name, getattr(part, name))
        for _, part in target.model.named_modules()
        for name in ("window_size", "sliding_window")
        if getattr(part, name, None) in set(wide) - {None}
    ]
    try:
        for part, name, own in holders:
            setattr(part, name, min(window, own))
        target.windows = tuple(None if size is None else min(window, size) for size in wide)
        yield
    finally:
        for part, name, own in holders:
            setattr(part, name, own)
        target.windows = wide


def load_target(folder: Path, dtype: mx.Dtype, device: mx.DeviceType) -> MlxTarget:
    """The target of a model folder; raises `UnsupportedTarget` unless every weight is there."""
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        model, config = load_model(folder, lazy=True, model_config=spelled_for_mlx(raw))
        model.set_dtype(dtype)
        mx.eval(model.freeze().parameters())
    except Exception as error:  # the loaders raise their own kinds for each sort of damage
        raise UnsupportedTarget(f"the target in {folder} cannot be loaded: {error}") from error
    return MlxTarget(model, config, dtype, device)


def spelled_for_mlx(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a `config.json` under the names that mlx-lm's model files read.

    transformers 5 writes `rope_parameters`; most of those files know `rope_theta` and
    `rope_scaling` only and would rotate with a default base, without a word. It also counts experts
    by another name, says by `layer_types` what is a distance in mlx-lm's Gemma 3 and Qwen3-Next,
    and has a name of its own for a Qwen3.5 without its images.
    """
    changed: dict[str, Any] = {}
    if isinstance(raw.get("text_config"), Mapping):
        changed["text_config"] = {**raw["text_config"], **spelled_for_mlx(raw["text_config"])}
    rope = raw.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    changed |= {key: full[key] for key in ("rope_theta", "partial_rotary_factor") if key in full}
    if full.get("rope_type", "default") != "default":
        changed["rope_scaling"] = dict(full)
    if "sliding_attention" in rope:
        changed["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    if "num_local_experts" in raw:
        changed["num_experts"] = raw["num_local_experts"]
    name, layers = str(raw.get("model_type")), raw.get("layer_types") or ()
    if name.startswith("gemma3") and layers:
        changed["sliding_window_pattern"] = _full_layer_distance(layers)
    if "linear_attention" in layers:
        changed["full_attention_interval"] = _full_layer_distance(layers)
    if name.startswith("qwen3_5") and name.endswith("_text"):
        changed["model_type"] = name.removesuffix("_text")
    return changed


def _full_layer_distance(kinds: Sequence[str]) -> int:
    """After how many layers a full one comes; an error where they come at no fixed distance."""
    full = [kind == "full_attention" for kind in kinds]
    size = full.index(True) + 1 if any(full) else len(kinds) + 1
    if full != [i % size == size - 1 for i in range(len(kinds))]:
        raise UnsupportedTarget(
            f"layer_types is {list(kinds)}; mlx-lm knows full layers at a fixed distance only."
        )
    return size
