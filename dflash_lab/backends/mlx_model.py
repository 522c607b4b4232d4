"""The DFlash draft network in plain MLX, the twin of `torch_model`: same classes, order and names.

Shapes carry two leading axes, `seq` (texts) and `anchors` (blocks asked for at once in one text):
decoding runs with one of each, replay with many. So there is one network and one mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import mlx.core as mx
from jaxtyping import Bool, Float, Int
from mlx import nn

from dflash_lab.checkpoint import (
    CheckpointError,
    DFlash2,
    DraftConfig,
    Rope,
    TensorMismatch,
    bare_names,
    check_headers,
    read_headers,
    weight_files,
)

Array = mx.array
KeysValues = tuple[Float[Array, "seq kv context head"], Float[Array, "seq kv context head"]]

GROUP = 64  # weights that share a scale in a quantised draft


class RMSNorm(nn.Module):
    """Root-mean-square norm; statistics in float32, the weight multiplies directly."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = mx.ones(size)
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows size"]) -> Float[Array, "*rows size"]:
        return mx.fast.rms_norm(x, self.weight, self.eps)


def inverse_frequencies(rope: Rope, head_dim: int) -> Float[Array, " half"]:
    """`Rope.inverse_frequencies` on the device."""
    return mx.array(rope.inverse_frequencies(head_dim), mx.float32)


def rotary(
    positions: Int[Array, "*rows"], rope: Rope, head_dim: int, dtype: mx.Dtype
) -> tuple[Float[Array, "*rows head"], Float[Array, "*rows head"]]:
    """Cosines and sines of the half-rotation layout at absolute positions."""
    angles = positions.astype(mx.float32)[..., None] * inverse_frequencies(rope, head_dim)
    angles = mx.concatenate((angles, angles), axis=-1)
    return (mx.cos(angles) * rope.scale).astype(dtype), (mx.sin(angles) * rope.scale).astype(dtype)


def rotate(
    x: Float[Array, "*rows head"], cos: Float[Array, "*r head"], sin: Float[Array, "*r head"]
) -> Float[Array, "*rows head"]:
    """Apply the rotation that `rotary` describes."""
    first, second = mx.split(x, 2, axis=-1)
    return x * cos + mx.concatenate((-second, first), axis=-1) * sin


def context_mask(
    anchors: Int[Array, "seq anchors"],
    width: int,
    context_positions: Int[Array, " context"],
    draft_window: int | None,
    layer_window: int | None,
) -> Bool[Array, "seq anchors width context"]:
    """Which committed positions each block row may see (dflash.md 1.5).

    Always strictly before the anchor. `draft_window` is per block: the same last positions for
    every row. `layer_window` is per row: a row further right sees less of the past.
    """
    before = anchors[:, :, None, None] - context_positions
    visible = before > 0
    if draft_window is not None:
        visible = visible & (before <= draft_window)
    rows = mx.arange(width)[:, None]
    if layer_window is not None:
        return visible & (before + rows < layer_window)
    seq, blocks, _, length = visible.shape
    return mx.broadcast_to(visible, (seq, blocks, width, length))


def block_mask(width: int, causal: bool) -> Bool[Array, "width width"] | None:
    """Which rows of its own block a row may see; None is all of them."""
    if not causal:
        return None
    rows = mx.arange(width)
    return rows[:, None] >= rows


def attend(
    queries: Float[Array, "seq anchors heads width head"],
    context: KeysValues,
    block: tuple[
        Float[Array, "seq anchors kv width head"], Float[Array, "seq anchors kv width head"]
    ],
    visible: Bool[Array, "seq anchors width context"] | None,
    within: Bool[Array, "width width"] | None,
) -> Float[Array, "seq anchors heads width head"]:
    """Softmax attention over [context ; own block], the context shared by all blocks of a text.

    Query heads of one key-value head are folded into the rows, so no key or value is repeated.
    """
    seq, anchors, heads, width, head = queries.shape
    kv, length = context[0].shape[1], context[0].shape[2]
    group = heads // kv
    grouped = queries.reshape(seq, anchors, kv, group * width, head)
    flat = grouped.swapaxes(1, 2).reshape(seq, kv, anchors * group * width, head)
    past = (flat @ context[0].swapaxes(-1, -2)).reshape(seq, kv, anchors, group, width, length)
    own = grouped @ block[0].swapaxes(-1, -2)
    own = own.reshape(seq, anchors, kv, group, width, width).swapaxes(1, 2)
    if visible is not None:
        past = mx.where(visible[:, None, :, None], past, -mx.inf)
    if within is not None:
        own = mx.where(within, own, -mx.inf)
    scores = mx.concatenate((past, own), axis=-1).astype(mx.float32) * head**-0.5
    weights = mx.softmax(scores, axis=-1).astype(queries.dtype)
    past, own = mx.split(weights, [length], axis=-1)
    out = past.reshape(seq, kv, anchors * group * width, length) @ context[1]
    out = out.reshape(seq, kv, anchors, group * width, head).swapaxes(1, 2)
    own = own.swapaxes(1, 2).reshape(seq, anchors, kv, group * width, width)
    return (out + own @ block[1]).reshape(seq, anchors, heads, width, head)


