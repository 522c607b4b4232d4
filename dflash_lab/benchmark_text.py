"""A benchmark in words: its tables for a terminal, as Markdown, and as plain values for JSON."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash_lab.analyse import (
    BASELINES,
    OWN,
    baseline,
    benchmark_frame,
    choose,
    comparable,
    kinds,
    length_frame,
    looping,
    records,
    survival_frame,
    unknowns,
)
from dflash_lab.backends import LOOKUP
from dflash_lab.benchmarking import Benchmark
from dflash_lab.config import window_name
from dflash_lab.recommendation import COMFORTABLE, LOW
from dflash_lab.store import Cell, Run

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One table: a title, headings, and rows of text."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The cells of a benchmark that compare, and their figures as plain values."""

    run: Run
    rows: tuple[dict[str, Any], ...]  # of `benchmark_frame`
    positions: tuple[dict[str, Any], ...]  # of `survival_frame`
    unknown: tuple[str, ...]

    @property
    def title(self) -> str:
        """What all of these cells have in common."""
        ask = self.run.cells[0].request
        prompts, least = ask["prompts"], ask.get("min_new_tokens")
        span = f"{least} to" if least else "up to"
        drawn = f", temperature {ask['temperature']:g}" if ask["temperature"] else ""
        return (
            f"{prompts['count']} prompts of {prompts['source']}, {span} {ask['max_new_tokens']} "
            f"new tokens{drawn}, thinking {ask['thinking']}, {ask['backend']} on {ask['device']} "
            f"({ask['hardware']})"
        )


def parts_of(run: Run) -> list[Part]:
    """The figures of a run, part by part, made from what is stored."""
    parts = []
    for part in kinds(run):
        frame = benchmark_frame(part)
        parts.append(
            Part(
                run=part,
                rows=tuple(records(frame)),
                positions=tuple(records(survival_frame(part))),
                unknown=tuple(unknowns(frame)),
            )
        )
    return parts


# Tables


def sections(parts: Sequence[Part]) -> list[Section]:
    """The tables of all parts, those without a row left out."""
    made = [
        section
        for part in parts
        for section in (_speed(part), _acceptance(part), _positions(part), _waits(part))
    ]
    return [section for section in made if section.rows]


def _speed(part: Part) -> Section:
    against = ("plain loop", "library", "prompt lookup")
    rows = [
        (
            *_names(row),
            interval(row, "tokens_per_s", number),
            *(_speedup(part.run, row, column) for column in BASELINES),
            str(row["prompts"]),
        )
        for row in part.rows
    ]
    heads = ("engine", "dtype", "block size", "window", "tokens/s [95 %]")
    heads = (*heads, *(f"over {name}" for name in against), "prompts")
    return Section(title=f"Speed: {part.title}", heads=heads, rows=tuple(rows))


def _acceptance(part: Part) -> Section:
    rows = [
        (
            *_names(row)[2:],
            interval(row, "tau", number),
            interval(row, "draft_rate", percent),
            interval(row, "tokens_per_block", number),
            interval(row, "seconds_per_block", milliseconds),
            megabytes(row["draft_cache_bytes"]),
            f"{row['blocks']} ({row['cut_blocks']})",
            str(row["prompts"]),
        )
        for row in part.rows
        if row["engine"] == OWN
    ]
    heads = ("block size", "window", "tau", "draft rate", "tokens per block", "ms per block")
    heads = (*heads, "draft cache", "blocks (cut)", "prompts")
    title = "Acceptance: cut blocks count for tokens and times alone"
    return Section(title=title, heads=heads, rows=tuple(rows))


