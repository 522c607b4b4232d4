"""The batched anchor pass in MLX, the twin of `torch_anchors`: same classes, order and names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from dflash_lab.backends import Proposals
from dflash_lab.backends.mlx_model import ContextCache, DraftNetwork, KeysValues, best, finite_rows
from dflash_lab.backends.mlx_target import MlxTarget, not_finite

Array = mx.array
BUDGET = 128 * 2**20  # bytes that the scores of one batch of anchors, or its logits, may take


class MlxAnchors:
    """A text with the draft's view of it, to be asked for a block at any of its new tokens.

    `context` are the draft's keys and values of positions 0 to length - 2, `tokens` is prompt and
    text. Anchor n is the new token n, at the position prompt_length + n.
    """

    def __init__(
        self,
        network: DraftNetwork,
        target: MlxTarget,
        context: Sequence[KeysValues],
        tokens: Sequence[int],
        prompt_length: int,
        choices: Sequence[int] = (),
        margins: Sequence[float] = (),
        leads: Sequence[float] = (),
        sizes: Sequence[float] = (),
        budget: int = BUDGET,
    ):
        self.network, self.embedding, self.head = network, target.embedding, target.head
        self.device, self.vocabulary = target.device, target.embedding.weight.shape[0]
        self.choices, self.margins, self.leads, self.sizes = choices, margins, leads, sizes
        self.context, self.tokens, self.prompt_length = context, tokens, prompt_length
        self.budget = budget
        self.finite = True  # False once the draft's numbers overflowed

    def accepted(
        self, anchors: Sequence[int], block_size: int, draft_window: int | None
    ) -> list[int]:
        """How many drafted tokens equal the text, from the left, for a block at each anchor.

        Counted no further than the text goes: min(accepted, remaining).
        """
        counts: list[int] = []
        with mx.stream(self.device):
            for at, states in self._states(anchors, block_size, draft_window):
                counts += self._leading_matches(at, states)
        return counts

    def proposals(
        self, anchors: Sequence[int], block_size: int, draft_window: int | None
    ) -> list[Proposals]:
        """What is drafted in a block at each anchor, and how sure of it the draft is."""
        made: list[Proposals] = []
        with mx.stream(self.device):
            for at, states in self._states(anchors, block_size, draft_window):
                many = max(1, self._rows_at_once() // (block_size - 1))
                for places in pieces(range(len(at)), many):
                    rows = states[places.start : places.stop, 1:]
                    made += self._propose(rows, at[places.start : places.stop])
        return made

    def _states(
        self, anchors: Sequence[int], block_size: int, draft_window: int | None
    ) -> Iterator[tuple[list[int], Array]]:
        """Positions of a batch of anchors, and the final states [anchors, block_size, hidden]."""
        positions = [self.prompt_length + n for n in anchors]
        masks = [self.network.config.mask_token] * (block_size - 1)
        for batch in pieces(positions, self._batch(block_size)):
            block = mx.array([[self.tokens[at], *masks] for at in batch])
            embedded = self.network.embed(self.embedding, block)[None]
            context, seen = self._seen(batch, draft_window)
            states = self.network(embedded, mx.array([batch]), context, seen, draft_window)[0]
            mx.eval(states)
            yield batch, states

    def _seen(self, at: list[int], draft_window: int | None) -> tuple[list[KeysValues], Array]:
        """The part of the context that a batch of anchors may see, and its positions."""
        first = 0 if draft_window is None else max(0, min(at) - draft_window)
        last = max(at)
        rows = [(keys[:, :, first:last], values[:, :, first:last]) for keys, values in self.context]
        return rows, mx.arange(first, last)

    def _batch(self, block_size: int) -> int:
        """Anchors at once: scores in the weights' dtype, in float32, and what softmax makes."""
        config = self.network.config
        scores = config.num_heads * (len(self.tokens) - 1 + block_size)
        rows = 3 * scores + 3 * config.intermediate_size + 8 * config.hidden_size
        return max(1, self.budget // (4 * block_size * rows))

    def _leading_matches(self, at: list[int], states: Array) -> list[int]:
        """The head is asked for draft position k only where all before it matched.

        There the token before it is the text's own, which is what a DFlash 2 selector goes by.
        """
        counts = [0] * len(at)
        alive: Sequence[int] = range(len(at))
        for position in range(1, states.shape[1]):
            alive = [i for i in alive if at[i] + position < len(self.tokens)]
            parts = pieces(alive, self._rows_at_once())
            alive = [i for part in parts for i in self._matching(at, states, position, part)]
            for i in alive:
                counts[i] += 1
        return counts

    def _matching(
        self, at: list[int], states: Array, position: int, alive: Sequence[int]
    ) -> list[int]:
        """Those of the anchors alive whose draft at that position is the text's own token."""
        rows = states[mx.array(alive), position]
        raw = self._raw(rows)
        before = mx.array([self.tokens[at[i] + position - 1] for i in alive])
        drafted = self.network.choose(rows, lambda _: raw, before).tolist()
        text = (self.tokens[at[i] + position] for i in alive)
        return [i for i, mine, its in zip(alive, drafted, text, strict=True) if mine == its]

    def _propose(self, states: Array, at: list[int]) -> list[Proposals]:
        """The blocks at `at`, from the states [anchors, slots, hidden] of their drafted entries."""
        network, raw = self.network, self._raw(states)
        logits = network.logits(raw)
        if network.candidate_selector is None:
            drafted = best(logits)
        else:  # it runs free here, as it does live: after its own choices, not after the text
            anchors = mx.array([self.tokens[place] for place in at])
            walks = zip(states, logits, anchors, strict=True)
            drafted = mx.stack([network.candidate_selector.walk(*walk) for walk in walks])
        sure = network.confidences(logits)
        return [
            Proposals(drafted=tuple(tokens), confidences=tuple(numbers))
            for tokens, numbers in zip(drafted.tolist(), sure.tolist(), strict=True)
        ]

    def _raw(self, states: Array) -> Array:
        """What the head says, looked at for numbers that are not finite, as the live draft is."""
        raw = self.head(states)
        self.finite = self.finite and bool(finite_rows(raw).all().item())
        return raw

    def _rows_at_once(self) -> int:
        return rows_at_once(self.vocabulary, self.budget)


def pieces(values: Any, size: int) -> Iterator[Any]:
    """A sequence in parts of that many entries, the last one of fewer."""
    for start in range(0, len(values), size):
        yield values[start : start + size]


def rows_at_once(vocabulary: int, budget: int) -> int:
    """Rows whose logits in float32, twice over, stay within so many bytes."""
    return max(1, budget // (8 * vocabulary))


def read_anchors(
    target: MlxTarget,
    network: DraftNetwork,
    prompt: Sequence[int],
    tokens: Sequence[int],
    chunk: int,
) -> MlxAnchors:
    """The target's one pass over a prompt and the tokens after it, `chunk` rows at a time.

    Features become the draft's keys and values at once, so those of a long text are never held.
    """
    text, first = [*prompt, *tokens], len(prompt) - 1
    narrow = min(chunk, rows_at_once(target.embedding.weight.shape[0], BUDGET))
    cache, context, taps = target.new_cache(), ContextCache(None), network.config.target_layer_ids
    read: list[tuple[int, float, float, float]] = []  # choice, margin, lead and size of each place
    with mx.stream(target.device):
        for part in (*pieces(range(first), chunk), *pieces(range(first, len(text) - 1), narrow)):
            ids = mx.array([text[part.start : part.stop]])
            logits, features = target.logits(ids, cache, taps)
            context.append(network.context(features, mx.arange(part.start, part.stop)))
            mx.eval([layer.state for layer in cache], context.layers())  # and no logits
            if part.start >= first:
                judged = mx.array(text[part.start + 1 : part.stop + 1])
                read += _judged(logits[0], judged, target.dtype)
    found = map(list, zip(*read, strict=True))  # choices, margins, leads, sizes
    return MlxAnchors(network, target, context.layers(), text, len(prompt), *found)


def _judged(
    logits: Array, tokens: Array, dtype: mx.Dtype
) -> Iterator[tuple[int, float, float, float]]:
    """Of each row: the best token, how far its logit is above the given token's and above the
    second best, and the largest logit by size.
    """
    if not finite_rows(logits).all().item():
        raise not_finite(dtype)
    chosen, wide = best(logits), logits.astype(mx.float32)
    top = wide.max(axis=-1)
    apart = top - mx.take_along_axis(wide, tokens[:, None], axis=-1)[:, 0]
    lead = top - mx.topk(wide, 2, axis=-1).min(axis=-1)
    size = mx.maximum(top, -wide.min(axis=-1))
    return zip(*(part.tolist() for part in (chosen, apart, lead, size)), strict=True)
