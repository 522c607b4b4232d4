"""Many texts from the target at once: a fixed number of slots, each refilled when its text ends."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from dflash_lab.backends import UnsupportedTarget
from dflash_lab.backends.torch_target import TorchTarget
from dflash_lab.train.rows import LOOP_SPAN, loop_start

LIKELIEST = 256  # sampling never looks further down than this
LOOP_CHECK = 16  # tokens between two looks for a repetition loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is drawn; temperature 0 takes the likeliest."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                f"temperature is {self.temperature} and top_p {self.top_p}; "
                "a temperature is at least 0 and top_p lies above 0 and not above 1."
            )


@dataclass(slots=True, kw_only=True)
class Text:
    """One text being written: `tokens` grows, `stop` says why it ended."""

    index: int
    prompt_ids: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)  # may begin with what an earlier run wrote
    stop: str = ""  # "end", "loop", "length" or, given up, "time"


class Writer:
    """Writes texts with the target, `slots` at a time.

    What a text becomes depends on its index, prompt and seed, and not on its neighbours, but for
    rounding.
    """

    def __init__(
        self,
        target: TorchTarget,
        max_new_tokens: int,
        stop_tokens: frozenset[int],
        sampling: Sampling | None = None,
        slots: int = 128,
        keep_loops: bool = False,
    ):
        refuse_recurrent(target)
        self.target, self.slots, self.keep_loops = target, slots, keep_loops
        self.max_new_tokens, self.stop_tokens = max_new_tokens, stop_tokens
        self.sampling = Sampling() if sampling is None else sampling
        self.active: list[Text] = []

    @torch.inference_mode()
    def write(self, texts: Iterable[Text]) -> Iterator[list[Text]]:
        """The texts that ended, after every pass of the target; `active` holds those under way."""
        waiting, memory = iter(texts), _Memory(self.target, self.slots)
        self.active, empty = [], False
        while True:
            wanted = self.slots - len(self.active)
            if not empty and (wanted >= max(1, self.slots // 16) or not self.active):
                fresh = list(islice(waiting, wanted))
                empty = len(fresh) < wanted
                yield self._begin(fresh, memory)
            if not self.active:
                if empty:
                    return
                continue
            yield self._step(memory)

    def give_up(self) -> list[Text]:
        """The texts under way, ended where they are."""
        ended, self.active = self.active, []
        for text in ended:
            text.stop = "time"
        return ended

    def _begin(self, fresh: Sequence[Text], memory: _Memory) -> list[Text]:
        """Prefill new texts, those of like length together."""
        ended: list[Text] = []
        queue = sorted(fresh, key=lambda text: len(text.prompt_ids) + len(text.tokens))
        while queue:
            part = [queue.pop(0)]
            while queue and (len(part) + 1) * _length(queue[0]) <= 4096:
                part.append(queue.pop(0))
            known = [(*text.prompt_ids, *text.tokens) for text in part]
            logits = memory.prefill(known)
            self.active += part
            ended += self._extend(part, logits)
        self._drop_ended(memory)
        return ended

    def _step(self, memory: _Memory) -> list[Text]:
        logits = memory.step([text.tokens[-1] for text in self.active])
        ended = self._extend(self.active, logits)
        if ended:
            self._drop_ended(memory)
        return ended

    def _drop_ended(self, memory: _Memory) -> None:
        going = [place for place, text in enumerate(self.active) if not text.stop]
        if len(going) == len(self.active):
            return
        # The last rows move into the gaps, so that little is copied.
        rows, last = list(range(len(going))), [place for place in going if place >= len(going)]
        for place in rows:
            if self.active[place].stop:
                rows[place] = last.pop()
        memory.keep(rows)
        self.active = [self.active[place] for place in rows]

    def _extend(self, texts: Sequence[Text], logits: Tensor) -> list[Text]:
        for text, token in zip(texts, self._choose(texts, logits), strict=True):
            text.tokens.append(token)
            if token in self.stop_tokens:
                text.stop = "end"
            elif len(text.tokens) >= self.max_new_tokens:
                text.stop = "length"
            elif not self.keep_loops and self._loops(text):
                text.stop = "loop"
        return [text for text in texts if text.stop]

    def _loops(self, text: Text) -> bool:
        tokens = text.tokens
        return (
            len(tokens) % LOOP_CHECK == 0
            and loop_start(tokens[-LOOP_SPAN - LOOP_CHECK :]) is not None
        )

    def _choose(self, texts: Sequence[Text], logits: Tensor) -> list[int]:
        if self.sampling.temperature == 0:
            return logits.argmax(-1).tolist()
        scaled = logits.float() / self.sampling.temperature
        best = scaled.topk(min(LIKELIEST, scaled.shape[-1]))
        share = (best.values - scaled.logsumexp(-1, keepdim=True)).exp()
        before = share.cumsum(-1) - share
        share = share * (before < self.sampling.top_p)
        draws = torch.tensor([self._draw(text) for text in texts], device=share.device)
        reached = share.cumsum(-1) > (draws * share.sum(-1))[:, None]
        place = reached.to(torch.int8).argmax(-1, keepdim=True)
        return best.indices.gather(-1, place)[:, 0].tolist()

    def _draw(self, text: Text) -> float:
        # Named by text and position: the same draw whichever texts share the pass.
        return random.Random(f"{self.sampling.seed}/{text.index}/{len(text.tokens)}").random()


def refuse_recurrent(target: TorchTarget) -> None:
    """Raise `UnsupportedTarget` where padding would become a part of a text's state."""
    if target.recurrent:
        raise UnsupportedTarget(
            f"{type(target.model).__name__} has recurrent layers, and texts of different lengths "
            "cannot be written side by side with it. Train with a target that has attention alone."
        )


