"""Long frames of an acceptance map: a row a block, a setting, or a claim beside the truth."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from dflash_lab.replay.maps import AcceptanceMap, visited
from dflash_lab.replay.walks import replay_traces
from dflash_lab.trace import tau


def replay_frame(acceptance: AcceptanceMap) -> pd.DataFrame:
    """One row a block of every block size and window, blocks of one size throughout.

    `cell_block_size` is the setting; `block_size` the block's own, narrower where the context
    ended. `remaining` are the tokens that the text has after the anchor.
    """
    names = ("index", "start", "block_size", "rows", "accepted", "emitted", "cut")
    rows = []
    for size, window in acceptance.cells():
        for trace in replay_traces(acceptance, size, window):
            about = (trace.prompt_id, trace.turn, trace.task, size, window)
            left = len(trace.tokens) - 1
            for block in trace.blocks:
                rows.append((*about, *(getattr(block, name) for name in names), left))
                left -= block.emitted
    about = ("prompt_id", "turn", "task", "cell_block_size", "draft_window")
    frame = pd.DataFrame(rows, columns=[*about, *names, "remaining"])
    return frame.astype({"draft_window": "Int64"})


def acceptance_frame(acceptance: AcceptanceMap) -> pd.DataFrame:
    """One row a block size and window: the two averages of accepted, named apart, and tau.

    `accepted_all_anchors` is the mean over every token of the texts, a figure of training;
    `accepted_visited` the mean over the blocks that decoding would have made, cut ones left out,
    which is tau - 1. Missing, never 0, where there is no such block.
    """
    rows = []
    for size, window in acceptance.cells():
        s, w = acceptance.place(size, window)
        everywhere = [entry.accepted[s, w] for entry in acceptance.prompts]
        traces = replay_traces(acceptance, size, window)
        blocks = [block for trace in traces for block in trace.blocks]
        of_blocks = tau(blocks)
        by_prompt = [trace.tau for trace in traces if trace.tau is not None]
        rows.append(
            {
                "block_size": size,
                "draft_window": window,
                "prompts": len(traces),
                "anchors": sum(map(len, everywhere)),
                "blocks": len(blocks),
                "cut_blocks": sum(block.cut for block in blocks),
                "emitted": sum(block.emitted for block in blocks),
                "accepted_all_anchors": _mean(np.concatenate(everywhere)),
                "accepted_visited": None if of_blocks is None else of_blocks - 1,
                "tau": of_blocks,
                "tau_by_prompt": _mean(by_prompt),
                "tokens_per_block": _mean([block.emitted for block in blocks]),
            }
        )
    frame = pd.DataFrame(rows).astype({"draft_window": "Int64"})
    means = ["accepted_all_anchors", "accepted_visited", "tau", "tau_by_prompt", "tokens_per_block"]
    return frame.astype(dict.fromkeys(means, "Float64"))


def _mean(values: Sequence[float] | np.ndarray) -> float | None:
    return float(np.mean(values)) if len(values) else None


def clip_frame(acceptance: AcceptanceMap, block_size: int | None = None) -> pd.DataFrame:
    """What traces of one block size, cut shorter, claim of smaller ones; beside the truth.

    Two rows a smaller size and window. Kind "estimate" clips the larger blocks, "re-draft" asks
    the draft for blocks of that size. `accepted` is the mean over the same states, those where the
    uncut larger blocks begin; `tau` is of a walk of its own. `wrong_share` is the share of states
    where the estimate is not the truth (dflash.md 6.3).
    """
    largest = acceptance.block_sizes[-1] if block_size is None else block_size
    rows = []
    for window in acceptance.draft_windows:
        big, w = acceptance.place(largest, window)
        for s, size in enumerate(acceptance.block_sizes):
            if not 1 < size < largest:
                continue
            clipped = [np.minimum(e.accepted[big, w], size - 1) for e in acceptance.prompts]
            truth = [entry.accepted[s, w] for entry in acceptance.prompts]
            states = [_uncut(entry.accepted[big, w]) for entry in acceptance.prompts]
            here = [
                np.concatenate([c[at] for c, at in zip(part, states, strict=True)])
                for part in (clipped, truth)
            ]
            wrong = _mean(here[0] != here[1])
            for kind, counts, found in (
                ("estimate", clipped, here[0]),
                ("re-draft", truth, here[1]),
            ):
                rows.append(
                    {
                        "from_block_size": largest,
                        "block_size": size,
                        "draft_window": window,
                        "kind": kind,
                        "states": len(found),
                        "accepted": _mean(found),
                        "tau": _tau_of(counts),
                        "wrong_share": wrong if kind == "estimate" else None,
                    }
                )
    columns = ("from_block_size", "block_size", "draft_window", "kind", "states", "accepted", "tau")
    frame = pd.DataFrame(rows, columns=[*columns, "wrong_share"])
    kinds = dict.fromkeys(("accepted", "tau", "wrong_share"), "Float64")
    return frame.astype({"draft_window": "Int64"} | kinds)


def _uncut(counts: np.ndarray) -> np.ndarray:
    """The anchors where uncut blocks of one size begin."""
    chosen = visited(counts)
    return chosen[chosen + counts[chosen] + 1 <= len(counts)]


def _tau_of(columns: Sequence[np.ndarray]) -> float | None:
    lengths = np.concatenate([counts[_uncut(counts)] + 1 for counts in columns])
    return _mean(lengths)
