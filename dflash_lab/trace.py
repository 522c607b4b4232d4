"""Records of a decode: one of the prefill, one a block, and the trace that holds them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dflash_lab.accept import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Seconds of one block; the stages are None in timing mode `whole`, never guesses."""

    total: float
    draft: float | None = None
    verify: float | None = None
    commit: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRecord:
    """The target's pass over the prompt, which gives the first output token."""

    prompt_length: int
    token: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRecord:
    """One turn of the loop: what was drafted, what the target said, how much was kept.

    Where a policy had fewer rows verified, the drafts that nobody judged are not in it.
    """

    index: int  # 0 for the first block after prefill
    start: int  # position of the anchor in prompt + output
    anchor: int
    block_size: int  # entries of this block, the anchor among them
    verdict: Verdict
    accepted: int  # drafted tokens kept by the rule, from the left
    emitted: int  # below accepted + 1 only where the output ended inside the block
    draft_cache_tokens: int  # committed positions the draft saw
    draft_cache_bytes: int  # what its cache of them takes
    seconds: StageSeconds

    @property
    def drafted(self) -> tuple[int, ...]:
        return self.verdict.drafted

    @property
    def posterior(self) -> tuple[int, ...]:
        return self.verdict.posterior

    @property
    def draft_prob(self) -> tuple[float, ...] | None:
        """The draft's probability of each drafted token; None where nobody asked for it."""
        return self.verdict.draft_prob

    @property
    def target_prob(self) -> tuple[float, ...] | None:
        """The target's probability of each drafted token; None where nobody asked for it."""
        return self.verdict.target_prob

    @property
    def rows(self) -> int:
        """Entries that were verified: all of the block, unless a policy wanted fewer."""
        return len(self.verdict.posterior)

    @property
    def cut(self) -> bool:
        """Whether the output ended inside this block."""
        return self.emitted < self.accepted + 1

    @property
    def acceptance_length(self) -> int:
        return self.accepted + 1

    @property
    def tokens(self) -> tuple[int, ...]:
        """What was emitted: the accepted drafts, then one token of the target's own."""
        return (*self.drafted[: self.accepted], self.posterior[self.accepted])[: self.emitted]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRequest:
    """A `DecodeConfig` made definite for one pair: every value that decides the result."""

    block_size: int
    block_size_requested: int  # what the source named, before it was lowered
    block_size_source: str  # "argument", "DFLASH_BLOCK_SIZE", "draft config: block_size", "default"
    trained_block_size: int
    beyond_trained: bool  # the size used is above the trained one
    draft_window: int | None
    window_rule: str  # "per_block" for a window the user chose
    layer_windows: tuple[int | None, ...]  # the checkpoint's own, a layer each
    max_new_tokens: int
    context_limit: int
    stop_tokens: frozenset[int]
    rule: str
    proposal: str
    temperature: float
    seed: int | None
    timing: str
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    probabilities: bool = False
    stop_strings: tuple[str, ...] = ()
    min_new_tokens: int = 0  # no stop token before so many ends the output
    policy: Any = None  # an object with name and version; `describe_policy` makes a record of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Everything that happened while one prompt was decoded."""

    request: DecodeRequest
    prompt_ids: tuple[int, ...]
    prefill: PrefillRecord | None  # None where it was cancelled before the first token
    blocks: tuple[BlockRecord, ...]
    text: str  # the tokens decoded, without what ended them; "" where the pair has no tokenizer
    finish_reason: str  # "stop", "length", "context" or "cancelled"
    total_s: float  # outer clock, start of prefill to last token
    peak_bytes: int | None  # peak memory of the device, or of the process on a CPU
    thinking: str  # "on", "off", "template default" or "no template"
    warnings: tuple[str, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        """The new tokens, the one that ended them included."""
        if self.prefill is None:
            return ()
        return (self.prefill.token, *(token for block in self.blocks for token in block.tokens))

    @property
    def tau(self) -> float | None:
        """Mean acceptance length over the blocks that were not cut; None without any."""
        return tau(self.blocks)

    @property
    def ttft_s(self) -> float | None:
        return None if self.prefill is None else self.prefill.seconds

    @property
    def decode_s(self) -> float:
        """Seconds of all blocks, what a reader of the stream did in between left out."""
        return sum(block.seconds.total for block in self.blocks)

    @property
    def block_size(self) -> int:
        return self.request.block_size

    @property
    def block_size_requested(self) -> int:
        return self.request.block_size_requested

    @property
    def block_size_source(self) -> str:
        return self.request.block_size_source

    @property
    def draft_window(self) -> int | None:
        return self.request.draft_window

    @property
    def policy(self) -> str | None:
        """Name and version of the policy; None where every block was alike."""
        policy = self.request.policy
        return None if policy is None else f"{policy.name} {policy.version}"


def tau(blocks: Iterable[BlockRecord], cut_blocks: bool = False) -> float | None:
    """Sum of acceptance lengths over number of blocks; None where no block counts.

    Cut blocks are left out unless `cut_blocks`; that figure is another one and its label says so.
    """
    lengths = [block.accepted + 1 for block in blocks if cut_blocks or not block.cut]
    return sum(lengths) / len(lengths) if lengths else None
