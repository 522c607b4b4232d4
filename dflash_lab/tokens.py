"""Text coloured by what the draft got right: one HTML for notebooks, the explorer and reports.

Needs no script. What a model wrote is escaped, shown literally and kept from turning the direction
of what stands beside it.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from dflash_lab.load import Pair
from dflash_lab.trace import Trace

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
    """One block as text: what the output got of it, and what was drafted in vain."""

    kept: tuple[str, ...]  # accepted drafts that the output took
    own: str | None  # the target's own token; None where the output ended before it
    rejected: tuple[str, ...]
    unused: tuple[str, ...]  # accepted, but past the end of the output

    @property
    def drafted(self) -> int:
        return len(self.kept) + len(self.unused) + len(self.rejected)

    @property
    def accepted(self) -> int:
        return len(self.kept) + len(self.unused)

    @property
    def summary(self) -> str:
        if not self.drafted:
            return "nothing drafted"
        cut = "; the output ended in this block" if self.own is None else ""
        return f"{self.accepted} of {self.drafted} accepted{cut}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTrace:
    """The output of one prompt as text, block by block."""

    first: str | None  # None where decoding was stopped before it
    blocks: tuple[ShownBlock, ...]


def shown_block(
    pieces: Sequence[str], drafted: Sequence[str], accepted: int, emitted: int
) -> ShownBlock:
    """Sort one block's tokens; `pieces` are the texts of the `emitted` ones."""
    kept = min(accepted, emitted)
    return ShownBlock(
        kept=tuple(pieces[:kept]),
        own=pieces[kept] if emitted > accepted else None,
        rejected=tuple(drafted[accepted:]),
        unused=tuple(drafted[kept:accepted]),
    )


def stored_trace(
    pieces: Sequence[str], blocks: Iterable[Mapping[str, Any]], tokens: Mapping[str, str]
) -> ShownTrace:
    """From rows of blocks.parquet in order, and `pieces` and `tokens` of texts.json."""
    shown, at = [], 1
    for row in blocks:
        drafted = [tokens[str(token)] for token in row["drafted"]]
        end = at + row["emitted"]
        shown.append(shown_block(pieces[at:end], drafted, row["accepted"], row["emitted"]))
        at = end
    return ShownTrace(first=pieces[0] if pieces else None, blocks=tuple(shown))


def live_trace(pair: Pair, trace: Trace) -> ShownTrace:
    """From a trace in memory."""
    pieces = pair.pieces(trace.tokens, trace.request.stop_tokens)
    rows = [
        {"drafted": block.drafted, "accepted": block.accepted, "emitted": block.emitted}
        for block in trace.blocks
    ]
    drafted = {token for block in trace.blocks for token in block.drafted}
    return stored_trace(pieces, rows, {str(token): pair.text_so_far([token]) for token in drafted})


# HTML


@cache
def stylesheet() -> str:
    """The rules for every class used here; colours can be set from outside by --dl-... ."""
    return files("dflash_lab").joinpath("tokens.css").read_text(encoding="utf-8")


def token_html(text: str, kind: str = "") -> str:
    """One token; what shows nothing by itself gets a mark from the style sheet."""
    hidden = "dl-part" if not text else "dl-line" if not text.strip() and "\n" in text else ""
    classes = " ".join(filter(None, (kind and f"dl-{kind}", hidden)))
    shown = html.escape(text.translate(SHOWN_AS))
    return f'<bdi class="{classes}">{shown}</bdi>' if classes else f"<bdi>{shown}</bdi>"


def in_vain(texts: Iterable[str], kind: str, tag: str) -> str:
    """Drafted tokens that the output did not take; a part of a character has no text to show."""
    tokens = "".join(token_html("" if "\ufffd" in text else text) for text in texts)
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


def trace_html(trace: ShownTrace, lines: bool | None = None) -> str:
    """Text, legend and style sheet in one piece, to stand anywhere.

    `lines` puts each block on a line of its own, or not; with None the reader has a box for it.
    """
    toggle = toggle_html() if lines is None else ""
    classes = "dl-trace dl-lines tex2jax_ignore" if lines else "dl-trace tex2jax_ignore"
    return (
        f'<div class="{classes}"><style>{stylesheet()}</style>{legend_html()}{toggle}'
        f"{text_html(trace)}</div>"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceView:
    """A trace that a notebook shows in colours."""

    trace: ShownTrace
    summary: str

    def _repr_html_(self) -> str:
        return trace_html(self.trace)

    def __repr__(self) -> str:
        return self.summary


def show_trace(pair: Pair, trace: Trace) -> TraceView:
    """The text of a trace coloured by what the draft got right, for the end of a notebook cell."""
    tau = "n/a" if trace.tau is None else f"{trace.tau:.2f}"
    summary = f"{len(trace.tokens)} tokens in {len(trace.blocks)} blocks, tau {tau}: {trace.text!r}"
    return TraceView(trace=live_trace(pair, trace), summary=summary)
