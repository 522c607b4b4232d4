"""A draft's `config.json`: every spelling of it, one `DraftConfig`, the source of each value."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEFAULT_BLOCK_SIZE = 16
FULL, SLIDING = "full_attention", "sliding_attention"

# Values of a checkpoint that the lab may change without making it another draft.
LOCKABLE = ("block_size", "trained_block_size")

# Keys of other draft designs. Loaded as a DFlash draft, one of them would accept next to nothing.
FOREIGN_KEYS = {
    "markov_rank": "a Markov head (DSpark)",
    "sample_from_anchor": "an anchor that predicts too (DSpark)",
    "confidence_head": "a confidence head (DSpark)",
    "use_swa": "a speculators-style sliding window",
    "swa_window_size": "a speculators-style sliding window",
    "attention_sink_bias": "attention sinks",
    "attention_value_scale": "a scale on the values",
    "mask_token": "a mask token of its own",
    "mask_embedding": "a mask embedding of its own",
    "projector_type": "a projector of its own",
    "attention_mode": "another attention mode",
}
PRIVATE_KEYS = ("runtime_block_size", "draft_window_size")
KNOWN_NESTED = {
    "target_layer_ids",
    "mask_token_id",
    "block_size",
    "causal",
    "final_logit_softcapping",
    "output_multiplier",
    "input_embedding_scale",
    "num_target_layers",
    "rope_theta",
    *PRIVATE_KEYS,
}
OWN_VOCABULARY = ("lm_head", "embed_tokens", "d2t", "t2d", "mask_embedding")
DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


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
    rope_theta: float
    target_layer_ids: tuple[int, ...]  # 0-based target blocks whose output is read, in list order
    mask_token: int
    block_size: int  # what the checkpoint asks for, the anchor included
    trained_block_size: int  # the limit for clamping
    layer_windows: tuple[int | None, ...]  # a layer's own window in tokens; None is full attention
    layer_causal: tuple[bool, ...]  # causal inside the block
    attention_bias: bool = False
    sources: Mapping[str, str] = field(default_factory=dict)  # key -> where its value stood
    notes: tuple[str, ...] = ()  # what a user should be shown: conflicts resolved, defaults taken

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the checkpoint must hold, by name without prefix (dflash.md 2.3)."""
        hidden, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, len(self.target_layer_ids) * hidden),
            "hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
        }
        for layer in range(self.num_layers):
            at = f"layers.{layer}."
            shapes |= {
                at + "input_layernorm.weight": (hidden,),
                at + "post_attention_layernorm.weight": (hidden,),
                at + "self_attn.q_proj.weight": (queries, hidden),
                at + "self_attn.k_proj.weight": (keys, hidden),
                at + "self_attn.v_proj.weight": (keys, hidden),
                at + "self_attn.o_proj.weight": (hidden, queries),
                at + "self_attn.q_norm.weight": (self.head_dim,),
                at + "self_attn.k_norm.weight": (self.head_dim,),
                at + "mlp.gate_proj.weight": (inner, hidden),
                at + "mlp.up_proj.weight": (inner, hidden),
                at + "mlp.down_proj.weight": (hidden, inner),
            }
            if self.attention_bias:
                shapes |= {
                    at + "self_attn.q_proj.bias": (queries,),
                    at + "self_attn.k_proj.bias": (keys,),
                    at + "self_attn.v_proj.bias": (keys,),
                    at + "self_attn.o_proj.bias": (hidden,),
                }
        return shapes

    @property
    def parameters(self) -> int:
        """How many numbers the draft's own tensors hold."""
        total = 0
        for shape in self.tensor_shapes.values():
            size = 1
            for side in shape:
                size *= side
            total += size
        return total

    def context_bytes_per_token(self, bytes_per_number: int) -> int:
        """Bytes of draft cache for one committed position, keys and values of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_number


def default_taps(target_layers: int, count: int) -> tuple[int, ...]:
    """Evenly spaced target layers, rounded half to even; may repeat on tiny targets."""
    if count == 1:
        return (target_layers // 2,)
    return tuple(round(1 + i * (target_layers - 4) / (count - 1)) for i in range(count))


def read_draft_config(folder: Path) -> DraftConfig:
    """The configuration in `folder/config.json`; raises a `CheckpointError` that names the key."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"there is no config.json in {folder}. "
            "A draft is a folder with config.json and model.safetensors."
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds a {type(raw).__name__}, expected a JSON object.")
    return parse_draft_config(raw)


