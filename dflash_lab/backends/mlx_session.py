"""The MLX verbs: prefill, draft, verify, commit on one prompt, and the pair they run on.

MLX is lazy: an array is computed when its numbers are asked for. Here that is once a block, where
`verify` hands integers to the loop, and where `synchronize` waits for a draft that is to be timed.
"""

from __future__ import annotations

import functools
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.utils import maybe_set_recommended_wired_limit

from dflash_lab.accept import Verdict
from dflash_lab.backends import Generated, OutOfMemory
from dflash_lab.backends.mlx_anchors import MlxAnchors, read_anchors
from dflash_lab.backends.mlx_model import (
    ContextCache,
    DraftNetwork,
    best,
    finite_rows,
    load_network,
)
from dflash_lab.backends.mlx_sampling import MlxSampler, slot_scores
from dflash_lab.backends.mlx_target import (
    MlxTarget,
    let_stay,
    load_target,
    not_finite,
    out_of_memory,
    take_back,
)
from dflash_lab.checkpoint import DraftConfig, check_target
from dflash_lab.sampling import Sampling

Array = mx.array
# On some GPUs MLX multiplies float32 in 19 bits unless told otherwise; here it means float32.
os.environ.setdefault("MLX_ENABLE_TF32", "0")
PREFILL_CHUNK = 1024  # tokens; bounds the memory of a long prompt
BORDER = 256  # tokens; memory that MLX keeps for reuse is given back at each multiple


@dataclass(frozen=True, slots=True)
class MlxBlock:
    """The anchor and the drafted tokens, still on the device."""

    tokens: Array  # int32 [1, block_size]
    finite: Array | None = None  # bool []; None where nothing was drafted
    raw: Array | None = None  # what the head said [block_size - 1, vocab], for `confidences`
    weights: Array | None = None  # what was drawn from [block_size - 1, vocab], where needed


def on_device(verb: Callable[..., Any]) -> Callable[..., Any]:
    """Run a verb on the target's device; memory that runs out becomes one error that helps.

    RuntimeError in another thread than the session's first one: what is not computed yet is bound
    to that thread's stream.
    """

    @functools.wraps(verb)
    def run(session: MlxSession, *args: Any, **settings: Any) -> Any:
        here = threading.get_ident()
        session.thread = session.thread or here
        if session.thread != here:
            raise RuntimeError(
                "this stream was begun in another thread, and MLX computes in that one alone. Go "
                "on there, or begin a new stream here; closing it works from any thread."
            )
        try:
            with mx.stream(session.target.device):
                return verb(session, *args, **settings)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            raise OutOfMemory(session.explain(error)) from error

    return run


