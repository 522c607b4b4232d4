"""The one loop: draft, verify, decide, commit. `stream` to watch it, `decode` for the trace."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from dflash_lab.accept import RULES, kept
from dflash_lab.backends import Generated, Session
from dflash_lab.checkpoint import CheckpointError, DraftConfig
from dflash_lab.config import BLOCK_SIZE_SOURCES, DecodeConfig, check_block_size
from dflash_lab.load import Pair, PromptLike
from dflash_lab.policies import Steering, has_hook
from dflash_lab.sampling import Sampling, new_seed
from dflash_lab.texts import StopStrings, stop_place, text_before_end
from dflash_lab.trace import BlockRecord, DecodeRequest, PrefillRecord, StageSeconds, Trace

Record = PrefillRecord | BlockRecord
SILENT_BLOCKS = 30  # so many blocks without one accepted token are worth a word


class BlockSizeWarning(UserWarning):
    """The block size used is not the one asked for."""


class AcceptanceWarning(UserWarning):
    """The draft is of no use in this run, although the text is right."""


@dataclass(slots=True)
class Stopwatch:
    """Seconds of a block and of its stages; the device is waited for where a figure is read."""

    synchronize: Callable[[], None]
    stages: bool
    began: float = 0.0
    last: float = 0.0
    laps: dict[str, float] = field(default_factory=dict)

    def restart(self) -> None:
        self.began = self.last = time.perf_counter()
        self.laps = {}

    def lap(self, stage: str) -> None:
        if self.stages:
            self.synchronize()
            now = time.perf_counter()
            self.laps[stage], self.last = now - self.last, now

    def total(self) -> float:
        self.synchronize()
        return time.perf_counter() - self.began

    def read(self) -> StageSeconds:
        return StageSeconds(total=self.total(), **self.laps)


def run_blocks(
    session: Session,
    prompt: Sequence[int],
    request: DecodeRequest,
    read: Callable[[Sequence[int]], str],
) -> Iterator[Record]:
    """Decode one prompt, yielding a record of the prefill and then of each block.

    `read` makes text of new tokens, for stop strings. What the caller does between two records is
    not counted.
    """
    rule = RULES[request.rule]
    watch = Stopwatch(session.synchronize, stages=request.timing == "stages")
    watch.restart()
    anchor = session.prefill(prompt)
    yield PrefillRecord(prompt_length=len(prompt), token=anchor, seconds=watch.total())

    steering = Steering(request.policy, request.block_size)
    stops = StopStrings(request.stop_strings, read)
    stops.kept((anchor,))
    index, start = 0, len(prompt)
    budget = min(request.max_new_tokens, request.context_limit - start) - 1
    unheeded = request.min_new_tokens - 2  # so many tokens to come end nothing
    while budget > 0 and not (anchor in request.stop_tokens and unheeded < 0) and not stops.found:
        watch.restart()
        size = min(steering.width(), request.context_limit - start)
        block = session.draft(anchor, size)
        rows = steering.rows(size, partial(_confidences, session, block))
        watch.lap("draft")
        verdict = session.verify(block, rows)
        watch.lap("verify")
        accepted = rule(verdict)
        session.commit(accepted)
        watch.lap("commit")
        tokens = (*verdict.drafted[:accepted], verdict.posterior[accepted])
        emitted = stops.kept(tokens[: kept(tokens, request.stop_tokens, budget, unheeded)])
        yield BlockRecord(
            index=index,
            start=start,
            anchor=anchor,
            block_size=size,
            verdict=verdict,
            accepted=accepted,
            emitted=emitted,
            draft_cache_tokens=session.draft_cache_tokens,
            draft_cache_bytes=session.draft_cache_bytes,
            seconds=watch.read(),
        )
        steering.note(size, len(verdict.posterior), accepted)
        index, start, budget = index + 1, start + emitted, budget - emitted
        anchor, unheeded = tokens[emitted - 1], unheeded - emitted


def _confidences(session: Session, block: Any) -> Sequence[float]:
    return session.confidences(block)


def choose_block_size(
    draft: DraftConfig | None = None,
    *,
    argument: Any = None,
    flag: Any = None,
    variable: Any = None,
    sweep: Any = None,
) -> tuple[int | None, str | None]:
    """The block size that counts and its source: of those given, the first in this order.

    An argument, a flag, the variable DFLASH_BLOCK_SIZE, a sweep, then the draft's configuration
    (nested before top level), then 16. Flag and variable may be text. Without `draft` it is None
    where nobody names one: there the pair will say. Raises ValueError naming the source.
    """
    texts = {"flag": _typed(flag), "variable": _typed(variable)}
    for source, value in ({"argument": argument} | texts | {"sweep": sweep}).items():
        if value is not None:
            return check_block_size(value, BLOCK_SIZE_SOURCES[source]), source
    if draft is None:
        return None, None
    stood = draft.sources["block_size"]
    return draft.block_size, stood if stood == "default" else f"draft config: {stood}"


def _typed(value: Any) -> Any:
    """Text of a whole number from 1 as that number; anything else as it is, for the error."""
    fits = isinstance(value, str) and re.fullmatch(r"\s*0*[1-9][0-9]*\s*", value)
    return int(value) if fits else value


def resolve_request(pair: Pair, config: DecodeConfig) -> DecodeRequest:
    """Make a `DecodeConfig` definite for a pair; a block size above the trained one is lowered."""
    draft = pair.draft_config
    trained = draft.trained_block_size
    size, source = choose_block_size(draft, **{config.block_size_source: config.block_size})
    requested = size
    if size > trained and not config.beyond_trained:
        warnings.warn(
            f"block size {size} is above the {trained} that this draft was trained with; using "
            f"{trained}. Pass beyond_trained=True (--beyond-trained) to insist.",
            BlockSizeWarning,
            stacklevel=3,
        )
        size = trained
    for layer, window in enumerate(draft.layer_windows):
        if window is not None and window < size:
            raise CheckpointError(
                f"layer {layer} of the draft slides over {window} positions, fewer than the block "
                f"size {size}. Use a block size of at most {window}."
            )
    if config.stop_strings and pair.tokenizer is None:
        raise ValueError(
            f"stop_strings are {', '.join(map(repr, config.stop_strings))}, but this pair has no "
            "tokenizer to make text with. Use stop_tokens, which are ids."
        )
    ends = frozenset() if config.ignore_end else pair.stop_tokens
    draws = config.temperature > 0
    return DecodeRequest(
        block_size=size,
        block_size_requested=requested,
        block_size_source=BLOCK_SIZE_SOURCES.get(source, source),
        trained_block_size=trained,
        beyond_trained=size > trained,
        draft_window=config.draft_window,
        window_rule="per_block",
        layer_windows=draft.layer_windows,
        max_new_tokens=config.max_new_tokens,
        context_limit=pair.models.context_limit,
        stop_tokens=ends | frozenset(config.stop_tokens),
        rule=config.rule,
        proposal=config.proposal,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        repetition_penalty=config.repetition_penalty,
        probabilities=config.probabilities,
        seed=new_seed() if draws and config.seed is None else config.seed,
        stop_strings=config.stop_strings,
        min_new_tokens=config.min_new_tokens,
        timing=config.timing,
        policy=config.policy,
    )


def sampling_of(request: DecodeRequest) -> Sampling | None:
    """What a session needs to draw tokens; None where it takes the best ones and tells no more."""
    names = (field.name for field in fields(Sampling) if field.name != "seed")
    made = Sampling(seed=request.seed or 0, **{name: getattr(request, name) for name in names})
    return None if made.is_plain else made


def check_prompt(pair: Pair, ids: Sequence[int]) -> None:
    """Raise ValueError for a prompt that is empty or leaves no room for a token."""
    limit = pair.models.context_limit
    if not ids:
        raise ValueError("the prompt is empty; give text, chat messages or token ids.")
    if len(ids) >= limit:
        raise ValueError(
            f"the prompt has {len(ids)} tokens, but the target's context holds {limit}, new tokens "
            "included. Shorten the prompt."
        )


def library_decode(
    pair: Pair, ids: Sequence[int], request: DecodeRequest, lookup: int | None = None
) -> Generated:
    """What the library's own generator makes of a prompt under the same ends."""
    room = min(request.max_new_tokens, request.context_limit - len(ids))
    return pair.models.library_generate(
        ids, room, request.stop_tokens, request.min_new_tokens, lookup
    )


