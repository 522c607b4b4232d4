"""The batched anchor pass: the draft asked from every position of a text at once."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dflash_lab.backends.torch_model import DraftNetwork


@torch.inference_mode()
def accepted_counts(
    network: DraftNetwork,
    embedding: nn.Module,
    head: nn.Module,
    features: Tensor,
    tokens: Tensor,
    prompt_length: int,
    block_size: int,
    draft_window: int | None = None,
    anchors_at_once: int = 64,
) -> list[int]:
    """How many drafted tokens equal the text, for a block at each of its anchors.

    `features` [context, fused] are the target's at positions 0 .. len(tokens) - 2 at least;
    `tokens` [length] is prompt and text. Entry n belongs to the anchor at prompt_length + n,
    n = 0 .. N - 2, and counts no further than the text goes: min(accepted, remaining).
    """
    length = tokens.shape[0]
    positions = torch.arange(length - 1, device=tokens.device)
    context = network.context(features[None, : length - 1], positions)
    mask = torch.tensor([network.config.mask_token], device=tokens.device)
    counts: list[int] = []
    for anchors in torch.arange(prompt_length, length - 1, device=tokens.device).split(
        anchors_at_once
    ):
        block = mask.expand(len(anchors), block_size).clone()
        block[:, 0] = tokens[anchors]
        embedded = network.embed(embedding, block)[None]
        states = network(embedded, anchors[None], context, positions, draft_window)[0]
        counts += _leading_matches(network, states, head, tokens, anchors)
    return counts


def _leading_matches(
    network: DraftNetwork, states: Tensor, head: nn.Module, tokens: Tensor, anchors: Tensor
) -> list[int]:
    """The head is asked for draft position k only where all before it matched.

    There the token before it is the text's own, which is what a DFlash 2 selector goes by.
    """
    counts = torch.zeros(len(anchors), dtype=torch.long, device=tokens.device)
    alive = torch.arange(len(anchors), device=tokens.device)
    for position in range(1, states.shape[1]):
        alive = alive[anchors[alive] + position < len(tokens)]
        if not len(alive):
            break
        before = tokens[anchors[alive] + position - 1]
        drafted = network.choose(states[alive, position], head, before)
        alive = alive[drafted == tokens[anchors[alive] + position]]
        counts[alive] += 1
    return counts.tolist()


def walk(counts: list[int]) -> list[int]:
    """Accepted counts of the blocks that decoding would visit, the cut one at the end left out."""
    visited, n, end = [], 0, len(counts)  # anchors 0 .. N - 2; the text ends at N - 1 = end
    while n < end:
        if n + counts[n] + 1 <= end:
            visited.append(counts[n])
        n += counts[n] + 1
    return visited
