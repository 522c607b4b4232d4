"""The target in torch: logits and features of new tokens, a cache, and taking tokens back."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Cache, DynamicCache, PreTrainedModel
from transformers.utils import logging as transformers_logging


class UnsupportedTarget(ValueError):
    """A model whose layers, embedding or head are not where a causal language model has them."""


class TargetNotReversible(ValueError):
    """The target holds state that cannot be taken back after a rejected draft."""


class TorchTarget:
    """A causal language model of transformers, loaded once and shared by many sessions."""

    def __init__(self, model: PreTrainedModel):
        self.model = model.eval().requires_grad_(False)
        self.config = model.config
        self.layers: nn.ModuleList = getattr(model.base_model, "layers", None)
        self.embedding: nn.Module = model.get_input_embeddings()
        self.head: nn.Module = model.get_output_embeddings()
        if self.layers is None or self.head is None:
            raise UnsupportedTarget(
                f"{type(model).__name__} has no decoder layers or no head where a causal language "
                "model has them. Targets of the Llama and Qwen3 kinds can be decoded."
            )
        self.hidden_size: int = self.config.hidden_size
        self.context_limit: int = self.config.max_position_embeddings
        # forward's keyword for the cache was renamed in transformers 5.24
        names = inspect.signature(type(model).forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"
        self.lock = threading.Lock()  # hooks see every pass, so passes with hooks go one at a time
        refuse_irreversible(self.new_cache())

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.weight.dtype

    def new_cache(self) -> DynamicCache:
        """An empty cache for one text; the session that asks owns it."""
        return DynamicCache(config=self.config)

    @torch.inference_mode()
    def logits(
        self, ids: Tensor, cache: DynamicCache, taps: Sequence[int], last_only: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [seq, rows, vocab] of new tokens and their features [seq, new, taps * hidden].

        Features are None where no taps are asked for: plain decoding pays for none.
        """
        with self.lock, captured(self.layers, taps) as features:
            out = self.model(
                input_ids=ids, use_cache=True, logits_to_keep=int(last_only), **self.cached(cache)
            )
            return out.logits, features() if taps else None

    def read(self, ids: Tensor, taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Final states and features of whole texts [seq, length], without a cache."""
        with self.lock, captured(self.layers, taps) as features:
            states = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            return states, features()

    def cached(self, cache: Cache) -> dict[str, Any]:
        """The cache under the name that this model's forward has for it."""
        return {self._cache_name: cache}


@contextmanager
def captured(layers: nn.ModuleList, taps: Sequence[int]) -> Iterator[Any]:
    """Read the output of the tapped layers during one pass; no hook outlives it.

    Tap `i` is the residual stream after the 0-based layer `i`, before any final norm.
    """
    outputs: dict[int, Tensor] = {}

    def keep(tap: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            outputs[tap] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [layers[tap].register_forward_hook(keep(tap)) for tap in taps]
    try:
        yield lambda: torch.cat([outputs[tap] for tap in taps], dim=-1)
    finally:
        for handle in handles:
            handle.remove()


def refuse_irreversible(cache: DynamicCache) -> None:
    """Raise `TargetNotReversible` naming the first layer state that cannot be taken back."""
    for layer in cache.layers:
        kind = type(layer).__name__
        if kind != "DynamicLayer":
            raise TargetNotReversible(
                f"this target keeps {kind} state, and tokens cannot be taken back from it. "
                "Targets with full attention in every layer (Llama, Qwen3 kinds) can be decoded."
            )


def take_back(cache: DynamicCache, tokens: int) -> None:
    """Remove the last `tokens` positions from a cache, all of them or an error."""
    before = cache.get_seq_length()
    if not 0 <= tokens <= before:
        raise ValueError(f"cannot take {tokens} tokens back from a cache that holds {before}.")
    if tokens:
        cache.crop(-tokens)
    if cache.get_seq_length() != before - tokens:
        raise TargetNotReversible(
            f"the cache holds {cache.get_seq_length()} positions after {tokens} of {before} were "
            "taken back; decoding would go on from rejected tokens."
        )


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
    return TorchTarget(model.to(device))
