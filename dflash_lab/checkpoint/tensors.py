"""The files of a draft: JSON, which safetensors there are, what their headers announce."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_lab.checkpoint.records import (
    CheckpointError,
    DraftConfig,
    OwnVocabularyUnsupported,
    TensorMismatch,
    UnsupportedDraft,
)

# Values of a checkpoint that the lab may change without making it another draft.
LOCKABLE = ("block_size", "trained_block_size")

# Beginnings of a part of a tensor's name.
FOREIGN_TENSORS = {
    "encoder": "an encoder of its own (a Muse assistant)",
    "markov": "a Markov head (DSpark)",
    "confidence": "a confidence head (DSpark)",
    "aux_hidden_norms": "a norm for each tap",
    "g_proj": "a gate on the attention's output",
    "sinks": "attention sinks",
    "attention_sink": "attention sinks",
}
OWN_VOCABULARY = ("lm_head", "embed_tokens", "d2t", "t2d", "mask_embedding")
FUSED = {"qkv_proj": "q_proj, k_proj and v_proj", "gate_up_proj": "gate_proj and up_proj"}
STORED_DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes a number


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """What a safetensors header says of one tensor."""

    dtype: str  # as safetensors names it: BF16, F32, ...
    shape: tuple[int, ...]


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds a {type(raw).__name__}, expected a JSON object.")
    return raw


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


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a draft; where an index lies beside them, exactly those it names."""
    folder = Path(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = sorted(
            path.name for end in ("bin", "pt", "pth", "ckpt") for path in folder.glob(f"*.{end}")
        )
        reason = (
            f" {', '.join(pickled)} is not read: such a file can run code while it is loaded. "
            "Convert it to safetensors."
            if pickled
            else " A draft is a folder with config.json and model.safetensors."
        )
        raise CheckpointError(f"there is no *.safetensors file in {folder}.{reason}")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = set(_weight_map(index).values())
        there = {path.name for path in files}
        if named != there:
            raise TensorMismatch(
                f"{index.name} does not fit the files beside it. "
                f"Missing: {_names(named - there)}. Not named by it: {_names(there - named)}."
            )
    return files


def _weight_map(index: Path) -> dict[str, str]:
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict):
        raise CheckpointError(f"{index} has no weight_map; take a complete checkpoint.")
    return named


def _names(found: Iterable[str]) -> str:
    return ", ".join(sorted(found)) or "none"


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors that one safetensors file announces; no weight is read.

    Raises `CheckpointError` where the file is damaged or shorter than its header says.
    """
    try:
        with path.open("rb") as file:
            size = struct.unpack("<Q", file.read(8))[0]
            header = json.loads(file.read(size).decode("utf-8")) if size < 1 << 27 else None
        found = {
            name: (TensorInfo(dtype=entry["dtype"], shape=tuple(entry["shape"])), entry)
            for name, entry in header.items()
            if name != "__metadata__"
        }
        end = 8 + size + max((entry["data_offsets"][1] for _, entry in found.values()), default=0)
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
    if path.stat().st_size != end:
        raise CheckpointError(
            f"{path} cannot be read: its header announces {end} bytes, the file has "
            f"{path.stat().st_size}. Fetch it again."
        )
    return {name: info for name, (info, _) in found.items()}


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """All tensors of a draft folder by their bare names, from the headers alone."""
    found: dict[str, TensorInfo] = {}
    for path in weight_files(folder):
        header = read_header(path)
        if twice := found.keys() & header.keys():
            raise TensorMismatch(f"tensors stand in two files of {folder}: {_names(twice)}.")
        found |= header
    index = Path(folder) / "model.safetensors.index.json"
    if index.is_file() and (differ := _weight_map(index).keys() ^ found.keys()):
        raise TensorMismatch(f"{index.name} and the files disagree about: {_names(differ)}.")
    return bare_names(found)


def bare_names(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The same entries without a `model.` that stands before every name."""
    if tensors and all(name.startswith("model.") for name in tensors):
        return {name.removeprefix("model."): value for name, value in tensors.items()}
    return dict(tensors)


def check_headers(config: DraftConfig, found: Mapping[str, TensorInfo]) -> None:
    """`check_tensors`, and every tensor stored as numbers that are weights."""
    check_tensors(config, {name: info.shape for name, info in found.items()})
    odd = [f"{name} is {i.dtype}" for name, i in found.items() if i.dtype not in STORED_DTYPES]
    if odd:
        raise TensorMismatch(
            f"tensors stored in another form than {', '.join(STORED_DTYPES)}: "
            f"{'; '.join(sorted(odd))}. A quantised draft is not read; take the original."
        )


def check_tensors(config: DraftConfig, found: Mapping[str, Sequence[int]]) -> None:
    """Raise `TensorMismatch` listing every tensor missing, left over or of the wrong shape.

    Tensors of another kind of draft are named as such.
    """
    own = sorted(name for name in found if set(name.split(".")) & set(OWN_VOCABULARY))
    if own:
        raise OwnVocabularyUnsupported(
            f"the draft holds {', '.join(own)}: a vocabulary of its own. The target's in its place "
            "would ruin acceptance, so such a draft is not decoded."
        )
    for kind, what in FOREIGN_TENSORS.items():
        foreign = sorted(n for n in found if any(p.startswith(kind) for p in n.split(".")))
        if foreign:
            raise UnsupportedDraft(
                f"the draft holds {', '.join(foreign)}: {what}. That is another kind of draft, "
                "and only DFlash 1 and DFlash 2 are decoded."
            )
    if problems := _tensor_problems(config.tensor_shapes, found):
        raise TensorMismatch(
            "the draft's tensors do not fit its config.json. " + ". ".join(problems)
        )


def _tensor_problems(
    expected: Mapping[str, Sequence[int]], found: Mapping[str, Sequence[int]]
) -> list[str]:
    problems = []
    if missing := expected.keys() - found.keys():
        problems.append("missing: " + _names(missing))
    if unexpected := found.keys() - expected.keys():
        problems.append("left over: " + _names(unexpected))
    if wrong := [
        f"{name} is {tuple(found[name])}, expected {tuple(shape)}"
        for name, shape in sorted(expected.items())
        if name in found and tuple(found[name]) != tuple(shape)
    ]:
        problems.append("wrong shape: " + "; ".join(wrong))
    for fused, parts in FUSED.items():
        if any(fused in name.split(".") for name in found):
            problems.append(f"{fused} is fused; split it into {parts}")
    return problems
