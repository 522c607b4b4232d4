"""The shape and the settings of a draft as plain values, and what can be wrong with them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


class CheckpointError(ValueError):
    """A draft checkpoint that cannot be used as it is; the message names file, key and way out."""


class UnsupportedDraft(CheckpointError):
    """Another kind of draft than the ones this version decodes."""


class ConfigMissing(CheckpointError):
    """No value for a required key in any of the places it may stand."""


class ConfigConflict(CheckpointError):
    """Two values for one key that must be one."""


class UnknownLayerType(CheckpointError):
    """A layer type other than full or sliding attention, or a list of the wrong length."""


class WindowMissing(CheckpointError):
    """A sliding layer without a usable `sliding_window`."""


class RopeUnsupported(CheckpointError):
    """A rotary embedding of another form than the ones implemented."""


class TensorMismatch(CheckpointError):
    """Tensors missing, left over or of another shape than the configuration says."""


class OwnVocabularyUnsupported(CheckpointError):
    """The draft brings an embedding, a head or a vocabulary map of its own."""


class WidthMismatch(CheckpointError):
    """Draft and target do not fit together."""


class MaskIdOutOfRange(CheckpointError):
    """The mask token has no row in the target's embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """A rotary embedding: its base, and how it is stretched beyond the length trained with."""

    theta: float
    kind: str = "default"  # "default", "linear" or "yarn"
    factor: float = 1.0
    original_length: int = 0  # yarn only, as are those below
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    scale: float = 1.0  # multiplies cosines and sines

    def inverse_frequencies(self, head_dim: int) -> tuple[float, ...]:
        """Radians a position, one for each pair of channels."""
        plain = [self.theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
        if self.kind == "default":
            return tuple(plain)
        if self.kind == "linear":
            return tuple(frequency / self.factor for frequency in plain)
        low, high = self._ramp(head_dim)
        shares = [min(1.0, max(0.0, (i - low) / (high - low))) for i in range(head_dim // 2)]
        return tuple(
            frequency * (1 - share + share / self.factor)
            for frequency, share in zip(plain, shares, strict=True)
        )

    def _ramp(self, head_dim: int) -> tuple[float, float]:
        """Channel pairs between which yarn (arXiv 2309.00071) goes over to stretching."""

        def pair_turning(turns: float) -> float:
            reach = self.original_length / (turns * 2 * math.pi)
            return head_dim * math.log(reach) / (2 * math.log(self.theta))

        low, high = pair_turning(self.beta_fast), pair_turning(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        return low, high + 0.001 if low == high else high


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlash2:
    """What a DFlash 2 draft has on top: convolutions in every layer, a selector at the end."""

    conv_taps: int  # rows a convolution sees, its own among them
    conv_group: int  # channels that share a dynamic kernel
    selector_rank: int
    selector_top_k: int  # candidates a slot


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """The shape and the settings of one DFlash draft."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    target_layer_ids: tuple[int, ...]  # 0-based target blocks whose output is read, in list order
    mask_token: int
    block_size: int  # what the checkpoint asks for, the anchor included
    trained_block_size: int  # the limit for clamping
    layer_windows: tuple[int | None, ...]  # a layer's own window in tokens; None is full attention
    layer_causal: tuple[bool, ...]  # causal inside the block
    layer_ropes: tuple[Rope, ...]
    attention_bias: bool = False
    embedding_scale: float = 1.0  # multiplies what the target's embedding says
    output_multiplier: float = 1.0  # multiplies the logits, before the softcap
    softcap: float | None = None  # logits become s * tanh(logits / s)
    dflash2: DFlash2 | None = None
    sources: Mapping[str, str] = field(default_factory=dict)  # key -> where its value stood
    notes: tuple[str, ...] = ()  # what a user should be shown: conflicts resolved, defaults taken

    @property
    def kind(self) -> str:
        """`DFlash 1` or `DFlash 2`."""
        return "DFlash 1" if self.dflash2 is None else "DFlash 2"

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the checkpoint must hold, by name without prefix (dflash.md 2.3, 2.4)."""
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, len(self.target_layer_ids) * hidden),
            "hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
        }
        for layer in range(self.num_layers):
            shapes |= {f"layers.{layer}.{name}": s for name, s in self._layer_shapes().items()}
        if self.dflash2 is not None:
            rank = self.dflash2.selector_rank
            shapes |= {
                "candidate_selector.hidden_projection.weight": (rank, hidden),
                "candidate_selector.predecessor_codebook": (self.vocab_size, rank),
                "candidate_selector.successor_codebook": (self.vocab_size, rank),
            }
        return shapes

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (queries, hidden),
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.v_proj.weight": (keys, hidden),
            "self_attn.o_proj.weight": (hidden, queries),
            "self_attn.q_norm.weight": (self.head_dim,),
            "self_attn.k_norm.weight": (self.head_dim,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        if self.attention_bias:
            shapes |= {
                "self_attn.q_proj.bias": (queries,),
                "self_attn.k_proj.bias": (keys,),
                "self_attn.v_proj.bias": (keys,),
                "self_attn.o_proj.bias": (hidden,),
            }
        if self.dflash2 is not None:
            taps = self.dflash2.conv_taps
            rows = 2 * taps * hidden // self.dflash2.conv_group
            for name in ("attention_conv", "mlp_conv"):
                shapes[f"{name}.base_kernel"] = (2, taps, hidden)
                shapes[f"{name}.kernel_projection.weight"] = (rows, hidden)
        return shapes

    @property
    def parameters(self) -> int:
        """How many numbers the draft's own tensors hold."""
        return sum(math.prod(shape) for shape in self.tensor_shapes.values())

    def context_bytes_per_token(self, bytes_per_number: int) -> int:
        """Bytes of draft cache for one committed position, keys and values of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_number

    def context_window(self, draft_window: int | None) -> int | None:
        """How many committed positions are worth keeping: the most that any layer may see.

        A layer's own window counts the block row itself, so its first row sees one fewer.
        """
        own = [None if window is None else max(1, window - 1) for window in self.layer_windows]
        limits = [window for window in own if window is not None]
        widest = max(limits) if len(limits) == len(own) else None
        if widest is None or draft_window is None:
            return draft_window if widest is None else widest
        return min(widest, draft_window)


def default_taps(target_layers: int, count: int) -> tuple[int, ...]:
    """Evenly spaced target layers, rounded half to even; may repeat on tiny targets."""
    if count == 1:
        return (target_layers // 2,)
    return tuple(round(1 + i * (target_layers - 4) / (count - 1)) for i in range(count))


def check_target(config: DraftConfig, hidden_size: int, layers: int, vocabulary: int) -> None:
    """Raise where the draft was made for a target of another shape.

    `vocabulary` counts the rows of the target's embedding, padding included.
    """
    if config.hidden_size != hidden_size:
        raise WidthMismatch(
            f"the draft's hidden size is {config.hidden_size}, the target's is "
            f"{hidden_size}. This draft was trained for another target."
        )
    if max(config.target_layer_ids) >= layers:
        raise WidthMismatch(
            f"the draft reads target layers {list(config.target_layer_ids)}, but this target has "
            f"layers 0 to {layers - 1}. This draft was trained for another target."
        )
    if config.mask_token >= vocabulary:
        raise MaskIdOutOfRange(
            f"the draft's mask token is {config.mask_token}, but the target's embedding has "
            f"{vocabulary} rows (0 to {vocabulary - 1})."
        )
    if config.vocab_size > vocabulary:
        raise WidthMismatch(
            f"the draft's vocabulary has {config.vocab_size} entries, the target's {vocabulary}."
        )
    if config.dflash2 is not None and config.vocab_size != vocabulary:
        raise WidthMismatch(
            f"the selector of this DFlash 2 draft knows {config.vocab_size} tokens, the target's "
            f"head has {vocabulary}. They must be the same."
        )
