"""Filters and draws in MLX: probabilities of whole rows, and a token of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx

from dflash_lab.backends.mlx_model import DraftNetwork, best, ranks
from dflash_lab.sampling import DRAFT, TOKEN, Sampling

Array = mx.array
SMALLEST = 1e-20  # temperature that is divided by; what is nearer to 0 draws the best token as well
LARGEST = 1e30  # in the place of a draft's logit that is no finite number

Scores = Callable[[int, Array], Array]  # slot and the token before it -> logits [vocab]


class Judged(NamedTuple):
    """The target's tokens after each row, and both probabilities of the drafted ones."""

    chosen: Array  # int32 [rows]
    told: Array | None = None  # float32 [2, rows - 1]: the target's, the draft's


class MlxSampler:
    """What one session draws with: the settings, and the tokens that its penalty counts."""

    def __init__(self, settings: Sampling, vocabulary: int):
        self.settings = settings
        self.seen = mx.zeros((vocabulary,), mx.bool_)  # committed ones
        self._block = mx.zeros((0,), mx.int32)  # judged last

    def first(self, logits: Array, prompt: Array) -> Array:
        """The token after a prompt [length], from its last row of logits [vocab]."""
        self.seen[prompt] = True
        return self.judge(logits[None], prompt[-1:], None, prompt.shape[0]).chosen[0]

    def propose(
        self, scores: Scores, best: Array, anchor: Array, position: int
    ) -> tuple[Array, Array]:
        """The drafted tokens [slots] and what each was weighed with [slots, vocab].

        `best` are the draft's best tokens, `position` is that of the first. From left to right,
        since penalty and selector look at the tokens before.
        """
        draws = self._draws(DRAFT, position, best.shape[0])
        seen, previous = mx.array(self.seen), anchor
        tokens, weights = [], []
        for slot in range(best.shape[0]):
            seen[previous] = True
            row = scores(slot, previous).astype(mx.float32)[None]
            row = mx.nan_to_num(row, nan=-LARGEST, posinf=LARGEST, neginf=-LARGEST)
            row = penalised(row, seen, self.settings.repetition_penalty)
            weights.append(probabilities(row, self.settings))
            sampled = self.settings.proposal == "sample"
            previous = pick(weights[-1], draws[slot : slot + 1])[0] if sampled else best[slot]
            tokens.append(previous)
        return mx.stack(tokens), mx.concatenate(weights)

    def judge(self, logits: Array, tokens: Array, weights: Array | None, position: int) -> Judged:
        """The target's choice after each row of logits [rows, vocab].

        `tokens` [rows] are the anchor and the drafted ones, `weights` [slots, vocab] what those
        were weighed with; `position` is that of the first choice.
        """
        settings, self._block = self.settings, tokens
        wide = logits.astype(mx.float32)
        if settings.repetition_penalty != 1:
            wide = penalised(wide, self._counted(tokens), settings.repetition_penalty)
        if settings.temperature == 0 and not settings.weighs_target:
            return Judged(best(wide))
        p, drafted = probabilities(wide, settings), tokens[1:, None]
        certain = point_masses(p[:-1], drafted)
        q = certain if weights is None else weights[: len(drafted)]
        told = None
        if settings.weighs_target:
            both = [mx.take_along_axis(rows, drafted, axis=-1) for rows in (p[:-1], q)]
            told = mx.concatenate(both, axis=-1).T
        if settings.temperature == 0:
            return Judged(best(wide), told)
        if settings.rule == "rejection":
            rest = left_over(p[:-1], q if settings.proposal == "sample" else certain)
            p = mx.concatenate((rest, p[-1:]))
        return Judged(pick(p, self._draws(TOKEN, position, tokens.shape[0])), told)

    def verdict_parts(self, told: Array | None, position: int) -> dict[str, tuple[float, ...]]:
        """What the verdict says of the drafted tokens' probabilities, the first at `position`."""
        return {} if told is None else self.settings.told(position, *told.tolist())

    def keep(self, count: int) -> None:
        """Count the first tokens of the block just judged as committed."""
        self.seen[self._block[:count]] = True

    def _draws(self, purpose: str, position: int, count: int) -> Array:
        return mx.array(self.settings.draws(purpose, position, count), mx.float32)

    def _counted(self, tokens: Array) -> Array:
        """What the penalty counts at each row: what is committed, and the block up to the row."""
        rows = tokens.shape[0]
        so_far = mx.tril(mx.ones((rows, rows), mx.bool_))
        block = mx.where(so_far, tokens, tokens[0])
        committed = mx.repeat(self.seen[None], rows, axis=0)
        return mx.put_along_axis(committed, block, mx.array(True), axis=-1)


