"""The DFlash draft network in plain torch: what it computes, what a row may see, what it remembers.

Shapes carry two leading axes, `seq` (texts) and `anchors` (blocks asked for at once in one text):
decoding runs with one of each, training and replay with many. So there is one network and one mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import load_file
from torch import Tensor, nn

from dflash_lab.checkpoint import (
    DFlash2,
    DraftConfig,
    Rope,
    TensorMismatch,
    bare_names,
    check_headers,
    read_headers,
    weight_files,
)

KeysValues = tuple[Float[Tensor, "seq kv context head"], Float[Tensor, "seq kv context head"]]


class RMSNorm(nn.Module):
    """Root-mean-square norm; statistics in float32, the weight multiplies directly."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*rows size"]) -> Float[Tensor, "*rows size"]:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight


@cache
def inverse_frequencies(rope: Rope, head_dim: int, device: torch.device) -> Float[Tensor, " half"]:
    """`Rope.inverse_frequencies` on the device, where they stay."""
    with torch.inference_mode(False):
        return torch.tensor(rope.inverse_frequencies(head_dim), device=device, dtype=torch.float32)


def rotary(
    positions: Int[Tensor, "*rows"], rope: Rope, head_dim: int, dtype: torch.dtype
) -> tuple[Float[Tensor, "*rows head"], Float[Tensor, "*rows head"]]:
    """Cosines and sines of the half-rotation layout at absolute positions."""
    angles = positions.float()[..., None] * inverse_frequencies(rope, head_dim, positions.device)
    angles = torch.cat((angles, angles), dim=-1)
    return (angles.cos() * rope.scale).to(dtype), (angles.sin() * rope.scale).to(dtype)


