"""How tokens are drawn: settings that both backends honour alike, and the random numbers.

A random number follows from the seed, the token's position in prompt and output, and what it is
for. So nothing is global: sessions that are interleaved or on threads do not disturb each other,
and under the match rule a seed gives the same text at every block size.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

# What a number is for. They are independent, so each decision at a position has one of its own.
DRAFT, ACCEPT, TOKEN = "draft", "accept", "token"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """From logits to tokens, in this order: penalty, temperature, top-k, top-p, min-p.

    The same for the target and, where proposals are sampled, for the draft.
    """

    temperature: float = 0.0  # 0 takes the best token after the penalty
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    rule: str = "match"
    proposal: str = "argmax"
    probabilities: bool = False  # tell those of the drafted tokens

    @property
    def is_plain(self) -> bool:
        """Whether the best logit decides and nothing else is asked for."""
        penalised = self.repetition_penalty != 1
        return self.temperature == 0 and not penalised and not self.probabilities

    @property
    def weighs_drafts(self) -> bool:
        """Whether the draft's probabilities are needed, not only its best tokens."""
        return self.proposal == "sample" or self.probabilities

    @property
    def weighs_target(self) -> bool:
        """Whether the target's probabilities of the drafted tokens are needed."""
        return self.rule == "rejection" or self.probabilities

    def draws(self, purpose: str, first: int, count: int) -> list[float]:
        """`uniforms` of this seed."""
        return uniforms(self.seed, purpose, first, count)

    def told(
        self, first: int, p: Sequence[float], q: Sequence[float] | None
    ) -> dict[str, tuple[float, ...]]:
        """What a verdict says of the drafted tokens from position `first` on.

        `p` are the target's probabilities of them, `q` the draft's. The rule divides by what the
        token was drawn with, which for the draft's best one is 1, whatever its softmax says.
        """
        parts: dict[str, tuple[float, ...]] = {}
        if self.rule == "rejection":
            drawn_with = q if self.proposal == "sample" else (1.0,) * len(p)
            parts["odds"] = tuple(over / under for over, under in zip(p, drawn_with, strict=True))
            parts["draws"] = tuple(self.draws(ACCEPT, first, len(p)))
        if self.probabilities:
            parts |= {"draft_prob": tuple(q), "target_prob": tuple(p)}
        return parts


def uniforms(seed: int, purpose: str, first: int, count: int) -> list[float]:
    """A number in [0, 1) for each of `count` positions from `first` on; multiples of 2**-24.

    Every float32 holds them exactly, so both backends draw with the same ones.
    """
    return [_uniform(f"{seed} {purpose} {place}") for place in range(first, first + count)]


def _uniform(key: str) -> float:
    digest = hashlib.blake2b(key.encode(), digest_size=3).digest()
    return int.from_bytes(digest, "big") / 2**24


def new_seed() -> int:
    """A seed of the system's own choice; no generator of the process is touched."""
    return secrets.randbits(32)
