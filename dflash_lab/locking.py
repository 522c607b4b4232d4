"""The chosen block size written into a draft's config.json, and taken out again byte for byte."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_lab.checkpoint import CheckpointError, parse_draft_config, read_draft_config
from dflash_lab.config import check_block_size
from dflash_lab.load import is_snapshot
from dflash_lab.store import write_atomic

BEFORE = "config.json.before-lock"  # the file as it was, for the undo
NESTED = "dflash_config"


@dataclass(frozen=True, slots=True, kw_only=True)
class Locked:
    """A draft folder whose config.json names the chosen block size."""

    folder: Path  # the draft's own, or the copy of one in a hub's cache
    copied: bool
    block_size: int
    before: int  # what config.json asked for until now
    trained_block_size: int
    keys: tuple[str, ...]  # where the size was written


def lock_block_size(
    draft: str | Path, block_size: int, copy_to: str | Path | None = None
) -> Locked:
    """Make `block_size` the default of a draft folder, and keep the trained size beside it.

    It is written where the draft keeps its block size, and `trained_block_size` is added at top
    level unless it is there. A snapshot in a hub's cache is never edited: it is copied to
    `copy_to`, which has to be named then. Raises ValueError for a size above the trained one.
    """
    folder, size = Path(draft).expanduser(), check_block_size(block_size)
    config = read_draft_config(folder)
    if size > config.trained_block_size:
        raise ValueError(
            f"block size {size} is above the {config.trained_block_size} that this draft was "
            "trained with, and such a size is not locked."
        )
    copied = copy_to is not None or in_hub_cache(folder)
    if copied:
        folder = _copy(folder, copy_to)
    path = folder / "config.json"
    stored = path.read_bytes()
    changed, keys = locked_config(stored, size)
    if not (folder / BEFORE).exists():
        write_atomic(folder / BEFORE, stored)
    write_atomic(path, changed)
    return Locked(
        folder=folder,
        copied=copied,
        block_size=size,
        before=config.block_size,
        trained_block_size=config.trained_block_size,
        keys=keys,
    )


def unlock_block_size(draft: str | Path) -> Path:
    """Restore a locked draft's config.json byte for byte; its path.

    Raises ValueError where nothing was locked, or where the file was edited since.
    """
    folder = Path(draft).expanduser()
    path, before = folder / "config.json", folder / BEFORE
    if not before.is_file():
        raise ValueError(f"nothing is locked in {folder}: there is no {BEFORE} in it.")
    stored, now = before.read_bytes(), path.read_bytes()
    try:
        untouched = now == locked_config(stored, read_draft_config(folder).block_size)[0]
    except CheckpointError:
        untouched = False
    if not untouched:
        raise ValueError(
            f"{path} was edited after it was locked, and an undo would lose that. The file as it "
            f"was is {BEFORE} beside it: put it back by hand."
        )
    write_atomic(path, stored)
    before.unlink()
    return path


def in_hub_cache(folder: Path) -> bool:
    """Whether a folder is a snapshot in a hub's cache, whose files are shared."""
    return is_snapshot(folder.resolve()) or (folder / "config.json").is_symlink()


def _copy(folder: Path, copy_to: str | Path | None) -> Path:
    if copy_to is None:
        raise ValueError(
            f"{folder} is a snapshot in a hub's cache, which is never edited. Name a folder for a "
            "copy of it: copy_to=, or --copy-to on the command line."
        )
    made = Path(copy_to).expanduser()
    if made.exists():
        raise ValueError(f"{made} is there already; a copy goes into a folder of its own.")
    shutil.copytree(folder.resolve(), made)  # follows the cache's links: the copy has the files
    return made


def locked_config(stored: bytes, block_size: int) -> tuple[bytes, tuple[str, ...]]:
    """The text of a config.json with the size in it, and the keys it was written to.

    What stands both nested and at top level is written to both, or they would differ.
    """
    raw: dict[str, Any] = json.loads(stored)
    trained = parse_draft_config(raw).trained_block_size
    nested = raw.get(NESTED) or {}
    keys = [
        *([f"{NESTED}.block_size"] if nested.get("block_size") is not None else []),
        *(["block_size"] if raw.get("block_size") is not None else []),
    ] or ["block_size"]
    for key in keys:
        holder = nested if key.startswith(NESTED) else raw
        holder["block_size"] = block_size
    told = (nested.get("trained_block_size"), raw.get("trained_block_size"))
    if told == (None, None):
        raw["trained_block_size"] = trained
    text = json.dumps(raw, indent=2, ensure_ascii=False) + "\n"
    return text.encode(), tuple(keys)


def ways_to_set(block_size: int, draft_window: int | None = None) -> Mapping[str, str]:
    """The setting for those who write it into their own calls: Python, flag, variable."""
    window = "" if draft_window is None else f", draft_window={draft_window}"
    flag = "" if draft_window is None else f" --draft-sliding-window-size {draft_window}"
    return {
        "python": f"DecodeConfig(block_size={block_size}{window})",
        "flag": f"--block-size {block_size}{flag}",
        "variable": f"DFLASH_BLOCK_SIZE={block_size}",
    }
