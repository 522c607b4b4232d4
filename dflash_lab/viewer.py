"""A decoded prompt to step through: one script for notebooks and reports, and a twin without it.

`viewer.js` shows what `view` tells it and computes nothing but places on the screen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Any

from dflash_lab.load import Pair
from dflash_lab.store import Run, open_run
from dflash_lab.tokens import (
    KINDS,
    ShownBlock,
    ShownTrace,
    Traces,
    alone,
    live_trace,
    shown_as,
    stylesheet,
    trace_html,
)
from dflash_lab.trace import StageSeconds, Trace

INSTALL = 'pip install "ipywidgets>=8.1" anywidget, then restart the kernel'


# What the script is told

NOTHING = {"first": None, "ttft_s": None, "clock": "", "blocks": []}  # with a `note` that says why


def view(trace: ShownTrace) -> dict[str, Any]:
    """A trace as plain values, every text as it is to be seen."""
    ends = _ends(trace)
    survived = survival_so_far(trace.blocks)
    of = len(trace.blocks)
    return {
        "first": None if trace.first is None else shown_as(trace.first),
        "ttft_s": trace.ttft_s,
        "clock": clock(trace),
        "note": ending(trace),
        "blocks": [
            {
                "label": f"block {place + 1} of {of}: {block.summary}",
                **_texts(block),
                "draft_prob": _rounded(block.draft_prob),
                "target_prob": _rounded(block.target_prob),
                "survival": survived[place],
                "begin_s": ends and _round(ends[place]),
                "seconds": _stages(block.seconds),
            }
            for place, block in enumerate(trace.blocks)
        ],
    }


def _texts(block: ShownBlock) -> dict[str, Any]:
    taken = len(block.kept) + (block.own is not None)
    choices = [shown_as(text) for text in block.choices[:taken]]
    return {
        "kept": [shown_as(text) for text in block.kept],
        "own": None if block.own is None else shown_as(block.own),
        "unused": [shown_as(alone(text)) for text in block.unused],
        "rejected": [shown_as(alone(text)) for text in block.rejected],
        "choices": [*choices, *(shown_as(alone(text)) for text in block.choices[taken:])],
    }


def survival_so_far(blocks: Sequence[ShownBlock]) -> list[list[tuple[int, int]]]:
    """After each block: of how many that drafted up to k so far how many were accepted up to k.

    A list a block, of pairs (accepted, drafted) for k = 1, 2, ... Blocks that were cut are left
    out, as in the survival of a run.
    """
    found: list[list[tuple[int, int]]] = []
    counts: list[tuple[int, int]] = []
    for block in blocks:
        counts += [(0, 0)] * (block.drafted - len(counts))
        if not block.cut:
            counts = [
                (kept + (k <= block.accepted), drafted + (k <= block.drafted))
                for k, (kept, drafted) in enumerate(counts, start=1)
            ]
        found.append(counts[: block.drafted])
    return found


def _ends(trace: ShownTrace) -> list[float] | None:
    """Seconds from the request to the end of the prefill and of each block; None if unknown."""
    seconds = [block.seconds for block in trace.blocks]
    if trace.ttft_s is None or None in seconds:
        return None
    return list(accumulate((each.total for each in seconds), initial=trace.ttft_s))


def clock(trace: ShownTrace) -> str:
    """The times of a trace in words."""
    ends = _ends(trace)
    if ends is None:
        return "Times were not recorded."
    blocks = f"{len(trace.blocks)} block{'s' * (len(trace.blocks) != 1)}"
    return f"{ends[0]:.3f} s to the first token, then {blocks} in {ends[-1] - ends[0]:.3f} s."


def ending(trace: ShownTrace) -> str:
    """A sentence where the output did not end by itself, else nothing."""
    return "Stopped before its end." if trace.finish_reason == "cancelled" else ""


def _stages(seconds: StageSeconds | None) -> dict[str, float] | None:
    """The total, and draft and verify where they were timed; the rest of the block is other."""
    if seconds is None:
        return None
    told = {"total": seconds.total, "draft": seconds.draft, "verify": seconds.verify}
    return {name: _round(value) for name, value in told.items() if value is not None}


def _rounded(values: Iterable[float | None] | None) -> list[float | None] | None:
    """Probabilities to four digits; what is missing or no number stays missing."""
    if values is None:
        return None
    return [None if v is None or not math.isfinite(v) else round(v, 4) for v in values]


def _round(seconds: float) -> float:
    return round(seconds, 6)


# The script, and who runs it


@cache
def script() -> str:
    """viewer.js, a module that exports `render({ model, el })` and imports nothing."""
    return _own("viewer.js")


@cache
def viewer_styles() -> str:
    """Every rule that the script's elements need."""
    return f"{stylesheet()}\n{_own('viewer.css')}"


