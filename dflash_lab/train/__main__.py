"""`python -m dflash_lab.train`: fit a draft to a target from rows that the target wrote."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from dflash_lab.backends.torch_model import DraftNetwork
from dflash_lab.backends.torch_target import TorchTarget, load_target
from dflash_lab.checkpoint import parse_draft_config
from dflash_lab.train.features import cache_features
from dflash_lab.train.fit import Batches, FitConfig, fit, held_out_tau, warm_start
from dflash_lab.train.rows import Row, RowCounts, read_jsonl, read_rows, split

HELD_OUT = 120  # rows


def main() -> None:
    """Read rows, cache features, fit, write the draft folder; every stage resumes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True, help="model folder")
    parser.add_argument("--rows", type=Path, required=True, help="JSONL: prompt, response_ids")
    parser.add_argument("--forbidden", type=Path, nargs="*", default=[], help="prompts kept out")
    parser.add_argument("--work", type=Path, required=True, help="features and checkpoints")
    parser.add_argument("--out", type=Path, required=True, help="draft folder to write")
    parser.add_argument("--taps", default="1,8,14,20,27")
    parser.add_argument("--mask-token", type=int, default=15)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=FitConfig.steps)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    forbidden = [text for path in arguments.forbidden for text in prompt_texts(path)]
    rows, counts = read_rows(arguments.rows, tokenizer, forbidden)
    train, held_out = split(rows, HELD_OUT)
    print(f"{counts.used} rows, {counts.answer_tokens} answer tokens", flush=True)

    target = load_target(arguments.target, torch.bfloat16, torch.device("cpu"))
    raw = draft_json(target, arguments)
    config = parse_draft_config(raw)
    cache = cache_features(
        arguments.work / "features", [*train, *held_out], target, config.target_layer_ids, say
    )
    torch.manual_seed(0)
    network = DraftNetwork(config)
    warm_start(network, target)
    settings = replace(FitConfig(), steps=arguments.steps)
    measure = held_out_tau(target, held_out, cache, len(train), settings.evaluation_block)
    batches = Batches(train, cache, settings, target.head.weight.shape[0])
    state = fit(arguments.work / "fit", network, target, batches, measure, settings, say)
    write_draft(arguments.out, network, raw, counts, rows, state.curve)


def say(line: str) -> None:
    print(line, flush=True)


def prompt_texts(path: Path) -> list[str]:
    """Every text of a prompt file, whatever its columns are called."""
    texts: list[str] = []
    for row in read_jsonl(path):
        for value in row.values():
            parts = value if isinstance(value, list) else [value]
            texts += [part for part in parts if isinstance(part, str)]
    return texts


def draft_json(target: TorchTarget, arguments: argparse.Namespace) -> dict[str, object]:
    """The `config.json` of a draft as wide as its target, in the upstream form."""
    config = target.config
    rope = getattr(config, "rope_parameters", None) or {"rope_theta": config.rope_theta}
    heads = config.num_attention_heads
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": rope["rope_theta"],
        "attention_bias": False,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "block_size": arguments.block_size,
        "num_target_layers": config.num_hidden_layers,
        "dflash_config": {
            "target_layer_ids": [int(tap) for tap in arguments.taps.split(",")],
            "mask_token_id": arguments.mask_token,
        },
    }


def write_draft(
    folder: Path,
    network: DraftNetwork,
    raw: dict[str, object],
    counts: RowCounts,
    rows: list[Row],
    curve: list[dict[str, int | float]],
) -> None:
    """Weights in bfloat16, `config.json`, and the manifest of what it was trained on."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.to(torch.bfloat16).contiguous() for name, value in network.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    manifest = {
        "rows_read": counts.read,
        "rows_used": counts.used,
        "loops_cut": counts.loops_cut,
        "too_short": counts.too_short,
        "duplicates": counts.duplicates,
        "overlapping_dropped": counts.overlapping,
        "answer_tokens": counts.answer_tokens,
        "held_out_rows": HELD_OUT,
        "ngram_words": 13,
        "ngrams": len(counts.ngrams),
        "curve": curve,
    }
    (folder / "training.json").write_text(json.dumps(manifest, indent=1) + "\n")
    (folder / "training_ngrams.bin").write_bytes(b"".join(sorted(counts.ngrams)))


if __name__ == "__main__":
    main()
