"""Large runs: a million blocks as frames, ten thousand cells as a status; made here, never kept."""

import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_lab.store import BLOCK_FILE, BLOCKS, CELL, PROMPT_FILE, PROMPTS, SCHEMA, cell_id
from dflash_lab.tests.runs import prompt, provenance, request_of

pytestmark = pytest.mark.thorough
PROMPTS_A_CELL, BLOCKS_A_PROMPT = 20, 50
IDS = [f"p{i:02d}" for i in range(PROMPTS_A_CELL)]

FRAMES = """
import resource, sys, time
began = time.perf_counter()
from dflash_lab import analyse, open_run
run = open_run(sys.argv[1])
names = ("block_frame", "prompt_frame", "cell_frame", "survival_frame", "length_frame")
rows = [len(getattr(analyse, name)(run)) for name in names]
unit = 1 if sys.platform == "darwin" else 1024
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
print(time.perf_counter() - began, peak, *rows)
"""
STATUS = """
import sys, time
began = time.perf_counter()
from dflash_lab.sweeps import status
print(len(status(sys.argv[1])), time.perf_counter() - began)
"""


def figures(code, run):
    """What the code prints in a process of its own, the quickest of three."""
    command = [sys.executable, "-c", code, str(run)]
    tries = [
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        for _ in range(3)
    ]
    return min(([float(word) for word in words] for words in tries), key=min)


def cell_folder(run, place):
    """A new cell's folder with its `cell.json`, its block size and its id."""
    size = 2 + place % 15
    request = request_of(IDS, block_size=size, draft_window=10 + place // 15)
    name = cell_id(request)
    folder = run / "cells" / name
    folder.mkdir(parents=True)
    about = {
        "schema": SCHEMA,
        "id": name,
        "request": request,
        "requested_block_sizes": [size],
        "provenance": provenance(request),
        "summary": {"decodes": PROMPTS_A_CELL, "tokens": 1000, "last_order": 0},
    }
    (folder / CELL).write_text(json.dumps(about, indent=1))
    return folder, size, name


def lists(rng, rows, length):
    """Lists of token ids, all of one length."""
    ends = pa.array(np.arange(0, rows * length + 1, length, dtype=np.int32))
    return pa.ListArray.from_arrays(ends, pa.array(rng.integers(0, 49_000, rows * length)))


def fill(rng, folder, size, name):
    """A cell's tables."""
    rows = PROMPTS_A_CELL * BLOCKS_A_PROMPT
    accepted = np.minimum(rng.geometric(0.4, rows) - 1, size - 1)
    index = np.tile(np.arange(BLOCKS_A_PROMPT), PROMPTS_A_CELL)
    zeros, empty = np.zeros(rows, dtype=int), [None] * rows
    columns = {name: empty for name in BLOCKS.names} | {
        "cell": [name] * rows,
        "prompt_id": np.repeat(IDS, BLOCKS_A_PROMPT),
        **{column: zeros for column in ("turn", "repeat", "anchor", "draft_cache_tokens")},
        "draft_cache_bytes": zeros,
        "index": index,
        "start": 50 + index,
        "block_size": zeros + size,
        "drafted": lists(rng, rows, size - 1),
        "posterior": lists(rng, rows, size),
        "accepted": accepted,
        "emitted": accepted + 1,
        "cut": zeros.astype(bool),
        "total_s": rng.random(rows),
    }
    arrays = [pa.array(columns[f.name]).cast(f.type) for f in BLOCKS]
    pq.write_table(pa.table(arrays, schema=BLOCKS), folder / BLOCK_FILE, compression="zstd")
    ids = rng.integers(0, 49_000, 120).tolist()
    decodes = [prompt(one, cell=name, new_ids=ids, order=i) for i, one in enumerate(IDS)]
    table = pa.Table.from_pylist(decodes, schema=PROMPTS)
    pq.write_table(table, folder / PROMPT_FILE, compression="zstd")


def test_a_million_blocks_load_and_give_every_frame_in_8_s_and_3_gb(tmp_path):
    rng = np.random.default_rng(0)
    for place in range(1000):
        fill(rng, *cell_folder(tmp_path, place))
    seconds, peak, blocks, prompts, cells, *_ = figures(FRAMES, tmp_path)
    assert (blocks, prompts, cells) == (1_000_000, 20_000, 1000)
    assert peak < 3e9
    assert seconds < 8


def test_the_status_of_ten_thousand_cells_takes_under_3_s(tmp_path):
    for place in range(10_000):
        cell_folder(tmp_path, place)
    cells, seconds = figures(STATUS, tmp_path)
    assert cells == 10_000
    assert seconds < 3
