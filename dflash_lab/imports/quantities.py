"""One name a quantity: what other systems call acceptance or block size, in this project's terms.

Nothing here is called acceptance alone: every function takes and gives a quantity that has a
definition (dflash.md 5.2, 5.3).
"""

from __future__ import annotations

from dflash_lab.config import check_block_size, one_of, whole

# How many more entries a block has than the setting of each system says: 1 where it counts drafted
# tokens, 0 where it counts the anchor too.
SETTINGS = {
    "checkpoint": ("block_size", 0),
    "vllm": ("num_speculative_tokens", 1),
    "sglang": ("speculative_num_draft_tokens", 0),
    "llama.cpp": ("spec-draft-n-max", 1),
    "tensorrt-llm": ("max_draft_len", 1),
    "transformers": ("num_assistant_tokens", 1),
    "mlx-lm": ("num_draft_tokens", 1),
    "dflash_mlx": ("block_tokens", 0),
    "mlx_dspark": ("max_draft_tokens", 1),
    "mlx-vlm": ("draft-block-size", 0),
    "atharvrn": ("block_size", 0),
}


def block_size_of(system: str, setting: int) -> int:
    """The block size, anchor included, that a system's own setting stands for."""
    one_of("system", system, tuple(SETTINGS))
    name, more = SETTINGS[system]
    return whole(name, setting, 1 - more, f"It is a setting of {system}.") + more


def setting_of(system: str, block_size: int) -> int:
    """What to set in a system for blocks of that size, anchor included."""
    one_of("system", system, tuple(SETTINGS))
    return check_block_size(block_size) - SETTINGS[system][1]


def tau_of_counts(accepted: int, blocks: int) -> float | None:
    """Mean acceptance length of so many accepted tokens in so many blocks; None without any."""
    return 1 + accepted / blocks if blocks else None


def draft_rate_of(tau: float, block_size: int) -> float | None:
    """Accepted over drafted of blocks of one size; None where nothing is drafted."""
    return (tau - 1) / (block_size - 1) if check_block_size(block_size) > 1 else None


def draft_share_of(tokens_per_block: float) -> float:
    """Accepted over emitted tokens, what dflash_mlx calls its acceptance ratio."""
    return 1 - 1 / tokens_per_block


def tokens_per_block_of(draft_share: float) -> float:
    """Emitted tokens over blocks, from accepted over emitted; ValueError at 1, where none is."""
    if not 0 <= draft_share < 1:
        raise ValueError(f"draft_share is {draft_share}; expected a share from 0 to below 1.")
    return 1 / (1 - draft_share)


def tau_of_filled_share(filled_share: float, block_size: int) -> float:
    """Mean acceptance length, from itself over the block size: AtharvRN's acceptance ratio."""
    return filled_share * check_block_size(block_size)
