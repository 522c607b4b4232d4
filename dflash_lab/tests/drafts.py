"""Draft checkpoints for the tests: the published forms (dflash.md 2.6), and random weights in any.

raw = PUBLISHED["gpt-oss-20b-DFlash"]       config.json as published, as far as it is known
save_random(folder, shrunken(raw))          the same form with a few thousand weights
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dflash_lab.checkpoint import parse_draft_config

F, S = "full_attention", "sliding_attention"
CODE = {"AutoModel": "dflash.DFlashDraftModel"}


def old(hidden: int, inner: int, layers: int, taps: list[int], mask: int, **changes: Any) -> dict:
    """The form until about May 2026: block size and RoPE base at top level."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "attention_bias": False,
        "block_size": 16,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": taps},
        "dtype": "bfloat16",
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "layer_types": [F] * layers,
        "max_position_embeddings": 40960,
        "max_window_layers": layers,
        "num_attention_heads": 32,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1_000_000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151_936,
    } | changes


def new(
    hidden: int,
    inner: int,
    windows: list[int | None],
    taps: list[int],
    mask: int,
    nested: dict[str, Any],
    **changes: Any,
) -> dict:
    """The form since: block size in `dflash_config`, the base in `rope_parameters`."""
    raw = old(hidden, inner, len(windows), taps, mask)
    for key in ("block_size", "rope_theta", "rope_scaling"):
        del raw[key]
    return {
        **raw,
        "dflash_config": {**raw["dflash_config"], "block_size": 16, **nested},
        "layer_types": [F if window is None else S for window in windows],
        "sliding_window": next((window for window in windows if window), None),
        "rope_parameters": {"rope_theta": 10_000_000, "rope_type": "default"},
        "vocab_size": 248_320,
        **changes,
    }


SECOND = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
TWO = ["DFlash2DraftModel"]
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
OSS = {
    "attention_bias": True,
    "head_dim": 64,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "rope_scaling": YARN,
    "rope_theta": 150_000,
    "vocab_size": 201_088,
}
# What dflash.md 2.6 marks with a question mark stands here with a likely value: heads 32, widths.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3-4B-DFlash-b16": old(2560, 9728, 5, [1, 9, 17, 25, 33], 151669, auto_map=CODE),
    "Qwen3-8B-DFlash-b16": old(4096, 12288, 5, [1, 9, 17, 25, 33], 151669, auto_map=CODE),
    "Qwen3.5-4B-DFlash, before June 2026": old(
        2560, 9728, 5, [1, 8, 15, 22, 29], 248070, rope_theta=10_000_000, vocab_size=248_320
    ),
    "Qwen3.5-4B-DFlash": new(
        2560, 9216, [4096] * 5 + [None], [1, 5, 9, 13, 17, 21, 25, 29], 248077, {}
    ),
    "Qwen3.6-27B-DFlash": old(
        5120,
        17408,
        5,
        [1, 16, 31, 46, 61],
        248070,
        layer_types=[S] * 4 + [F],
        sliding_window=2048,
        rope_theta=10_000_000,
        vocab_size=248_320,
    ),
    "gpt-oss-20b-DFlash": old(2880, 7680, 8, [1, 6, 11, 16, 21], 200000, block_size=8, **OSS),
    "gpt-oss-120b-DFlash": old(2880, 7680, 8, [1, 9, 17, 25, 33], 200000, block_size=10, **OSS),
    "LLaMA3.1-8B-DFlash-UltraChat": old(
        4096, 14336, 5, [1, 8, 15, 22, 29], 128002, block_size=10, vocab_size=128_256
    ),
    "Qwen3.8-27B-DFlash2": new(
        5120,
        17408,
        [2048] * 5,
        [5, 19, 33, 47, 61],
        248070,
        {"block_size": 8, **SECOND},
        architectures=TWO,
        is_causal=False,
    ),
    "Muse-Glimmer-30B-DFlash2": new(
        6656,
        19968,
        [2048] * 5,
        [1, 13, 25, 37, 49],
        201818,
        {"final_logit_softcapping": 20.0, "output_multiplier": 0.1961, **SECOND},
        architectures=TWO,
        is_causal=False,
        rope_parameters={"rope_theta": 500_000, "rope_type": "default"},
        vocab_size=202_048,
    ),
    "Qwen3.5-0.8B-DFlash": old(
        1024, 3072, 5, [3, 7, 11, 15, 19], 248077, rope_theta=10_000_000, vocab_size=248_320
    ),
    "Qwen2.5-0.5B": old(
        896,
        4864,
        5,
        [1, 6, 11, 16, 21],
        151669,
        num_attention_heads=14,
        num_key_value_heads=2,
        head_dim=64,
    ),
}


def shrunken(raw: dict[str, Any]) -> dict[str, Any]:
    """The same form, so small that its random weights are worth some kilobytes."""
    small = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "vocab_size": 64}
    nested = dict(raw["dflash_config"])
    nested |= {"conv_group_size": 8, "selector_rank": 6} if "selector_rank" in nested else {}
    return {
        **raw,
        **small,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "dflash_config": nested,
    }


def random_tensors(raw: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    """Weights by the names a checkpoint must have; norms around 1, the rest around 0.

    Convolutions multiply with one another from layer to layer and are kept small.
    """
    import torch

    maker = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in parse_draft_config(raw).tensor_shapes.items():
        noise = torch.randn(shape, generator=maker) * (0.05 if "_conv." in name else 0.2)
        made[name] = noise + 1 if "norm" in name else noise
    return made


def save_random(
    folder: Path, raw: dict[str, Any], *, seed: int = 0, prefix: str = "", shards: int = 1
) -> dict[str, Any]:
    """Write `raw` and random weights, in several files with an index where asked for."""
    from safetensors.torch import save_file

    tensors = {prefix + name: value for name, value in random_tensors(raw, seed).items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw, indent=2), encoding="utf-8")
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return tensors
    names, placed = sorted(tensors), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, folder / file)
        placed |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return tensors
