"""Acceptance maps beside a run: `maps/<id>/` with `map.json`, written last, and two tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from dflash_lab.replay.maps import AcceptanceMap, Parting, PromptMap, Text
from dflash_lab.store import Run, cell_id, map_names, read_map, write_map


def save_map(run: Run, acceptance: AcceptanceMap) -> str:
    """Store a map beside a run; the name it can be loaded by. The same map has the same name."""
    texts = [
        {
            "prompt_id": entry.text.prompt_id,
            "turn": entry.text.turn,
            "task": entry.text.task,
            "prompt_ids": entry.text.prompt_ids,
            "new_ids": entry.text.tokens,
            "finite": entry.finite,
        }
        for entry in acceptance.prompts
    ]
    about = {
        "facts": acceptance.facts,
        "block_sizes": acceptance.block_sizes,
        "draft_windows": acceptance.draft_windows,
        "context_limit": acceptance.context_limit,
        "trained_block_size": acceptance.trained_block_size,
        "drafted": acceptance.prompts[0].drafted is not None,
        "confidences": acceptance.prompts[0].confidences is not None,
    }
    name = cell_id({**about, "texts": texts})
    partings = [
        {"prompt": place, **asdict(parting)}
        for place, entry in enumerate(acceptance.prompts)
        for parting in entry.partings
    ]
    header = {"id": name, **about, "partings": partings}
    write_map(run.path, header, texts, list(_map_rows(acceptance)))
    return name


def _map_rows(acceptance: AcceptanceMap) -> Iterator[dict[str, Any]]:
    for entry in acceptance.prompts:
        for size, window in acceptance.cells():
            s, w = acceptance.place(size, window)
            yield {
                "prompt_id": entry.text.prompt_id,
                "turn": entry.text.turn,
                "block_size": size,
                "draft_window": window,
                "accepted": entry.accepted[s, w].tolist(),
                "drafted": _flat(entry.drafted, s, w),
                "confidences": _flat(entry.confidences, s, w),
            }


def _flat(values: np.ndarray | None, s: int, w: int) -> list[Any] | None:
    return None if values is None else values[s, w].ravel().tolist()


def load_map(run: Run, name: str | None = None) -> AcceptanceMap:
    """A map stored beside a run; without a name, the only one there is."""
    names = map_names(run.path)
    if name is None and len(names) != 1:
        raise ValueError(f"{run.path.name} holds {len(names)} acceptance maps {names}; name one.")
    header, texts, rows = read_map(run.path, names[0] if name is None else name)
    sizes, windows = tuple(header["block_sizes"]), tuple(header["draft_windows"])
    cells, slots = len(sizes) * len(windows), max(sizes) - 1
    prompts = []
    for place, raw in enumerate(texts):
        text = Text(
            prompt_id=raw["prompt_id"],
            turn=raw["turn"],
            task=raw["task"],
            prompt_ids=tuple(raw["prompt_ids"]),
            tokens=tuple(raw["new_ids"]),
        )
        part = rows[place * cells : (place + 1) * cells]
        shape = (len(sizes), len(windows), len(text.tokens) - 1)
        prompts.append(
            PromptMap(
                text=text,
                accepted=_shaped(part, "accepted", shape, np.int32),
                drafted=_shaped(part, "drafted", (*shape, slots), np.int32),
                confidences=_shaped(part, "confidences", (*shape, slots), np.float32),
                partings=tuple(
                    Parting(**{key: value for key, value in at.items() if key != "prompt"})
                    for at in header["partings"]
                    if at["prompt"] == place
                ),
                finite=raw["finite"],
            )
        )
    return AcceptanceMap(
        block_sizes=sizes,
        draft_windows=windows,
        prompts=tuple(prompts),
        context_limit=header["context_limit"],
        trained_block_size=header["trained_block_size"],
        facts=header["facts"],
    )


def _shaped(
    rows: Sequence[Mapping[str, Any]], name: str, shape: tuple[int, ...], kind: type
) -> np.ndarray | None:
    if any(row[name] is None for row in rows):
        return None
    return np.array([row[name] for row in rows], kind).reshape(shape)