def _length(text: Text) -> int:
    return len(text.prompt_ids) + len(text.tokens)


class _Memory:
    """Keys and values of all active texts; text i is row i."""

    def __init__(self, target: TorchTarget, slots: int):
        self.target, self.slots = target, slots
        self.lengths = torch.zeros(0, dtype=torch.long, device=target.device)
        self.layers = [_SlotLayer(self, window) for window in target.windows]
        self.cache = Cache(layers=self.layers)

    def prefill(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Logits [texts, vocab] of what follows each text; the texts become the last rows."""
        lengths = torch.tensor([len(text) for text in texts], device=self.target.device)
        # Padding stands on the right: causal attention keeps it away from every real position.
        longest = int(lengths.max())
        ids = torch.tensor([[*text, *(0,) * (longest - len(text))] for text in texts])
        fresh = self.target.new_cache()
        states = self._states(ids.to(self.target.device), fresh)
        for layer, new in zip(self.layers, fresh.layers, strict=True):
            layer.append(new.keys, new.values)
        self.lengths = torch.cat((self.lengths, lengths))
        return self.target.next_logits(states[torch.arange(len(texts)), lengths - 1])

    def step(self, tokens: Sequence[int]) -> Tensor:
        """Logits [texts, vocab] after one more token in every row."""
        ids = torch.tensor(tokens, device=self.target.device)[:, None]
        room = int(self.lengths.max()) + 1
        for layer in self.layers:
            layer.grow(room)
        states = self._states(
            ids,
            self.cache,
            attention_mask=self._masks(room),
            position_ids=self.lengths[:, None],
        )
        self.lengths = self.lengths + 1
        return self.target.next_logits(states[:, -1])

    def keep(self, rows: Sequence[int]) -> None:
        """Forget all rows but these, in this order."""
        order = torch.tensor(rows, device=self.target.device, dtype=torch.long)
        self.lengths = self.lengths[order]
        for layer in self.layers:
            layer.keep(order)

    def _masks(self, room: int) -> Tensor | dict[str, Tensor]:
        """What each row may see, to be added to scores; by kind of layer if there are two."""
        places, ends = torch.arange(room, device=self.target.device), self.lengths[:, None]
        seen = {"full_attention": places <= ends}
        if windows := {window for window in self.target.windows if window is not None}:
            seen["sliding_attention"] = seen["full_attention"] & (places > ends - min(windows))
        masks = {
            kind: torch.zeros(rows.shape, dtype=self.target.dtype, device=rows.device).masked_fill(
                ~rows, torch.finfo(self.target.dtype).min
            )[:, None, None]
            for kind, rows in seen.items()
        }
        if None not in self.target.windows:
            return masks["sliding_attention"]
        return masks if windows else masks["full_attention"]

    def _states(self, ids: Tensor, cache: Cache, **masked: Any) -> Tensor:
        named = self.target.cached(cache)
        return self.target.model.base_model(
            input_ids=ids, use_cache=True, **named, **masked
        ).last_hidden_state


class _SlotLayer(CacheLayerMixin):
    """One layer: rows of different lengths in one block of memory, grown as needed."""

    def __init__(self, memory: _Memory, window: int | None):
        super().__init__()
        self.memory = memory
        self.is_sliding = window is not None  # the window itself is in the mask
        self.rows = 0

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Rows [texts, heads, length, dim] behind those that are there."""
        if self.keys is None:
            shape = (self.memory.slots, keys.shape[1], 0, keys.shape[3])
            self.keys, self.values = keys.new_empty(shape), values.new_empty(shape)
        self.grow(keys.shape[2])
        part = slice(self.rows, self.rows + len(keys))
        self.keys[part, :, : keys.shape[2]] = keys
        self.values[part, :, : values.shape[2]] = values
        self.rows += len(keys)

    def grow(self, room: int) -> None:
        """Make room for `room` positions in every row."""
        if self.keys.shape[2] < room:
            more = (*self.keys.shape[:2], 64 + room - self.keys.shape[2], self.keys.shape[3])
            # zeros, not what memory holds: a masked NaN would still be a NaN
            self.keys = torch.cat((self.keys, self.keys.new_zeros(more)), 2)
            self.values = torch.cat((self.values, self.values.new_zeros(more)), 2)

    def keep(self, order: Tensor) -> None:
        """Rows of `order` come first, the others are forgotten."""
        moved = (order != torch.arange(len(order), device=order.device)).nonzero()[:, 0]
        self.keys[moved] = self.keys[order[moved]]
        self.values[moved] = self.values[order[moved]]
        self.rows = len(order)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        rows, lengths = torch.arange(self.rows, device=key_states.device), self.memory.lengths
        self.keys[rows, :, lengths] = key_states[:, :, 0]
        self.values[rows, :, lengths] = value_states[:, :, 0]
        room = int(lengths.max()) + 1
        return self.keys[: self.rows, :, :room], self.values[: self.rows, :, :room]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return int(self.memory.lengths.max()) if self.rows else 0

    def get_max_length(self) -> int:
        return -1


@torch.inference_mode()
def tokens_per_second(target: TorchTarget, slots: int, length: int = 128) -> float:
    """How fast a full `Writer` would be with texts of some length, from three of its passes."""
    refuse_recurrent(target)
    memory = _Memory(target, slots)
    memory.prefill([(0,) * length] * slots)
    memory.step([0] * slots)
    began = time.monotonic()
    for _ in range(2):
        memory.step([0] * slots)
    return 2 * slots / (time.monotonic() - began)
