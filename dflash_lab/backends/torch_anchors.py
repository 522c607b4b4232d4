"""The batched anchor pass: the draft asked from every position of a text at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from dflash_lab.backends import Proposals
from dflash_lab.backends.torch_model import ContextCache, DraftNetwork, KeysValues
from dflash_lab.backends.torch_target import TorchTarget, not_finite

BUDGET = 128 * 2**20  # bytes that the scores of one batch of anchors, or its logits, may take


class TorchAnchors:
    """A text with the draft's view of it, to be asked for a block at any of its new tokens.

    `context` are the draft's keys and values of positions 0 to length - 2, `tokens` [length] is
    prompt and text. Anchor n is the new token n, at the position prompt_length + n.
    """

    def __init__(
        self,
        network: DraftNetwork,
        embedding: nn.Module,
        head: nn.Module,
        context: Sequence[KeysValues],
        tokens: Tensor,
        prompt_length: int,
        choices: Sequence[int] = (),
        margins: Sequence[float] = (),
        leads: Sequence[float] = (),
        sizes: Sequence[float] = (),
        budget: int = BUDGET,
    ):
        self.network, self.embedding, self.head = network, embedding, head
        self.choices, self.margins, self.leads, self.sizes = choices, margins, leads, sizes
        self.context, self.tokens, self.prompt_length = context, tokens, prompt_length
        self.positions = torch.arange(tokens.shape[0] - 1, device=tokens.device)
        self.budget = budget
        self.finite = True  # False once the draft's numbers overflowed

    @torch.inference_mode()
    def accepted(
        self, anchors: Sequence[int], block_size: int, draft_window: int | None
    ) -> list[int]:
        """How many drafted tokens equal the text, from the left, for a block at each anchor.

        Counted no further than the text goes: min(accepted, remaining).
        """
        counts: list[int] = []
        for at, states in self._states(anchors, block_size, draft_window):
            counts += self._leading_matches(at, states)
        return counts

    @torch.inference_mode()
    def proposals(
        self, anchors: Sequence[int], block_size: int, draft_window: int | None
    ) -> list[Proposals]:
        """What is drafted in a block at each anchor, and how sure of it the draft is."""
        made: list[Proposals] = []
        for at, states in self._states(anchors, block_size, draft_window):
            many = max(1, _rows_at_once(self.head, self.budget) // (block_size - 1))
            for rows, places in zip(states[:, 1:].split(many), at.split(many), strict=True):
                made += self._propose(rows, places)
        return made

    def _states(
        self, anchors: Sequence[int], block_size: int, draft_window: int | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Positions of a batch of anchors, and the final states [anchors, block_size, hidden]."""
        if not len(anchors):
            return
        at = torch.tensor(list(anchors), dtype=torch.long, device=self.tokens.device)
        for batch in (at + self.prompt_length).split(self._batch(block_size)):
            block = self.tokens.new_full((len(batch), block_size), self.network.config.mask_token)
            block[:, 0] = self.tokens[batch]
            embedded = self.network.embed(self.embedding, block)[None]
            context, positions = self._seen(batch, draft_window)
            yield batch, self.network(embedded, batch[None], context, positions, draft_window)[0]

    def _seen(self, at: Tensor, draft_window: int | None) -> tuple[list[KeysValues], Tensor]:
        """The part of the context that a batch of anchors may see, and its positions."""
        first = 0 if draft_window is None else max(0, int(at.min()) - draft_window)
        part = slice(first, int(at.max()))
        rows = [(keys[:, :, part], values[:, :, part]) for keys, values in self.context]
        return rows, self.positions[part]

    def _batch(self, block_size: int) -> int:
        """Anchors at once: scores in the weights' dtype, in float32, and what softmax makes."""
        config = self.network.config
        scores = config.num_heads * (len(self.positions) + block_size)
        rows = 3 * scores + 3 * config.intermediate_size + 8 * config.hidden_size
        return max(1, self.budget // (4 * block_size * rows))

    def _leading_matches(self, at: Tensor, states: Tensor) -> list[int]:
        """The head is asked for draft position k only where all before it matched.

        There the token before it is the text's own, which is what a DFlash 2 selector goes by.
        """
        counts = torch.zeros(len(at), dtype=torch.long, device=at.device)
        alive = torch.arange(len(at), device=at.device)
        for position in range(1, states.shape[1]):
            alive = alive[at[alive] + position < len(self.tokens)]
            if not len(alive):
                break
            parts = alive.split(_rows_at_once(self.head, self.budget))
            same = torch.cat([self._matches(at, states, position, part) for part in parts])
            alive = alive[same]
            counts[alive] += 1
        return counts.tolist()

    def _matches(self, at: Tensor, states: Tensor, position: int, alive: Tensor) -> Tensor:
        raw = self._raw(states[alive, position])
        before = self.tokens[at[alive] + position - 1]
        drafted = self.network.choose(states[alive, position], lambda _: raw, before)
        return drafted == self.tokens[at[alive] + position]

    def _propose(self, states: Tensor, at: Tensor) -> list[Proposals]:
        """The blocks at `at`, from the states [anchors, slots, hidden] of their drafted entries."""
        network, raw = self.network, self._raw(states)
        logits = network.logits(raw)
        if network.candidate_selector is None:
            drafted = logits.argmax(-1)
        else:  # it runs free here, as it does live: after its own choices, not after the text
            walks = zip(states, logits, self.tokens[at], strict=True)
            drafted = torch.stack([network.candidate_selector.walk(*walk) for walk in walks])
        sure = network.confidences(logits)
        return [
            Proposals(drafted=tuple(tokens), confidences=tuple(numbers))
            for tokens, numbers in zip(drafted.tolist(), sure.tolist(), strict=True)
        ]

    def _raw(self, states: Tensor) -> Tensor:
        """What the head says, looked at for numbers that are not finite, as the live draft is."""
        raw = self.head(states.contiguous())  # a slice of blocks takes several times as long
        self.finite = self.finite and bool(torch.isfinite(raw.amax(-1)).all())
        return raw


def _rows_at_once(head: nn.Module, budget: int) -> int:
    """Rows whose logits in float32, twice over, stay within so many bytes."""
    return max(1, budget // (8 * head.weight.shape[0]))


@torch.inference_mode()
def read_anchors(
    target: TorchTarget,
    network: DraftNetwork,
    prompt: Sequence[int],
    tokens: Sequence[int],
    chunk: int,
) -> TorchAnchors:
    """The target's one pass over a prompt and the tokens after it, `chunk` rows at a time.

    Features become the draft's keys and values at once, so those of a long text are never held.
    """
    text = torch.tensor([*prompt, *tokens], device=target.device)
    length, new = len(prompt), text[len(prompt) :]
    narrow = min(chunk, _rows_at_once(target.head, BUDGET))  # rows whose logits are all wanted
    cache, context = target.new_cache(), ContextCache(None)
    read: list[tuple[int, float, float, float]] = []  # choice, margin, lead and size of each place
    for part in (*text[:length].split(chunk), *text[length:-1].split(narrow)):
        start, end = context.end, context.end + len(part)
        if not len(part):
            continue
        taps, asks_prompt = network.config.target_layer_ids, start < length
        logits, features = target.logits(part[None], cache, taps, last_only=asks_prompt)
        positions = torch.arange(start, end, device=target.device)
        context.append(network.context(features, positions))
        if end >= length:
            judged = new[len(read) : len(read) + logits.shape[1]]
            read += _judged(logits[0], judged, target.dtype)
    choices, margins, leads, sizes = map(list, zip(*read, strict=True))
    return TorchAnchors(
        network,
        target.embedding,
        target.head,
        context.layers(),
        text,
        length,
        choices=choices,
        margins=margins,
        leads=leads,
        sizes=sizes,
    )


def _judged(
    logits: Tensor, tokens: Tensor, dtype: torch.dtype
) -> Iterator[tuple[int, float, float, float]]:
    """Of each row: the best token, how far its logit is above the given token's and above the
    second best, and the largest logit by size.
    """
    best = logits.argmax(-1)
    top = logits.gather(-1, best[:, None])[:, 0].float()
    if not top.isfinite().all():
        raise not_finite(dtype)
    apart = top - logits.gather(-1, tokens[:, None])[:, 0].float()
    lead = top - logits.topk(2).values[:, 1].float()
    size = torch.maximum(top, -logits.amin(-1).float())
    return zip(*(part.tolist() for part in (best, apart, lead, size)), strict=True)


def accepted_counts(
    network: DraftNetwork,
    embedding: nn.Module,
    head: nn.Module,
    features: Tensor,
    tokens: Tensor,
    prompt_length: int,
    block_size: int,
    draft_window: int | None = None,
    budget: int = BUDGET,
) -> list[int]:
    """Accepted counts of every anchor of a text whose features are at hand, as in training.

    `features` [context, fused] are the target's at positions 0 .. length - 2 at least; see
    `TorchAnchors` for the rest.
    """
    context = text_context(network, features, len(tokens))
    made = TorchAnchors(network, embedding, head, context, tokens, prompt_length, budget=budget)
    return made.accepted(range(len(tokens) - 1 - prompt_length), block_size, draft_window)


@torch.inference_mode()
def text_context(network: DraftNetwork, features: Tensor, length: int) -> list[KeysValues]:
    """The draft's keys and values of a text of that length: its last token is never context."""
    positions = torch.arange(length - 1, device=features.device)
    return network.context(features[None, : length - 1], positions)


def walk(counts: Sequence[int]) -> list[int]:
    """Accepted counts of the blocks that decoding would visit, the cut one at the end left out."""
    visited, n, end = [], 0, len(counts)  # anchors 0 .. N - 2; the text ends at N - 1 = end
    while n < end:
        if n + counts[n] + 1 <= end:
            visited.append(counts[n])
        n += counts[n] + 1
    return visited