def rotate(
    x: Float[Tensor, "*rows head"], cos: Float[Tensor, "*r head"], sin: Float[Tensor, "*r head"]
) -> Float[Tensor, "*rows head"]:
    """Apply the rotation that `rotary` describes."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def context_mask(
    anchors: Int[Tensor, "seq anchors"],
    width: int,
    context_positions: Int[Tensor, " context"],
    draft_window: int | None,
    layer_window: int | None,
) -> Bool[Tensor, "seq anchors width context"]:
    """Which committed positions each block row may see (dflash.md 1.5).

    Always strictly before the anchor. `draft_window` is per block: the same last positions for
    every row. `layer_window` is per row: a row further right sees less of the past.
    """
    before = anchors[:, :, None, None] - context_positions
    visible = before > 0
    if draft_window is not None:
        visible = visible & (before <= draft_window)
    rows = torch.arange(width, device=anchors.device)[:, None]
    if layer_window is not None:
        return visible & (before + rows < layer_window)
    return visible.expand(-1, -1, width, -1)


def block_mask(
    width: int, causal: bool, device: torch.device
) -> Bool[Tensor, "width width"] | None:
    """Which rows of its own block a row may see; None is all of them."""
    if not causal:
        return None
    return torch.ones(width, width, dtype=torch.bool, device=device).tril()


def attend(
    queries: Float[Tensor, "seq anchors heads width head"],
    context: KeysValues,
    block: tuple[
        Float[Tensor, "seq anchors kv width head"], Float[Tensor, "seq anchors kv width head"]
    ],
    visible: Bool[Tensor, "seq anchors width context"] | None,
    within: Bool[Tensor, "width width"] | None,
) -> Float[Tensor, "seq anchors heads width head"]:
    """Softmax attention over [context ; own block], the context shared by all blocks of a text.

    Query heads of one key-value head are folded into the rows, so no key or value is repeated.
    """
    seq, anchors, heads, width, head = queries.shape
    kv, length = context[0].shape[1], context[0].shape[2]
    group = heads // kv
    grouped = queries.reshape(seq, anchors, kv, group * width, head)
    flat = grouped.transpose(1, 2).reshape(seq, kv, anchors * group * width, head)
    past = (flat @ context[0].transpose(-1, -2)).view(seq, kv, anchors, group, width, length)
    own = grouped @ block[0].transpose(-1, -2)
    own = own.view(seq, anchors, kv, group, width, width).transpose(1, 2)
    if visible is not None:
        past = past.masked_fill(~visible[:, None, :, None], float("-inf"))
    if within is not None:
        own = own.masked_fill(~within, float("-inf"))
    scores = torch.cat((past, own), dim=-1).float() * head**-0.5
    weights = scores.softmax(dim=-1).to(queries.dtype)
    past, own = weights.split((length, width), dim=-1)
    out = past.reshape(seq, kv, anchors * group * width, length) @ context[1]
    out = out.view(seq, kv, anchors, group * width, head).transpose(1, 2)
    own = own.transpose(1, 2).reshape(seq, anchors, kv, group * width, width)
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
        x: Float[Tensor, "*rows length hidden"],
        cos: Float[Tensor, "*r length head"],
        sin: Float[Tensor, "*r length head"],
    ) -> tuple[Float[Tensor, "*rows kv length head"], Float[Tensor, "*rows kv length head"]]:
        """Keys (normed and rotated) and values of any rows, context or block."""
        shape = (*x.shape[:-1], self.kv, self.head)
        keys = self.k_norm(self.k_proj(x).view(shape)).transpose(-2, -3)
        values = self.v_proj(x).view(shape).transpose(-2, -3)
        return rotate(keys, cos.unsqueeze(-3), sin.unsqueeze(-3)), values

    def forward(
        self,
        x: Float[Tensor, "seq anchors width hidden"],
        context: KeysValues,
        rotation: tuple[Tensor, Tensor],
        visible: Bool[Tensor, "seq anchors width context"] | None,
        within: Bool[Tensor, "width width"] | None,
    ) -> Float[Tensor, "seq anchors width hidden"]:
        cos, sin = rotation
        shape = (*x.shape[:-1], self.heads, self.head)
        queries = self.q_norm(self.q_proj(x).view(shape)).transpose(-2, -3)
        queries = rotate(queries, cos.unsqueeze(-3), sin.unsqueeze(-3))
        out = attend(queries, context, self.keys_values(x, cos, sin), visible, within)
        return self.o_proj(out.transpose(-2, -3).flatten(-2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows hidden"]:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Convolution(nn.Module):
    """DFlash 2: a causal convolution over block rows before and after one half of a layer.

    Its kernels are a fixed part a channel and a dynamic part a group of channels, the latter made
    from the row itself. Rows before the block count as zero (dflash.md 2.5).
    """

    def __init__(self, config: DraftConfig, extras: DFlash2):
        super().__init__()
        hidden, self.taps, self.group = config.hidden_size, extras.conv_taps, extras.conv_group
        groups = hidden // self.group
        self.base_kernel = nn.Parameter(torch.zeros(2, self.taps, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * self.taps * groups, bias=False)

    def forward(
        self,
        x: Float[Tensor, "*rows width hidden"],
        inner: Callable[[Tensor], Tensor],
    ) -> Float[Tensor, "*rows width hidden"]:
        """`inner` between the two convolutions; both have the kernels of the rows that came in."""
        dynamic = self.kernel_projection(x).unflatten(-1, (2, self.taps, -1))
        kernels = self.base_kernel + dynamic.repeat_interleave(self.group, dim=-1)
        before, after = kernels.unbind(-3)
        return convolve(inner(convolve(x, before)), after)


def convolve(
    x: Float[Tensor, "*rows width hidden"], kernels: Float[Tensor, "*rows width taps hidden"]
) -> Float[Tensor, "*rows width hidden"]:
    """Each row as a weighted sum of itself and the rows just before it, a kernel a row."""
    width = x.shape[-2]
    total = kernels[..., 0, :] * x
    for back in range(1, min(kernels.shape[-2], width)):
        past = nn.functional.pad(x[..., : width - back, :], (0, 0, back, 0))
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

    def forward(
        self,
        x: Float[Tensor, "seq anchors width hidden"],
        context: KeysValues,
        rotation: tuple[Tensor, Tensor],
        visible: Bool[Tensor, "seq anchors width context"] | None,
        within: Bool[Tensor, "width width"] | None,
    ) -> Float[Tensor, "seq anchors width hidden"]:
        seen = {"context": context, "rotation": rotation, "visible": visible, "within": within}
        attend_rows = partial(self.self_attn, **seen)
        x = x + surround(self.attention_conv, self.input_layernorm(x), attend_rows)
        return x + surround(self.mlp_conv, self.post_attention_layernorm(x), self.mlp)


def surround(
    conv: Convolution | None, x: Tensor, inner: Callable[[Tensor], Tensor]
) -> Float[Tensor, "*rows width hidden"]:
    """`inner`, between the convolutions where the draft has them."""
    return inner(x) if conv is None else conv(x, inner)


class CandidateSelector(nn.Module):
    """DFlash 2: chooses among a slot's likeliest tokens by the token before it (dflash.md 2.5)."""

    def __init__(self, config: DraftConfig, extras: DFlash2):
        super().__init__()
        rank = extras.selector_rank
        self.top_k = min(extras.selector_top_k, config.vocab_size)
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.zeros(config.vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(config.vocab_size, rank))

    def candidates(
        self, states: Float[Tensor, "*slots hidden"], logits: Float[Tensor, "*slots vocab"]
    ) -> tuple[Int[Tensor, "*slots k"], Float[Tensor, "*slots k"], Float[Tensor, "*slots k rank"]]:
        """Tokens in the order of their ids, their logits, and what a predecessor is weighed with.

        All slots at once, so that the walk gathers one row a slot.
        """
        tokens = likeliest(logits, self.top_k)
        wanted = self.hidden_projection(states).float().unsqueeze(-2)
        links = self.successor_codebook[tokens].float() * wanted
        return tokens, logits.gather(-1, tokens).float(), links

    def scores(
        self,
        logits: Float[Tensor, "*slots k"],
        links: Float[Tensor, "*slots k rank"],
        previous: Int[Tensor, "*slots"],
    ) -> Float[Tensor, "*slots k"]:
        """The candidates' logits, corrected by the token before them."""
        before = self.predecessor_codebook[previous].float()
        return logits + (links @ before.unsqueeze(-1)).squeeze(-1)

    def choose(
        self,
        states: Float[Tensor, "*slots hidden"],
        logits: Float[Tensor, "*slots vocab"],
        previous: Int[Tensor, "*slots"],
    ) -> Int[Tensor, "*slots"]:
        """The best candidate of each slot after the given tokens; the lowest id among equals."""
        tokens, base, links = self.candidates(states, logits)
        return take(tokens, self.scores(base, links, previous))

    def walk(
        self,
        states: Float[Tensor, "slots hidden"],
        logits: Float[Tensor, "slots vocab"],
        anchor: Int[Tensor, ""],
    ) -> Int[Tensor, " slots"]:
        """The slots from left to right, each after the token chosen before it."""
        chosen = [anchor]
        for tokens, base, links in zip(*self.candidates(states, logits), strict=True):
            chosen.append(take(tokens, self.scores(base, links, chosen[-1])))
        return torch.stack(chosen[1:])