def _positions(part: Part) -> Section:
    names = {row["cell"]: " ".join(_names(row)[1:]) for row in part.rows}
    found: dict[int, dict[str, str]] = {}
    for row in part.positions:
        told = f"{interval(row, 'survival', percent)} ({row['prompts']})"
        found.setdefault(row["draft_position"], {})[row["cell"]] = told
    cells = list(dict.fromkeys(row["cell"] for row in part.positions))
    rows = [
        (str(position), *(by_cell.get(cell, "") for cell in cells))
        for position, by_cell in sorted(found.items())
    ]
    return Section(
        title="Acceptance by position: share of blocks accepted up to there [95 %] (prompts)",
        heads=("position", *(names[cell] for cell in cells)),
        rows=tuple(rows),
    )


def _waits(part: Part) -> Section:
    scored = any(row["scored"] for row in part.rows)
    rows = [
        (
            *_names(row),
            interval(row, "ttft_s", milliseconds),
            interval(row, "tpot_s", milliseconds),
            interval(row, "end_to_end_per_s", number),
            interval(row, "peak_bytes", megabytes),
            *((interval(row, "accuracy", percent),) if scored else ()),
            str(row["prompts"]),
        )
        for row in part.rows
    ]
    heads = ("engine", "dtype", "block size", "window", "TTFT, ms", "TPOT, ms")
    heads = (*heads, "end to end, tokens/s", "peak memory [least, most]")
    heads = (*heads, *(("right answers",) if scored else ()), "prompts")
    return Section(title="Waiting, memory", heads=heads, rows=tuple(rows))


def _names(row: Row) -> tuple[str, str, str, str]:
    steered = f", {row['policy']}" if row["policy"] else ""
    window = "none" if row["block_size"] == 1 else window_name(row["draft_window"])
    size = str(row["block_size"]) if row["engine"] == OWN else "none"
    return row["engine"], row["dtype"], f"{size}{steered}", window


def _speedup(run: Run, row: Row, column: str) -> str:
    base = baseline(run, BASELINES[column], row["dtype"])
    if base is not None and base.id == row["cell"]:
        return "baseline"
    told, value = interval(row, column, lambda value: f"{value:.2f}x"), row[column]
    slower = value is not None and value < 1
    return told.replace("x", "x slower", 1) if slower else told


def interval(row: Row, name: str, form: Callable[[float], str]) -> str:
    """A figure with the ends of its interval, where it has one; n/a where it is not known."""
    if row[name] is None:
        return "n/a"
    # the interval of a share by position has plain names
    low, high = (row.get(f"{name}_{end}", row.get(end)) for end in ("low", "high"))
    ends = "" if low is None else f" [{form(low)}, {form(high)}]"
    return form(row[name]) + ends


def number(value: float) -> str:
    return f"{value:.2f}"


def percent(value: float | None) -> str:
    """Whole per cent."""
    return "n/a" if value is None else f"{value:.0%}"


def milliseconds(value: float) -> str:
    """Seconds in ms."""
    return f"{1000 * value:.2f}"


def megabytes(value: float | None) -> str:
    """Bytes in MB."""
    return "n/a" if value is None else f"{value / 1e6:.2f} MB"


# Sentences


def head_lines(made: Benchmark) -> list[str]:
    """Which pair, which prompts, where it is kept."""
    return [
        f"target: {made.spec.target}",
        f"draft: {made.spec.draft}, trained at {made.trained_block_size}",
        f"prompts: {made.prompts} of the {made.held} of {made.source}",
        f"run: {made.run.path}",
    ]


def remarks(made: Benchmark, parts: Sequence[Part]) -> list[str]:
    """What a reader of the tables should know, a sentence each."""
    told = [*made.notes, *dict.fromkeys(line for part in parts for line in part.unknown)]
    told += filter(None, (looping(part.rows) for part in parts))
    told += lowered_lines(made.run.cells)
    if any(cell.engine == LOOKUP for cell in made.run.cells):
        told.append("Of its own drafts the library tells nothing, so prompt lookup has no tau.")
    return [*told, *judgement(made.run, parts)]