class Attention(nn.Module):
    """Grouped-query attention whose keys and values come from the context and from the block."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.heads, self.kv, self.head = config.num_heads, config.num_kv_heads, config.head_dim
        hidden, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(hidden, self.heads * self.head, bias=bias)
        self.k_proj = nn.Linear(hidden, self.kv * self.head, bias=bias)
        self.v_proj = nn.Linear(hidden, self.kv * self.head, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head, hidden, bias=bias)
        self.q_norm = RMSNorm(self.head, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head, config.rms_norm_eps)

    def keys_values(
        self,
        x: Float[Array, "*rows length hidden"],
        cos: Float[Array, "*r length head"],
        sin: Float[Array, "*r length head"],
    ) -> tuple[Float[Array, "*rows kv length head"], Float[Array, "*rows kv length head"]]:
        """Keys (normed and rotated) and values of any rows, context or block."""
        shape = (*x.shape[:-1], self.kv, self.head)
        keys = self.k_norm(self.k_proj(x).reshape(shape)).swapaxes(-2, -3)
        values = self.v_proj(x).reshape(shape).swapaxes(-2, -3)
        return rotate(keys, mx.expand_dims(cos, -3), mx.expand_dims(sin, -3)), values

    def __call__(
        self,
        x: Float[Array, "seq anchors width hidden"],
        context: KeysValues,
        rotation: tuple[Array, Array],
        visible: Bool[Array, "seq anchors width context"] | None,
        within: Bool[Array, "width width"] | None,
    ) -> Float[Array, "seq anchors width hidden"]:
        cos, sin = rotation
        shape = (*x.shape[:-1], self.heads, self.head)
        queries = self.q_norm(self.q_proj(x).reshape(shape)).swapaxes(-2, -3)
        queries = rotate(queries, mx.expand_dims(cos, -3), mx.expand_dims(sin, -3))
        out = attend(queries, context, self.keys_values(x, cos, sin), visible, within)
        return self.o_proj(out.swapaxes(-2, -3).flatten(-2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, x: Float[Array, "*rows hidden"]) -> Float[Array, "*rows hidden"]:
        gate = self.gate_proj(x)
        return self.down_proj(gate * mx.sigmoid(gate) * self.up_proj(x))


class Convolution(nn.Module):
    """DFlash 2: a causal convolution over block rows before and after one half of a layer.

    Its kernels are a fixed part a channel and a dynamic part a group of channels, the latter made
    from the row itself. Rows before the block count as zero (dflash.md 2.5).
    """

    def __init__(self, config: DraftConfig, extras: DFlash2):
        super().__init__()
        hidden, self.taps, self.group = config.hidden_size, extras.conv_taps, extras.conv_group
        groups = hidden // self.group
        self.base_kernel = mx.zeros((2, self.taps, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * self.taps * groups, bias=False)

    def __call__(
        self,
        x: Float[Array, "*rows width hidden"],
        inner: Callable[[Array], Array],
    ) -> Float[Array, "*rows width hidden"]:
        """`inner` between the two convolutions; both have the kernels of the rows that came in."""
        dynamic = self.kernel_projection(x).reshape(*x.shape[:-1], 2, self.taps, -1)
        kernels = self.base_kernel + mx.repeat(dynamic, self.group, axis=-1)
        before, after = kernels[..., 0, :, :], kernels[..., 1, :, :]
        return convolve(inner(convolve(x, before)), after)


def convolve(
    x: Float[Array, "*rows width hidden"], kernels: Float[Array, "*rows width taps hidden"]
) -> Float[Array, "*rows width hidden"]:
    """Each row as a weighted sum of itself and the rows just before it, a kernel a row."""
    width = x.shape[-2]
    total = kernels[..., 0, :] * x
    for back in range(1, min(kernels.shape[-2], width)):
        zeros = mx.zeros_like(x[..., :back, :])
        past = mx.concatenate((zeros, x[..., : width - back, :]), axis=-2)
        total = total + kernels[..., back, :] * past
    return total


class Layer(nn.Module):
    """One decoder layer over block rows; the context enters as keys and values alone."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        extras = config.dflash2
        self.attention_conv = None if extras is None else Convolution(config, extras)
        self.mlp_conv = None if extras is None else Convolution(config, extras)

    def __call__(
        self,
        x: Float[Array, "seq anchors width hidden"],
        context: KeysValues,
        rotation: tuple[Array, Array],
        visible: Bool[Array, "seq anchors width context"] | None,
        within: Bool[Array, "width width"] | None,
    ) -> Float[Array, "seq anchors width hidden"]:
        seen = {"context": context, "rotation": rotation, "visible": visible, "within": within}
        attend_rows = partial(self.self_attn, **seen)
        x = x + surround(self.attention_conv, self.input_layernorm(x), attend_rows)
        return x + surround(self.mlp_conv, self.post_attention_layernorm(x), self.mlp)


