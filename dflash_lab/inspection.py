"""What a draft checkpoint is and what it asks for, from its config.json and headers alone.

No weight is read and no framework is loaded, of a hub repository a few kilobytes are fetched.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash_lab.checkpoint import (
    STORED_DTYPES,
    CheckpointError,
    DraftConfig,
    TensorInfo,
    bare_names,
    check_headers,
    check_target,
    parse_draft_config,
    read_headers,
    read_json,
)
from dflash_lab.config import check_block_size, check_window, whole
from dflash_lab.load import DRAFT_FILES, ModelUnavailable

LOGIT_BYTES = 4  # choices are made in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerView:
    """What one draft layer sees and how it rotates."""

    window: int | None  # in tokens, counted from the row itself; None is full attention
    causal: bool  # inside the block
    rope: str  # "default", "linear" or "yarn"
    rope_theta: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryView:
    """Bytes at one block size, window and context, of what a draft adds to its target."""

    block_size: int
    draft_window: int | None
    context: int  # committed positions
    cached_positions: int  # those of them that some layer may see
    draft_weights: int  # as stored
    draft_cache: int  # keys and values of the cached positions, in the type stored
    verify_logits: int  # float32, one row an entry of the block


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetNeeds:
    """The targets that a draft fits: all of this must hold."""

    hidden_size: int
    least_layers: int  # the highest tap is one of them
    layers: int | None  # num_target_layers, where the checkpoint tells
    least_vocabulary: int  # rows of the embedding
    exact_vocabulary: bool  # a DFlash 2 selector knows exactly those tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFit:
    """One target, beside what the draft needs."""

    target: str
    hidden_size: int
    layers: int
    vocabulary: int
    problem: str | None  # None where it fits

    @property
    def fits(self) -> bool:
        return self.problem is None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFit:
    """Whether a program can run this checkpoint, as far as is known."""

    engine: str
    verdict: str  # "yes", "differs" (it loads and computes something else), "no" or "unknown"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """A draft checkpoint, explained."""

    draft: str
    kind: str  # "DFlash 1" or "DFlash 2"
    config: DraftConfig
    tensors: int
    parameters: int  # the header's and the formula's: an unequal pair is an error
    dtypes: Mapping[str, int]  # type stored -> tensors
    layers: tuple[LayerView, ...]
    memory: MemoryView
    needs: TargetNeeds
    target: TargetFit | None  # the one asked about
    engines: tuple[EngineFit, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values; `config.sources` says where each setting stood."""
        return asdict(self)

    def sections(self) -> dict[str, list[tuple[str, ...]]]:
        """The same as rows of text under headings, for a terminal."""
        return {
            "draft": _draft_rows(self),
            "layers": _layer_rows(self.layers),
            "memory": _memory_rows(self.memory),
            "targets": _target_rows(self.needs, self.target),
            "engines": [(e.engine, e.verdict, e.reason) for e in self.engines],
            "where each value stood": sorted(self.config.sources.items()),
            "notes": [(note,) for note in self.notes],
        }


def inspect_draft(
    draft: str | Path,
    *,
    block_size: int | None = None,
    draft_window: int | None = None,
    context: int = 4096,
    target: str | Path | None = None,
    revision: str | None = None,
) -> Inspection:
    """Explain a draft, a folder or a hub id; its own block size is taken where none is given.

    Raises the `CheckpointError` kinds that loading would raise, but for weights that are not
    finite: none is read. `target` is a folder or a hub id, of which config.json alone is read.
    """
    window = check_window(draft_window)
    size = None if block_size is None else check_block_size(block_size)
    positions = whole("context", context, 0, "It counts committed positions.")
    raw, headers = _checkpoint(draft, revision)
    config = parse_draft_config(raw)
    check_headers(config, headers)
    size = config.block_size if size is None else size
    return Inspection(
        draft=str(draft),
        kind=config.kind,
        config=config,
        tensors=len(headers),
        parameters=sum(math.prod(info.shape) for info in headers.values()),
        dtypes=_dtypes(headers),
        layers=_layers(config),
        memory=_memory(config, headers, size, window, positions),
        needs=_needs(config, raw),
        target=None if target is None else _target_fit(config, target),
        engines=engines(config, raw),
        notes=(*config.notes, *_size_notes(config, size)),
    )