def penalised(logits: Array, seen: Array, penalty: float) -> Array:
    """Logits of tokens that were seen, divided by the penalty where above 0, else multiplied."""
    if penalty == 1:
        return logits
    return mx.where(seen, mx.where(logits > 0, logits / penalty, logits * penalty), logits)


def probabilities(logits: Array, settings: Sampling) -> Array:
    """What is drawn from: temperature, top-k, top-p, min-p, in this order, summing to 1.

    Among equal logits the lower id goes first. At temperature 0 they are those of temperature 1.
    """
    scaled = logits - logits.max(axis=-1, keepdims=True)
    if settings.temperature:
        scaled = scaled / max(settings.temperature, SMALLEST)
    order = None
    if settings.top_k is not None or settings.top_p < 1:
        order = ordered(scaled, settings.top_k or scaled.shape[-1])
        scaled = mx.take_along_axis(scaled, order, axis=-1)
    p = mx.softmax(scaled, axis=-1, precise=True)
    if settings.top_p < 1:
        before = mx.cumsum(p, axis=-1) - p
        p = mx.where(before < settings.top_p, p, 0.0)
    if settings.min_p:
        p = mx.where(p >= settings.min_p * p.max(axis=-1, keepdims=True), p, 0.0)
    p = p / p.sum(axis=-1, keepdims=True)
    return p if order is None else mx.put_along_axis(mx.zeros_like(logits), order, p, axis=-1)


def ordered(logits: Array, count: int) -> Array:
    """The `count` tokens of the highest logits, the highest first, the lower id among equals."""
    return mx.argsort(-ranks(logits), axis=-1)[..., :count].astype(mx.int32)


def pick(weights: Array, draws: Array) -> Array:
    """A token of each row by its weights, which need not sum to 1; never one of weight 0."""
    sums = mx.where(weights > 0, mx.cumsum(weights, axis=-1), 0.0)
    beyond = sums > draws[:, None] * sums.max(axis=-1, keepdims=True)
    return mx.argmax(beyond, axis=-1).astype(mx.int32)


def point_masses(like: Array, tokens: Array) -> Array:
    """Rows with all weight on one token."""
    return mx.put_along_axis(mx.zeros_like(like), tokens, mx.array(1.0), axis=-1)


def left_over(p: Array, q: Array) -> Array:
    """What p has above q, to draw from after a rejection; p itself where rounding left nothing."""
    rest = mx.maximum(p - q, 0.0)
    return mx.where(rest.sum(axis=-1, keepdims=True) > 0, rest, p)


def slot_scores(network: DraftNetwork, states: Array, logits: Array) -> Scores:
    """Logits of a slot by the token before it; outside a selector's candidates there are none."""
    selector = network.candidate_selector
    if selector is None:
        return lambda slot, previous: logits[slot]
    tokens, base, links = selector.candidates(states, logits)

    def scores(slot: int, previous: Array) -> Array:
        known = selector.scores(base[slot], links[slot], previous)
        row = mx.full(logits[slot].shape, -LARGEST, mx.float32)
        return mx.put_along_axis(row, tokens[slot], known, axis=-1)

    return scores
