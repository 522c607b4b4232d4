"""Type a prompt and watch it decoded block by block, beside plain decoding; Stop is at hand.

One thread decodes, one at a time a device. Controls are read where a button is pressed, and what
is shown is a few traits, assigned at most ten times a second.
"""

from __future__ import annotations

import html
import time
from threading import Event, Lock, Thread
from typing import Any

from dflash_lab.backends import OutOfMemory
from dflash_lab.config import DecodeConfig
from dflash_lab.load import Pair
from dflash_lab.racing import Lane, run_race
from dflash_lab.tokens import live_trace
from dflash_lab.trace import Trace
from dflash_lab.viewer import TraceView, bundle_of, trace_widget, view
from dflash_lab.widget_parts import import_widgets, problem_html, wide

PAUSE_S = 0.1  # between two pictures
WINDOWS = (16, 64, 256, 1024)
FULL = "full"  # of the window slider, whose value cannot be None
PROMPT = "List three uses of salt."
STYLE = """<style>
.dl-race { display: grid; grid-template-columns: auto 1fr; gap: 0.3em 1em; max-width: 60em; }
.dl-race { align-items: center; line-height: 1.5; font-variant-numeric: tabular-nums; }
.dl-race i { display: block; height: 0.9em; background: #2b83c6; }
.dl-race .plain i { background: repeating-linear-gradient(90deg, #808080 0 3px, #0000 3px 6px); }
</style>"""

_AT_WORK: dict[str, Lock] = {}  # a lock a device: two decodes at once would slow each other


def live(pair: Pair, *, chat: bool = True) -> LivePanel:
    """The panel of a pair: prompt, block size, window and temperature; Run and Stop.

    Without `chat` the prompt is read as it stands, without the chat template. Raises ImportError
    naming the install line where ipywidgets or anywidget is missing.
    """
    return LivePanel(pair, chat, import_widgets("the live panel", "dl.decode works without it."))


