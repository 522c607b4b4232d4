"""What others published, for figures that set a run beside it. Never mixed with measured rows."""

from __future__ import annotations

import pandas as pd

# Source, machine and model, prompts; block size, speed-up over plain decoding there, tau with the
# target's own token. Greedy. From dflash.md, sections 9.1, 9.3, 9.5 and 9.6.
_PAPER = "DFlash paper"
_POINTS = (
    (_PAPER, "H200, Qwen3-4B, mean of 7 sets", 16, 4.91, 6.54),
    (_PAPER, "H200, Qwen3-8B, mean of 7 sets", 16, 4.86, 6.49),
    (_PAPER, "H200, Qwen3-4B, MT-Bench", 16, 2.85, 4.35),
    (_PAPER, "H200, 8 layers, MATH-500", 16, 4.64, 6.33),
    (_PAPER, "the same, used at 8", 8, 3.87, 5.09),
    ("mlxcel#1937", "GB10, Qwen3.5 pair", 4, 67.5 / 58, None),
    ("mlxcel#1937", "GB10, Qwen3.5 pair", 16, 41.9 / 58, None),
    ("Model-Optimizer", "H100, vLLM, Qwen3-8B", 16, 422 / 145, None),
)


def published_points() -> pd.DataFrame:
    """One row a published point: source, setup, block_size, speedup, tau, and `told`, in words.

    `speedup` is over plain decoding on the same machine by the same source; what a source does not
    say is missing. dflash.md, section 9.
    """
    frame = pd.DataFrame(_POINTS, columns=["source", "setup", "block_size", "speedup", "tau"])
    told = [f"{source}: {setup}" for source, setup, *_ in _POINTS]
    return frame.assign(told=told).astype({"speedup": float, "tau": float})
