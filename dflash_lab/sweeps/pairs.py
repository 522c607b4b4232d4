"""The pair of a sweep in each dtype that it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dflash_lab.config import PairSpec, SweepConfig
from dflash_lab.load import Pair, load_spec, pair_spec
from dflash_lab.sweeps.progress import SweepProgress


class Pairs:
    """The pair of a sweep, loaded once for each dtype that has something to decode."""

    def __init__(
        self, config: SweepConfig, pair: Pair | None, show: Callable[[SweepProgress], None]
    ):
        self._say = lambda text: show(SweepProgress(done=0, total=0, seconds_left=None, label=text))
        self.first = pair or load_spec(_spec(config), self._say)
        self.dtype = self.first.models.dtype
        self._asked = config.dtype if isinstance(config.pair, str) else config.pair.dtype
        if pair is not None and config.dtype not in ("auto", self.dtype):
            raise ValueError(
                f"dtype is {config.dtype!r}, but the pair given was loaded in {self.dtype}. "
                "Leave dtype out, or load the pair in that one."
            )
        self._loaded = {self.dtype: self.first}

    def effective(self, dtype: str) -> str:
        """The name of what is loaded where `dtype` is asked for."""
        if dtype == self._asked:
            return self.dtype
        if dtype == "auto":
            pair = load_spec(replace(self.first.spec, dtype=dtype), self._say)
            return self._loaded.setdefault(pair.models.dtype, pair).models.dtype
        return dtype

    def get(self, dtype: str) -> Pair:
        """The pair in an effective dtype."""
        if dtype not in self._loaded:
            spec = replace(self.first.spec, dtype=dtype)
            self._loaded[dtype] = load_spec(spec, self._say)
        return self._loaded[dtype]


def _spec(config: SweepConfig) -> PairSpec:
    if isinstance(config.pair, PairSpec):
        return config.pair
    return pair_spec(config.pair, backend=config.backend, dtype=config.dtype, device=config.device)