class LivePanel:
    """The panel; after a run `trace` and `plain` are what was decoded, whole or up to Stop."""

    def __init__(self, pair: Pair, chat: bool, widgets: Any):
        self.pair, self.chat = pair, chat
        self.trace: Trace | None = None
        self.plain: Trace | None = None  # None where the block size was 1, plain itself
        self._stop, self._thread = Event(), None
        self._shown_at = 0.0
        self._make_controls(widgets)
        self.status, self.problem, self.race = (widgets.HTML() for _ in range(3))
        self.viewer = trace_widget(None)
        self.start.on_click(self.run)
        self.halt.on_click(self.stop)
        buttons = widgets.HBox([self.start, self.halt, self.status])
        controls = [self.prompt, self.block_size, self.draft_window, self.temperature]
        shown = [self.problem, self.race, self.viewer]
        self.widget = widgets.VBox([*controls, self.new_tokens, buttons, *shown])

    def _make_controls(self, widgets: Any) -> None:
        draft, room = self.pair.draft_config, wide(widgets)
        sizes = range(1, draft.trained_block_size + 1)
        windows = [(str(w), w) for w in WINDOWS if w < self.pair.models.context_limit]
        self.prompt = widgets.Textarea(value=PROMPT, description="prompt", rows=3, **room)
        self.block_size = widgets.SelectionSlider(
            options=[(str(size), size) for size in sizes],
            value=min(draft.block_size, sizes[-1]),
            description="block size",
            **room,
        )
        self.draft_window = widgets.SelectionSlider(
            options=[*windows, (FULL, FULL)],
            value=FULL,
            description="sliding-window size (draft)",
            **room,
        )
        self.temperature = widgets.FloatSlider(
            value=0, min=0, max=2, step=0.1, description="temperature (0 is greedy)", **room
        )
        self.new_tokens = widgets.BoundedIntText(
            value=64, min=1, max=self.pair.models.context_limit, description="new tokens", **room
        )
        self.start = widgets.Button(description="Run", button_style="primary")
        self.halt = widgets.Button(description="Stop", disabled=True)

    def __repr__(self) -> str:
        done = "nothing decoded yet" if self.trace is None else self._summary()
        return f"LivePanel of {self.pair.spec.target}: {done}"

    @property
    def html(self) -> str:
        """What the panel shows, without its controls."""
        if self.trace is None:
            return "<p>Nothing was decoded in this panel.</p>"
        return self.race.value + TraceView(live_trace(self.pair, self.trace), "").html

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        """The widget for a live notebook, and its twin in HTML for every other reader."""
        bundle = bundle_of(self.widget._repr_mimebundle_())
        return {**bundle, "text/html": self.html, "text/plain": repr(self)}

    # Run and Stop

    def run(self, _: Any = None) -> None:
        """Start decoding what the controls say; returns at once."""
        lock = _AT_WORK.setdefault(self.pair.models.device, Lock())
        if not lock.acquire(blocking=False):
            device = self.pair.models.device
            self.status.value = f"A decode is running on {html.escape(device)}; stop it first."
            return
        try:
            prompt, configs = self.prompt.value, self._configs()
            self._stop, self.trace, self.plain = Event(), None, None
            self.problem.value, self.status.value = "", "running"
            self.start.disabled, self.halt.disabled = True, False
            self._thread = Thread(target=self._work, args=(prompt, configs, lock), daemon=True)
            self._thread.start()
        except Exception as error:
            self._end(lock)
            self._complain(error)

    def stop(self, _: Any = None) -> None:
        """Ask the decode to end after the block that it is at; returns at once."""
        if not self.halt.disabled:
            self._stop.set()
            self.halt.disabled = True
            self.status.value = "stopping"

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until nothing is decoded any more; whether that is so."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()

    def _configs(self) -> list[DecodeConfig]:
        """What is asked for, and plain decoding beside it unless that is what is asked for."""
        window, size = self.draft_window.value, self.block_size.value
        told: dict[str, Any] = {
            "draft_window": None if window == FULL else window,
            "temperature": self.temperature.value,
            "max_new_tokens": self.new_tokens.value,
            "seed": time.time_ns() % (1 << 31),  # the same draws in both lanes
        }
        return [DecodeConfig(block_size=size, **told) for size in dict.fromkeys((size, 1))]

    # On the thread

    def _work(self, prompt: str, configs: list[DecodeConfig], lock: Lock) -> None:
        said = ""
        try:
            self._race(prompt, configs)
            said = self._summary()
        except Exception as error:
            self._complain(error)
        self._end(lock, said)

    def _race(self, prompt: str, configs: list[DecodeConfig]) -> None:
        if not prompt.strip():
            raise ValueError("the prompt is empty; type one.")
        encoded = self.pair.encode(prompt, self.chat)
        lanes = [Lane(self.pair, encoded, config) for config in configs]
        try:
            run_race(lanes, self._stop, lambda: self._tell(lanes))
        finally:
            self._tell(lanes, last=True)

    def _tell(self, lanes: list[Lane], last: bool = False) -> None:
        """Show where the lanes are, unless that was done a moment ago."""
        began = time.monotonic()
        if began < self._shown_at and not last:
            return
        self.trace, *others = [lane.trace() for lane in lanes]
        self.plain = next(iter(others), None)
        told = view(live_trace(self.pair, self.trace))
        if not last:
            told["note"] = ""
        with self.viewer.hold_sync():
            self.viewer.block = max(0, len(told["blocks"]) - 1)
            self.viewer.trace = told
        self.race.value = race_html(self.trace, self.plain)
        # A long text takes a while to be made: never more than a fifth of the time goes there.
        self._shown_at = began + max(PAUSE_S, 5 * (time.monotonic() - began))

    def _end(self, lock: Lock, said: str = "") -> None:
        lock.release()
        self.status.value = said
        self.start.disabled, self.halt.disabled = False, True

    def _summary(self) -> str:
        made = self.trace
        count = f"{len(made.tokens)} tokens in {len(made.blocks)} blocks"
        if made.finish_reason == "cancelled":
            return f"Stopped after {count}; panel.trace keeps them."
        return " ".join([f"{count}.", verdict(made, self.plain), *made.warnings]).rstrip()

    def _complain(self, error: Exception) -> None:
        narrow = isinstance(error, MemoryError | OutOfMemory)
        hint = "Take a smaller block size or window, or fewer new tokens; then press Run again."
        self.problem.value = problem_html(
            error, hint if narrow else "Change what it names, then press Run again."
        )


# The race in words


def pace(trace: Trace) -> float | None:
    """Tokens a second after the first one; None where there is none."""
    after_first = len(trace.tokens) - 1
    return after_first / trace.decode_s if after_first > 0 and trace.decode_s > 0 else None


def verdict(trace: Trace, plain: Trace | None) -> str:
    """How the drafting lane did against plain decoding, and whether the texts are the same."""
    if plain is None or pace(trace) is None or pace(plain) is None:
        return ""
    ratio = pace(trace) / pace(plain)
    words = f"{ratio:.2f}x the speed of plain decoding" + ("." if ratio >= 1 else ": slower.")
    pairs = enumerate(zip(trace.tokens, plain.tokens, strict=False))
    apart = next((place for place, (one, other) in pairs if one != other), None)
    same = "The same text." if apart is None else f"The texts part at new token {apart}, from 0."
    return f"{words} {same}"


def race_html(trace: Trace, plain: Trace | None) -> str:
    """A bar a lane, as long as its share of the tokens asked for."""
    lanes = [(f"block size {trace.block_size}", "draft", trace)]
    lanes += [] if plain is None else [("plain decoding", "plain", plain)]
    rows = "".join(_lane_html(*lane) for lane in lanes)
    return f'{STYLE}<div class="dl-race">{rows}</div>'


def _lane_html(name: str, kind: str, trace: Trace) -> str:
    share = 100 * len(trace.tokens) / trace.request.max_new_tokens
    speed = pace(trace)
    told = "" if speed is None else f", {speed:.1f} tokens/s after the first"
    words = f"{name}: {len(trace.tokens)} tokens in {trace.total_s:.2f} s{told}"
    bar = f'<span class="{kind}" aria-hidden="true"><i style="width: {share:.1f}%"></i></span>'
    return f"<span>{words}</span>{bar}"