def surround(
    conv: Convolution | None, x: Array, inner: Callable[[Array], Array]
) -> Float[Array, "*rows width hidden"]:
    """`inner`, between the convolutions where the draft has them."""
    return inner(x) if conv is None else conv(x, inner)


class CandidateSelector(nn.Module):
    """DFlash 2: chooses among a slot's likeliest tokens by the token before it (dflash.md 2.5)."""

    def __init__(self, config: DraftConfig, extras: DFlash2):
        super().__init__()
        rank = extras.selector_rank
        self.top_k = min(extras.selector_top_k, config.vocab_size)
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)
        self.predecessor_codebook = mx.zeros((config.vocab_size, rank))
        self.successor_codebook = mx.zeros((config.vocab_size, rank))

    def candidates(
        self, states: Float[Array, "*slots hidden"], logits: Float[Array, "*slots vocab"]
    ) -> tuple[Int[Array, "*slots k"], Float[Array, "*slots k"], Float[Array, "*slots k rank"]]:
        """Tokens in the order of their ids, their logits, and what a predecessor is weighed with.

        All slots at once, so that the walk gathers one row a slot.
        """
        tokens = likeliest(logits, self.top_k)
        wanted = mx.expand_dims(self.hidden_projection(states).astype(mx.float32), -2)
        links = self.successor_codebook[tokens].astype(mx.float32) * wanted
        return tokens, mx.take_along_axis(logits, tokens, axis=-1).astype(mx.float32), links

    def scores(
        self,
        logits: Float[Array, "*slots k"],
        links: Float[Array, "*slots k rank"],
        previous: Int[Array, "*slots"],
    ) -> Float[Array, "*slots k"]:
        """The candidates' logits, corrected by the token before them."""
        before = self.predecessor_codebook[previous].astype(mx.float32)
        return logits + (links @ mx.expand_dims(before, -1)).squeeze(-1)

    def choose(
        self,
        states: Float[Array, "*slots hidden"],
        logits: Float[Array, "*slots vocab"],
        previous: Int[Array, "*slots"],
    ) -> Int[Array, "*slots"]:
        """The best candidate of each slot after the given tokens; the lowest id among equals."""
        tokens, base, links = self.candidates(states, logits)
        return take(tokens, self.scores(base, links, previous))

    def walk(
        self,
        states: Float[Array, "slots hidden"],
        logits: Float[Array, "slots vocab"],
        anchor: Int[Array, ""],
    ) -> Int[Array, " slots"]:
        """The slots from left to right, each after the token chosen before it."""
        chosen = [anchor]
        for tokens, base, links in zip(*self.candidates(states, logits), strict=True):
            chosen.append(take(tokens, self.scores(base, links, chosen[-1])))
        return mx.stack(chosen[1:])


def take(tokens: Int[Array, "*slots k"], scores: Float[Array, "*slots k"]) -> Int[Array, "*slots"]:
    """The token of the best score, the first among equals."""
    at = mx.argmax(scores, axis=-1, keepdims=True)
    return mx.take_along_axis(tokens, at, axis=-1).squeeze(-1)


def likeliest(logits: Float[Array, "*slots vocab"], count: int) -> Int[Array, "*slots k"]:
    """The `count` tokens of the highest logits, by id; where logits are equal, the lowest ids."""
    best = mx.argpartition(-ranks(logits), count - 1, axis=-1)[..., :count]
    return mx.sort(best, axis=-1).astype(mx.int32)


