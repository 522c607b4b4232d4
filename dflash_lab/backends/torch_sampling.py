"""Filters and draws in torch: probabilities of whole rows, and a token of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dflash_lab.backends.torch_model import DraftNetwork, likeliest
from dflash_lab.sampling import DRAFT, TOKEN, Sampling

SMALLEST = 1e-20  # temperature that is divided by; what is nearer to 0 draws the best token as well
LARGEST = 1e30  # in the place of a draft's logit that is no finite number

Scores = Callable[[int, Tensor], Tensor]  # slot and the token before it -> logits [vocab]


class Judged(NamedTuple):
    """The target's tokens after each row, and both probabilities of the drafted ones."""

    chosen: Tensor  # int64 [rows]
    told: Tensor | None = None  # float32 [2, rows - 1]: the target's, the draft's


class TorchSampler:
    """What one session draws with: the settings, and the tokens that its penalty counts."""

    def __init__(self, settings: Sampling, vocabulary: int, device: torch.device):
        self.settings = settings
        self.seen = torch.zeros(vocabulary, dtype=torch.bool, device=device)  # committed ones
        self._block = torch.empty(0, dtype=torch.long, device=device)  # judged last

    def first(self, logits: Tensor, prompt: Tensor) -> Tensor:
        """The token after a prompt [length], from its last row of logits [vocab]."""
        self.seen[prompt] = True
        return self.judge(logits[None], prompt[-1:], None, prompt.shape[0]).chosen[0]

    def propose(
        self, scores: Scores, best: Tensor, anchor: Tensor, position: int
    ) -> tuple[Tensor, Tensor]:
        """The drafted tokens [slots] and what each was weighed with [slots, vocab].

        `best` are the draft's best tokens, `position` is that of the first. From left to right,
        since penalty and selector look at the tokens before.
        """
        draws = self._draws(DRAFT, position, best.shape[0])
        seen, previous = self.seen.clone(), anchor
        tokens, weights = [], []
        for slot in range(best.shape[0]):
            seen[previous] = True
            row = scores(slot, previous).float()[None]
            row = row.nan_to_num(nan=-LARGEST, posinf=LARGEST, neginf=-LARGEST)
            row = penalised(row, seen, self.settings.repetition_penalty)
            weights.append(probabilities(row, self.settings))
            sampled = self.settings.proposal == "sample"
            previous = pick(weights[-1], draws[slot : slot + 1])[0] if sampled else best[slot]
            tokens.append(previous)
        return torch.stack(tokens), torch.cat(weights)

    def judge(
        self, logits: Tensor, tokens: Tensor, weights: Tensor | None, position: int
    ) -> Judged:
        """The target's choice after each row of logits [rows, vocab].

        `tokens` [rows] are the anchor and the drafted ones, `weights` [slots, vocab] what those
        were weighed with; `position` is that of the first choice.
        """
        settings, self._block = self.settings, tokens
        wide = logits.float()
        if settings.repetition_penalty != 1:
            wide = penalised(wide, self._counted(tokens), settings.repetition_penalty)
        if settings.temperature == 0 and not settings.weighs_target:
            return Judged(wide.argmax(-1))
        p, drafted = probabilities(wide, settings), tokens[1:, None]
        certain = point_masses(p[:-1], drafted)
        q = certain if weights is None else weights[: len(drafted)]
        told = None
        if settings.weighs_target:
            told = torch.cat((p[:-1].gather(-1, drafted), q.gather(-1, drafted)), dim=-1).T
        if settings.temperature == 0:
            return Judged(wide.argmax(-1), told)
        if settings.rule == "rejection":
            rest = left_over(p[:-1], q if settings.proposal == "sample" else certain)
            p = torch.cat((rest, p[-1:]))
        return Judged(pick(p, self._draws(TOKEN, position, tokens.shape[0])), told)

    def verdict_parts(self, told: Tensor | None, position: int) -> dict[str, tuple[float, ...]]:
        """What the verdict says of the drafted tokens' probabilities, the first at `position`."""
        return {} if told is None else self.settings.told(position, *told.tolist())

    def keep(self, count: int) -> None:
        """Count the first tokens of the block just judged as committed."""
        self.seen[self._block[:count]] = True

    def _draws(self, purpose: str, position: int, count: int) -> Tensor:
        return torch.tensor(self.settings.draws(purpose, position, count), device=self.seen.device)

    def _counted(self, tokens: Tensor) -> Tensor:
        """What the penalty counts at each row: what is committed, and the block up to the row."""
        rows = tokens.shape[0]
        so_far = torch.ones(rows, rows, dtype=torch.bool, device=tokens.device).tril()
        return self.seen.repeat(rows, 1).scatter(-1, torch.where(so_far, tokens, tokens[0]), True)


def penalised(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Logits of tokens that were seen, divided by the penalty where above 0, else multiplied."""
    if penalty == 1:
        return logits
    return logits.where(~seen, torch.where(logits > 0, logits / penalty, logits * penalty))


def probabilities(logits: Tensor, settings: Sampling) -> Tensor:
    """What is drawn from: temperature, top-k, top-p, min-p, in this order, summing to 1.

    Among equal logits the lower id goes first. At temperature 0 they are those of temperature 1.
    """
    scaled = logits - logits.amax(-1, keepdim=True)
    if settings.temperature:
        scaled = scaled / max(settings.temperature, SMALLEST)
    order = None
    if settings.top_k is not None or settings.top_p < 1:
        order = ordered(scaled, settings.top_k or scaled.shape[-1])
        scaled = scaled.gather(-1, order)
    p = scaled.softmax(-1)
    if settings.top_p < 1:
        before = p.cumsum(-1) - p
        p = p.where(before < settings.top_p, 0.0)
    if settings.min_p:
        p = p.where(p >= settings.min_p * p.amax(-1, keepdim=True), 0.0)
    p = p / p.sum(-1, keepdim=True)
    return p if order is None else torch.zeros_like(logits).scatter(-1, order, p)


def ordered(logits: Tensor, count: int) -> Tensor:
    """The `count` tokens of the highest logits, the highest first, the lower id among equals."""
    if count < logits.shape[-1]:
        ids = likeliest(logits, count)
        return ids.gather(-1, ordered(logits.gather(-1, ids), count))
    return logits.sort(dim=-1, descending=True, stable=True).indices


def pick(weights: Tensor, draws: Tensor) -> Tensor:
    """A token of each row by its weights, which need not sum to 1; never one of weight 0."""
    sums = weights.cumsum(-1).where(weights > 0, 0.0)
    return (sums > draws[:, None] * sums.amax(-1, keepdim=True)).int().argmax(-1)


def point_masses(like: Tensor, tokens: Tensor) -> Tensor:
    """Rows with all weight on one token."""
    return torch.zeros_like(like).scatter(-1, tokens, 1.0)


def left_over(p: Tensor, q: Tensor) -> Tensor:
    """What p has above q, to draw from after a rejection; p itself where rounding left nothing."""
    rest = (p - q).clamp(min=0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)


def slot_scores(network: DraftNetwork, states: Tensor, logits: Tensor) -> Scores:
    """Logits of a slot by the token before it; outside a selector's candidates there are none."""
    selector = network.candidate_selector
    if selector is None:
        return lambda slot, previous: logits[slot]
    tokens, base, links = selector.candidates(states, logits)

    def scores(slot: int, previous: Tensor) -> Tensor:
        known = selector.scores(base[slot], links[slot], previous)
        row = torch.full_like(logits[slot], -LARGEST, dtype=torch.float32)
        return row.scatter(-1, tokens[slot], known)

    return scores