class MlxSession:
    """One prompt being decoded with an MLX pair, from one thread: MLX's streams belong to it."""

    def __init__(
        self,
        target: MlxTarget,
        draft: DraftNetwork | None,
        draft_window: int | None,
        prefill_chunk: int = PREFILL_CHUNK,
        sampling: Sampling | None = None,
    ):
        self.target = target
        self.network = draft
        self.prefill_chunk = prefill_chunk
        self.taps = draft.config.target_layer_ids if draft is not None else ()
        self.window = draft.config.context_window(draft_window) if draft is not None else None
        self.draft_window = draft_window
        self.block_size: int | None = None  # of the last block
        self.thread: int | None = None  # that runs the verbs
        rows = target.embedding.weight.shape[0]
        self.sampler = sampling and MlxSampler(sampling, rows)
        self.cache = target.new_cache()
        self.context = ContextCache(self.window)
        self.pending: list[Array] = []  # features [1, rows, fused] the draft has not seen yet
        self.committed = 0  # positions in the target's cache: the anchor comes next
        self._rows: Array | None = None  # features of the block just verified
        self._verified = 0
        self._finite: list[int] = []  # 1 for each of its rows whose logits are finite
        self._drafted: Array | None = None  # asked for, perhaps not computed yet

    @on_device
    def prefill(self, prompt: Sequence[int]) -> int:
        ids = mx.array([list(prompt)])
        for start, stop in chunks(len(prompt), self.prefill_chunk):
            logits, features = self.target.logits(ids[:, start:stop], self.cache, self.taps)
            let_stay(self.cache)
            if features is not None:
                self._remember(features)
            mx.eval([part.state for part in self.cache], self.pending)  # and no logits
            self._advance(stop - start)
        if not finite_rows(logits[0, -1]).item():
            raise not_finite(self.target.dtype)
        if self.sampler is not None:
            return self.sampler.first(logits[0, -1], ids[0]).item()
        return best(logits[0, -1]).item()

    @on_device
    def draft(self, anchor: int, block_size: int) -> MlxBlock:
        self.block_size = block_size
        first = mx.array([[anchor]])
        if block_size == 1:
            return MlxBlock(first)
        network = self._draft_network()
        self._feed(network)
        masks = mx.full((1, block_size - 1), network.config.mask_token, first.dtype)
        tokens = mx.concatenate((first, masks), axis=1)
        embedded = network.embed(self.target.embedding, tokens)[None]
        anchors = mx.array([[self.committed]])
        states = network(
            embedded, anchors, self.context.layers(), self._context_positions(), self.draft_window
        )
        raw = self.target.head(states[0, 0, 1:])
        drafted, finite = network.propose(states[0, 0, 1:], lambda _: raw, first[0, 0])
        weights = None
        if self.sampler is not None and self.sampler.settings.weighs_drafts:
            scores = slot_scores(network, states[0, 0, 1:], network.logits(raw))
            drafted, weights = self.sampler.propose(
                scores, drafted, first[0, 0], self.committed + 1
            )
        self._drafted = mx.concatenate((first, drafted[None]), axis=1)
        return MlxBlock(self._drafted, finite, raw, weights)

    @on_device
    def confidences(self, block: MlxBlock) -> list[float]:
        if block.raw is None:
            return []
        network = self._draft_network()
        return network.confidences(network.logits(block.raw)).tolist()

    @on_device
    def verify(self, block: MlxBlock, rows: int | None = None) -> Verdict:
        tokens = block.tokens[:, :rows]
        logits, self._rows = self.target.logits(tokens, self.cache, self.taps)
        self._verified = tokens.shape[1]
        chosen, told, first = best(logits[0]), None, self.committed + 1
        if self.sampler is not None:
            chosen, told = self.sampler.judge(logits[0], tokens[0], block.weights, first)
        finite = finite_rows(logits[0]).astype(tokens.dtype)
        # One evaluation a block: drafted, chosen and the flags travel together.
        flag = mx.array([True]) if block.finite is None else block.finite[None]
        numbers = mx.concatenate((tokens[0], chosen, finite, flag.astype(tokens.dtype)))
        mx.eval(numbers, self._rows, told)
        numbers = numbers.tolist()
        count = self._verified
        self._finite = numbers[2 * count : 3 * count]
        return Verdict(
            drafted=tuple(numbers[1:count]),
            posterior=tuple(numbers[count : 2 * count]),
            finite=bool(numbers[-1]),
            **({} if self.sampler is None else self.sampler.verdict_parts(told, first)),
        )

    @on_device
    def commit(self, accepted: int) -> None:
        keep = accepted + 1
        if not all(self._finite[:keep]):  # rows behind these are no part of the text
            raise not_finite(self.target.dtype)
        take_back(self.cache, self._verified - keep)
        if self.sampler is not None:
            self.sampler.keep(keep)
        if self._rows is not None:
            self._remember(self._rows[:, :keep])
        self._advance(keep)
        self._rows, self._verified = None, 0

    @on_device
    def synchronize(self) -> None:
        mx.eval(self._drafted)
        mx.synchronize()

    def close(self) -> None:
        self.cache, self.context = self.target.new_cache(), ContextCache(self.window)
        self.pending, self._rows, self._drafted, self.committed = [], None, None, 0

    @property
    def draft_cache_tokens(self) -> int:
        return len(self.context)

    @property
    def draft_cache_bytes(self) -> int:
        return self.context.allocated_bytes

    def explain(self, error: RuntimeError) -> str:
        """What ran out of memory, and the two ways out."""
        window = "no draft window" if self.draft_window is None else f"window {self.draft_window}"
        size = "prefill" if self.block_size is None else f"block size {self.block_size}"
        asked = re.search(r"(\d+)(?= bytes)", str(error))
        more = f", asking for {int(asked[1]):,} bytes more" if asked else ""
        return (
            f"out of memory at {size} and {window}, {self.committed:,} positions in: "
            f"{mx.get_active_memory():,} bytes in use{more}. Use a smaller block size or a "
            "smaller draft window."
        )

    def _advance(self, tokens: int) -> None:
        """Count committed positions; give unused memory back once for each border crossed."""
        before = self.committed // BORDER
        self.committed += tokens
        if self.committed // BORDER > before:
            mx.clear_cache()

    def _draft_network(self) -> DraftNetwork:
        if self.network is None:
            raise RuntimeError("this session was opened without a draft; its block size is 1.")
        return self.network

    def _remember(self, features: Array) -> None:
        """Keep features for the next draft pass, no more of them than it may see."""
        self.pending.append(features)
        if self.window is not None:
            held = sum(part.shape[1] for part in self.pending)
            while held - self.pending[0].shape[1] >= self.window:
                held -= self.pending.pop(0).shape[1]
            if held > self.window:
                self.pending[0] = self.pending[0][:, held - self.window :]

    def _feed(self, network: DraftNetwork) -> None:
        """Turn pending features into context keys and values, up to just before the anchor."""
        first = self.committed - sum(part.shape[1] for part in self.pending)
        if first > self.context.end:
            self.context = ContextCache(self.window)  # all it held has left the window
            self.context.skip_to(first)
        while self.pending:
            features = self._take_pending()
            end = first + features.shape[1]
            self.context.append(network.context(features, mx.arange(first, end)))
            if self.pending:
                mx.eval(self.context.layers())  # what is not computed keeps its features alive
            first = end

    def _take_pending(self) -> Array:
        """The oldest pending features, of one prefill chunk at most.

        Part by part, so that those of a long prompt are never twice in memory.
        """
        rows, count = self.pending[0].shape[1], 1
        while count < len(self.pending):
            rows += self.pending[count].shape[1]
            if rows > self.prefill_chunk:
                break
            count += 1
        parts, self.pending = self.pending[:count], self.pending[count:]
        return mx.concatenate(parts, axis=1)

    def _context_positions(self) -> Array | None:
        """Absolute positions of the context rows, needed only where a layer has its own window."""
        if self.network is None or all(w is None for w in self.network.config.layer_windows):
            return None
        start = self.context.end - len(self.context)
        return mx.arange(start, self.context.end)