def ranks(logits: Float[Array, "*slots vocab"]) -> Int[Array, "*slots vocab"]:
    """Whole numbers in the order of the logits, all different; the lower id above its equals.

    Half-precision logits are often equal, and which of them sorting puts first is nowhere said. So
    these are made of a float's bits, in order, then of the id.
    """
    bits = logits.astype(mx.float32).view(mx.int32).astype(mx.int64)
    order = mx.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    vocab = logits.shape[-1]
    return order * vocab + (vocab - 1 - mx.arange(vocab))


def finite_rows(logits: Float[Array, "*rows vocab"]) -> Bool[Array, "*rows"]:
    """Whether the highest logit of each row is a finite number; one that is none is the highest."""
    return mx.isfinite(mx.where(mx.isnan(logits), mx.inf, logits).max(axis=-1))


def best(logits: Float[Array, "*rows vocab"]) -> Int[Array, "*rows"]:
    """The best token of each row, the lowest id among equals, compared in float32."""
    return mx.argmax(logits.astype(mx.float32), axis=-1).astype(mx.int32)


class DraftNetwork(nn.Module):
    """The draft's own parameters. Embedding and head are the target's and are not in here."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.config = config
        hidden, taps = config.hidden_size, len(config.target_layer_ids)
        self.fc = nn.Linear(taps * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.layers = [Layer(config) for _ in range(config.num_layers)]
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        extras = config.dflash2
        self.candidate_selector = None if extras is None else CandidateSelector(config, extras)

    def embed(self, embedding: Callable[[Array], Array], tokens: Int[Array, "*rows"]) -> Array:
        """The block's rows from the target's embedding, that one's own scale included."""
        rows = embedding(tokens)
        scale = self.config.embedding_scale
        return rows if scale == 1 else rows * scale

    def context(
        self,
        features: Float[Array, "seq context fused"],
        positions: Int[Array, " context"],
    ) -> list[KeysValues]:
        """Keys and values of committed positions, one pair a layer.

        They depend on the features and the weights alone (dflash.md 1.7), so they are computed once
        for every anchor, block size and window.
        """
        fused = self.hidden_norm(self.fc(features))
        rotations = self.rotations(positions, fused.dtype)
        return [
            layer.self_attn.keys_values(fused, cos, sin)
            for layer, (cos, sin) in zip(self.layers, rotations, strict=True)
        ]

    def rotations(
        self, positions: Int[Array, "*rows"], dtype: mx.Dtype
    ) -> list[tuple[Array, Array]]:
        """Cosines and sines for each layer; layers that rotate alike share them."""
        config = self.config
        made = {
            rope: rotary(positions, rope, config.head_dim, dtype)
            for rope in dict.fromkeys(config.layer_ropes)
        }
        return [made[rope] for rope in config.layer_ropes]

    def __call__(
        self,
        embedded: Float[Array, "seq anchors width hidden"],
        anchors: Int[Array, "seq anchors"],
        context: Sequence[KeysValues],
        context_positions: Int[Array, " context"] | None,
        draft_window: int | None = None,
    ) -> Float[Array, "seq anchors width hidden"]:
        """Final normed states of every block row, the anchor's (untrained) row among them.

        `context_positions=None` says that the context holds exactly what every row may see.
        """
        width = embedded.shape[2]
        positions = anchors[:, :, None] + mx.arange(width)
        rotations = self.rotations(positions, embedded.dtype)
        x = embedded
        masks: dict[int | None, Array | None] = {}
        for index, layer in enumerate(self.layers):
            window = self.config.layer_windows[index]
            if window not in masks:
                masks[window] = (
                    context_mask(anchors, width, context_positions, draft_window, window)
                    if context_positions is not None
                    else None
                )
            within = block_mask(width, self.config.layer_causal[index])
            x = layer(x, context[index], rotations[index], masks[window], within)
        return self.norm(x)

    def logits(self, raw: Float[Array, "*slots vocab"]) -> Float[Array, "*slots vocab"]:
        """What the target's head said of the draft's states, multiplied and capped."""
        multiplier, cap = self.config.output_multiplier, self.config.softcap
        if multiplier == 1 and cap is None:
            return raw
        scaled = raw.astype(mx.float32) * multiplier
        return scaled if cap is None else cap * mx.tanh(scaled / cap)

    def confidences(self, logits: Float[Array, "*slots vocab"]) -> Float[Array, "*slots"]:
        """The highest probability of each slot, by the logits alone (a selector not heeded)."""
        wide = logits.astype(mx.float32)
        return mx.exp(wide.max(axis=-1) - mx.logsumexp(wide, axis=-1))

    def choose(
        self,
        states: Float[Array, "*slots hidden"],
        head: Callable[[Array], Array],
        previous: Int[Array, "*slots"],
    ) -> Int[Array, "*slots"]:
        """The drafted token of slots whose token before is known, as in a text."""
        logits = self.logits(head(states))
        if self.candidate_selector is None:
            return best(logits)
        return self.candidate_selector.choose(states, logits, previous)

    def propose(
        self,
        states: Float[Array, "slots hidden"],
        head: Callable[[Array], Array],
        anchor: Int[Array, ""],
    ) -> tuple[Int[Array, " slots"], Bool[Array, ""]]:
        """The drafted tokens of one block, and whether all its logits are finite numbers.

        `states` are those of slots 1 to `block_size - 1`. A softcap would hide an infinite logit,
        so what the head said is looked at, and of each slot only the highest.
        """
        raw = head(states)
        finite = finite_rows(raw).all()
        logits = self.logits(raw)
        if self.candidate_selector is None:
            return best(logits), finite
        return self.candidate_selector.walk(states, logits, anchor), finite


