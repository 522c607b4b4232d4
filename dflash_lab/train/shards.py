"""Texts that the target wrote, as token shards on disk: atomic, compressed, resumable."""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dflash_lab.train.generate import Text, Writer

ROWS_A_SHARD = 2048
SAVE_S = 20.0  # a kill loses no more than this
UNDER_WAY = "under-way.parquet"


class OtherSettings(ValueError):
    """A folder of shards that was made with another target or other settings."""


class Shards:
    """One folder of written texts: `shard-00000.parquet` and on, and the texts under way."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], vocabulary: int):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.token = pa.uint16() if vocabulary <= 1 << 16 else pa.uint32()
        _same_settings(folder, settings)
        self.open_texts: list[Text] = []  # of the last shard, while it is not full
        self.count = len(_shard_files(folder))
        self.done: set[int] = set()
        self.tokens = 0
        for text in read_shards(folder):
            self.done.add(text.index)
            self.tokens += len(text.tokens)
        if self.count:
            last = list(_read(_shard_files(folder)[-1]))
            if len(last) < ROWS_A_SHARD:
                self.open_texts, self.count = last, self.count - 1

    def resumed(self, texts: Iterable[Text]) -> Iterator[Text]:
        """The texts not yet finished, those under way with the tokens that they had."""
        path = self.folder / UNDER_WAY
        before = {text.index: text for text in _read(path)} if path.exists() else {}
        for text in texts:
            if text.index not in self.done:
                known = before.get(text.index)
                yield known if known and known.prompt_ids == text.prompt_ids else text

    def save(self, finished: Sequence[Text], under_way: Sequence[Text]) -> None:
        """Append finished texts, and remember the others as they stand."""
        self.open_texts += finished
        self.done |= {text.index for text in finished}
        self.tokens += _tokens(finished)
        while self.open_texts:
            part = self.open_texts[:ROWS_A_SHARD]
            self._write(self.folder / f"shard-{self.count:05d}.parquet", part)
            if len(part) < ROWS_A_SHARD:
                break
            self.open_texts, self.count = self.open_texts[ROWS_A_SHARD:], self.count + 1
        self._write(self.folder / UNDER_WAY, under_way)

    def _write(self, path: Path, texts: Sequence[Text]) -> None:
        table = pa.table(
            {
                "index": pa.array([text.index for text in texts], pa.int32()),
                "prompt_ids": pa.array([list(t.prompt_ids) for t in texts], pa.list_(self.token)),
                "tokens": pa.array([text.tokens for text in texts], pa.list_(self.token)),
                "stop": pa.array([text.stop for text in texts], pa.string()),
            }
        )
        beside = path.with_name(f"{path.name}.tmp.{os.getpid()}")
        pq.write_table(table, beside, compression="zstd", compression_level=9)
        os.replace(beside, path)


def named_by(ids: Sequence[int]) -> int:
    """An index for a prompt that stays the same whatever other prompts there are."""
    return zlib.crc32(" ".join(map(str, ids)).encode()) >> 1


def read_shards(folder: Path) -> Iterator[Text]:
    """Every finished text of a folder."""
    for path in _shard_files(folder):
        yield from _read(path)


def write_shards(
    shards: Shards,
    writer: Writer,
    texts: Iterable[Text],
    enough: Callable[[int], bool],
    progress: Callable[[str], None],
) -> None:
    """Write what is missing until the texts run out or `enough(tokens so far)` says so.

    Saves every 20 s and when it is interrupted, so that no more than that is ever lost.
    """
    finished: list[Text] = []
    started = saved = time.monotonic()
    before = shards.tokens
    try:
        for ended in writer.write(shards.resumed(texts)):
            finished += ended
            now = time.monotonic()
            if now - saved > SAVE_S:
                shards.save(finished, writer.active)
                finished, saved = [], now
                speed = (shards.tokens - before) / (now - started)
                progress(f"{len(shards.done)} texts, {shards.tokens} tokens, {speed:.0f} tokens/s")
            if enough(shards.tokens + _tokens(finished) + _tokens(writer.active)):
                finished += writer.give_up()
                break
    finally:
        shards.save(finished, writer.active)


def _tokens(texts: Iterable[Text]) -> int:
    return sum(len(text.tokens) for text in texts)


def _read(path: Path) -> Iterator[Text]:
    table = pq.read_table(path).to_pydict()
    for index, prompt, tokens, stop in zip(*table.values(), strict=True):
        yield Text(index=index, prompt_ids=tuple(prompt), tokens=tokens, stop=stop)


def _shard_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.parquet"))


def _same_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    path = folder / "settings.json"
    text = json.dumps(dict(settings), indent=1, sort_keys=True) + "\n"
    if path.exists() and path.read_text() != text:
        raise OtherSettings(
            f"{folder} holds texts made with other settings ({path.name} there says which). "
            "Delete the folder or name another."
        )
    if not path.exists():
        beside = path.with_name(f"{path.name}.tmp.{os.getpid()}")
        beside.write_text(text)
        os.replace(beside, path)
