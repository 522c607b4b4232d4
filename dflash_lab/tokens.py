"""Decoded text sorted into what the draft got right, and as coloured HTML.

The HTML needs no script; `viewer` shows the same with one. What a model wrote is escaped, shown
literally and kept from turning the direction of what stands beside it.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from dflash_lab.load import Pair
from dflash_lab.store import Run, block_row
from dflash_lab.texts import output_pieces, settled
from dflash_lab.trace import StageSeconds, Trace

KINDS = {
    "accepted": "drafted and accepted",
    "own": "the target's own token after them",
    "first": "first token, from the prefill",
    "rejected": "drafted and rejected",
    "unused": "accepted, but past the end of the output",
}
SHOWN_AS = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"} | {
    0x7F: "\u2421"
}  # control characters have pictures; most of them are not allowed in HTML


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownBlock:
    """One block as text: what the output got of it, what was drafted in vain, what both said."""

    kept: tuple[str, ...]  # accepted drafts that the output took
    own: str | None  # the target's own token; None where the output ended before it
    rejected: tuple[str, ...]
    unused: tuple[str, ...]  # accepted, but past the end of the output
    choices: tuple[str, ...] = ()  # the target's after each entry; () where nobody kept them
    draft_prob: tuple[float | None, ...] | None = None  # of each drafted token, as stored
    target_prob: tuple[float | None, ...] | None = None
    seconds: StageSeconds | None = None  # None where nobody measured it

    @property
    def drafts(self) -> tuple[str, ...]:
        return (*self.kept, *self.unused, *self.rejected)

    @property
    def drafted(self) -> int:
        return len(self.drafts)

    @property
    def accepted(self) -> int:
        return len(self.kept) + len(self.unused)

    @property
    def cut(self) -> bool:
        """Whether the output ended inside this block."""
        return self.own is None

    @property
    def summary(self) -> str:
        if not self.drafted:
            return "nothing drafted"
        cut = "; the output ended in this block" if self.cut else ""
        return f"{self.accepted} of {self.drafted} accepted{cut}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTrace:
    """The output of one prompt as text, block by block."""

    first: str | None  # None where decoding was stopped before it
    blocks: tuple[ShownBlock, ...]
    ttft_s: float | None = None
    finish_reason: str | None = None


def shown_block(
    pieces: Sequence[str], drafted: Sequence[str], accepted: int, emitted: int, **said: Any
) -> ShownBlock:
    """Sort one block's tokens; `pieces` are the texts of the `emitted` ones.

    `said` are the other fields of a `ShownBlock`.
    """
    kept = min(accepted, emitted)
    return ShownBlock(
        kept=tuple(pieces[:kept]),
        own=pieces[kept] if emitted > accepted else None,
        rejected=tuple(drafted[accepted:]),
        unused=tuple(drafted[kept:accepted]),
        **said,
    )


def stored_trace(
    pieces: Sequence[str],
    blocks: Iterable[Mapping[str, Any]],
    tokens: Mapping[str, str],
    ttft_s: float | None = None,
    finish_reason: str | None = None,
) -> ShownTrace:
    """From rows of blocks.parquet in order, and `pieces` and `tokens` of texts.json."""
    shown, at = [], 1
    for row in blocks:
        end = at + row["emitted"]
        shown.append(_block_of(row, pieces[at:end], tokens))
        at = end
    first = pieces[0] if pieces else None
    return ShownTrace(first=first, blocks=tuple(shown), ttft_s=ttft_s, finish_reason=finish_reason)


def _block_of(
    row: Mapping[str, Any], pieces: Sequence[str], tokens: Mapping[str, str]
) -> ShownBlock:
    drafted, posterior = row["drafted"], row.get("posterior") or ()
    choices = [tokens[str(token)] for token in posterior]
    # A token that the output took is read in the whole text: alone it may be part of a character.
    for place, piece in enumerate(pieces[: len(choices)]):
        if place == row["accepted"] or posterior[place] == drafted[place]:
            choices[place] = piece
    return shown_block(
        pieces,
        [tokens[str(token)] for token in drafted],
        row["accepted"],
        row["emitted"],
        choices=tuple(choices),
        draft_prob=_all(row.get("draft_prob")),
        target_prob=_all(row.get("target_prob")),
        seconds=_seconds(row),
    )


def _all(values: Iterable[float | None] | None) -> tuple[float | None, ...] | None:
    return None if values is None else tuple(values)


def _seconds(row: Mapping[str, Any]) -> StageSeconds | None:
    if row.get("total_s") is None:
        return None
    names = ("total", "draft", "verify", "commit")
    return StageSeconds(**{name: row.get(f"{name}_s") for name in names})


def live_trace(pair: Pair, trace: Trace) -> ShownTrace:
    """From a trace in memory."""
    used = {token for block in trace.blocks for token in (*block.drafted, *block.posterior)}
    pieces = list(output_pieces(pair, trace.tokens, trace.request))
    if pieces and trace.finish_reason == "cancelled":
        pieces[-1] = settled(pieces[-1])  # the next token may have made a character of it
    return stored_trace(
        pieces,
        [block_row(block) for block in trace.blocks],
        {str(token): pair.text_so_far([token]) for token in used},
        trace.ttft_s,
        trace.finish_reason,
    )


# Of a run


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptKey:
    """One decoded prompt, as texts.json names it."""

    key: str
    label: str
    task: str | None = None


class Traces:
    """The texts of a run's cells, read once and put together when asked for."""

    KEYS = ("cell", "prompt_id", "turn", "repeat")
    BLOCKS = (
        *("index", "drafted", "posterior", "accepted", "emitted", "draft_prob", "target_prob"),
        *("draft_s", "verify_s", "commit_s", "total_s"),
    )

    def __init__(self, run: Run, cells: Iterable[str]):
        self.texts = {cell: run.texts(cell) for cell in dict.fromkeys(cells)}
        self.blocks: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for row in run.blocks((*self.KEYS, *self.BLOCKS)).to_pylist():
            if row["cell"] in self.texts:
                self.blocks.setdefault((row["cell"], prompt_key(row)), []).append(row)
        rows = run.prompts((*self.KEYS, "task", "ttft_s", "finish_reason")).to_pylist()
        self.rows = {(r["cell"], prompt_key(r)): r for r in rows if r["cell"] in self.texts}
        known = {key: row for (_, key), row in self.rows.items()}
        self.prompts = tuple(
            PromptKey(key=key, label=_label(row), task=row["task"]) for key, row in known.items()
        )

    def of(self, cell: str, key: str) -> ShownTrace | None:
        """The trace of one prompt in one cell; None where the cell lacks the prompt."""
        texts, row = self.texts[cell], self.rows.get((cell, key))
        if key not in texts["pieces"] or row is None:
            return None
        blocks = sorted(self.blocks.get((cell, key), []), key=lambda row: row["index"])
        about = (row["ttft_s"], row["finish_reason"])
        return stored_trace(texts["pieces"][key], blocks, texts["tokens"], *about)