class ContextCache:
    """The draft's keys and values of the committed positions that it may still see.

    Buffers grow by doubling; with a window they stay bounded, since only the last `window` rows are
    carried over when a buffer is full.
    """

    def __init__(self, window: int | None):
        self.window = window
        self.end = 0  # absolute position after the last row held
        self._buffers: list[tuple[Array, Array]] = []
        self._start = self._stop = 0  # rows of the buffers in use

    def append(self, new: Sequence[KeysValues]) -> None:
        """Add rows that follow those held; rows that left the window are dropped."""
        rows = new[0][0].shape[2]
        if not self._buffers or self._stop + rows > self._buffers[0][0].shape[2]:
            self._make_room(new, rows)
        for (keys, values), (new_keys, new_values) in zip(self._buffers, new, strict=True):
            keys[:, :, self._stop : self._stop + rows] = new_keys
            values[:, :, self._stop : self._stop + rows] = new_values
        self._stop += rows
        self.end += rows
        if self.window is not None:
            self._start = max(self._start, self._stop - self.window)

    def skip_to(self, position: int) -> None:
        """Begin at an absolute position other than 0: what lies before is outside the window."""
        assert not self._buffers
        self.end = position

    def _make_room(self, new: Sequence[KeysValues], rows: int) -> None:
        held = len(self)
        capacity = max(64, 2 * (held + rows))
        grown = []
        for index, (new_keys, _) in enumerate(new):
            shape = (*new_keys.shape[:2], capacity, new_keys.shape[3])
            pair = (mx.zeros(shape, new_keys.dtype), mx.zeros(shape, new_keys.dtype))
            if held:
                for side in (0, 1):
                    old = self._buffers[index][side]
                    pair[side][:, :, :held] = old[:, :, self._start : self._stop]
            grown.append(pair)
        self._buffers, self._start, self._stop = grown, 0, held

    def layers(self) -> list[KeysValues]:
        """The rows held, a view for each layer."""
        part = slice(self._start, self._stop)
        return [(keys[:, :, part], values[:, :, part]) for keys, values in self._buffers]

    def __len__(self) -> int:
        return self._stop - self._start

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the buffers, rows held for growth included."""
        return sum(array.nbytes for pair in self._buffers for array in pair)


def load_network(
    folder: Path, config: DraftConfig, dtype: mx.Dtype, draft_bits: int | None = None
) -> DraftNetwork:
    """The network of a draft folder, strictly: every tensor present, none left over, all finite.

    With `draft_bits` its matrices are quantised after loading; norms stay as they are.
    """
    check_headers(config, read_headers(folder))
    tensors: dict[str, Array] = {}
    for file in weight_files(folder):
        tensors |= mx.load(str(file))
    tensors = bare_names(tensors)
    broken = [name for name, value in tensors.items() if not mx.isfinite(value).all()]
    if broken:
        raise TensorMismatch(
            f"tensors with values that are not finite: {', '.join(sorted(broken))}"
        )
    network = DraftNetwork(config)
    network.load_weights(list(tensors.items()))
    network.set_dtype(dtype)
    if draft_bits is not None:
        quantise(network, draft_bits)
    network.eval().freeze()
    mx.eval(network.parameters())
    return network


def quantise(network: DraftNetwork, bits: int) -> None:
    """Replace the matrices by quantised ones; raises where a width is no multiple of the group."""
    odd = sorted(
        name
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and module.weight.shape[1] % GROUP
    )
    if odd:
        raise CheckpointError(
            f"draft_bits is {bits}, but scales are shared by {GROUP} weights and the inputs of "
            f"{', '.join(odd)} are no multiple of that. Leave draft_bits out."
        )
    nn.quantize(network, group_size=GROUP, bits=bits)
