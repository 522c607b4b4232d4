"""Columns of the parquet files, in their final form."""

from __future__ import annotations

import pyarrow as pa

SCHEMA = 1

SCHEMA_KEY = b"dflash_lab.schema"

_METADATA = {SCHEMA_KEY: str(SCHEMA).encode()}

_KEYS = [
    ("cell", pa.string()),
    ("prompt_id", pa.string()),
    ("turn", pa.int32()),
    ("repeat", pa.int32()),
]

BLOCKS = pa.schema(
    [
        *_KEYS,
        ("index", pa.int32()),
        ("start", pa.int32()),
        ("anchor", pa.int32()),
        ("block_size", pa.int32()),
        ("drafted", pa.list_(pa.int32())),
        ("posterior", pa.list_(pa.int32())),
        ("accepted", pa.int32()),
        ("emitted", pa.int32()),
        ("cut", pa.bool_()),
        ("draft_cache_tokens", pa.int64()),
        ("draft_cache_bytes", pa.int64()),
        ("draft_s", pa.float64()),  # stage seconds are null in timing mode "whole"
        ("verify_s", pa.float64()),
        ("commit_s", pa.float64()),
        ("total_s", pa.float64()),
        ("draft_prob", pa.list_(pa.float32())),
        ("target_prob", pa.list_(pa.float32())),
    ],
    metadata=_METADATA,
)

PROMPTS = pa.schema(
    [
        *_KEYS,
        ("task", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("new_ids", pa.list_(pa.int32())),
        ("text", pa.string()),
        ("finish_reason", pa.string()),
        ("ttft_s", pa.float64()),
        ("decode_s", pa.float64()),
        ("total_s", pa.float64()),
        ("peak_bytes", pa.int64()),
        ("order", pa.int64()),  # place of this decode in the run's whole sequence
    ],
    metadata=_METADATA,
)

MAP_TEXTS = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("turn", pa.int32()),
        ("task", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("new_ids", pa.list_(pa.int32())),
        ("finite", pa.bool_()),
    ],
    metadata=_METADATA,
)

MAP_ACCEPTED = pa.schema(
    [
        ("prompt_id", pa.string()),
        ("turn", pa.int32()),
        ("block_size", pa.int32()),
        ("draft_window", pa.int32()),
        ("accepted", pa.list_(pa.int32())),  # an anchor each
        ("drafted", pa.list_(pa.int32())),  # anchors times slots of the largest size; -1 is none
        ("confidences", pa.list_(pa.float32())),  # the same shape; NaN is none
    ],
    metadata=_METADATA,
)