# --- where files lie ----------------------------------------------------------------------------


def _checkpoint(where: str | Path, revision: str | None) -> tuple[dict, dict[str, TensorInfo]]:
    folder = Path(where).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ValueError(f"revision is {revision!r}, but {where} is a folder on disk.")
        return _folder(folder)
    if not _is_hub_id(where):
        raise ModelUnavailable(
            f"the draft {str(where)!r} is neither a folder here nor a hub id (owner/name)."
        )
    return _hub(str(where), revision)


def _is_hub_id(where: str | Path) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", str(where)) is not None


def _folder(folder: Path) -> tuple[dict, dict[str, TensorInfo]]:
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"there is no config.json in {folder}. "
            "A draft is a folder with config.json and model.safetensors."
        )
    return read_json(path), read_headers(folder)


def _hub(repository: str, revision: str | None) -> tuple[dict, dict[str, TensorInfo]]:
    """config.json and the headers from the hub, else a snapshot that is here already."""
    import huggingface_hub as hub

    try:
        path = hub.hf_hub_download(repository, "config.json", revision=revision)
        metadata = hub.get_safetensors_metadata(repository, revision=revision)
    except Exception as error:  # the client raises a dozen kinds; every one leads to the cache
        try:
            found = hub.snapshot_download(
                repository,
                revision=revision,
                allow_patterns=list(DRAFT_FILES),
                local_files_only=True,
            )
        except Exception:
            raise ModelUnavailable(
                f"the draft {repository!r} is no folder here, not in the hub's cache, and cannot "
                f"be read there ({type(error).__name__}: {error}). Download it elsewhere and "
                "give its folder."
            ) from error
        return _folder(Path(found))
    headers = {
        name: TensorInfo(dtype=str(info.dtype), shape=tuple(info.shape))
        for file in metadata.files_metadata.values()
        for name, info in file.tensors.items()
    }
    return read_json(Path(path)), bare_names(headers)


def _target_json(where: str | Path) -> dict[str, Any]:
    path = Path(where).expanduser() / "config.json"
    if not path.is_file() and _is_hub_id(where) and not path.parent.is_dir():
        from huggingface_hub import hf_hub_download

        try:
            path = Path(hf_hub_download(str(where), "config.json"))
        except Exception as error:  # a dozen kinds, all of them: not to be had
            raise ModelUnavailable(
                f"the target {str(where)!r} is no folder here, and its config.json cannot be "
                f"fetched ({type(error).__name__}). Give a folder."
            ) from error
    if not path.is_file():
        raise ModelUnavailable(f"there is no config.json in {where}: not a model folder.")
    raw = read_json(path)
    return {**raw, **(raw.get("text_config") or {})}


# --- what they say ------------------------------------------------------------------------------


def _dtypes(headers: Mapping[str, TensorInfo]) -> dict[str, int]:
    kinds = [info.dtype for info in headers.values()]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def _layers(config: DraftConfig) -> tuple[LayerView, ...]:
    return tuple(
        LayerView(window=window, causal=causal, rope=rope.kind, rope_theta=rope.theta)
        for window, causal, rope in zip(
            config.layer_windows, config.layer_causal, config.layer_ropes, strict=True
        )
    )


def _memory(
    config: DraftConfig,
    headers: Mapping[str, TensorInfo],
    block_size: int,
    draft_window: int | None,
    context: int,
) -> MemoryView:
    limit = config.context_window(draft_window)
    cached = context if limit is None else min(context, limit)
    stored = STORED_DTYPES[headers["layers.0.self_attn.k_proj.weight"].dtype]
    return MemoryView(
        block_size=block_size,
        draft_window=draft_window,
        context=context,
        cached_positions=cached,
        draft_weights=sum(
            math.prod(info.shape) * STORED_DTYPES[info.dtype] for info in headers.values()
        ),
        draft_cache=cached * config.context_bytes_per_token(stored),
        verify_logits=block_size * config.vocab_size * LOGIT_BYTES,
    )


