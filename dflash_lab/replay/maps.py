"""Acceptance maps: one pass of the target over its text, the draft asked at every token of it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from dflash_lab.backends import OWN, Proposals
from dflash_lab.config import DecodeConfig, check_block_size, check_window
from dflash_lab.decoding import check_prompt, decode, resolve_request
from dflash_lab.exactness import label_of, tolerance_of
from dflash_lab.load import Pair
from dflash_lab.prompts import Prompt
from dflash_lab.provenance import hardware, pair_names
from dflash_lab.store import Run
from dflash_lab.trace import Trace

NO_TOKEN = -1  # where a slot was not asked for
DRAFTED = (None, "visited", "all")


class InconsistentText(ValueError):
    """A text that this target, in float32, would not have written."""


class InconsistentTextWarning(UserWarning):
    """A text that parts from the target's choices by more than rounding explains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A prompt and what the target wrote after it."""

    prompt_id: str
    turn: int = 0
    task: str = "none"
    prompt_ids: tuple[int, ...]
    tokens: tuple[int, ...]  # the new ones, an end token included

    @property
    def remaining(self) -> np.ndarray:
        """Tokens that the text still has after each anchor: N - 1 down to 1."""
        return np.arange(len(self.tokens) - 1, 0, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """A place where the target, reading the text, would have gone on otherwise."""

    position: int  # of the token in prompt and text
    text_token: int
    target_token: int
    margin: float  # logits between the two
    kind: str  # "near tie" or "mismatch", as in an audit


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptMap:
    """What the draft would have been right about, from every token of one text.

    Anchor n is the new token n, n = 0 .. N - 2, at the position prompt length + n. The axes are the
    map's block sizes and draft windows, then the anchors; draft position k is column k - 1.
    """

    text: Text
    accepted: np.ndarray  # int32 [sizes, windows, anchors]: min(accepted, remaining)
    drafted: np.ndarray | None = None  # int32 [sizes, windows, anchors, slots], NO_TOKEN: not asked
    confidences: np.ndarray | None = None  # float32, the same shape; NaN where there is no slot
    partings: tuple[Parting, ...] = ()  # in float32 none
    finite: bool = True  # False where the draft's numbers overflowed

    @property
    def remaining(self) -> np.ndarray:
        return self.text.remaining


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AcceptanceMap:
    """Accepted counts of every block size, window and anchor, for each prompt of a set.

    `facts` say which pair, dtype and machine it was made with.
    """

    block_sizes: tuple[int, ...]  # ascending, each once
    draft_windows: tuple[int | None, ...]  # in the order asked for, each once
    prompts: tuple[PromptMap, ...]
    context_limit: int  # where it would overflow a block is narrower
    trained_block_size: int
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def partings(self) -> tuple[tuple[str, Parting], ...]:
        """Where the target's choices part from the texts, with the prompt's id; none in float32."""
        return tuple((p.text.prompt_id, at) for p in self.prompts for at in p.partings)

    def place(self, block_size: int, draft_window: int | None) -> tuple[int, int]:
        """Where a cell stands on the first two axes; ValueError for one that was not asked for."""
        if block_size not in self.block_sizes:
            known = ", ".join(map(str, self.block_sizes))
            raise ValueError(f"block size {block_size} is not in this map; it has {known}.")
        if draft_window not in self.draft_windows:
            known = ", ".join(map(str, self.draft_windows))
            raise ValueError(f"draft window {draft_window} is not in this map; it has {known}.")
        return self.block_sizes.index(block_size), self.draft_windows.index(draft_window)

    def cells(self) -> Iterator[tuple[int, int | None]]:
        """Every block size with every draft window."""
        return product(self.block_sizes, self.draft_windows)

    def select(self, prompt_ids: Iterable[str]) -> AcceptanceMap:
        """The map of some of its prompts; ValueError for an id it has not."""
        wanted = tuple(prompt_ids)
        known = {entry.text.prompt_id for entry in self.prompts}
        if unknown := sorted(set(wanted) - known):
            raise ValueError(f"no prompt {', '.join(unknown)} in this map; it has {sorted(known)}.")
        kept = tuple(entry for entry in self.prompts if entry.text.prompt_id in wanted)
        return replace(self, prompts=kept)


def acceptance_map(
    pair: Pair,
    source: Run | Sequence[Text | Trace | Prompt],
    block_sizes: Sequence[int],
    draft_windows: Sequence[int | None] = (None,),
    *,
    drafted: str | None = None,
    confidences: bool = False,
    beyond_trained: bool = False,
    max_new_tokens: int = 128,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> AcceptanceMap:
    """Ask the draft from every token of the target's own texts, for each block size and window.

    `source`: a run of this target, texts, traces, or prompts, whose texts (up to `max_new_tokens`)
    are then decoded first. The target reads each text once. `drafted` keeps drafted tokens, at the
    anchors that blocks of one size visit ("visited") or at all of them ("all", which policies
    need); `confidences` keeps the draft's at all anchors: both ask the head for every slot.
    Sizes above the trained one are lowered with a warning unless `beyond_trained`.
    Raises `InconsistentText` where a float32 target would not have written the text.
    """
    if not hasattr(pair.models, "anchors"):
        raise ValueError(
            f"the backend {pair.spec.backend!r} has no batched anchor pass. Load the pair with "
            "backend='torch' or 'mlx'; what is accepted in float32 is the same."
        )
    if drafted not in DRAFTED:
        raise ValueError(f"drafted is {drafted!r}; expected None, 'visited' or 'all'.")
    sizes = effective_sizes(pair, block_sizes, beyond_trained)
    windows = tuple(dict.fromkeys(check_window(window) for window in draft_windows))
    if not sizes or not windows:
        raise ValueError("block_sizes and draft_windows need one entry at least; (None,) is full.")
    texts = texts_of(pair, source, max_new_tokens)
    made = []
    for number, text in enumerate(texts, start=1):
        made.append(prompt_map(pair, text, sizes, windows, drafted, confidences))
        progress(number, len(texts))
    return AcceptanceMap(
        block_sizes=sizes,
        draft_windows=windows,
        prompts=tuple(made),
        context_limit=pair.models.context_limit,
        trained_block_size=pair.draft_config.trained_block_size,
        facts=pair_facts(pair),
    )


def effective_sizes(
    pair: Pair, block_sizes: Sequence[int], beyond_trained: bool
) -> tuple[int, ...]:
    """The block sizes that a decode of this pair would use, ascending, each once."""
    asked = dict.fromkeys(map(check_block_size, block_sizes))
    configs = [DecodeConfig(block_size=size, beyond_trained=beyond_trained) for size in asked]
    return tuple(sorted({resolve_request(pair, config).block_size for config in configs}))


def pair_facts(pair: Pair) -> dict[str, Any]:
    """What acceptance depends on beside the texts, and where it was computed."""
    told = pair.models.describe()
    return {
        **pair_names(pair),
        "device": pair.models.device,
        "dtype": pair.models.dtype,
        "template_sha": pair.fingerprint.get("template"),
        "attention": told.get("attention"),
        "hardware": hardware(told.get("gpu"))["class"],
        "window_rule": "per_block",
        "layer_windows": pair.draft_config.layer_windows,
        "rule": "match",
        "proposal": "argmax",
        "temperature": 0.0,
    }


def texts_of(
    pair: Pair, source: Run | Sequence[Text | Trace | Prompt], max_new_tokens: int
) -> list[Text]:
    """The texts to replay; every one has a prompt the target takes and a token at least."""
    if isinstance(source, Run):
        texts = run_texts(pair, source)
    else:
        texts = [_text(pair, one, place, max_new_tokens) for place, one in enumerate(source)]
    if not texts:
        raise ValueError("there is no text to replay; give prompts, texts, traces or a run.")
    twice = Counter((text.prompt_id, text.turn) for text in texts)
    if repeated := [prompt_id for (prompt_id, _), count in twice.items() if count > 1]:
        raise ValueError(f"the prompt {repeated[0]!r} is there twice; ids name results, so no two.")
    for text in texts:
        check_prompt(pair, text.prompt_ids)
        if not text.tokens:
            raise ValueError(f"the text of {text.prompt_id!r} has no token: nothing was decoded.")
        room = pair.models.context_limit - len(text.prompt_ids)
        if len(text.tokens) > room:
            raise ValueError(
                f"the text of {text.prompt_id!r} has {len(text.tokens)} tokens, but the target's "
                f"context leaves room for {room}. It is the text of another target."
            )
    return texts


def _text(pair: Pair, one: Any, place: int, max_new_tokens: int) -> Text:
    if isinstance(one, Text):
        return one
    if isinstance(one, Trace):
        return Text(prompt_id=f"trace-{place}", prompt_ids=one.prompt_ids, tokens=one.tokens)
    if isinstance(one, Prompt):
        trace = decode(pair, one.turns[0], DecodeConfig(max_new_tokens=max_new_tokens))
        return Text(
            prompt_id=one.id, task=one.category, prompt_ids=trace.prompt_ids, tokens=trace.tokens
        )
    raise ValueError(
        f"a {type(one).__name__} cannot be replayed; expected texts, traces, prompts or a run."
    )


def run_texts(pair: Pair, run: Run) -> list[Text]:
    """The texts of one cell of a run: plain decoding where it is there, in the pair's dtype.

    Raises ValueError where the run is of another target or has no cell in that dtype.
    """
    sha, dtype = pair.fingerprint.get("target"), pair.models.dtype
    ours = [cell for cell in run.cells if cell.request.get("target_sha") == sha]
    if not ours:
        raise ValueError(
            f"{run.path.name} has no finished cell of this target: another one's text would give "
            "teacher-forced numbers, not acceptance."
        )
    fitting = [cell for cell in ours if cell.dtype == dtype]
    if not fitting:
        there = ", ".join(sorted({cell.dtype for cell in ours}))
        raise ValueError(
            f"{run.path.name} has texts in {there}, the pair is loaded in {dtype}. Load the pair "
            "in the dtype of the run."
        )
    plain_first = min(fitting, key=lambda cell: (cell.engine != OWN, cell.block_size))
    return [
        Text(
            prompt_id=row["prompt_id"],
            turn=row["turn"],
            task=row["task"],
            prompt_ids=tuple(row["prompt_ids"]),
            tokens=tuple(row["new_ids"]),
        )
        for row in replace(run, cells=(plain_first,)).prompts().to_pylist()
        if row["repeat"] == 0
    ]


def consistency(
    text: Text,
    choices: Sequence[int],
    margins: Sequence[float],
    sizes: Sequence[float],
    dtype: str,
) -> tuple[Parting, ...]:
    """Where the target, reading the text, would have gone on otherwise.

    Raises `InconsistentText` for the first such place in float32; in a narrower dtype warns of
    those that no rounding explains.
    """
    first, read = len(text.prompt_ids), zip(text.tokens, choices, margins, sizes, strict=True)
    partings = tuple(
        Parting(
            position=first + n,
            text_token=token,
            target_token=choice,
            margin=margin,
            kind=label_of(margin, tolerance_of(dtype, size)),
        )
        for n, (token, choice, margin, size) in enumerate(read)
        if token != choice
    )
    worst = max(partings, key=lambda at: at.margin, default=None)
    if worst is None:
        return ()
    exact = dtype == "float32"
    at = partings[0] if exact else worst
    told = (
        f"the text of {text.prompt_id!r} has token {at.text_token} at position {at.position}, "
        f"where the target in {dtype} says {at.target_token}, {at.margin:.3g} logits above it"
    )
    if exact:
        raise InconsistentText(
            f"{told}. A replay needs greedy text of the same target in the same dtype: decode the "
            "prompts with this pair."
        )
    if at.kind == "mismatch":
        warnings.warn(
            f"{told}: more than rounding explains. Is it the target's own greedy text?",
            InconsistentTextWarning,
            stacklevel=4,
        )
    return partings


def prompt_map(
    pair: Pair,
    text: Text,
    block_sizes: Sequence[int],
    draft_windows: Sequence[int | None],
    drafted: str | None = None,
    confidences: bool = False,
) -> PromptMap:
    """The map of one text: one pass of the target, then the draft for each size and window."""
    asking = _Asking(pair, text)
    read = asking.anchors
    partings = consistency(text, read.choices, read.margins, read.sizes, pair.models.dtype)
    accepted = asking.counts(block_sizes, draft_windows)
    slots = (*accepted.shape, max(block_sizes) - 1)
    tokens = np.full(slots, NO_TOKEN, np.int32) if drafted else None
    sure = np.full(slots, np.nan, np.float32) if confidences else None
    for s, w in np.ndindex(*accepted.shape[:2]) if drafted or confidences else ():
        everywhere = confidences or drafted == "all"
        chosen = np.arange(accepted.shape[2]) if everywhere else visited(accepted[s, w])
        for n, proposal in asking.proposals(chosen, block_sizes[s], draft_windows[w]):
            count = len(proposal.drafted)
            if tokens is not None:
                tokens[s, w, n, :count] = proposal.drafted
            if sure is not None:
                sure[s, w, n, :count] = proposal.confidences
    return PromptMap(
        text=text,
        accepted=accepted,
        drafted=tokens,
        confidences=sure,
        partings=partings,
        finite=asking.anchors.finite,
    )


class _Asking:
    """One text, read by the target, while the draft is asked at its anchors."""

    def __init__(self, pair: Pair, text: Text):
        self.anchors = pair.models.anchors(text.prompt_ids, text.tokens)
        self.positions = len(text.prompt_ids) + np.arange(len(text.tokens) - 1)
        self.room = pair.models.context_limit - self.positions  # of a block at each anchor
        self.causal = all(pair.draft_config.layer_causal)

    def counts(self, sizes: Sequence[int], windows: Sequence[int | None]) -> np.ndarray:
        """Accepted counts [sizes, windows, anchors].

        Where every layer is causal in the block, a shorter block is the beginning of a longer one
        (dflash.md 1.7), and the largest size serves all.
        """
        made = np.zeros((len(sizes), len(windows), len(self.positions)), np.int32)
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        drafting = [largest] if self.causal else range(len(sizes))
        for s in drafting:
            wider = None
            for w in sorted(range(len(windows)), key=lambda w: -(windows[w] or np.inf)):
                made[s, w] = wider = self._column(sizes[s], windows[w], wider)
        for s in set(range(len(sizes))) - set(drafting):
            made[s] = np.minimum(made[largest], self._widths(sizes[s]) - 1)
        return made

    def _widths(self, size: int) -> np.ndarray:
        """Entries of a block at each anchor: narrower where the context would overflow."""
        return np.minimum(size, self.room)

    def _column(self, size: int, window: int | None, wider: np.ndarray | None) -> np.ndarray:
        """One cell; where a window takes nothing away, what a wider one gave."""
        counts = np.zeros(len(self.positions), np.int32) if wider is None else wider.copy()
        cut = self.positions > window if window and wider is not None else self.positions > 0
        for chosen, width in self._by_width(np.flatnonzero(cut), size):
            counts[chosen] = self.anchors.accepted(chosen.tolist(), width, window)
        return counts

    def proposals(
        self, chosen: np.ndarray, size: int, window: int | None
    ) -> Iterator[tuple[int, Proposals]]:
        """What is drafted at some of the anchors, those without a drafted token left out."""
        for some, width in self._by_width(chosen, size):
            yield from zip(
                some.tolist(), self.anchors.proposals(some.tolist(), width, window), strict=True
            )

    def _by_width(self, chosen: np.ndarray, size: int) -> Iterator[tuple[np.ndarray, int]]:
        widths = self._widths(size)[chosen]
        for width in np.unique(widths).tolist():
            if width > 1:
                yield chosen[widths == width], width


def visited(counts: np.ndarray) -> np.ndarray:
    """The anchors where blocks of one size begin."""
    chosen, n = [], 0
    while n < len(counts):
        chosen.append(n)
        n += int(counts[n]) + 1
    return np.array(chosen, np.int64)