def prompt_key(row: Mapping[str, Any]) -> str:
    return f"{row['prompt_id']}|{row['turn']}|{row['repeat']}"


def _label(row: Mapping[str, Any]) -> str:
    turn = f", turn {row['turn'] + 1}" if row["turn"] else ""
    repeat = f", repeat {row['repeat'] + 1}" if row["repeat"] else ""
    return f"{row['prompt_id']}{turn}{repeat}"


# HTML


@cache
def stylesheet() -> str:
    """The rules for every class used here; colours can be set from outside by --dl-... ."""
    return files("dflash_lab").joinpath("tokens.css").read_text(encoding="utf-8")


def shown_as(text: str) -> str:
    """Text as a reader sees it: control characters as their pictures."""
    return text.translate(SHOWN_AS)


def alone(text: str) -> str:
    """A token read by itself, which has no text to show where it is a part of a character."""
    return "" if "\ufffd" in text else text


def token_html(text: str, kind: str = "") -> str:
    """One token; what shows nothing by itself gets a mark from the style sheet."""
    hidden = "dl-part" if not text else "dl-line" if not text.strip() and "\n" in text else ""
    classes = " ".join(filter(None, (kind and f"dl-{kind}", hidden)))
    shown = html.escape(shown_as(text))
    return f'<bdi class="{classes}">{shown}</bdi>' if classes else f"<bdi>{shown}</bdi>"


def in_vain(texts: Iterable[str], kind: str, tag: str) -> str:
    """Drafted tokens that the output did not take."""
    tokens = "".join(token_html(alone(text)) for text in texts)
    return f'<{tag} class="dl-{kind}">{tokens}</{tag}>' if tokens else ""


def block_html(block: ShownBlock, number: int, of: int) -> str:
    """One block of the text, with what was drafted in it to be shown on hover or focus."""
    kept = "".join(token_html(piece, "accepted") for piece in block.kept)
    own = "" if block.own is None else token_html(block.own, "own")
    label = f"block {number} of {of}: {block.summary}"
    lost = in_vain(block.unused, "unused", "span") + in_vain(block.rejected, "rejected", "s")
    current = " dl-current" if number == 1 else ""
    return (
        f'<span class="dl-block{current}" tabindex="0" role="group" aria-label="{label}">'
        f'{kept}{own}<span class="dl-drafts"><b>{label}</b>{kept}{lost}{own}</span></span>'
    )


def text_html(trace: ShownTrace) -> str:
    """The output, every token in its colour; inside <pre>, where nothing typesets dollar signs."""
    first = "" if trace.first is None else token_html(trace.first, "first")
    of = len(trace.blocks)
    blocks = (block_html(block, number, of) for number, block in enumerate(trace.blocks, start=1))
    return f'<pre class="dl-text" dir="auto">{first}{"".join(blocks)}</pre>'


def legend_html() -> str:
    samples = {
        "accepted": token_html("token", "accepted"),
        "own": token_html("token", "own"),
        "first": token_html("token", "first"),
        "rejected": in_vain(["token"], "rejected", "s"),
        "unused": in_vain(["token"], "unused", "span"),
    }
    items = "".join(f"<span>{samples[kind]} {words}</span>" for kind, words in KINDS.items())
    return f'<div class="dl-legend">{items}</div>'


def toggle_html() -> str:
    return (
        '<label class="dl-toggle"><input type="checkbox"> '
        "each block on a line of its own, with everything that was drafted</label>"
    )


def trace_html(trace: ShownTrace) -> str:
    """Text, legend and style sheet in one piece, to stand anywhere."""
    return (
        f'<div class="dl-trace tex2jax_ignore"><style>{stylesheet()}</style>{legend_html()}'
        f"{toggle_html()}{text_html(trace)}</div>"
    )
