"""A draft's folder: every spelling of its `config.json`, the source of each value, its tensors.

No framework is needed for any of this: shapes come from the headers of the safetensors files.
"""

from dflash_lab.checkpoint.records import (
    CheckpointError,
    ConfigConflict,
    ConfigMissing,
    DFlash2,
    DraftConfig,
    MaskIdOutOfRange,
    OwnVocabularyUnsupported,
    Rope,
    RopeUnsupported,
    TensorMismatch,
    UnknownLayerType,
    UnsupportedDraft,
    WidthMismatch,
    WindowMissing,
    check_target,
    default_taps,
)
from dflash_lab.checkpoint.spelling import (
    DEFAULT_BLOCK_SIZE,
    parse_draft_config,
    read_draft_config,
)
from dflash_lab.checkpoint.tensors import (
    STORED_DTYPES,
    TensorInfo,
    bare_names,
    check_headers,
    check_tensors,
    draft_fingerprint,
    read_header,
    read_headers,
    read_json,
    weight_files,
)

__all__ = [
    "DEFAULT_BLOCK_SIZE",
    "STORED_DTYPES",
    "CheckpointError",
    "ConfigConflict",
    "ConfigMissing",
    "DFlash2",
    "DraftConfig",
    "MaskIdOutOfRange",
    "OwnVocabularyUnsupported",
    "Rope",
    "RopeUnsupported",
    "TensorInfo",
    "TensorMismatch",
    "UnknownLayerType",
    "UnsupportedDraft",
    "WidthMismatch",
    "WindowMissing",
    "bare_names",
    "check_headers",
    "check_target",
    "check_tensors",
    "default_taps",
    "draft_fingerprint",
    "parse_draft_config",
    "read_draft_config",
    "read_header",
    "read_headers",
    "read_json",
    "weight_files",
]
