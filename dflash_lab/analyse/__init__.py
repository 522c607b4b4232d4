"""From stored cells to frames, intervals over prompts, drift and the choice. Nothing is drawn here.

`sums` counts per cell and prompt, `resampling` draws prompts again, `frames` makes a row a block,
prompt, cell, position, length or pair of cells, `choice` says which setting wins.
"""

from dflash_lab.analyse.choice import (
    COMPARABLE,
    NEAR,
    OBJECTIVES,
    Arm,
    Choice,
    Contest,
    NearEqual,
    Ratio,
    Setting,
    Speeds,
    choose,
    comparable,
    contest,
    drafting_cells,
    settle,
    trained_block_size,
)
from dflash_lab.analyse.frames import (
    OWN,
    HardwareWarning,
    block_frame,
    cell_frame,
    hardware_classes,
    length_frame,
    paired_frame,
    prompt_frame,
    records,
    survival_frame,
)
from dflash_lab.analyse.order import Drift, drift
from dflash_lab.analyse.resampling import draw_prompts, ends, intervals, ratio
from dflash_lab.analyse.sums import Repetition, prompt_sums, repetition

__all__ = [
    "COMPARABLE",
    "NEAR",
    "OBJECTIVES",
    "OWN",
    "Arm",
    "Choice",
    "Contest",
    "Drift",
    "HardwareWarning",
    "NearEqual",
    "Ratio",
    "Repetition",
    "Setting",
    "Speeds",
    "block_frame",
    "cell_frame",
    "choose",
    "comparable",
    "contest",
    "drafting_cells",
    "draw_prompts",
    "drift",
    "ends",
    "hardware_classes",
    "intervals",
    "length_frame",
    "paired_frame",
    "prompt_frame",
    "prompt_sums",
    "ratio",
    "records",
    "repetition",
    "settle",
    "survival_frame",
    "trained_block_size",
]