def chunks(length: int, size: int) -> Iterator[tuple[int, int]]:
    """Beginnings and ends of a prompt's pieces, its last token by itself.

    So one row of logits is computed, however long the prompt.
    """
    for start in range(0, length - 1, size):
        yield start, min(start + size, length - 1)
    yield length - 1, length


class MlxModels:
    """A target and a draft in MLX."""

    def __init__(self, target: MlxTarget, draft: DraftNetwork, end_tokens: frozenset[int]):
        check_fit(target, draft.config)
        self.target, self.draft = target, draft
        self.dtype = str(target.dtype).removeprefix("mlx.core.")
        self.device = target.device.name
        self.context_limit = target.context_limit
        self.vocabulary = target.embedding.weight.shape[0]
        self.end_tokens = end_tokens

    def session(
        self, draft_window: int | None, speculate: bool, sampling: Sampling | None = None
    ) -> MlxSession:
        draft = self.draft if speculate else None
        return MlxSession(self.target, draft, draft_window, sampling=sampling)

    def anchors(self, prompt: Sequence[int], tokens: Sequence[int]) -> MlxAnchors:
        return read_anchors(self.target, self.draft, prompt, tokens, PREFILL_CHUNK)

    def library_generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        stop_tokens: frozenset[int],
        min_new_tokens: int = 0,
        lookup: int | None = None,
    ) -> Generated:
        if lookup is not None:
            raise ValueError("mlx-lm has no prompt-lookup decoding. Use backend='torch' for it.")
        tokens: list[int] = []
        with self.target.lock, mx.stream(self.target.device):
            began = time.perf_counter()
            steps = generate_step(
                mx.array(list(prompt)),
                self.target.model,
                mx.default_stream(self.target.device),  # mlx-lm's own is another thread's
                max_tokens=max_new_tokens,
            )
            for token, _ in steps:
                if not tokens:
                    ttft = time.perf_counter() - began
                tokens.append(token)
                if token in stop_tokens and len(tokens) >= min_new_tokens:
                    break
            mx.synchronize()
        total = time.perf_counter() - began
        return Generated(tokens=tuple(tokens), ttft_s=ttft, total_s=total)

    def peak_bytes(self) -> int | None:
        peak = mx.get_peak_memory()
        mx.reset_peak_memory()
        return peak

    def describe(self) -> dict[str, Any]:
        return {
            "attention": "mx.fast",
            "device": self.device,
            "gpu": gpu_name(self.target.device),
            "target_quantization": self.target.config.get("quantization"),
            "draft_bits": getattr(self.draft.fc, "bits", None),
        }


