"""A torch session that drafts what a script says, for tests and the check of a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dflash_lab.backends.torch_session import TorchBlock, TorchSession
from dflash_lab.load import Pair
from dflash_lab.tests.toys import Script, told_block


class ToldSession(TorchSession):
    """A real session whose proposals come from a script instead of the network."""

    def follow(self, script: Script, text: Sequence[int]) -> ToldSession:
        self.script, self.text = script, text  # prompt and greedy continuation
        return self

    def draft(self, anchor: int, block_size: int) -> TorchBlock:
        made = super().draft(anchor, block_size)  # the network runs, its caches stay right
        tokens = told_block(self.script, self.text, anchor, self.committed, block_size)
        return TorchBlock(torch.tensor([tokens], device=self.target.device), made.finite)


def told_sessions(pair: Pair, script: Script, text: Sequence[int]) -> Callable[..., ToldSession]:
    """What stands for `pair.models.session` while the script decides."""

    def session(window: int | None, speculate: bool, sampling: Any = None) -> ToldSession:
        draft = pair.models.draft if speculate else None
        made = ToldSession(pair.models.target, draft, window, sampling=sampling)
        return made.follow(script, text)

    return session
