"""The stored run: cells on disk, written so that a kill at any moment loses one prompt at most.

A finished cell is a folder with `cell.json`, written last, beside `prompts.parquet`,
`blocks.parquet` and `texts.json`. While it is filled there is a `part.jsonl` instead.

`schema` has the columns, `strict_json` and `files` write and read, `decodes` makes rows, `parts`
fills a cell, `runs` opens a folder, `maps` keeps acceptance maps beside it.
"""

from dflash_lab.store.decodes import (
    block_row,
    block_table,
    decode_key,
    decode_line,
)
from dflash_lab.store.files import (
    DamagedCell,
    DiskFull,
    NewerSchema,
    NotARun,
    clear_when_full,
    write_atomic,
    write_json,
)
from dflash_lab.store.maps import (
    map_names,
    read_map,
    write_map,
)
from dflash_lab.store.parts import (
    BLOCK_FILE,
    CELL,
    PART,
    PROMPT_FILE,
    Part,
    TornLineWarning,
    fail_cell,
    finish_cell,
    open_part,
    read_part,
    tidy,
)
from dflash_lab.store.runs import (
    Cell,
    FailedCell,
    Run,
    open_run,
)
from dflash_lab.store.schema import (
    BLOCKS,
    PROMPTS,
    SCHEMA,
)
from dflash_lab.store.strict_json import (
    canonical,
    cell_id,
    plain,
    to_json,
)

__all__ = [
    "BLOCKS",
    "BLOCK_FILE",
    "CELL",
    "PART",
    "PROMPTS",
    "PROMPT_FILE",
    "SCHEMA",
    "Cell",
    "DamagedCell",
    "DiskFull",
    "FailedCell",
    "NewerSchema",
    "NotARun",
    "Part",
    "Run",
    "TornLineWarning",
    "block_row",
    "block_table",
    "canonical",
    "cell_id",
    "clear_when_full",
    "decode_key",
    "decode_line",
    "fail_cell",
    "finish_cell",
    "map_names",
    "open_part",
    "open_run",
    "plain",
    "read_map",
    "read_part",
    "tidy",
    "to_json",
    "write_atomic",
    "write_json",
    "write_map",
]
