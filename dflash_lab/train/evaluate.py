"""How many tokens a block of the draft brings on prompts it never saw, by block size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from dflash_lab.analyse import draw_prompts, intervals, repetition
from dflash_lab.backends.torch_anchors import TorchAnchors, text_context, walk
from dflash_lab.backends.torch_model import DraftNetwork
from dflash_lab.backends.torch_target import TorchTarget
from dflash_lab.train.generate import Text, Writer
from dflash_lab.train.rows import prompt_ids, read_jsonl

BLOCK_SIZES = (2, 4, 8, 12, 16)
QUESTION = ("prompt", "question", "turns", "instruction", "text")  # where a data set keeps it


def question(raw: Mapping[str, Any], where: str) -> str:
    """The user's (first) turn of a row of a public data set."""
    for name in QUESTION:
        value = raw.get(name)
        if value:
            return value if isinstance(value, str) else str(value[0])
    raise ValueError(f"{where}: none of the columns {', '.join(QUESTION)}; it has {sorted(raw)}.")


def questions(path: Path, limit: int | None = None) -> list[str]:
    """The prompts of a JSONL file, in file order."""
    rows = [question(raw, f"{path}, row {n}") for n, raw in enumerate(read_jsonl(path), 1)]
    if not rows:
        raise ValueError(f"{path} holds no prompts.")
    return rows[:limit]


def greedy_texts(
    target: TorchTarget,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_tokens: frozenset[int],
) -> list[Text]:
    """The target's own greedy answers, in the order of the prompts."""
    writer = Writer(target, max_new_tokens, stop_tokens, slots=32, keep_loops=True)
    texts = [Text(index=i, prompt_ids=tuple(ids)) for i, ids in enumerate(prompts)]
    ended = [text for batch in writer.write(texts) for text in batch]
    return sorted(ended, key=lambda text: text.index)


@torch.inference_mode()
def acceptance(
    network: DraftNetwork,
    target: TorchTarget,
    texts: Sequence[Text],
    block_sizes: Sequence[int] = BLOCK_SIZES,
) -> pd.DataFrame:
    """A row for each text and block size: `blocks` that were not cut, what they `emitted`."""
    rows = []
    for text in texts:
        ids = (*text.prompt_ids, *text.tokens)
        tokens = torch.tensor(ids, device=target.device)
        _, features = target.read(tokens[None], network.config.target_layer_ids)
        context = text_context(network, features[0], len(ids))
        anchors = TorchAnchors(
            network, target.embedding, target.head, context, tokens, len(text.prompt_ids)
        )
        for size in block_sizes:
            accepted = walk(anchors.accepted(range(len(text.tokens) - 1), size, None))
            rows.append(
                {
                    "prompt": text.index,
                    "block_size": size,
                    "blocks": len(accepted),
                    "emitted": sum(accepted) + len(accepted),
                    "looped": repetition(text.tokens).looped,
                }
            )
    return pd.DataFrame(rows)


def tau_table(frame: pd.DataFrame, resamples: int = 2000) -> pd.DataFrame:
    """tau by data set and block size: emitted over blocks, with a 95 % interval over prompts.

    `loop_free` tells apart the prompts whose answer has no repetition loop and all of them.
    """
    rows = []
    for loop_free in (True, False):
        kept = frame[~frame.looped] if loop_free else frame
        for (dataset, size), part in kept.groupby(["dataset", "block_size"], sort=False):
            emitted, blocks = part.emitted.to_numpy(), part.blocks.to_numpy()
            draws = draw_prompts(len(part), resamples, 0)
            low, high = intervals(draws, emitted[None], blocks[None])
            rows.append(
                {
                    "dataset": dataset,
                    "block_size": int(size),
                    "loop_free": loop_free,
                    "prompts": len(part),
                    "tau": emitted.sum() / max(1, blocks.sum()),
                    "low": low[0],
                    "high": high[0],
                }
            )
    return pd.DataFrame(rows)


def evaluate(
    network: DraftNetwork,
    target: TorchTarget,
    tokenizer: Any,
    files: Sequence[Path],
    stop_tokens: frozenset[int],
    prompts: int = 20,
    max_new_tokens: int = 96,
) -> pd.DataFrame:
    """Acceptance on the first `prompts` of every file, on the target's own greedy answers."""
    parts = []
    for path in files:
        ids = [prompt_ids(tokenizer, text) for text in questions(path, prompts)]
        texts = greedy_texts(target, ids, max_new_tokens, stop_tokens)
        parts.append(acceptance(network, target, texts).assign(dataset=dataset_name(path)))
    return pd.concat(parts, ignore_index=True)


def dataset_name(path: Path) -> str:
    """`gsm8k/test-sample.jsonl` is gsm8k; a lone file goes by its own name."""
    generic = ("test", "train", "question", "sample", "data")
    return path.parent.name if path.stem.startswith(generic) else path.stem