def stream(
    pair: Pair,
    prompt: PromptLike,
    config: DecodeConfig | None = None,
    *,
    chat: bool = True,
    thinking: bool | None = None,
) -> Iterator[Record]:
    """Decode and yield each record as it is made: first the prefill's, then one a block.

    Settings and prompt are checked at the call, before the first record is asked for. The session
    is closed when the iterator ends, is closed or is dropped.
    """
    request = resolve_request(pair, config or DecodeConfig())
    ids = pair.encode(prompt, chat, thinking).ids
    check_prompt(pair, ids)
    return run_session(pair, ids, request)


def run_session(pair: Pair, ids: Sequence[int], request: DecodeRequest) -> Iterator[Record]:
    """The records of one prompt in a session of its own, closed at the end."""
    sampling = sampling_of(request)
    drawn = {} if sampling is None else {"sampling": sampling}
    session = pair.models.session(request.draft_window, speculate=request.block_size > 1, **drawn)
    if has_hook(request.policy, "rows") and not hasattr(session, "confidences"):
        raise ValueError(
            f"the policy {request.policy.name!r} looks at the draft's confidences, which the "
            f"backend {pair.spec.backend!r} does not tell. Use backend='torch', or a policy with "
            "width() alone."
        )
    with closing(session):
        read = partial(text_before_end, pair, request=request)
        yield from run_blocks(session, ids, request, read)


