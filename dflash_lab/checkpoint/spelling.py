"""Every spelling of a draft's `config.json`: one `DraftConfig`, and the source of each value."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_lab.checkpoint.records import (
    CheckpointError,
    ConfigConflict,
    ConfigMissing,
    DFlash2,
    DraftConfig,
    OwnVocabularyUnsupported,
    Rope,
    RopeUnsupported,
    UnknownLayerType,
    UnsupportedDraft,
    WidthMismatch,
    WindowMissing,
    default_taps,
)
from dflash_lab.checkpoint.tensors import read_json

DEFAULT_BLOCK_SIZE = 16
FULL, SLIDING = "full_attention", "sliding_attention"


# Keys of other draft designs. Loaded as a DFlash draft, one of them would accept next to nothing.
FOREIGN_KEYS = {
    "markov_rank": "a Markov head (DSpark)",
    "sample_from_anchor": "an anchor that predicts too (DSpark)",
    "confidence": "a confidence head (DSpark)",
    "use_swa": "a speculators-style sliding window",
    "swa_window_size": "a speculators-style sliding window",
    "aux_hidden_state_layer_ids": "taps counted as in speculators, from the embedding",
    "speculators_model_type": "a checkpoint in the form of speculators",
    "attention_sink_bias": "attention sinks",
    "attention_value_scale": "a scale on the values",
    "mask_token": "a mask token of its own",
    "mask_embedding": "a mask embedding of its own",
    "projector_type": "a projector of its own",
    "attention_mode": "another attention mode",
}
FOREIGN_ARCHITECTURES = {
    "MuseGlimmerAssistant": "a Muse assistant, whose tensors are named encoder.*",
    "DSpark": "a DSpark draft",
    "Eagle": "an EAGLE draft",
    "JetSpec": "a JetSpec draft",
    "DDTree": "a DDTree draft",
}
PRIVATE_KEYS = ("runtime_block_size", "draft_window_size")
DFLASH2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
KNOWN_NESTED = {
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "attention_bias",
    "block_size",
    "trained_block_size",
    "target_layer_ids",
    "num_target_layers",
    "mask_token_id",
    "causal",
    "layer_types",
    "sliding_window",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "final_logit_softcapping",
    "output_multiplier",
    "input_embedding_scale",
    *DFLASH2_KEYS,
    *PRIVATE_KEYS,
}
# A rotation laid out otherwise: key -> the value that changes nothing.
ROPE_LAYOUTS = {
    "partial_rotary_factor": 1.0,
    "rope_interleave": False,
    "rope_interleaved": False,
    "is_neox_style": True,
    "rope_local_base_freq": None,
}
IMAGE_ROPE_KEYS = ("mrope_section", "mrope_interleaved")  # of targets that see images too
YARN_KEYS = (
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
)
ROPE_KEYS = {"default": (), "linear": ("factor",), "yarn": YARN_KEYS}


def read_draft_config(folder: Path) -> DraftConfig:
    """The configuration in `folder/config.json`; raises a `CheckpointError` that names the key."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"there is no config.json in {folder}. "
            "A draft is a folder with config.json and model.safetensors."
        )
    return parse_draft_config(read_json(path))


