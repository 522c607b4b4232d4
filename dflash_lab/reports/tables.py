"""Tables of a report: each figure as it is written, and its value in full."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_lab.analyse import OWN
from dflash_lab.config import window_name
from dflash_lab.panels import with_interval, written


def said(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table: its heading, how a row is written in it, and the full value."""

    head: str
    text: Callable[[Mapping[str, Any]], str]
    value: Callable[[Mapping[str, Any]], Any]


def plainly(head: str, name: str) -> Column:
    return Column(head=head, text=lambda row: said(row[name]), value=lambda row: row[name])


def figure(head: str, name: str, scale: float = 1.0) -> Column:
    def text(row: Mapping[str, Any]) -> str:
        return written(None if row[name] is None else row[name] * scale)

    return Column(head=head, text=text, value=lambda row: row[name])


def interval(head: str, name: str, scale: float = 1.0) -> Column:
    return Column(
        head=head, text=lambda row: with_interval(row, name, scale), value=lambda row: row[name]
    )


def window(row: Mapping[str, Any]) -> str:
    drafting = row.get("engine", OWN) == OWN and row["block_size"] > 1
    return window_name(row["draft_window"]) if drafting else "none"


WINDOW = Column(head="window", text=window, value=lambda row: row["draft_window"])
NAMES = (
    plainly("cell", "cell"),
    plainly("engine", "engine"),
    plainly("dtype", "dtype"),
    plainly("block size", "block_size"),
    WINDOW,
)
CELL_COLUMNS = (
    *NAMES,
    interval("tokens/s", "tokens_per_s"),
    interval("tau", "tau"),
    interval("draft rate, %", "draft_rate", 100),
    figure("tokens per block", "tokens_per_block"),
    interval("ms per block", "seconds_per_block", 1000),
    plainly("prompts", "prompts"),
)
MORE_COLUMNS = (
    *NAMES,
    figure("end to end, tokens/s", "end_to_end_per_s"),
    figure("TTFT, ms", "ttft_s", 1000),
    figure("tau by prompt", "tau_by_prompt"),
    figure("draft share, %", "draft_share", 100),
    figure("full blocks, %", "full_block_share", 100),
    figure("draft cache, MB", "draft_cache_bytes", 1e-6),
    figure("peak memory, MB", "peak_bytes", 1e-6),
    plainly("tokens", "tokens"),
    plainly("blocks", "blocks"),
    plainly("cut", "cut_blocks"),
    plainly("looped", "looped"),
)
SURVIVAL_COLUMNS = (
    plainly("cell", "cell"),
    plainly("dtype", "dtype"),
    plainly("block size", "block_size"),
    WINDOW,
    plainly("draft position", "draft_position"),
    figure("survival", "survival"),
    figure("low", "low"),
    figure("high", "high"),
    figure("conditional", "conditional"),
    plainly("blocks at risk", "at_risk"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Headings, and rows of (written, value in full)."""

    heads: tuple[str, ...]
    rows: tuple[tuple[tuple[str, str], ...], ...]

    @classmethod
    def of(cls, columns: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> Table:
        return cls(
            heads=tuple(column.head for column in columns),
            rows=tuple(
                tuple((column.text(row), _full(column.value(row))) for column in columns)
                for row in rows
            ),
        )


def _full(value: Any) -> str:
    return "" if value is None else str(value)