def parse_draft_config(raw: Mapping[str, Any]) -> DraftConfig:
    """`DraftConfig` from the JSON of any published form of a DFlash 1 draft (dflash.md 2.2)."""
    reader = _Reader(raw)
    _refuse_foreign(reader)
    reader.notes += [
        f"dflash_config.{key} is another program's setting and is not used here."
        for key in PRIVATE_KEYS
        if key in reader.nested
    ]
    hidden = reader.whole("hidden_size")
    heads = reader.whole("num_attention_heads")
    layers = reader.whole("num_hidden_layers")
    block_size = _block_size(reader)
    taps = _taps(reader, layers)
    windows = _layer_windows(reader, layers)
    return DraftConfig(
        hidden_size=hidden,
        intermediate_size=reader.whole("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=reader.whole("num_key_value_heads", default=heads),
        head_dim=reader.whole("head_dim", default=hidden // heads),
        vocab_size=reader.whole("vocab_size"),
        rms_norm_eps=float(reader.get("rms_norm_eps")),
        rope_theta=_rope_theta(reader),
        target_layer_ids=taps,
        mask_token=reader.whole("mask_token_id", low=0),
        block_size=block_size,
        trained_block_size=reader.whole("trained_block_size", default=block_size),
        layer_windows=windows,
        layer_causal=_layer_causal(reader, windows),
        attention_bias=bool(reader.get("attention_bias", default=False)),
        sources=dict(reader.sources),
        notes=tuple(reader.notes),
    )


def draft_fingerprint(folder: Path) -> str:
    """A hash of the draft's files that locking a block size does not change."""
    folder = Path(folder)
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    plain = {key: value for key, value in raw.items() if key not in LOCKABLE}
    nested = plain.get("dflash_config")
    if isinstance(nested, dict):
        plain["dflash_config"] = {k: v for k, v in nested.items() if k not in LOCKABLE}
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


def check_tensors(config: DraftConfig, found: Mapping[str, Sequence[int]]) -> None:
    """Raise `TensorMismatch` listing every tensor missing, left over or of the wrong shape."""
    own = sorted(name for name in found if name.split(".")[0] in OWN_VOCABULARY)
    if own:
        raise OwnVocabularyUnsupported(
            f"the draft holds {', '.join(own)}: a vocabulary of its own. The target's in its place "
            "would ruin acceptance, so such a draft is not decoded."
        )
    expected = config.tensor_shapes
    missing = sorted(expected.keys() - found.keys())
    unexpected = sorted(found.keys() - expected.keys())
    wrong = [
        f"{name} is {tuple(found[name])}, expected {shape}"
        for name, shape in sorted(expected.items())
        if name in found and tuple(found[name]) != shape
    ]
    problems = []
    if missing:
        problems.append("missing: " + ", ".join(missing))
    if unexpected:
        problems.append("left over: " + ", ".join(unexpected))
    if wrong:
        problems.append("wrong shape: " + "; ".join(wrong))
    if problems:
        raise TensorMismatch(
            "the draft's tensors do not fit its config.json. " + ". ".join(problems)
        )


class _Reader:
    """Looks a key up where it may stand, nested before top level, and remembers where it stood."""

    def __init__(self, raw: Mapping[str, Any]):
        self.top = raw
        nested = raw.get("dflash_config") or {}
        if not isinstance(nested, Mapping):
            raise CheckpointError(f"dflash_config is {nested!r}, expected a JSON object.")
        self.nested = nested
        self.sources: dict[str, str] = {}
        self.notes: list[str] = []

    def get(self, key: str, **default: Any) -> Any:
        if self.nested.get(key) is not None:
            self.sources[key] = f"dflash_config.{key}"
            return self.nested[key]
        if self.top.get(key) is not None:
            self.sources[key] = key
            return self.top[key]
        if "default" in default:
            self.sources[key] = "default"
            return default["default"]
        raise ConfigMissing(
            f"config.json has no {key}, neither in dflash_config nor at top level. "
            "Add it, or take a complete checkpoint."
        )

    def whole(self, key: str, *, low: int = 1, **default: Any) -> int:
        value = self.get(key, **default)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise CheckpointError(
                f"{self.sources[key]} is {value!r}, expected a whole number from {low}."
            )
        return value


def _refuse_foreign(reader: _Reader) -> None:
    names = [str(name) for name in reader.top.get("architectures") or ()]
    two = [key for key in DFLASH2_KEYS if key in reader.nested or key in reader.top]
    if two or any("DFlash2" in name for name in names):
        raise UnsupportedDraft(
            f"this is a DFlash 2 draft ({', '.join(two) or names[0]}); "
            "this version decodes DFlash 1 drafts only."
        )
    for key, what in FOREIGN_KEYS.items():
        if reader.nested.get(key) or (key != "mask_token" and reader.top.get(key)):
            raise UnsupportedDraft(
                f"{key} is set: {what}. That is another kind of draft, "
                "and reading it as a DFlash 1 draft would accept almost nothing."
            )
    unknown = sorted(k for k in reader.nested if k not in KNOWN_NESTED and k not in FOREIGN_KEYS)
    if unknown:
        raise UnsupportedDraft(
            f"dflash_config has unknown keys: {', '.join(unknown)}. "
            f"Known are {', '.join(sorted(KNOWN_NESTED))}."
        )
    for key, neutral in (
        ("final_logit_softcapping", (None, 0, 0.0)),
        ("output_multiplier", (None, 1, 1.0)),
        ("input_embedding_scale", (None, 1, 1.0)),
    ):
        value = reader.get(key, default=None)
        if value not in neutral:
            raise UnsupportedDraft(f"{reader.sources[key]} is {value}; not supported yet.")


def _block_size(reader: _Reader) -> int:
    value = reader.whole("block_size", default=DEFAULT_BLOCK_SIZE)
    top, nested = reader.top.get("block_size"), reader.nested.get("block_size")
    if top is not None and nested is not None and top != nested:
        reader.notes.append(
            f"config.json gives two block sizes, dflash_config.block_size = {nested} "
            f"and block_size = {top}; the nested one, {nested}, is used."
        )
    if reader.sources["block_size"] == "default":
        reader.notes.append(f"config.json names no block size; the default {value} is used.")
    return value


def _taps(reader: _Reader, layers: int) -> tuple[int, ...]:
    taps = reader.get("target_layer_ids", default=None)
    if taps is None:
        taps = default_taps(reader.whole("num_target_layers"), layers)
    if not isinstance(taps, list | tuple):
        raise WidthMismatch(f"target_layer_ids is {taps!r}; expected a list of whole numbers.")
    taps = tuple(taps)
    bad = [tap for tap in taps if isinstance(tap, bool) or not isinstance(tap, int) or tap < 0]
    if bad or not taps or len(set(taps)) != len(taps):
        raise WidthMismatch(
            f"target_layer_ids is {list(taps)}: expected different whole numbers from 0, "
            "the 0-based target layers to read. Give them explicitly in dflash_config."
        )
    return taps


def _layer_windows(reader: _Reader, layers: int) -> tuple[int | None, ...]:
    types = reader.get("layer_types", default=[FULL] * layers)
    unknown = sorted({str(kind) for kind in types if kind not in (FULL, SLIDING)})
    if unknown or len(types) != layers:
        raise UnknownLayerType(
            f"layer_types has {len(types)} entries for {layers} layers"
            + (f" and unknown types {', '.join(unknown)}" if unknown else "")
            + f"; expected one of {FULL}, {SLIDING} a layer."
        )
    if SLIDING not in types:
        return (None,) * layers
    window = reader.get("sliding_window", default=None)
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise WindowMissing(
            f"layer_types names sliding layers, but sliding_window is {window!r}; "
            "expected a whole number of tokens from 1."
        )
    return tuple(window if kind == SLIDING else None for kind in types)


def _layer_causal(reader: _Reader, windows: Sequence[int | None]) -> tuple[bool, ...]:
    if reader.top.get("is_causal") is not None:
        reader.sources["is_causal"] = "is_causal"
        return (bool(reader.top["is_causal"]),) * len(windows)
    if reader.nested.get("causal") is not None:
        reader.sources["is_causal"] = "dflash_config.causal"
        return (bool(reader.nested["causal"]),) * len(windows)
    reader.sources["is_causal"] = "layer_types"
    return tuple(window is not None for window in windows)


def _rope_theta(reader: _Reader) -> float:
    for key, neutral in (("partial_rotary_factor", 1.0), ("rope_interleave", False)):
        if reader.top.get(key) not in (None, neutral):
            raise RopeUnsupported(
                f"{key} is {reader.top[key]}; this version rotates whole heads in halves only."
            )
    found: dict[str, float] = {}
    for holder in ("rope_parameters", "rope_scaling"):
        inner = reader.top.get(holder) or {}
        for where, part in _rope_parts(holder, inner):
            kind = part.get("rope_type", part.get("type", "default"))
            if kind != "default":
                raise RopeUnsupported(
                    f"{where}.rope_type is {kind!r}; this version rotates with 'default' only."
                )
            if part.get("partial_rotary_factor") not in (None, 1.0):
                raise RopeUnsupported(f"{where}.partial_rotary_factor: partial rotation.")
            if "rope_theta" in part:
                found[f"{where}.rope_theta"] = float(part["rope_theta"])
    for name, holder in (("dflash_config.rope_theta", reader.nested), ("rope_theta", reader.top)):
        if holder.get("rope_theta") is not None:
            found[name] = float(holder["rope_theta"])
    if not found:
        raise ConfigMissing(
            "config.json has no rope_theta, neither in rope_parameters nor in rope_scaling "
            "nor at top level. Add the base that the draft was trained with."
        )
    if len(set(found.values())) > 1:
        named = " and ".join(f"{key} = {value:g}" for key, value in found.items())
        raise ConfigConflict(f"two RoPE bases in one config: {named}. Keep the right one.")
    reader.sources["rope_theta"] = next(iter(found))
    return next(iter(found.values()))


def _rope_parts(holder: str, inner: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    per_layer = [(f"{holder}.{kind}", inner[kind]) for kind in (FULL, SLIDING) if kind in inner]
    return per_layer or [(holder, inner)]
