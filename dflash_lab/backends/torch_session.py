"""The torch verbs: prefill, draft, verify, commit on one prompt, and the pair they run on."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from dflash_lab.accept import Verdict, kept
from dflash_lab.backends import Generated
from dflash_lab.backends.torch_anchors import TorchAnchors, read_anchors
from dflash_lab.backends.torch_model import ContextCache, DraftNetwork, load_network
from dflash_lab.backends.torch_sampling import TorchSampler, slot_scores
from dflash_lab.backends.torch_target import TorchTarget, load_target, not_finite, take_back
from dflash_lab.checkpoint import DraftConfig, check_target
from dflash_lab.sampling import Sampling

PREFILL_CHUNK = 1024  # tokens; bounds the memory of a long prompt


@dataclass(frozen=True, slots=True)
class TorchBlock:
    """The anchor and the drafted tokens, still on the device."""

    tokens: Tensor  # int64 [1, block_size]
    finite: Tensor | None = None  # bool []; None where nothing was drafted
    raw: Tensor | None = None  # what the head said [block_size - 1, vocab], for `confidences`
    weights: Tensor | None = None  # what was drawn from [block_size - 1, vocab], where needed


class TorchSession:
    """One prompt being decoded with a torch pair."""

    def __init__(
        self,
        target: TorchTarget,
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
        rows = target.embedding.weight.shape[0]
        self.sampler = sampling and TorchSampler(sampling, rows, target.device)
        self.cache = target.new_cache()
        self.context = ContextCache(self.window)
        self.pending: list[Tensor] = []  # features [1, rows, fused] the draft has not seen yet
        self.committed = 0  # positions in the target's cache: the anchor comes next
        self._rows: Tensor | None = None  # features of the block just verified
        self._verified = 0
        self._finite: list[int] = []  # 1 for each of its rows whose logits are finite

    @torch.inference_mode()
    def prefill(self, prompt: Sequence[int]) -> int:
        ids = torch.tensor([list(prompt)], device=self.target.device)
        for chunk in ids.split(self.prefill_chunk, dim=1):
            logits, features = self.target.logits(chunk, self.cache, self.taps, last_only=True)
            self.committed += chunk.shape[1]
            if features is not None:
                self._remember(features)
        token = int(logits[0, -1].argmax())
        if not logits[0, -1, token].isfinite():
            raise not_finite(self.target.dtype)
        return token if self.sampler is None else int(self.sampler.first(logits[0, -1], ids[0]))

    @torch.inference_mode()
    def draft(self, anchor: int, block_size: int) -> TorchBlock:
        first = torch.tensor([[anchor]], device=self.target.device)
        if block_size == 1:
            return TorchBlock(first)
        network = self._draft_network()
        self._feed(network)
        masks = first.new_full((1, block_size - 1), network.config.mask_token)
        embedded = network.embed(self.target.embedding, torch.cat((first, masks), dim=1))[None]
        anchors = first.new_full((1, 1), self.committed)
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
        return TorchBlock(torch.cat((first, drafted[None]), dim=1), finite, raw, weights)

    @torch.inference_mode()
    def confidences(self, block: TorchBlock) -> list[float]:
        if block.raw is None:
            return []
        network = self._draft_network()
        return network.confidences(network.logits(block.raw)).tolist()

    @torch.inference_mode()
    def verify(self, block: TorchBlock, rows: int | None = None) -> Verdict:
        tokens = block.tokens[:, :rows]
        logits, self._rows = self.target.logits(tokens, self.cache, self.taps)
        self._verified = tokens.shape[1]
        chosen, told = logits[0].argmax(-1), None
        # What is not finite, argmax takes: the chosen entries tell of their whole rows.
        finite = logits[0].gather(-1, chosen[:, None])[:, 0].isfinite().long()
        first = self.committed + 1
        if self.sampler is not None:
            chosen, told = self.sampler.judge(logits[0], tokens[0], block.weights, first)
        # One transfer a block: drafted, chosen and the flags travel together.
        flag = tokens.new_ones(1) if block.finite is None else block.finite[None].long()
        numbers = torch.cat((tokens[0], chosen, finite, flag)).tolist()
        count = self._verified
        self._finite = numbers[2 * count : 3 * count]
        return Verdict(
            drafted=tuple(numbers[1:count]),
            posterior=tuple(numbers[count : 2 * count]),
            finite=bool(numbers[-1]),
            **({} if self.sampler is None else self.sampler.verdict_parts(told, first)),
        )

    def commit(self, accepted: int) -> None:
        keep = accepted + 1
        if not all(self._finite[:keep]):  # rows behind these are no part of the text
            raise not_finite(self.target.dtype)
        take_back(self.cache, self._verified - keep)
        if self.sampler is not None:
            self.sampler.keep(keep)
        if self._rows is not None:
            self._remember(self._rows[:, :keep])
        self.committed += keep
        self._rows, self._verified = None, 0

    def synchronize(self) -> None:
        synchronize(self.target.device)

    def close(self) -> None:
        self.cache, self.context = self.target.new_cache(), ContextCache(self.window)
        self.pending, self._rows, self.committed = [], None, 0

    @property
    def draft_cache_tokens(self) -> int:
        return len(self.context)

    @property
    def draft_cache_bytes(self) -> int:
        return self.context.allocated_bytes

    def _draft_network(self) -> DraftNetwork:
        if self.network is None:
            raise RuntimeError("this session was opened without a draft; its block size is 1.")
        return self.network

    def _remember(self, features: Tensor) -> None:
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
            positions = torch.arange(first, end, device=features.device)
            self.context.append(network.context(features, positions))
            first = end

    def _take_pending(self) -> Tensor:
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
        return torch.cat(parts, dim=1) if count > 1 else parts[0]

    def _context_positions(self) -> Tensor | None:
        """Absolute positions of the context rows, needed only where a layer has its own window."""
        if self.network is None or all(w is None for w in self.network.config.layer_windows):
            return None
        start = self.context.end - len(self.context)
        return torch.arange(start, self.context.end, device=self.target.device)


def synchronize(device: torch.device) -> None:
    """Wait for the device; a CPU has nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def process_peak() -> int | None:
    """Peak memory of this process since the last call, where the system can tell; else None."""
    try:
        status = Path("/proc/self/status").read_text()
        Path("/proc/self/clear_refs").write_text("5")  # Linux: begin a new peak
    except OSError:
        return None
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found.group(1)) * 1024 if found else None