def parse_draft_config(raw: Mapping[str, Any]) -> DraftConfig:
    """`DraftConfig` from the JSON of any published form of a DFlash draft (dflash.md 2.2)."""
    reader = _Reader(raw)
    _refuse_foreign(reader)
    _note_ignored(reader)
    hidden = reader.whole("hidden_size")
    if reader.top.get("target_hidden_size") not in (None, hidden):
        raise WidthMismatch(
            f"hidden_size is {hidden} and target_hidden_size is "
            f"{reader.top['target_hidden_size']}: a draft is as wide as its target."
        )
    heads = reader.whole("num_attention_heads")
    layers = reader.whole("num_hidden_layers")
    block_size = _block_size(reader)
    windows = _layer_windows(reader, layers)
    trained = reader.whole("trained_block_size", default=block_size)
    if reader.sources["trained_block_size"] == "default":
        reader.sources["trained_block_size"] = reader.sources["block_size"]
    config = DraftConfig(
        hidden_size=hidden,
        intermediate_size=reader.whole("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=reader.whole("num_key_value_heads", default=heads),
        head_dim=reader.whole("head_dim", default=hidden // heads),
        vocab_size=reader.whole("vocab_size"),
        rms_norm_eps=reader.number("rms_norm_eps"),
        target_layer_ids=_taps(reader, layers),
        mask_token=reader.whole("mask_token_id", low=0),
        block_size=block_size,
        trained_block_size=trained,
        layer_windows=windows,
        layer_causal=_layer_causal(reader, windows),
        layer_ropes=_layer_ropes(reader, windows),
        attention_bias=reader.flag("attention_bias", default=False),
        embedding_scale=reader.number("input_embedding_scale", default=1.0),
        output_multiplier=reader.number("output_multiplier", default=1.0),
        softcap=_softcap(reader),
        dflash2=_dflash2(reader, hidden),
        sources=dict(reader.sources),
        notes=tuple(reader.notes),
    )
    _check_heads(config)
    return config


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
        inner, outer = self.nested.get(key), self.top.get(key)
        if inner is not None:
            self.sources[key] = f"dflash_config.{key}"
            if outer is not None and outer != inner:
                self.note(
                    f"config.json gives {key} twice, dflash_config.{key} = {inner} "
                    f"and {key} = {outer}; the nested one, {inner}, is used."
                )
            return inner
        if outer is not None:
            self.sources[key] = key
            return outer
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

    def number(self, key: str, **default: Any) -> float:
        return positive(self.get(key, **default), self.sources[key])

    def flag(self, key: str, **default: Any) -> bool:
        value = self.get(key, **default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.sources[key]} is {value!r}, expected true or false.")
        return value

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def positive(value: Any, where: str) -> float:
    """A finite number above 0, or a `CheckpointError` that says where it stood."""
    right = isinstance(value, int | float) and not isinstance(value, bool)
    if not right or not math.isfinite(value) or value <= 0:
        raise CheckpointError(f"{where} is {value!r}, expected a number above 0.")
    return float(value)


def _refuse_foreign(reader: _Reader) -> None:
    """Raise for what makes a draft another kind than DFlash 1 or 2, by its name."""
    names = _architectures(reader)
    for name, what in FOREIGN_ARCHITECTURES.items():
        if name.lower() in names.lower():
            raise UnsupportedDraft(
                f"architectures is {names}: {what}. That is another kind of draft, and only "
                "DFlash 1 and DFlash 2 are decoded."
            )
    for holder in (reader.nested, reader.top):
        for key, value in holder.items():
            # A tokenizer's mask_token may stand at top level and says nothing of the draft.
            tokenizers = key == "mask_token" and holder is reader.top
            if value and not tokenizers and (what := _foreign(key)):
                raise UnsupportedDraft(
                    f"{key} is set: {what}. That is another kind of draft, and reading it as a "
                    "DFlash draft would accept almost nothing."
                )
    own, whole = reader.top.get("draft_vocab_size"), reader.top.get("vocab_size")
    if own not in (None, whole):
        raise OwnVocabularyUnsupported(
            f"draft_vocab_size is {own} and vocab_size is {whole}: a reduced vocabulary. Such a "
            "draft needs its own head and is not decoded."
        )
    if unknown := sorted(k for k in reader.nested if k not in KNOWN_NESTED and not _foreign(k)):
        raise UnsupportedDraft(
            f"dflash_config has unknown keys: {', '.join(unknown)}. "
            f"Known are {', '.join(sorted(KNOWN_NESTED))}."
        )
    if reader.top.get("hidden_act") not in (None, "silu"):
        raise UnsupportedDraft(f"hidden_act is {reader.top['hidden_act']!r}; drafts use 'silu'.")


def _architectures(reader: _Reader) -> str:
    return ", ".join(map(str, reader.top.get("architectures") or ()))


def _foreign(key: str) -> str | None:
    """What a key of another kind of draft stands for."""
    return FOREIGN_KEYS.get("confidence" if key.startswith("confidence") else key)


def _note_ignored(reader: _Reader) -> None:
    for key in PRIVATE_KEYS:
        if key in reader.nested:
            reader.note(f"dflash_config.{key} is another program's setting and is not used here.")
    if reader.top.get("auto_map"):
        reader.note("auto_map names code that comes with the checkpoint; it is never run.")


def _block_size(reader: _Reader) -> int:
    value = reader.whole("block_size", default=DEFAULT_BLOCK_SIZE)
    if reader.sources["block_size"] == "default":
        reader.note(f"config.json names no block size; the default {value} is used.")
    return value


def _taps(reader: _Reader, layers: int) -> tuple[int, ...]:
    taps = reader.get("target_layer_ids", default=None)
    if taps is None:
        taps = default_taps(reader.whole("num_target_layers"), layers)
        reader.sources["target_layer_ids"] = "default, from num_target_layers"
    if not isinstance(taps, list | tuple):
        raise WidthMismatch(f"target_layer_ids is {taps!r}; expected a list of whole numbers.")
    taps = tuple(taps)
    bad = [tap for tap in taps if isinstance(tap, bool) or not isinstance(tap, int) or tap < 0]
    if bad or not taps or len(set(taps)) != len(taps):
        raise WidthMismatch(
            f"target_layer_ids is {list(taps)}: expected different whole numbers from 0, "
            "the 0-based target layers to read. Give them explicitly in dflash_config."
        )
    told = reader.top.get("num_target_layers")
    if isinstance(told, int) and max(taps) >= told:
        raise WidthMismatch(
            f"target_layer_ids is {list(taps)}, but num_target_layers is {told}: the layers are "
            f"counted 0 to {told - 1}."
        )
    return taps


def _layer_windows(reader: _Reader, layers: int) -> tuple[int | None, ...]:
    types = reader.get("layer_types", default=[FULL] * layers)
    if reader.sources["layer_types"] == "default" and reader.top.get("use_sliding_window"):
        reader.note(
            "use_sliding_window is true, but there are no layer_types: every layer is read as full "
            "attention."
        )
    if not isinstance(types, list | tuple):
        raise UnknownLayerType(f"layer_types is {types!r}; expected a list, one type a layer.")
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
    """Top-level `is_causal`, then `dflash_config.causal`, then the layer's own kind."""
    for where, value in (
        ("is_causal", reader.top.get("is_causal")),
        ("dflash_config.causal", reader.nested.get("causal")),
    ):
        if value is not None:
            reader.sources["is_causal"] = where
            if not isinstance(value, bool):
                raise CheckpointError(f"{where} is {value!r}, expected true or false.")
            return (value,) * len(windows)
    reader.sources["is_causal"] = "layer_types"
    return tuple(window is not None for window in windows)


def _softcap(reader: _Reader) -> float | None:
    value = reader.get("final_logit_softcapping", default=None)
    if value in (None, 0) and not isinstance(value, bool):
        return None
    return positive(value, reader.sources["final_logit_softcapping"])


def _dflash2(reader: _Reader, hidden: int) -> DFlash2 | None:
    given = any(key in reader.nested or key in reader.top for key in DFLASH2_KEYS)
    if not given and "DFlash2" not in _architectures(reader):
        return None
    taps, group, rank, top_k = (reader.whole(key) for key in DFLASH2_KEYS)
    if hidden % group:
        raise CheckpointError(
            f"conv_group_size is {group}, which does not divide hidden_size {hidden}."
        )
    return DFlash2(conv_taps=taps, conv_group=group, selector_rank=rank, selector_top_k=top_k)


def _check_heads(config: DraftConfig) -> None:
    if config.num_heads % config.num_kv_heads or config.head_dim % 2:
        raise CheckpointError(
            f"num_attention_heads is {config.num_heads}, num_key_value_heads "
            f"{config.num_kv_heads}, head_dim {config.head_dim}: every key head serves the same "
            "number of query heads, and a head has an even size."
        )


# --- rotary embedding ---------------------------------------------------------------------------


def _layer_ropes(reader: _Reader, windows: Sequence[int | None]) -> tuple[Rope, ...]:
    _refuse_layouts(reader.top, "")
    _refuse_layouts(reader.nested, "dflash_config.")
    kinds = [FULL if window is None else SLIDING for window in windows]
    found = {kind: _rope(reader, kind) for kind in dict.fromkeys(kinds)}
    reader.sources["rope_theta"] = ", ".join(dict.fromkeys(where for _, where in found.values()))
    return tuple(found[kind][0] for kind in kinds)


def _refuse_layouts(holder: Mapping[str, Any], where: str) -> None:
    for key, neutral in ROPE_LAYOUTS.items():
        if holder.get(key) not in (None, neutral):
            raise RopeUnsupported(
                f"{where}{key} is {holder[key]}; this version rotates whole heads in halves only."
            )


def _rope(reader: _Reader, kind: str) -> tuple[Rope, str]:
    """The rotation of the layers of one kind, and where its base stood."""
    bases: dict[str, float] = {}
    forms: dict[str, dict[str, Any]] = {}
    for where, part in _rope_parts(reader, kind):
        _refuse_layouts(part, f"{where}.")
        if part.get("rope_theta") is not None:
            bases[f"{where}.rope_theta"] = positive(part["rope_theta"], f"{where}.rope_theta")
        if any(key in part for key in IMAGE_ROPE_KEYS):
            reader.note(f"{where} says how images are placed; text needs none of it.")
        forms[where] = _rope_form(part)
    for name, holder in (("dflash_config.rope_theta", reader.nested), ("rope_theta", reader.top)):
        if holder.get("rope_theta") is not None:
            bases[name] = positive(holder["rope_theta"], name)
    if not bases:
        raise ConfigMissing(
            "config.json has no rope_theta, neither in rope_parameters nor in rope_scaling "
            "nor at top level. Add the base that the draft was trained with."
        )
    if len(set(bases.values())) > 1:
        named = " and ".join(f"{key} = {value:g}" for key, value in bases.items())
        raise ConfigConflict(f"two RoPE bases in one config: {named}. Keep the right one.")
    stretched = {where: form for where, form in forms.items() if form != {"rope_type": "default"}}
    if len({json.dumps(form, sort_keys=True, default=str) for form in stretched.values()}) > 1:
        named = " and ".join(f"{where} = {form}" for where, form in stretched.items())
        raise ConfigConflict(f"two rotary embeddings in one config: {named}. Keep the right one.")
    where, theta = next(iter(bases.items()))
    for place, form in stretched.items():
        reader.sources["rope_type"] = f"{place}.rope_type"
        return _stretched(theta, form, place), where
    return Rope(theta=theta), where


def _rope_form(part: Mapping[str, Any]) -> dict[str, Any]:
    """The type of a rotation and its settings; the base and what changes nothing left out."""
    dropped = ("rope_theta", "type", *ROPE_LAYOUTS, *IMAGE_ROPE_KEYS)
    form = {key: value for key, value in part.items() if key not in dropped and value is not None}
    return {"rope_type": part.get("type") or "default"} | form


def _rope_parts(reader: _Reader, kind: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Objects that describe the rotation of one kind of layer; some give each kind its own."""
    found = []
    for prefix, holder in (("dflash_config.", reader.nested), ("", reader.top)):
        for key in ("rope_parameters", "rope_scaling"):
            part, where = holder.get(key) or {}, prefix + key
            if isinstance(part, Mapping) and (FULL in part or SLIDING in part):
                part, where = part.get(kind) or {}, f"{where}.{kind}"
            if not isinstance(part, Mapping):
                raise CheckpointError(f"{where} is {part!r}, expected a JSON object.")
            if part:
                found.append((where, part))
    return found


def _stretched(theta: float, form: Mapping[str, Any], where: str) -> Rope:
    kind = form["rope_type"]
    if kind not in ROPE_KEYS:
        raise RopeUnsupported(
            f"{where}.rope_type is {kind!r}; this version has {', '.join(ROPE_KEYS)}."
        )
    unknown = sorted(form.keys() - {"rope_type", *ROPE_KEYS[kind]})
    if unknown:
        raise RopeUnsupported(f"{where} has keys unknown to {kind!r}: {', '.join(unknown)}.")
    if kind == "default":
        return Rope(theta=theta)
    factor = _rope_number(form, "factor", where)
    if kind == "linear":
        return Rope(theta=theta, kind=kind, factor=factor)
    return Rope(
        theta=theta,
        kind=kind,
        factor=factor,
        original_length=int(_rope_number(form, "original_max_position_embeddings", where)),
        beta_fast=_rope_number(form, "beta_fast", where, 32.0),
        beta_slow=_rope_number(form, "beta_slow", where, 1.0),
        truncate=bool(form.get("truncate", True)),
        scale=_yarn_scale(form, factor, where),
    )


def _rope_number(
    form: Mapping[str, Any], key: str, where: str, default: float | None = None
) -> float:
    value = form.get(key, default)
    if value is None:
        raise ConfigMissing(f"{where} is of type {form['rope_type']!r} and has no {key}. Add it.")
    return positive(value, f"{where}.{key}")


def _yarn_scale(form: Mapping[str, Any], factor: float, where: str) -> float:
    """What yarn multiplies cosines and sines by: given, or grown with the log of the factor."""

    def grown(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if "attention_factor" in form:
        return _rope_number(form, "attention_factor", where)
    if form.get("mscale") and form.get("mscale_all_dim"):
        over = grown(_rope_number(form, "mscale", where))
        return over / grown(_rope_number(form, "mscale_all_dim", where))
    return grown(1.0)
