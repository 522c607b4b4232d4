"""Upstream's PyTorch calls: a target that the caller loaded, a draft, ids in and ids out.

    draft = DFlashDraftModel.from_pretrained(folder_or_hub_id)
    output_ids = draft.spec_generate(target, input_ids, block_size=10, max_new_tokens=128)

The target is a causal language model of transformers. It is left as it was found: hooks, training
mode, gradients, generation config.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from dflash_lab.backends.torch_model import load_network
from dflash_lab.backends.torch_session import TorchModels
from dflash_lab.backends.torch_target import TorchTarget
from dflash_lab.calls import (
    Draft,
    GenerationResponse,
    GenerationStats,
    dflash_generate,
    read_draft,
    stream_generate,
)

__all__ = [
    "DFlashDraftModel",
    "GenerationResponse",
    "GenerationStats",
    "dflash_generate",
    "stream_generate",
]

# A session's hooks see every pass of its target, so all that decode with one share one lock.
_LOCKS: WeakKeyDictionary[Any, threading.Lock] = WeakKeyDictionary()


class DFlashDraftModel(Draft):
    """A draft in torch; it takes the dtype and the device of the target that it meets."""

    _met: TorchModels | None = None  # the last target, tested, and the weights made for it

    @classmethod
    def from_pretrained(
        cls,
        id_or_path: str | Path,
        *,
        revision: str | None = None,
        sliding_window_size: int | None = None,
    ) -> DFlashDraftModel:
        """The draft in a folder or a hub repository; raises `CheckpointError` for a faulty one."""
        return cls(*read_draft(id_or_path, revision), sliding_window_size)

    def models(self, target: Any) -> TorchModels:
        met = self._met
        if met is None or met.target.model is not target or place(met.target) != weights_of(met):
            with kept(target):
                found = TorchTarget(target)
                found.lock = _LOCKS.setdefault(target, found.lock)
                fits = met is not None and weights_of(met) == place(found)
                network = (
                    met.draft if fits else load_network(self.folder, self.config, *place(found))
                )
                self._met = TorchModels(found, network)
        return self._met

    def working(self, target: Any) -> Any:
        return evaluating(target)

    def ids_like(self, input_ids: Any, ids: Sequence[int]) -> Any:
        return input_ids.new_tensor([ids])


def place(holder: Any) -> tuple[Any, Any]:
    """The dtype and the device of a tensor or a target."""
    return holder.dtype, holder.device


def weights_of(models: TorchModels) -> tuple[Any, Any]:
    """The dtype and the device of a loaded draft."""
    return place(models.draft.fc.weight)


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """The model in evaluation mode, every part of it back in its own mode afterwards."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def kept(model: Any) -> Iterator[None]:
    """Give a model's modes, gradients and generation config back as they were."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    settings = model.generation_config
    with evaluating(model):
        try:
            yield
        finally:
            model.generation_config = settings
            for parameter in wanted:
                parameter.requires_grad_(True)