def decode(
    pair: Pair,
    prompt: PromptLike,
    config: DecodeConfig | None = None,
    *,
    chat: bool = True,
    thinking: bool | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Trace:
    """Decode one prompt to its trace.

    `should_stop` is asked once a block; where it says yes the trace so far is returned, its finish
    reason `cancelled`.
    """
    request = resolve_request(pair, config or DecodeConfig())
    encoded = pair.encode(prompt, chat, thinking)
    check_prompt(pair, encoded.ids)
    pair.models.peak_bytes()
    records: list[Record] = []
    began = time.perf_counter()
    with closing(run_session(pair, encoded.ids, request)) as source:
        for record in source:
            records.append(record)
            if should_stop():
                break
    total = time.perf_counter() - began
    prefill, blocks = records[0], tuple(records[1:])
    assert isinstance(prefill, PrefillRecord)
    tokens = (prefill.token, *(token for block in blocks for token in block.tokens))
    text = text_before_end(pair, tokens, request)
    place = stop_place(text, request.stop_strings)
    ended = finish_reason(tokens, len(encoded.ids), request, stopped=place is not None)
    return Trace(
        request=request,
        prompt_ids=encoded.ids,
        prefill=prefill,
        blocks=blocks,
        text=text[:place],
        finish_reason=ended or "cancelled",
        total_s=total,
        peak_bytes=pair.models.peak_bytes(),
        thinking=encoded.thinking,
        warnings=complain(blocks),
    )


def finish_reason(
    tokens: Sequence[int], prompt_length: int, request: DecodeRequest, stopped: bool = False
) -> str | None:
    """Why an output ends here: a stop goes before a limit reached by the same token.

    `stopped` says that a stop string is complete. None where the output does not end by itself.
    """
    if stopped or (tokens[-1] in request.stop_tokens and len(tokens) >= request.min_new_tokens):
        return "stop"
    if len(tokens) == request.max_new_tokens:
        return "length"
    if prompt_length + len(tokens) == request.context_limit:
        return "context"
    return None


def complaints(blocks: Sequence[BlockRecord]) -> tuple[str, ...]:
    """What is wrong with a draft whose text is right all the same."""
    found: list[str] = []
    drafting = [block for block in blocks if block.drafted]
    if any(not block.verdict.finite for block in drafting):
        first = next(block.index for block in drafting if not block.verdict.finite)
        found.append(
            f"draft logits not finite from block {first} on: the draft's numbers overflow in this "
            "dtype, and nothing it says is accepted. Use bfloat16 or float32, or check the weights."
        )
    if complaint := silence(len(drafting), sum(block.accepted for block in drafting)):
        found.append(complaint)
    return tuple(found)


def silence(blocks: int, accepted: int) -> str | None:
    """What to say where nothing was accepted in many blocks; None where all is well."""
    if accepted or blocks < SILENT_BLOCKS:
        return None
    return (
        f"0 accepted in {blocks} blocks. The usual causes: a draft of another target, dtype, "
        "thinking mode or template, target_layer_ids off by one, RoPE base."
    )


def complain(blocks: Sequence[BlockRecord]) -> tuple[str, ...]:
    """Warn of every complaint; returns them."""
    found = complaints(blocks)
    for complaint in found:
        warnings.warn(complaint, AcceptanceWarning, stacklevel=3)
    return found