def take(
    tokens: Int[Tensor, "*slots k"], scores: Float[Tensor, "*slots k"]
) -> Int[Tensor, "*slots"]:
    """The token of the best score, the first among equals."""
    return tokens.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1)


def likeliest(logits: Float[Tensor, "*slots vocab"], count: int) -> Int[Tensor, "*slots k"]:
    """The `count` tokens of the highest logits, by id; where logits are equal, the lowest ids.

    Half-precision logits are often equal, and which of them `topk` takes is nowhere said. So it
    ranks whole numbers that are all different: a float's bits, in order, then the id.
    """
    bits = logits.float().view(torch.int32).long()
    order = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    vocab = logits.shape[-1]
    ids = torch.arange(vocab, device=logits.device)
    ranks = order * vocab + (vocab - 1 - ids)
    return ranks.topk(count, dim=-1).indices.sort(dim=-1).values


class DraftNetwork(nn.Module):
    """The draft's own parameters. Embedding and head are the target's and are not in here."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        self.config = config
        hidden, taps = config.hidden_size, len(config.target_layer_ids)
        self.fc = nn.Linear(taps * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        extras = config.dflash2
        self.candidate_selector = None if extras is None else CandidateSelector(config, extras)

    def embed(self, embedding: Callable[[Tensor], Tensor], tokens: Int[Tensor, "*rows"]) -> Tensor:
        """The block's rows from the target's embedding, that one's own scale included."""
        rows = embedding(tokens)
        scale = self.config.embedding_scale
        return rows if scale == 1 else rows * scale

    def context(
        self,
        features: Float[Tensor, "seq context fused"],
        positions: Int[Tensor, " context"],
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
        self, positions: Int[Tensor, "*rows"], dtype: torch.dtype
    ) -> list[tuple[Tensor, Tensor]]:
        """Cosines and sines for each layer; layers that rotate alike share them."""
        config = self.config
        made = {
            rope: rotary(positions, rope, config.head_dim, dtype)
            for rope in dict.fromkeys(config.layer_ropes)
        }
        return [made[rope] for rope in config.layer_ropes]

    def forward(
        self,
        embedded: Float[Tensor, "seq anchors width hidden"],
        anchors: Int[Tensor, "seq anchors"],
        context: Sequence[KeysValues],
        context_positions: Int[Tensor, " context"] | None,
        draft_window: int | None = None,
    ) -> Float[Tensor, "seq anchors width hidden"]:
        """Final normed states of every block row, the anchor's (untrained) row among them.

        `context_positions=None` says that the context holds exactly what every row may see.
        """
        width = embedded.shape[2]
        positions = anchors[:, :, None] + torch.arange(width, device=anchors.device)
        rotations = self.rotations(positions, embedded.dtype)
        x = embedded
        masks: dict[int | None, Tensor | None] = {}
        for index, layer in enumerate(self.layers):
            window = self.config.layer_windows[index]
            if window not in masks:
                masks[window] = (
                    context_mask(anchors, width, context_positions, draft_window, window)
                    if context_positions is not None
                    else None
                )
            within = block_mask(width, self.config.layer_causal[index], x.device)
            x = layer(x, context[index], rotations[index], masks[window], within)
        return self.norm(x)

    def logits(self, raw: Float[Tensor, "*slots vocab"]) -> Float[Tensor, "*slots vocab"]:
        """What the target's head said of the draft's states, multiplied and capped."""
        multiplier, cap = self.config.output_multiplier, self.config.softcap
        if multiplier == 1 and cap is None:
            return raw
        scaled = raw.float() * multiplier
        return scaled if cap is None else cap * torch.tanh(scaled / cap)

    def confidences(self, logits: Float[Tensor, "*slots vocab"]) -> Float[Tensor, "*slots"]:
        """The highest probability of each slot, by the logits alone (a selector not heeded)."""
        wide = logits.float()
        return (wide.amax(-1) - wide.logsumexp(-1)).exp()

    def choose(
        self,
        states: Float[Tensor, "*slots hidden"],
        head: Callable[[Tensor], Tensor],
        previous: Int[Tensor, "*slots"],
    ) -> Int[Tensor, "*slots"]:
        """The drafted token of slots whose token before is known, as in a text."""
        logits = self.logits(head(states))
        if self.candidate_selector is None:
            return logits.argmax(-1)
        return self.candidate_selector.choose(states, logits, previous)

    def propose(
        self,
        states: Float[Tensor, "slots hidden"],
        head: Callable[[Tensor], Tensor],
        anchor: Int[Tensor, ""],
    ) -> tuple[Int[Tensor, " slots"], Bool[Tensor, ""]]:
        """The drafted tokens of one block, and whether all its logits are finite numbers.

        `states` are those of slots 1 to `block_size - 1`. A softcap would hide an infinite logit,
        so what the head said is looked at, and of each slot only the highest.
        """
        raw = head(states)
        finite = torch.isfinite(raw.amax(-1)).all()
        logits = self.logits(raw)
        if self.candidate_selector is None:
            return logits.argmax(-1), finite
        return self.candidate_selector.walk(states, logits, anchor), finite


class ContextCache:
    """The draft's keys and values of the committed positions that it may still see.

    Buffers grow by doubling; with a window they stay bounded, since only the last `window` rows are
    carried over when a buffer is full.
    """

    def __init__(self, window: int | None):
        self.window = window
        self.end = 0  # absolute position after the last row held
        self._buffers: list[tuple[Tensor, Tensor]] = []
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
            pair = (new_keys.new_empty(shape), new_keys.new_empty(shape))
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
        return sum(t.numel() * t.element_size() for pair in self._buffers for t in pair)


def load_network(
    folder: Path, config: DraftConfig, dtype: torch.dtype, device: torch.device
) -> DraftNetwork:
    """The network of a draft folder, strictly: every tensor present, none left over, all finite."""
    check_headers(config, read_headers(folder))
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        tensors |= load_file(file)
    tensors = bare_names(tensors)
    broken = [name for name, value in tensors.items() if not torch.isfinite(value).all()]
    if broken:
        raise TensorMismatch(
            f"tensors with values that are not finite: {', '.join(sorted(broken))}"
        )
    network = DraftNetwork(config)
    network.load_state_dict(tensors)
    return network.to(device=device, dtype=dtype).eval().requires_grad_(False)
