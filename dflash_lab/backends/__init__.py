"""What a backend must do: load a pair, and five verbs on one prompt. Plain numbers in and out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dflash_lab.accept import Verdict
from dflash_lab.checkpoint import DraftConfig
from dflash_lab.sampling import Sampling

OWN = "dflash_lab"  # the engine that is our own loop; any other is a library's generator
LIBRARIES = {"torch": "transformers", "mlx": "mlx-lm"}  # whose own generator is the reference
LOOKUP = "prompt-lookup"  # that generator, drafting what followed the same tokens before
LOOKUP_TOKENS = 10  # that it proposes at a time, as in Spec-Bench


class UnsupportedTarget(ValueError):
    """A model whose layers, embedding or head are not where a causal language model has them."""


class TargetNotReversible(ValueError):
    """The target holds state that cannot be taken back after a rejected draft."""


class TargetNotFinite(ArithmeticError):
    """The target's logits are not finite numbers, so no token can be chosen."""


class OutOfMemory(RuntimeError):
    """The device has no memory left for a block of this size over this much context."""


class Session(Protocol):
    """One prompt being decoded. Owns both models' caches; knows nothing of acceptance."""

    def prefill(self, prompt: Sequence[int]) -> int:
        """Run the target over the prompt; its choice of the first new token, drawn where asked."""

    def draft(self, anchor: int, block_size: int) -> Any:
        """A block of the anchor and `block_size - 1` drafted tokens, opaque, on the device."""

    def confidences(self, block: Any) -> Sequence[float]:
        """The draft's highest probability at each draft position of a block just drafted."""

    def verify(self, block: Any, rows: int | None = None) -> Verdict:
        """Run the target over the block, or over its first `rows` entries."""

    def commit(self, accepted: int) -> None:
        """Keep the anchor and the accepted tokens of the block just verified, undo the rest."""

    def synchronize(self) -> None:
        """Wait until the device has done all it was asked for."""

    def close(self) -> None:
        """Free the caches; the target is as it was found."""

    @property
    def draft_cache_tokens(self) -> int:
        """Committed positions the draft saw at its last pass."""

    @property
    def draft_cache_bytes(self) -> int:
        """Bytes of the draft's cache of committed positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposals:
    """What the draft proposes in one block, a token and its highest probability a position."""

    drafted: tuple[int, ...]
    confidences: tuple[float, ...]


class Anchors(Protocol):
    """A text that the target has read once; the draft can be asked from any of its new tokens.

    Anchor n is the new token n; it has a block only where another token follows.
    """

    choices: Sequence[int]  # the target's own next token at the place of each new one
    margins: Sequence[float]  # how far its logit stands above that of the text's token
    leads: Sequence[float]  # how far it stands above that of the second best token
    sizes: Sequence[float]  # the largest of all logits there, their signs aside
    finite: bool  # False once the draft's logits were not finite numbers

    def accepted(
        self, anchors: Sequence[int], block_size: int, draft_window: int | None
    ) -> list[int]:
        """For a block at each anchor: min(accepted, remaining), the text being the target's."""

    def proposals(
        self, anchors: Sequence[int], block_size: int, draft_window: int | None
    ) -> list[Proposals]:
        """What is drafted in a block at each anchor: all of it, unlike in `accepted`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What a library's own generator made of a prompt."""

    tokens: tuple[int, ...]
    ttft_s: float
    total_s: float


class Models(Protocol):
    """A target and a draft in memory, shared by the sessions opened on them."""

    dtype: str
    device: str
    context_limit: int
    vocabulary: int  # rows of the target's embedding
    end_tokens: frozenset[int]  # from the model's own configurations

    def session(
        self, draft_window: int | None, speculate: bool, sampling: Sampling | None = None
    ) -> Session:
        """A session of its own caches; without `speculate` it pays for no draft and no features.

        Without `sampling` it takes the best tokens, and nothing is weighed.
        """

    def anchors(self, prompt: Sequence[int], tokens: Sequence[int]) -> Anchors:
        """One pass of the target over a prompt and the tokens that it wrote after it."""

    def library_generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        stop_tokens: frozenset[int],
        min_new_tokens: int = 0,
        lookup: int | None = None,
    ) -> Generated:
        """Greedy decoding by the library's own generator: the independent reference.

        Stop tokens end nothing before `min_new_tokens`. `lookup` drafts so many tokens at a time by
        prompt lookup; ValueError where the library cannot do that.
        """

    def peak_bytes(self) -> int | None:
        """Peak bytes since the last call, of the GPU, else of the process; None where unknown."""

    def describe(self) -> dict[str, Any]:
        """Facts for provenance: versions, attention kernel, threads."""


class Backend(Protocol):
    """Loads pairs."""

    def load(
        self, target: Path, draft: Path, config: DraftConfig, dtype: str, device: str
    ) -> Models:
        """Both models of a pair; raises where they do not fit together."""


def open_backend(name: str) -> Backend:
    """The backend of that name; its framework is imported now and not before."""
    if name == "torch":
        from dflash_lab.backends.torch_session import TorchBackend

        return TorchBackend()
    if name == "mlx":
        from dflash_lab.backends.mlx_session import MlxBackend

        return MlxBackend()
    raise ValueError(f"backend is {name!r}; this version has {' and '.join(map(repr, LIBRARIES))}.")
