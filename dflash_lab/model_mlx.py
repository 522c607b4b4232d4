"""Upstream's MLX calls: load a target, load a draft, stream text.

    model, tokenizer = load(folder_or_hub_id)
    draft = load_draft(folder_or_hub_id, sliding_window_size=None)
    for response in stream_generate(model, draft, tokenizer, prompt, block_size=12, max_tokens=512):
        print(response.text, end="", flush=True)

A model that mlx-lm's own `load` made does as well. It is left as it was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dflash_lab.backends.mlx_model import DraftNetwork, load_network
from dflash_lab.backends.mlx_session import MlxModels, end_tokens, pick_device, pick_dtype
from dflash_lab.backends.mlx_target import MlxTarget, load_target
from dflash_lab.calls import (
    Draft,
    GenerationResponse,
    GenerationStats,
    dflash_generate,
    read_draft,
    stream_generate,
)
from dflash_lab.checkpoint import DraftConfig as DFlashConfig
from dflash_lab.load import TARGET_FILES, load_tokenizer, resolve

__all__ = [
    "DFlashConfig",
    "DFlashDraftModel",
    "GenerationResponse",
    "GenerationStats",
    "dflash_generate",
    "load",
    "load_draft",
    "stream_generate",
]


class DFlashDraftModel(Draft):
    """A draft in MLX; it takes the dtype of the target that it meets."""

    draft_bits: int | None = None
    _met: MlxModels | None = None  # the last target, and the weights made for it

    def models(self, target: Any) -> MlxModels:
        met = self._met
        if met is None or met.target.model is not target:
            found = target_of(target)
            fits = met is not None and met.target.dtype == found.dtype
            network = met.draft if fits else self._network(found)
            ends = getattr(target, "dflash_end_tokens", frozenset())
            self._met = MlxModels(found, network, ends)
        return self._met

    def ids_like(self, input_ids: Any, ids: Sequence[int]) -> Any:
        return type(input_ids)([ids])

    def _network(self, target: MlxTarget) -> DraftNetwork:
        return load_network(self.folder, self.config, target.dtype, self.draft_bits)


def load(
    id_or_path: str | Path,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
) -> tuple[Any, Any]:
    """A target as mlx-lm's model, and its tokenizer."""
    folder = resolve(str(id_or_path), revision, "target", TARGET_FILES)
    place = pick_device(device)
    target = load_target(folder, pick_dtype(dtype, place), place)
    target.model.dflash_target = target
    target.model.dflash_end_tokens = frozenset(end_tokens(folder))
    return target.model, load_tokenizer(folder)


def load_draft(
    id_or_path: str | Path,
    sliding_window_size: int | None = None,
    *,
    revision: str | None = None,
    draft_bits: int | None = None,
) -> DFlashDraftModel:
    """The draft in a folder or a hub repository.

    `sliding_window_size` bounds the committed positions that it sees and keeps, None does not;
    `draft_bits` (4 or 8) quantises it. Raises `CheckpointError` for a faulty one.
    """
    draft = DFlashDraftModel(*read_draft(id_or_path, revision), sliding_window_size)
    draft.draft_bits = draft_bits
    return draft


def target_of(model: Any) -> MlxTarget:
    """The target in an mlx-lm model, made by `load` or by mlx-lm itself."""
    if (known := getattr(model, "dflash_target", None)) is not None:
        return known
    place = pick_device("auto")
    named = (part.embed_tokens for _, part in model.named_modules() if "embed_tokens" in part)
    embedding = next(named, None)
    if embedding is None:
        dtype = pick_dtype("auto", place)
    else:  # a quantised one holds codes, and scales of the type that is computed in
        dtype = getattr(embedding, "scales", embedding.weight).dtype
    return MlxTarget(model, vars(model.args), dtype, place)