def end_tokens(folder: Path) -> list[int]:
    found: list[int] = []
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        for part in (config, config.get("text_config") or {}):
            ids = part.get("eos_token_id")
            if ids is not None:
                found += [ids] if isinstance(ids, int) else list(ids)
    return found


def check_fit(target: MlxTarget, config: DraftConfig) -> None:
    """Raise where the draft was made for a target of another shape."""
    rows = target.embedding.weight.shape[0]
    check_target(config, target.hidden_size, len(target.layers), rows)


class MlxBackend:
    """Loads pairs into MLX."""

    def load(
        self,
        target: Path,
        draft: Path,
        config: DraftConfig,
        dtype: str,
        device: str,
        draft_bits: int | None = None,
    ) -> MlxModels:
        place = pick_device(device)
        number = pick_dtype(dtype, place)
        if place == mx.gpu:  # as mlx-lm's generator does while it runs: so all arms are alike
            maybe_set_recommended_wired_limit()
        with mx.stream(place):
            loaded = load_target(target, number, place)
            check_fit(loaded, config)
            network = load_network(draft, config, number, draft_bits)
        return MlxModels(loaded, network, frozenset(end_tokens(target)))


def pick_device(name: str) -> mx.DeviceType:
    """`auto` is the GPU where there is one; a missing one is named before anything is loaded."""
    if name == "auto":
        return mx.gpu if mx.is_available(mx.gpu) else mx.cpu
    if name == "gpu" and not mx.is_available(mx.gpu):
        raise ValueError(f"device is {name!r}, but MLX has no GPU on this machine. Use auto.")
    return {"gpu": mx.gpu, "cpu": mx.cpu}[name]


def pick_dtype(name: str, device: mx.DeviceType) -> mx.Dtype:
    """`auto` is bfloat16 on a GPU and float32 on a CPU."""
    if name == "auto":
        return mx.float32 if device == mx.cpu else mx.bfloat16
    return getattr(mx, name)


def gpu_name(device: mx.DeviceType) -> str | None:
    """The name of an NVIDIA GPU; on Apple silicon the processor's own name tells it."""
    if device == mx.cpu or mx.metal.is_available():
        return None
    return str(mx.device_info()["device_name"])
