"""Layers of a torch target that fold all rows into a state, and taking rows back from them.

A gated delta net (Qwen3-Next, Qwen3.5) keeps the last inputs of its short convolution and a matrix
for each head. No row can be cut off from these: the state before the step is kept with what the
layer was given in it, and the rows that stay are given to it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import LinearAttentionLayer

from dflash_lab.backends import TargetNotReversible

STATES = ("conv_states", "recurrent_states", "has_previous_state")


def mixer(layer: nn.Module) -> nn.Module:
    """The part of a decoder layer that carries something from row to row: it knows its number."""
    parts = (part for part in layer.modules() if part is not layer)
    return next((part for part in parts if hasattr(part, "layer_idx")), layer)


def is_delta_net(part: nn.Module) -> bool:
    """Whether a mixer's state can be made again: its code writes into no state it was given."""
    return type(part).__name__.endswith("GatedDeltaNet")


class RecurrentCache(LinearAttentionLayer):
    """Convolution and recurrent state of one gated delta net, and how its last step began.

    Taking back some rows of a step costs a pass of this one net over the rows that stay, by the
    library's own code; it is exact, since they were read without those behind them. Taking back
    no row is free.
    """

    def __init__(self, net: nn.Module, states: int):
        super().__init__(states)
        self.net = net
        self.record_past = True  # then the library hands in every row, and writes into no state
        self.length = 0  # positions in the state
        self._before: dict[str, dict[int, Any]] = {}
        self._rows: Tensor | None = None

    def begin(self, rows: Tensor | None) -> None:
        """Note what a step will give the net [seq, new, hidden], None where it all stays."""
        self._rows = rows
        self._before = {} if rows is None else {name: dict(getattr(self, name)) for name in STATES}

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, *, conv_kernel_size: int, **kwargs: Any
    ) -> Tensor:
        """Add inputs of the convolution [seq, channels, new]; those before them and they."""
        held = self.conv_states[state_idx]
        if held is None:
            held = conv_states.new_zeros((*conv_states.shape[:2], conv_kernel_size))
        joined = torch.cat((held, conv_states), dim=-1)
        # a copy: a part of `joined` would keep all of a prompt in memory
        self.conv_states[state_idx] = joined[..., -conv_kernel_size:].clone()
        self.has_previous_state[state_idx] = True
        if state_idx == 0:
            self.length += conv_states.shape[-1]
        return joined

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states

    @torch.inference_mode()
    def take_back(self, tokens: int) -> None:
        """Remove the last rows; an error for more than the last step brought."""
        if not tokens:
            return
        rows = 0 if self._rows is None else self._rows.shape[1]
        if tokens > rows:
            raise TargetNotReversible(
                f"{tokens} tokens cannot be taken back from {self.length}: this layer keeps one "
                f"state for all of them, and can make it again without the last {rows} only."
            )
        kept = self._rows[:, : rows - tokens]
        for name, states in self._before.items():
            setattr(self, name, states)
        self.length -= rows
        self.begin(kept)
        if kept.shape[1]:
            # forward itself: hooks of a pass on another thread have no business here
            self.net.forward(kept, Cache(layers=[self] * (self.net.layer_idx + 1)))

    def get_seq_length(self) -> int:
        return self.length


@contextmanager
def remembered(cache: Cache, all_stay: bool) -> Iterator[None]:
    """Let the recurrent layers of a cache see how their step begins; no hook outlives the pass.

    Where all rows stay, as those of a prompt do, nothing is kept of them.
    """

    layers = [layer for layer in cache.layers if isinstance(layer, RecurrentCache)]
    handles = [
        layer.net.register_forward_pre_hook(partial(_begin, layer, all_stay), with_kwargs=True)
        for layer in layers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _begin(
    layer: RecurrentCache,
    all_stay: bool,
    net: nn.Module,
    args: tuple[Any, ...],
    named: dict[str, Any],
) -> None:
    layer.begin(None if all_stay else named.get("hidden_states", *args[:1]))
