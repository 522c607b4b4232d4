"""The target in torch: logits and features of new tokens, a cache, and taking tokens back.

A target's family shows in four places only: where its layers and its head are (`TorchTarget`), what
it makes of its embedding (`scaled_embedding`), what each layer keeps of a text (`layer_memories`)
and what cannot be decoded in blocks (`refuse_by_name`, and `self_test` for what no name tells).
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)
from transformers.utils import logging as transformers_logging

from dflash_lab.backends import TargetNotFinite, TargetNotReversible, UnsupportedTarget
from dflash_lab.backends.torch_recurrent import RecurrentCache, is_delta_net, mixer, remembered

DECODABLE = (
    "Targets of the Llama, Qwen2, Qwen3 (dense and MoE), Qwen3-Next, Qwen3.5, Gemma 2 and 3 "
    "(text) and gpt-oss kinds can be decoded."
)
SPARE = 64  # rows that a full buffer grows by at least
# Rows of a cached step and how many of them stay: 28 tokens, in steps below and above NARROW.
STEPS = ((5, 5), (6, 2), (9, 9), (8, 3), (1, 1), (20, 4), (1, 1), (3, 3))
NARROW = 8  # window of sliding layers in the self-test, so that a short text is past it
# How far the logits of cached steps may be from those of reading the text at once, on average and
# relative to how much they vary. Rounding makes 0.05 of bfloat16 in 30 layers; one wrong row of the
# cache makes 0.3 and more.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
TOLERANCE_16 = 0.2


class TorchTarget:
    """A causal language model of transformers, loaded once and shared by many sessions.

    Raises `UnsupportedTarget` or `TargetNotReversible` for a model that cannot be decoded in
    blocks: a few cached steps on random tokens are compared with reading the text at once.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model.eval().requires_grad_(False)
        self.config = model.config
        self.layers: nn.ModuleList = getattr(model.base_model, "layers", None)
        self.head: nn.Module = model.get_output_embeddings()
        if self.layers is None or self.head is None:
            raise UnsupportedTarget(
                f"{type(model).__name__} has no decoder layers or no head where a causal language "
                f"model has them. {DECODABLE}"
            )
        refuse_by_name(model)
        self.windows, self.recurrent = layer_memories(model, self.layers)
        # forward's keyword for the cache was renamed in transformers 5.24
        names = inspect.signature(type(model).forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self.lock = threading.Lock()  # hooks see every pass, so passes with hooks go one at a time
        self.embedding: nn.Module = scaled_embedding(model)
        self.hidden_size: int = self.config.hidden_size
        self.context_limit: int = self.config.max_position_embeddings
        self_test(self)

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    def new_cache(self) -> Cache:
        """An empty cache for one text; the session that asks owns it."""
        layers: list[LayerCache | RecurrentCache] = [LayerCache(window) for window in self.windows]
        for number, (net, states) in self.recurrent.items():
            layers[number] = RecurrentCache(net, states)
        return Cache(layers=layers)

    @torch.inference_mode()
    def logits(
        self, ids: Tensor, cache: Cache, taps: Sequence[int], last_only: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [seq, rows, vocab] of new tokens and their features [seq, new, taps * hidden].

        Features are None where no taps are asked for: plain decoding pays for none. Tokens read
        with `last_only` are there to stay: a recurrent layer cannot give them back.
        """
        with (
            self.lock,
            captured(self.layers, taps) as features,
            remembered(cache, all_stay=last_only),
        ):
            out = self.model(
                input_ids=ids, use_cache=True, logits_to_keep=int(last_only), **self.cached(cache)
            )
            return out.logits, features() if taps else None

    def read(self, ids: Tensor, taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Final states and features of whole texts [seq, length], without a cache."""
        with self.lock, captured(self.layers, taps) as features:
            states = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            return states, features()

    def next_logits(self, states: Tensor) -> Tensor:
        """The model's word on its final states: its head, and its softcap where it has one."""
        logits, cap = self.head(states), getattr(self.config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def cached(self, cache: Cache) -> dict[str, Any]:
        """The cache under the name that this model's forward has for it.

        Raises `UnsupportedTarget` for a cache that does not know which layers see a window: the
        model would let them see everything.
        """
        if cache.is_sliding != [window is not None for window in self.windows]:
            raise UnsupportedTarget(
                f"{type(self.model).__name__} has layers that see a window only, and this cache "
                "keeps none. Where full attention in every layer is needed, take another target."
            )
        return {self._cache_name: cache}


@contextmanager
def captured(layers: nn.ModuleList, taps: Sequence[int]) -> Iterator[Any]:
    """Read the output of the tapped layers during one pass; no hook outlives it.

    Tap `i` is the residual stream after the 0-based layer `i`, before any final norm.
    """
    outputs: dict[int, Tensor] = {}

    handles = [layers[tap].register_forward_hook(partial(_keep, outputs, tap)) for tap in taps]
    try:
        yield lambda: torch.cat([outputs[tap] for tap in taps], dim=-1)
    finally:
        for handle in handles:
            handle.remove()


def _keep(outputs: dict[int, Tensor], tap: int, module: nn.Module, args: Any, output: Any) -> None:
    outputs[tap] = output[0] if isinstance(output, tuple) else output


class LayerCache(CacheLayerMixin):
    """Keys and values of one layer, those that a row to come may still see.

    New rows are written into a buffer with room to spare, so that a step copies its own rows alone;
    taking rows back moves a number. A layer with a window hands out the rows inside it, and forgets
    older ones only where the buffer is full: those before the window of the step then at hand.
    """

    def __init__(self, window: int | None):
        super().__init__()
        self.window = window
        self.is_sliding = window is not None  # the library's masks ask for this
        self.length = 0  # positions in the cache
        self.first = 0  # position of the first row that is held
        self._buffers: tuple[Tensor, ...] = ()

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add rows [seq, heads, new, dim]; what they may see, themselves included."""
        seen, end = self._seen_from(self.length), self.length + key_states.shape[2]
        if not self._buffers or end - self.first > self._buffers[0].shape[2]:
            self._make_room((key_states, value_states), seen)
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer.narrow(2, self.length - self.first, new.shape[2]).copy_(new)
        self._hold(end)
        if seen == self.first:
            return self.keys, self.values
        return self.keys[:, :, seen - self.first :], self.values[:, :, seen - self.first :]

    def take_back(self, tokens: int) -> None:
        """Remove the last rows; an error where their windows reach before what is still held."""
        length = self.length - tokens
        if length < 0 or self._seen_from(length) < self.first:
            raise TargetNotReversible(
                f"{tokens} tokens cannot be taken back from {self.length}: this layer sees "
                f"{self.window} positions and holds those from {self.first} on."
            )
        if tokens:
            self._hold(length)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        seen = self._seen_from(self.length)
        return self.length - seen + query_length, seen

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1  # none

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def _seen_from(self, position: int) -> int:
        """The first position that a row at `position` sees."""
        return 0 if self.window is None else max(0, position - self.window + 1)

    def _hold(self, length: int) -> None:
        self.length = length
        keys, values = self._buffers
        self.keys = keys.narrow(2, 0, length - self.first)
        self.values = values.narrow(2, 0, length - self.first)

    def _make_room(self, new: tuple[Tensor, Tensor], seen: int) -> None:
        kept = self.length - seen
        needed = kept + new[0].shape[2]
        room = needed + max(SPARE, needed // 2)
        grown = tuple(t.new_empty((*t.shape[:2], room, t.shape[3])) for t in new)
        if kept:
            for buffer, held in zip(grown, (self.keys, self.values), strict=True):
                buffer[:, :, :kept] = held[:, :, seen - self.first :]
        self._buffers, self.first = grown, seen


def take_back(cache: Cache, tokens: int) -> None:
    """Remove the last `tokens` positions from a cache, all of them or an error."""
    before = cache.get_seq_length()
    if not 0 <= tokens <= before:
        raise ValueError(f"cannot take {tokens} tokens back from a cache that holds {before}.")
    for layer in cache.layers:
        if not isinstance(layer, LayerCache | RecurrentCache):
            raise TargetNotReversible(
                f"tokens cannot be taken back from a {type(layer).__name__}; take a cache of "
                "the target's own, made by new_cache()."
            )
        layer.take_back(tokens)
    for number, layer in enumerate(cache.layers):
        if layer.get_seq_length() != before - tokens:
            raise TargetNotReversible(
                f"layer {number} holds {layer.get_seq_length()} positions after {tokens} of "
                f"{before} were taken back; decoding would go on from rejected tokens."
            )


def layer_memories(
    model: PreTrainedModel, decoder_layers: nn.ModuleList
) -> tuple[tuple[int | None, ...], dict[int, tuple[nn.Module, int]]]:
    """How many positions each layer sees, and by number the recurrent ones: net and states.

    A row's own position is among those it sees; None is all. Raises `TargetNotReversible` naming
    the first kind of state that cannot be taken back.
    """
    try:
        layers = DynamicCache(config=model.config).layers
    except KeyError as error:
        raise _irreversible(model, f"{error.args[0]} layers") from error
    windows: list[int | None] = [None] * len(layers)
    recurrent: dict[int, tuple[nn.Module, int]] = {}
    for number, layer in enumerate(layers):
        if type(layer) is DynamicSlidingWindowLayer:
            windows[number] = layer.sliding_window
        elif type(layer) is not DynamicLayer:
            net, kind = mixer(decoder_layers[number]), type(layer)
            if kind is not LinearAttentionLayer or not is_delta_net(net):
                raise _irreversible(model, f"the state of {type(net).__name__} ({kind.__name__})")
            recurrent[number] = net, layer.number_of_states
    masked = getattr(model.config, "sliding_window", None)
    if odd := sorted({window for window in windows if window is not None} - {masked}):
        raise _irreversible(
            model, f"layers that see {odd[0]} positions by another rule than one sliding window"
        )
    return tuple(windows), recurrent


def refuse_by_name(model: PreTrainedModel) -> None:
    """Raise `TargetNotReversible` for what a short text would not show.

    Past its original length, longrope turns a whole pass by other frequencies: keys of rejected and
    of earlier rows would depend on where a block ended.
    """
    rope = getattr(model.config, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):
        if isinstance(part, dict) and part.get("rope_type") == "longrope":
            raise _irreversible(model, "a rope (longrope) that depends on where a pass ends")


def not_finite(dtype: torch.dtype) -> TargetNotFinite:
    """The error for logits that are not finite, with the way out in that dtype."""
    ways = {
        torch.float16: "Its numbers overflow: load it with dtype='bfloat16' or 'float32'.",
        torch.bfloat16: "Load it with dtype='float32'; if that does not help, take a new copy.",
    }
    way = ways.get(dtype, "Its weights are damaged: take a new copy of its folder.")
    return TargetNotFinite(f"the target's logits are not finite numbers in {_name(dtype)}. {way}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _irreversible(model: PreTrainedModel, what: str) -> TargetNotReversible:
    return TargetNotReversible(
        f"{type(model).__name__} has {what}, and tokens cannot be taken back from it. {DECODABLE}"
    )


class ScaledEmbedding(nn.Module):
    """An embedding that its model multiplies only after looking it up (Granite, older Gemma)."""

    def __init__(self, embedding: nn.Module, scale: float):
        super().__init__()
        self.embedding, self.scale = embedding, scale

    @property
    def weight(self) -> Tensor:
        return self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(ids) * self.scale


@torch.inference_mode()
def scaled_embedding(model: PreTrainedModel) -> nn.Module:
    """What turns ids into the input of the model's first layer, its family's scale included once.

    The scale is measured, so no family is asked for by name. Raises `UnsupportedTarget` where that
    input is not a multiple of the embedding: a draft could not be fed.
    """
    embedding, seen = model.get_input_embeddings(), []
    ids = _random_ids(embedding, 16)
    # not output_hidden_states=True: transformers' own hooks for that stay on the model for ever
    first = model.base_model.layers[0]
    hook = first.register_forward_pre_hook(
        lambda layer, args, named: seen.append(args[0] if args else named["hidden_states"]),
        with_kwargs=True,
    )
    try:
        model(input_ids=ids, use_cache=False)
    finally:
        hook.remove()
    found, wanted = embedding(ids).float(), seen[0].float()
    scale = float((found * wanted).sum() / found.square().sum())
    if not (wanted - scale * found).norm() < 0.02 * wanted.norm():
        raise UnsupportedTarget(
            f"the first layer of {type(model).__name__} reads something else than a multiple of "
            f"the embedding, and a draft borrows the embedding alone. {DECODABLE}"
        )
    return embedding if abs(scale - 1) < 1e-3 else ScaledEmbedding(embedding, scale)


def _random_ids(embedding: nn.Module, count: int) -> Tensor:
    dice = torch.Generator().manual_seed(0)
    ids = torch.randint(embedding.weight.shape[0], (1, count), generator=dice)
    return ids.to(embedding.weight.device)


def self_test(target: TorchTarget) -> None:
    """Raise `TargetNotReversible` unless cached steps say what reading the text at once says.

    Steps of one and of many tokens, tokens taken back, and text past a sliding window, which is
    made narrow for the while.
    """
    try:
        with narrowed(target, NARROW):
            _compare_steps(target)
    except (UnsupportedTarget, TargetNotReversible, TargetNotFinite, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever the installed model code makes of a cached step
        raise TargetNotReversible(
            f"{type(target.model).__name__} cannot be decoded in blocks: a cached step of it "
            f"fails with {type(error).__name__}: {error} {DECODABLE}"
        ) from error


@torch.inference_mode()
def _compare_steps(target: TorchTarget) -> None:
    ids = _random_ids(target.embedding, 40)
    wanted = target.model(input_ids=ids, use_cache=False).logits[0].float()
    cache, start = target.new_cache(), 0
    apart: list[tuple[float, int, int]] = []
    for rows, kept in STEPS:
        step = ids[:, start : start + rows].clone()
        step[:, kept:] = (step[:, kept:] + 1) % target.embedding.weight.shape[0]
        logits, _ = target.logits(step, cache, ())
        take_back(cache, rows - kept)
        found = distance(logits[0, :kept].float(), wanted[start : start + kept])
        apart.append((found, rows, start))
        start += kept
    mean, allowed = sum(found for found, *_ in apart) / len(apart), _tolerance(target.dtype)
    if not mean < float("inf"):
        raise not_finite(target.dtype)
    if mean > allowed:
        worst, rows, start = max(apart)
        raise TargetNotReversible(
            f"{type(target.model).__name__} cannot be decoded in blocks by its installed code: "
            f"cached steps say other than reading the text at once ({mean:.2g} apart on average, "
            f"{allowed:g} allowed in {_name(target.dtype)}; {worst:.2g} in a step of {rows} tokens "
            f"at position {start}). {DECODABLE}"
        )


def _tolerance(dtype: torch.dtype) -> float:
    return TOLERANCE.get(dtype, TOLERANCE_16)


def distance(found: Tensor, wanted: Tensor) -> float:
    """Mean distance of rows of logits, relative to how much the wanted ones vary."""
    spread = (wanted - wanted.mean(-1, keepdim=True)).norm(dim=-1).clamp_min(1e-30)
    return float(((found - wanted).norm(dim=-1) / spread).mean())


@contextmanager
def narrowed(target: TorchTarget, window: int) -> Iterator[None]:
    """The target with sliding windows of at most that size: in masks, kernels and new caches."""
    wide, own = target.windows, getattr(target.config, "sliding_window", None)
    if not any(wide):
        yield
        return
    parts = [part for part in target.model.modules() if getattr(part, "sliding_window", None)]
    holders = (target.config, *parts)
    try:
        for holder in holders:
            holder.sliding_window = min(window, own)
        target.windows = tuple(None if size is None else min(window, own) for size in wide)
        yield
    finally:
        for holder in holders:
            holder.sliding_window = own
        target.windows = wide


def load_target(folder: Path, dtype: torch.dtype, device: torch.device) -> TorchTarget:
    """The target of a model folder; raises `UnsupportedTarget` unless every weight is there."""
    bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        model, told = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # the loaders raise their own kinds for each sort of damage
        raise UnsupportedTarget(f"the target in {folder} cannot be loaded: {error}") from error
    finally:
        if bar:
            transformers_logging.enable_progress_bar()
    lacking = sorted(map(str, (*told["missing_keys"], *told["mismatched_keys"])))
    if lacking:
        raise UnsupportedTarget(
            f"the target in {folder} lacks weights, or has them in another shape: "
            f"{', '.join(lacking)}. They would be random numbers; take a complete folder."
        )
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # some releases take sdpa, which caps nothing
    return TorchTarget(model.to(device))
