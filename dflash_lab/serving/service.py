"""What a server serves: a pair, its worker, and the settings of requests that name none."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

from dflash_lab.config import DecodeConfig
from dflash_lab.decoding import resolve_request
from dflash_lab.load import Pair
from dflash_lab.provenance import short_name
from dflash_lab.serving.answers import block_size_of
from dflash_lab.serving.worker import Worker
from dflash_lab.trace import DecodeRequest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Service:
    """All that the routes know."""

    pair: Pair
    worker: Worker
    config: DecodeConfig  # its block size is the one used
    resolved: DecodeRequest  # the same as it was asked for, and where the size came from
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model(self) -> str:
        return self.pair.spec.name or short_name(self.pair.spec.target)

    @property
    def names(self) -> set[str]:
        """What a client may call it: the short name, or the target as the server was given it."""
        return {self.model, self.pair.spec.target}

    def request(self, config: DecodeConfig) -> DecodeRequest:
        """A request's settings made definite; the block size says what it was at the start."""
        made = resolve_request(self.pair, config)
        return replace(
            made,
            block_size_requested=self.resolved.block_size_requested,
            block_size_source=self.resolved.block_size_source,
        )

    def facts(self) -> dict[str, Any]:
        """What /health tells."""
        spec, models, worker = self.pair.spec, self.pair.models, self.worker
        return {
            "status": "ok" if worker.alive else "failed",
            "model": self.model,
            "target": short_name(spec.target),
            "draft": short_name(spec.draft),
            "backend": spec.backend,
            "dtype": models.dtype,
            "device": models.device,
            "context": models.context_limit,
            **block_size_of(self.resolved),
            "block_size_requested": self.resolved.block_size_requested,
            "trained_block_size": self.resolved.trained_block_size,
            "draft_window": self.config.draft_window,
            "max_tokens": self.config.max_new_tokens,
            "temperature": self.config.temperature,
            "active": int(worker.running is not None),
            "waiting": len(worker.waiting),
        }