def _needs(config: DraftConfig, raw: Mapping[str, Any]) -> TargetNeeds:
    return TargetNeeds(
        hidden_size=config.hidden_size,
        least_layers=max(config.target_layer_ids) + 1,
        layers=raw.get("num_target_layers"),
        least_vocabulary=max(config.vocab_size, config.mask_token + 1),
        exact_vocabulary=config.dflash2 is not None,
    )


def _target_fit(config: DraftConfig, where: str | Path) -> TargetFit:
    raw = _target_json(where)
    keys = ("hidden_size", "num_hidden_layers", "vocab_size")
    absent = [key for key in keys if not isinstance(raw.get(key), int)]
    if absent:
        raise CheckpointError(f"the target's config.json in {where} has no {', '.join(absent)}.")
    hidden, layers, vocabulary = (raw[key] for key in keys)
    try:
        check_target(config, hidden, layers, vocabulary)
        problem = None
    except CheckpointError as error:
        problem = str(error)
    return TargetFit(
        target=str(where),
        hidden_size=hidden,
        layers=layers,
        vocabulary=vocabulary,
        problem=problem,
    )


def _size_notes(config: DraftConfig, block_size: int) -> list[str]:
    notes = []
    if block_size > config.trained_block_size:
        notes.append(
            f"block size {block_size} is above the {config.trained_block_size} that this draft was "
            f"trained with; a decode uses {config.trained_block_size} unless told otherwise."
        )
    for layer, window in enumerate(config.layer_windows):
        if window is not None and window < block_size:
            notes.append(
                f"layer {layer} slides over {window} positions, fewer than the block size "
                f"{block_size}; a decode refuses that. Use a block size of at most {window}."
            )
    return notes


# --- which programs can run it ------------------------------------------------------------------

ENGINE_NAMES = {
    "april": "z-lab/dflash of April 2026",
    "torch": "dflash 0.1.0, PyTorch",
    "mlx": "dflash 0.1.0, MLX",
    "dflash_mlx": "dflash_mlx 0.1.8",
    "mlx_vlm": "mlx-vlm",
    "mlx_dspark": "mlx_dspark",
}


def engines(config: DraftConfig, raw: Mapping[str, Any]) -> tuple[EngineFit, ...]:
    """What is known of each program and this form of checkpoint.

    From dflash.md 1.5, 2.6 and 10, and for dflash 0.1.0 in PyTorch from comparing on the same
    weights. "yes" means that nothing known speaks against it.
    """
    fits = [EngineFit(engine="dflash_lab", verdict="yes", reason="all of it is read and used")]
    for name, engine in ENGINE_NAMES.items():
        if reasons := _failures(name, config, raw):
            verdict = "no"
        elif reasons := _differences(name, config, raw):
            verdict = "differs"
        elif config.dflash2 is not None and name not in ("torch", "mlx"):
            verdict, reasons = "unknown", ["nothing is known of it and DFlash 2"]
        else:
            verdict, reasons = "yes", ["nothing is known against it"]
        fits.append(EngineFit(engine=engine, verdict=verdict, reason="; ".join(reasons)))
    return tuple(fits)


def _is_nested(config: DraftConfig) -> bool:
    """Whether the block size stands in `dflash_config`, as in files since about May 2026."""
    return config.sources["block_size"].startswith("dflash_config.")


def _failures(name: str, config: DraftConfig, raw: Mapping[str, Any]) -> list[str]:
    """Why a program cannot load this checkpoint."""
    flat = not _is_nested(config) and config.sources["rope_theta"] == "rope_theta"
    reasons = []
    if name == "april" and _is_nested(config):
        reasons.append("fails on a block_size inside dflash_config")
    if name == "torch" and "num_target_layers" not in raw:
        reasons.append("asks for num_target_layers, even where the taps are given")
    if name == "torch" and len({rope.theta for rope in config.layer_ropes}) > 1:
        reasons.append("reads one RoPE base for all layers")
    if name == "dflash_mlx" and not flat:
        reasons.append("requires block_size and rope_theta at top level")
    if name in ("mlx", "mlx_vlm", "mlx_dspark") and config.attention_bias:
        reasons.append("builds attention without biases")
    return reasons