def lowered_lines(cells: Sequence[Cell]) -> list[str]:
    """A sentence for each size that stands for larger ones that were asked for."""
    found: dict[int, set[int]] = {}
    for cell in cells:
        found.setdefault(cell.block_size, set()).update(cell.requested_block_sizes)
    others = {size: sorted(asked - {size}) for size, asked in found.items()}
    return [
        f"block size {size} stands for {' and '.join(map(str, asked))} too: above the size that "
        "the draft was trained with, and lowered to it. --beyond-trained insists."
        for size, asked in others.items()
        if asked
    ]


def length_lines(run: Run) -> Iterator[str]:
    """How many drafts were accepted, cell by cell: the histogram."""
    prompts = {cell.id: cell.summary["prompts"] for cell in run.cells}
    for cell, group in itertools.groupby(records(length_frame(run)), lambda row: row["cell"]):
        rows = list(group)
        first, blocks = rows[0], sum(row["blocks"] for row in rows)
        shares = "  ".join(f"{row['accepted']}: {percent(row['share'])}" for row in rows)
        yield (
            f"block size {first['block_size']}, {first['dtype']}, window "
            f"{window_name(first['draft_window'])}, {prompts[cell]} prompts, {blocks} blocks: "
            f"{shares}"
        )


def judgement(run: Run, parts: Sequence[Part]) -> list[str]:
    """What the rule of thumb says of the draft rates, and what the measurement says."""
    part = comparable(run)
    alike = {cell.id for cell in part.cells}
    rows = [row for one in parts for row in one.rows if row["cell"] in alike]
    rows = [row for row in rows if row["draft_rate"] is not None]
    if not rows:
        return []
    high = [_setting(row) for row in rows if row["draft_rate"] > COMFORTABLE]
    low = [_setting(row) for row in rows if row["draft_rate"] < LOW]
    return [
        f"rule of thumb: a draft rate (accepted over drafted) above {COMFORTABLE:.0%} is "
        f"comfortable (block size {', '.join(high) or 'none'}), below {LOW:.0%} go back to a "
        f"smaller block ({', '.join(low) or 'none'}).",
        f"measured: {choose(part).sentence}",
    ]


def _setting(row: Row) -> str:
    size, window = row["block_size"], row["draft_window"]
    return str(size) if window is None else f"{size} at window {window}"


# Forms for programs and pages


def as_values(made: Benchmark) -> dict[str, Any]:
    """Everything as plain values: figures in full, what is not known null."""
    parts = parts_of(made.run)
    return {
        "run": str(made.run.path),
        "target": made.spec.target,
        "draft": made.spec.draft,
        "trained_block_size": made.trained_block_size,
        "prompts": {"source": made.source, "used": made.prompts, "held": made.held},
        "parts": [
            {
                "request": _shared(part.run),
                "cells": [
                    row
                    | {
                        "acceptance_by_position": [
                            {name: at[name] for name in POSITION}
                            for at in part.positions
                            if at["cell"] == row["cell"]
                        ]
                    }
                    for row in part.rows
                ],
                "unknown": part.unknown,
            }
            for part in parts
        ],
        "remarks": remarks(made, parts),
    }


POSITION = ("draft_position", "survival", "low", "high", "conditional", "at_risk", "prompts")


def _shared(run: Run) -> dict[str, Any]:
    """What the requests of all cells of a part say alike: prompts, template, limits, machine."""
    first, *others = (cell.request for cell in run.cells)
    return {
        name: value
        for name, value in first.items()
        if all(name in other and other[name] == value for other in others)
    }


def as_markdown(made: Benchmark) -> str:
    """The tables and remarks as one Markdown text."""
    parts = parts_of(made.run)
    lines = [*(f"- {line}" for line in head_lines(made)), ""]
    for section in sections(parts):
        lines += [f"### {section.title}", "", *_markdown_rows(section), ""]
    return "\n".join([*lines, *(f"- {line}" for line in remarks(made, parts))])


def _markdown_rows(section: Section) -> Iterator[str]:
    for row in (section.heads, ("---",) * len(section.heads), *section.rows):
        yield "| " + " | ".join(part.replace("|", "\\|") for part in row) + " |"