class _FirstToken:
    """A streamer that notes when the first new token came."""

    def __init__(self) -> None:
        self.calls, self.at = 0, 0.0

    def put(self, value: Tensor) -> None:
        self.calls += 1
        if self.calls == 2:  # the first call brings the prompt
            self.at = time.perf_counter()

    def end(self) -> None:
        pass


class _EndsLater(StoppingCriteria):
    """Ends an output at a stop token, the first tokens aside."""

    def __init__(self, prompt_length: int, min_new_tokens: int, stop_tokens: frozenset[int]):
        self.first, self.least, self.stops = prompt_length, min_new_tokens, stop_tokens

    def __call__(self, ids: Tensor, scores: Any, **more: Any) -> Tensor:
        new = ids[0, self.first :].tolist()
        ended = any(token in self.stops for token in new[max(0, self.least - 1) :])
        return torch.tensor([ended], device=ids.device)


class TorchModels:
    """A target and a draft in torch."""

    def __init__(self, target: TorchTarget, draft: DraftNetwork):
        check_fit(target, draft.config)
        self.target, self.draft = target, draft
        self.dtype = str(target.dtype).removeprefix("torch.")
        self.device = str(target.device)
        self.context_limit = target.context_limit
        self.vocabulary = target.embedding.weight.shape[0]
        self.end_tokens = frozenset(end_tokens(target.model))
        # generate() fills what a call leaves open from here: a repetition penalty, say, or an end
        # token that the caller did without. The reference is plain greedy decoding, nothing more.
        target.model.generation_config = GenerationConfig()

    def session(
        self, draft_window: int | None, speculate: bool, sampling: Sampling | None = None
    ) -> TorchSession:
        draft = self.draft if speculate else None
        return TorchSession(self.target, draft, draft_window, sampling=sampling)

    def anchors(self, prompt: Sequence[int], tokens: Sequence[int]) -> TorchAnchors:
        return read_anchors(self.target, self.draft, prompt, tokens, PREFILL_CHUNK)

    @torch.inference_mode()
    def library_generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        stop_tokens: frozenset[int],
        min_new_tokens: int = 0,
        lookup: int | None = None,
    ) -> Generated:
        ids = torch.tensor([list(prompt)], device=self.target.device)
        later = min_new_tokens > 1  # the library itself heeds end tokens from the first on
        settings = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=None if later else sorted(stop_tokens) or None,
            pad_token_id=min(stop_tokens, default=0),
            prompt_lookup_num_tokens=lookup,
        )
        ends = _EndsLater(ids.shape[1], min_new_tokens, stop_tokens)
        first = _FirstToken()
        with self.target.lock:
            began = time.perf_counter()
            out = self.target.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=settings,
                streamer=first,
                stopping_criteria=StoppingCriteriaList([ends] if later else []),
            )
            synchronize(self.target.device)
        total = time.perf_counter() - began
        new = out[0, ids.shape[1] :].tolist()
        if later:  # a step of prompt lookup may have gone past the end
            new = new[: kept(new, stop_tokens, len(new), min_new_tokens - 1)]
        return Generated(tokens=tuple(new), ttft_s=first.at - began, total_s=total)

    def redrafted(self, config: DraftConfig) -> TorchModels:
        """The same weights under another configuration of the same shape, on the same target."""
        network = DraftNetwork(config)
        network.load_state_dict(self.draft.state_dict())
        place = {"device": self.target.device, "dtype": self.target.dtype}
        return TorchModels(self.target, network.to(**place).eval().requires_grad_(False))

    @property
    def target_layers(self) -> int:
        """Blocks of the target."""
        return len(self.target.layers)

    @property
    def rope_bases(self) -> tuple[float, ...]:
        """Bases of the target's rotary embeddings, as far as its configuration names them."""
        told = getattr(self.target.config, "rope_parameters", None) or {}
        parts = [told, *(part for part in told.values() if isinstance(part, dict))]
        return tuple(part["rope_theta"] for part in parts if "rope_theta" in part)

    def peak_bytes(self) -> int | None:
        if self.target.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.target.device)
            torch.cuda.reset_peak_memory_stats(self.target.device)
            return peak
        return process_peak()

    def describe(self) -> dict[str, Any]:
        device = self.target.device
        return {
            "attention": self.target.config._attn_implementation,
            "threads": torch.get_num_threads(),
            "device": self.device,
            "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            "cuda": torch.version.cuda,
        }


