"""Replay: every block size, window and policy from one pass of the target over its own text.

Greedy text does not depend on the draft. So the target reads prompt and text once, the draft is
asked for a block at every new token, and what decoding would have done is a walk in whole numbers.
Replay tells acceptance; seconds come from a cost table.
"""

from dflash_lab.replay.compared import policy_frame
from dflash_lab.replay.frames import acceptance_frame, clip_frame, replay_frame
from dflash_lab.replay.maps import (
    AcceptanceMap,
    InconsistentText,
    InconsistentTextWarning,
    Parting,
    PromptMap,
    Text,
    acceptance_map,
)
from dflash_lab.replay.sampled import (
    ExpectedBlocks,
    acceptance_chances,
    draw_accepted,
    expected_blocks,
)
from dflash_lab.replay.stored import load_map, save_map
from dflash_lab.replay.walks import (
    Hindsight,
    ReplayBlock,
    ReplayTrace,
    per_block_best,
    per_prompt_best,
    replay_traces,
)

__all__ = [
    "AcceptanceMap",
    "ExpectedBlocks",
    "Hindsight",
    "InconsistentText",
    "InconsistentTextWarning",
    "Parting",
    "PromptMap",
    "ReplayBlock",
    "ReplayTrace",
    "Text",
    "acceptance_chances",
    "acceptance_frame",
    "acceptance_map",
    "clip_frame",
    "draw_accepted",
    "expected_blocks",
    "load_map",
    "per_block_best",
    "per_prompt_best",
    "policy_frame",
    "replay_frame",
    "replay_traces",
    "save_map",
]