def _differences(name: str, config: DraftConfig, raw: Mapping[str, Any]) -> list[str]:
    """What a program does otherwise than the checkpoint says."""
    sliding = any(window is not None for window in config.layer_windows)
    reasons = []
    if name == "april" and sliding:
        reasons.append("ignores sliding layers")
    if name == "torch" and sliding and not raw.get("use_sliding_window"):
        reasons.append("slides only where use_sliding_window is true; here it sees everything")
    if name in ("torch", "mlx") and config.sources["is_causal"] == "dflash_config.causal":
        reasons.append("does not look at dflash_config.causal")
    if name == "dflash_mlx" and not sliding:
        reasons.append("windows full attention to 64 + 1,024 positions, and does not say so")
    if name == "mlx_vlm" and _is_nested(config):
        reasons.append("puts defaults of its own in the place of values of the newer form")
    if name == "mlx_vlm" and any(config.layer_causal) and sliding:
        reasons.append("makes sliding layers bidirectional")
    return reasons


# --- as text ------------------------------------------------------------------------------------


def _draft_rows(seen: Inspection) -> list[tuple[str, ...]]:
    config = seen.config
    stored = ", ".join(f"{count} {kind}" for kind, count in seen.dtypes.items())
    rows = [
        ("kind", seen.kind),
        ("block size", _with_trained(config)),
        ("taps (0-based target layers)", ", ".join(map(str, config.target_layer_ids))),
        ("mask token", str(config.mask_token)),
        ("parameters", f"{seen.parameters:,} (the header's, and the formula's)"),
        ("tensors", f"{seen.tensors} ({stored})"),
        (
            "width, inner width, layers",
            f"{config.hidden_size}, {config.intermediate_size}, {config.num_layers}",
        ),
        (
            "heads, key heads, head size",
            f"{config.num_heads}, {config.num_kv_heads}, {config.head_dim}",
        ),
        ("biases in attention", "yes" if config.attention_bias else "no"),
    ]
    extras = config.dflash2
    if extras is not None:
        rows.append(("convolutions", f"{extras.conv_taps} rows, groups of {extras.conv_group}"))
        rows.append(
            ("selector", f"rank {extras.selector_rank}, {extras.selector_top_k} candidates")
        )
    for name, value, neutral in (
        ("embedding scale", config.embedding_scale, 1.0),
        ("output multiplier", config.output_multiplier, 1.0),
        ("softcap", config.softcap, None),
    ):
        if value != neutral:
            rows.append((name, f"{value:g}"))
    return rows


def _with_trained(config: DraftConfig) -> str:
    if config.block_size == config.trained_block_size:
        return f"{config.block_size}, the anchor included"
    return f"{config.block_size}, trained with {config.trained_block_size}"


def _layer_rows(layers: tuple[LayerView, ...]) -> list[tuple[str, ...]]:
    return [
        (
            str(index),
            "full attention" if layer.window is None else f"sliding, {layer.window} positions",
            "causal in the block" if layer.causal else "bidirectional in the block",
            f"RoPE {layer.rope}, base {layer.rope_theta:g}",
        )
        for index, layer in enumerate(layers)
    ]


def _memory_rows(memory: MemoryView) -> list[tuple[str, ...]]:
    window = "full" if memory.draft_window is None else str(memory.draft_window)
    return [
        ("draft weights", size_text(memory.draft_weights), "as stored"),
        (
            "draft cache",
            size_text(memory.draft_cache),
            f"{memory.cached_positions} of {memory.context} positions, draft window {window}",
        ),
        (
            "verify logits",
            size_text(memory.verify_logits),
            f"block size {memory.block_size}, float32",
        ),
    ]


def _target_rows(needs: TargetNeeds, target: TargetFit | None) -> list[tuple[str, ...]]:
    layers = f"at least {needs.least_layers}"
    if needs.layers is not None:
        layers += f"; the draft's own target has {needs.layers}"
    least = "exactly" if needs.exact_vocabulary else "at least"
    rows = [
        ("hidden size", str(needs.hidden_size)),
        ("layers", layers),
        ("rows of the embedding", f"{least} {needs.least_vocabulary}"),
    ]
    if target is not None:
        rows.append((target.target, target.problem or "fits"))
    return rows


def size_text(count: int) -> str:
    """Bytes in decimal units, three digits."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
