"""Layers of an MLX target that fold all rows into a state, and taking rows back from them.

A gated delta net (Qwen3-Next, Qwen3.5) keeps the last inputs of its short convolution and a matrix
for each head. No row can be cut off from these: the state before the step is kept with what the
layer was given in it, and the rows that stay are given to it again.
"""

from __future__ import annotations

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import ArraysCache

Array = mx.array


def has_delta_net(layer: nn.Module) -> bool:
    """Whether a layer's state can be made again: its code writes into no state it was given."""
    return any(type(part).__name__.endswith("GatedDeltaNet") for _, part in layer.named_modules())


class RecurrentCache(ArraysCache):
    """Convolution and recurrent state of one layer, and how its last step began.

    Taking back some rows of a step costs a pass of this layer's gated delta net over the rows that
    stay, by mlx-lm's own code; it is exact, since they were read without those behind them. The
    rest of the layer is asked for nothing, so MLX never computes it. Taking back no row is free.
    """

    def __init__(self, layer: nn.Module, states: int):
        super().__init__(states)
        self.layer = layer
        self.offset = 0  # positions in the state
        self._before: list[Array | None] = []
        self._rows: Array | None = None

    def advance(self, N: int) -> None:  # called once a step, at its end
        super().advance(N)
        self.offset += N

    def begin(self, rows: Array | None, before: list[Array | None]) -> None:
        """Note what a step gives the layer [seq, new, hidden], None where it all stays."""
        self._rows, self._before = rows, before

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        """Remove the last rows; none where they are more than the last step brought."""
        rows = 0 if self._rows is None else self._rows.shape[1]
        if n > rows:
            return 0
        kept = self._rows[:, : rows - n]
        self.cache, self.offset = list(self._before), self.offset - rows
        self._rows = kept
        if kept.shape[1]:
            self.layer(kept, mask=None, cache=self)
        return n