def end_tokens(model: Any) -> list[int]:
    found: list[int] = []
    for config in (model.config, model.generation_config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            found += [ids] if isinstance(ids, int) else list(ids)
    return found


def check_fit(target: TorchTarget, config: DraftConfig) -> None:
    """Raise where the draft was made for a target of another shape."""
    rows = target.embedding.weight.shape[0]
    check_target(config, target.hidden_size, len(target.layers), rows)


class TorchBackend:
    """Loads pairs into torch."""

    def load(
        self, target: Path, draft: Path, config: DraftConfig, dtype: str, device: str
    ) -> TorchModels:
        place = pick_device(device)
        number = pick_dtype(dtype, place)
        loaded = load_target(target, number, place)
        check_fit(loaded, config)
        return TorchModels(loaded, load_network(draft, config, number, place))


def pick_device(name: str) -> torch.device:
    """`auto` is cuda, else mps, else cpu; another name is checked before anything is loaded."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device is {name!r}; expected auto, cpu, cuda, cuda:0 or mps.") from error
    there = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
    if not there.get(device.type, lambda: True)():
        raise ValueError(f"device is {name!r}, but this machine has no {device.type}. Use auto.")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on a GPU and float32 on a CPU."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, name)


def fast_bfloat16(device: torch.device) -> bool:
    """Whether many rows are multiplied faster in bfloat16 than in float32.

    Measured, since a processor without instructions for it is many times slower, and not every
    platform says what it has.
    """

    def seconds(dtype: torch.dtype) -> float:
        left, right = (torch.ones(256, 1024, dtype=dtype, device=device) for _ in "ab")
        taken = []
        for _ in range(4):
            began = time.perf_counter()
            (left @ right.T).sum().item()  # waits for the device
            taken.append(time.perf_counter() - began)
        return min(taken)

    return seconds(torch.bfloat16) < seconds(torch.float32)