def _own(name: str) -> str:
    return files("dflash_lab").joinpath(name).read_text(encoding="utf-8")


@cache
def _widget_class() -> Any:
    import anywidget
    import traitlets

    class TraceWidget(anywidget.AnyWidget):
        _esm = script()
        _css = viewer_styles()
        legend = traitlets.Dict(KINDS).tag(sync=True)
        trace = traitlets.Dict().tag(sync=True)
        block = traitlets.Int(0).tag(sync=True)  # of the blocks, from 0

    return TraceWidget


def trace_widget(trace: ShownTrace | None = None) -> Any:
    """The live viewer: assign `view(...)` to its `trace` to show another one.

    Raises ImportError with the install line where anywidget is missing.
    """
    try:
        return _widget_class()(trace=NOTHING if trace is None else view(trace))
    except ImportError as error:
        raise ImportError(f"the trace viewer needs anywidget: {INSTALL}.") from error


class TraceView:
    """A trace that a notebook shows: to step through where there is a kernel, else coloured."""

    def __init__(self, trace: ShownTrace, summary: str):
        self.trace, self.summary = trace, summary

    @property
    def html(self) -> str:
        """What is shown without a script."""
        end = ending(self.trace)
        return trace_html(self.trace) + (f"<p>{end}</p>" if end else "")

    def __repr__(self) -> str:
        return self.summary

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """The widget and its twin in HTML; the twin alone where anywidget is not installed."""
        return {**self._widget_bundle(), "text/html": self.html, "text/plain": repr(self)}

    def _widget_bundle(self) -> dict[str, Any]:
        try:
            bundle = trace_widget(self.trace)._repr_mimebundle_()
        except ImportError:
            return {}
        return bundle_of(bundle)


def bundle_of(bundle: Any) -> dict[str, Any]:
    """What a widget says of itself, without metadata."""
    return dict(bundle[0] if isinstance(bundle, tuple) else bundle or {})


def show_trace(pair: Pair, trace: Trace) -> TraceView:
    """A decoded prompt to step through block by block, for the end of a notebook cell."""
    tau = "n/a" if trace.tau is None else f"{trace.tau:.2f}"
    summary = f"{len(trace.tokens)} tokens in {len(trace.blocks)} blocks, tau {tau}: {trace.text!r}"
    return TraceView(trace=live_trace(pair, trace), summary=summary)


def show_stored_trace(
    run: Run | str | Path, cell: str, prompt_id: str | None = None, turn: int = 0, repeat: int = 0
) -> TraceView:
    """`show_trace` for a prompt of a stored cell, its first where none is named.

    Raises ValueError naming the prompts where the cell has no such one.
    """
    run = run if isinstance(run, Run) else open_run(run)
    one = Run(path=run.path, cells=(run.cell(cell),))
    traces = Traces(one, [cell])
    named = f"{prompt_id}|{turn}|{repeat}"
    key = traces.prompts[0].key if prompt_id is None and traces.prompts else named
    trace = traces.of(cell, key)
    if trace is None:
        known = ", ".join(prompt.label for prompt in traces.prompts) or "none"
        raise ValueError(
            f"cell {cell} has no text of prompt {prompt_id!r}, turn {turn}, repeat {repeat}; "
            f"it has {known}."
        )
    label = next(prompt.label for prompt in traces.prompts if prompt.key == key)
    return TraceView(trace=trace, summary=f"{label} in cell {cell}: {len(trace.blocks)} blocks")
