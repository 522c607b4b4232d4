"""The target's features and likeliest next tokens at every position of the rows, on disk."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dflash_lab.backends.torch_target import TorchTarget
from dflash_lab.train.rows import Row

LIKELIEST = 16  # the target's top probabilities kept for soft labels
# Of a pass. On a CPU more of them leave its cache: 12,000 took 1.4 times as long a token as 1,024.
TOKENS_AT_ONCE, TOKENS_AT_ONCE_CPU = 6000, 1200
DONE = "done.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureCache:
    """Memory-mapped arrays over all positions of all rows, one row after the other."""

    features: np.ndarray  # uint16 [positions, fused]: the bits of bfloat16
    likeliest: np.ndarray  # int32 [positions, 16]: token ids, best first
    probabilities: np.ndarray  # float16 [positions, 16]
    offsets: np.ndarray  # int64 [rows + 1]

    def row(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """Features (bfloat16), likeliest ids and their probabilities of one row."""
        part = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        bits = torch.from_numpy(np.ascontiguousarray(self.features[part]).view(np.int16))
        return (
            bits.view(torch.bfloat16),
            torch.from_numpy(np.array(self.likeliest[part], dtype=np.int64)),
            torch.from_numpy(np.array(self.probabilities[part], dtype=np.float32)),
        )


def missing_of_cache(folder: Path, rows: Sequence[Row], fused: int) -> tuple[int, int]:
    """Positions that are to be computed yet, and bytes that the cache in `folder` will still take.

    The files have their whole length from the start; what is not written yet takes no room.
    """
    lengths = sorted(len(row.prompt_ids) + len(row.answer_ids) for row in rows)
    whole = sum(lengths) * (2 * fused + LIKELIEST * 6)
    there = sum(path.stat().st_blocks * 512 for path in folder.glob("*.bin"))
    return sum(lengths[_rows_done(folder) :]), max(0, whole - there)


def cache_features(
    folder: Path,
    rows: Sequence[Row],
    target: TorchTarget,
    taps: Sequence[int],
    progress: Callable[[str], None] = lambda line: None,
    tokens_at_once: int | None = None,
) -> FeatureCache:
    """Compute what is missing of the cache in `folder`; raises OSError where the disk is too small.

    A progress file counts the rows done, the shortest first, so a killed run goes on where it
    stopped; a folder made for other rows, another target or other taps is refused.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lengths = [len(row.prompt_ids) + len(row.answer_ids) for row in rows]
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    fused = len(taps) * target.hidden_size
    _check_manifest(folder, rows, target, taps)
    positions, need = missing_of_cache(folder, rows, fused)
    if positions and shutil.disk_usage(folder).free < need + (1 << 29):
        raise OSError(
            f"the features of {len(rows)} rows take {need / 1e9:.1f} GB and {folder} has "
            f"{shutil.disk_usage(folder).free / 1e9:.1f} GB free. Use fewer rows or another folder."
        )
    total = int(offsets[-1])
    cache = FeatureCache(
        features=_open(folder / "features.bin", np.uint16, (total, fused)),
        likeliest=_open(folder / "likeliest.bin", np.int32, (total, LIKELIEST)),
        probabilities=_open(folder / "probabilities.bin", np.float16, (total, LIKELIEST)),
        offsets=offsets,
    )
    done = _rows_done(folder)
    order = sorted(range(len(rows)), key=lambda i: lengths[i])
    if tokens_at_once is None:
        tokens_at_once = TOKENS_AT_ONCE_CPU if target.device.type == "cpu" else TOKENS_AT_ONCE
    while done < len(order):
        batch = [order[done]]
        while done + len(batch) < len(order):
            following = order[done + len(batch)]
            if lengths[following] * (len(batch) + 1) > tokens_at_once:
                break
            batch.append(following)
        _fill(cache, [(i, rows[i]) for i in batch], target, taps)
        done += len(batch)
        _replace(folder / DONE, json.dumps(done))
        progress(f"features of {done} of {len(rows)} rows")
    return cache


def _rows_done(folder: Path) -> int:
    path = folder / DONE
    return json.loads(path.read_text()) if path.exists() else 0


@torch.inference_mode()
def _fill(
    cache: FeatureCache,
    batch: Sequence[tuple[int, Row]],
    target: TorchTarget,
    taps: Sequence[int],
) -> None:
    # Padding stands on the right: causal attention keeps it away from every real position.
    texts = [row.prompt_ids + row.answer_ids for _, row in batch]
    longest = max(map(len, texts))
    padded = torch.tensor([[*text, *(0,) * (longest - len(text))] for text in texts])
    states, features = target.read(padded.to(target.device), taps)
    for place, (index, row) in enumerate(batch):
        start = int(cache.offsets[index])
        length = len(texts[place])
        bits = features[place, :length].to(torch.bfloat16).cpu().view(torch.int16)
        cache.features[start : start + length] = bits.numpy().view(np.uint16)
        first = len(row.prompt_ids) - 1  # the row that gives the answer's first token
        logits = target.next_logits(states[place, first:length]).float()
        best = logits.topk(LIKELIEST)
        likely = (best.values - logits.logsumexp(-1, keepdim=True)).exp()
        cache.likeliest[start + first : start + length] = best.indices.cpu().numpy()
        cache.probabilities[start + first : start + length] = likely.cpu().numpy()


def _check_manifest(
    folder: Path, rows: Sequence[Row], target: TorchTarget, taps: Sequence[int]
) -> None:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(np.asarray(row.prompt_ids + row.answer_ids, dtype=np.int32).tobytes())
    manifest = {"rows": digest.hexdigest(), "taps": list(taps), "hidden": target.hidden_size}
    path = folder / "manifest.json"
    if path.exists() and json.loads(path.read_text()) != manifest:
        raise ValueError(
            f"{folder} holds features of other rows or taps. Delete it or name another."
        )
    _replace(path, json.dumps(manifest))


def _open(path: Path, dtype: type, shape: tuple[int, ...]) -> np.ndarray:
    return np.memmap(path, dtype=dtype, mode="r+" if path.exists() else "w+", shape=shape)


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(f"{path.name}.tmp.{os.getpid()}")
    beside.write_text(text)
    os.replace(beside, path)
