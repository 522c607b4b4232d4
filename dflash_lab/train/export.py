"""A trained draft as a folder in the upstream checkpoint format, with a card made from the run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from safetensors.torch import save

from dflash_lab.backends.torch_model import DraftNetwork
from dflash_lab.backends.torch_target import TorchTarget
from dflash_lab.checkpoint import default_taps
from dflash_lab.store import write_atomic
from dflash_lab.train.rows import NGRAM, NGRAM_BYTES, RowCounts

TAPS = 5
NGRAMS = "training_ngrams.bin"


def pick_taps(target_layers: int) -> tuple[int, ...]:
    """Five evenly spaced layers; of a target too small for that, its last ones before the last.

    The very last layer is left out: other engines read it after the final norm.
    """
    taps = default_taps(target_layers, TAPS)
    if len(set(taps)) == TAPS and min(taps) >= 0:
        return taps
    return tuple(range(max(0, target_layers - 1 - TAPS), max(1, target_layers - 1)))


def pick_mask_token(tokenizer: Any, vocabulary: int, used: set[int]) -> int:
    """A row of the target's embedding that no text uses.

    The tokenizer's own mask token, else a row past its tokens, else a special token that the rows
    never hold, else the last id that they never hold.
    """
    if tokenizer is not None:
        if getattr(tokenizer, "mask_token_id", None) is not None:
            return int(tokenizer.mask_token_id)
        if len(tokenizer) < vocabulary:
            return len(tokenizer)
        closed = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
        reserved = [i for i in sorted(tokenizer.added_tokens_decoder) if i not in used | closed]
        if reserved:
            return reserved[-1]
    unused = [i for i in range(vocabulary - 1, -1, -1) if i not in used]
    if not unused:
        raise ValueError(
            f"every one of the target's {vocabulary} tokens occurs in the rows, so none is free to "
            "be the mask. Name one with mask_token (--mask-token)."
        )
    return unused[0]


def draft_json(
    target: TorchTarget, layers: int, block_size: int, taps: Sequence[int], mask_token: int
) -> dict[str, Any]:
    """The `config.json` of a draft as wide as its target, in the upstream form."""
    config = target.config
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0
    heads = config.num_attention_heads
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "vocab_size": target.embedding.weight.shape[0],
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": theta,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "block_size": block_size,
        "num_target_layers": len(target.layers),
        "dflash_config": {"target_layer_ids": list(taps), "mask_token_id": mask_token},
    }


def write_draft(folder: Path, network: DraftNetwork, raw: Mapping[str, Any]) -> None:
    """`config.json` and the weights in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.to("cpu", torch.bfloat16).contiguous()
        for name, value in network.state_dict().items()
    }
    # The library's own writing to a file leaves one that its owner alone may read.
    write_atomic(folder / "model.safetensors", save(tensors, {"format": "pt"}))
    write_atomic(folder / "config.json", json.dumps(raw, indent=2) + "\n")


def write_manifest(
    folder: Path, counts: RowCounts, curve: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]
) -> None:
    """What the draft was trained on: counts, the curve, and hashes of its prompts' 13-grams."""
    manifest = {
        **facts,
        "rows_read": counts.read,
        "rows_used": counts.used,
        "loops_cut": counts.loops_cut,
        "too_short": counts.too_short,
        "duplicates": counts.duplicates,
        "overlapping_dropped": counts.overlapping,
        "answer_tokens": counts.answer_tokens,
        "ngram_words": NGRAM,
        "ngrams": len(counts.ngrams),
    }
    (folder / "training.json").write_text(json.dumps(manifest, indent=1) + "\n")
    (folder / NGRAMS).write_bytes(b"".join(sorted(counts.ngrams)))
    pd.DataFrame(curve, columns=["step", "name", "slot", "value"]).to_parquet(
        folder / "curve.parquet", index=False
    )


def read_ngrams(folder: Path) -> set[bytes]:
    """The hashes that `write_manifest` left in a draft's folder; none where it left no file."""
    path = folder / NGRAMS
    content = path.read_bytes() if path.is_file() else b""
    return {content[i : i + NGRAM_BYTES] for i in range(0, len(content), NGRAM_BYTES)}


def card(
    facts: Mapping[str, Any], counts: RowCounts, taus: pd.DataFrame | None, command: str
) -> str:
    """The draft's README: what it was made from, what it reaches, how to make it again."""
    lines = [
        "---",
        f"base_model: {facts['target']}",
        *([f"license: {facts['license']}"] if facts.get("license") else []),
        "tags: [dflash, speculative-decoding]",
        "---",
        "",
        f"# DFlash draft for {facts['target']}",
        "",
        f"{facts['layers']} layers, block size {facts['block_size']}, {facts['parameters']:,} "
        f"parameters; reads the target's layers {', '.join(map(str, facts['taps']))}; mask token "
        f"{facts['mask_token']}.",
        "",
        "## Data",
        "",
        f"{counts.used:,} answers ({counts.answer_tokens:,} tokens) written by the target itself, "
        f"of {counts.read:,} read: {counts.loops_cut:,} were cut at a repetition loop, "
        f"{counts.too_short:,} dropped as too short, {counts.duplicates:,} as repeated prompts, "
        f"{counts.overlapping:,} because they share {NGRAM} words in a row with an evaluation "
        f"prompt. {facts['held_out']} prompts were held out.",
        "",
        "## Recipe",
        "",
        f"- began as: {_beginning(facts['start'])}",
        *[f"- {name}: {value}" for name, value in facts["fit"].items()],
        "",
    ]
    if taus is not None and len(taus):
        lines += ["## Acceptance length", "", *_tau_lines(taus), ""]
    lines += ["## How to make it again", "", "```", command, "```", ""]
    return "\n".join(lines)


def _beginning(start: Mapping[str, Any] | None) -> str:
    if start is None:
        return "the target's last layers"
    before, draft = start["training"], f"the draft `{start['draft']}`"
    told = "" if before is None else f", trained on {before['answer_tokens']:,} tokens before"
    return f"{draft} (sha256 of settings and weights {start['fingerprint'][:12]}){told}"


def _tau_lines(taus: pd.DataFrame) -> list[str]:
    lines = [
        "tau (tokens a block, anchor's bonus included) by block size, greedy, with 95 % intervals "
        "over prompts.",
        "",
        "| prompts | block size | tau | without loops |",
        "|---|---|---|---|",
    ]
    free = taus[taus.loop_free].set_index(["dataset", "block_size"])
    for row in taus[~taus.loop_free].itertuples():
        place = (row.dataset, row.block_size)
        other = free.loc[place] if place in free.index else None  # every answer may be a loop
        lines.append(
            f"| {row.dataset} ({row.prompts}) | {row.block_size} | {_interval(row)} | "
            f"{'none' if other is None else f'{_interval(other)} ({int(other.prompts)})'} |"
        )
    return lines


def _interval(row: Any) -> str:
    if math.isnan(row.low):
        return f"{row.tau:.2f} (one prompt, no interval)"
    return f"{row.tau:.2f} [{row.low:.2f}, {row.high:.2f}]"
