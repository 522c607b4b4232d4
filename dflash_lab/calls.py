"""The calls that upstream's users know, over the one loop; `model` and `model_mlx` offer them.

Counts are this project's; where upstream (dflash 0.1.0) counts otherwise, a comment says so.
At a temperature above 0 tokens are drawn from the target by the match rule, with argmax proposals;
a `seed` repeats them. The other sampling settings are those of `DecodeConfig`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash_lab.backends import Models
from dflash_lab.checkpoint import DraftConfig, check_headers, read_draft_config, read_headers
from dflash_lab.config import DecodeConfig, PairSpec, check_window
from dflash_lab.decoding import (
    Record,
    check_prompt,
    complain,
    decode,
    finish_reason,
    resolve_request,
    run_session,
)
from dflash_lab.load import DRAFT_FILES, DraftConfigWarning, Pair, flat_ids, resolve
from dflash_lab.texts import TextStream
from dflash_lab.trace import BlockRecord, DecodeRequest, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResponse:
    """What one turn of the loop added: the first of the prefill, then one of each block."""

    text: str  # new text; a character split over blocks comes with its last token
    tokens: tuple[int, ...]  # new ones, with what ended the output; its text is not in `text`
    accepted: int | None  # drafts kept by the rule; upstream's counts the target's own token too
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int  # so far
    generation_tps: float  # after the first token, the caller's own time left out; 0 before a block
    peak_memory: float | None  # GB so far
    finish_reason: str | None  # "stop", "length" or "context" in the last response
    record: Record  # everything else: block size, drafted, posterior, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStats:
    """What `dflash_generate` made and how long it took, by upstream's names."""

    output_ids: Any  # [1, prompt + new]
    num_input_tokens: int
    num_output_tokens: int
    time_to_first_token: float  # seconds
    time_per_output_token: float | None  # of those after the first; upstream divides by all of them
    acceptance_lengths: list[int]  # accepted + 1 a block; upstream's last one counts what was kept
    trace: Trace


class Draft:
    """A draft by itself, whose weights are read when it meets a target; a backend says how."""

    def __init__(self, folder: Path, config: DraftConfig, sliding_window_size: int | None = None):
        self.folder, self.config = folder, config
        self.sliding_window_size = check_window(sliding_window_size)

    @property
    def block_size(self) -> int:
        """The checkpoint's own, the anchor included: what is used where a call names none."""
        return self.config.block_size

    def window(self, asked: int | None) -> int | None:
        """The window of a call, else the draft's own."""
        return self.sliding_window_size if asked is None else asked

    def models(self, target: Any) -> Models:
        """The target and this draft, ready for sessions."""
        raise NotImplementedError

    def working(self, target: Any) -> AbstractContextManager[None]:
        """Entered while the target works; it is as the caller left it before and after."""
        return nullcontext()

    def ids_like(self, input_ids: Any, ids: Sequence[int]) -> Any:
        """Ids as an array [1, length] of the kind that `input_ids` is."""
        raise NotImplementedError

    def spec_generate(
        self,
        target: Any,
        input_ids: Any,
        max_new_tokens: int = 128,
        stop_token_ids: Sequence[int] | None = None,
        temperature: float = 0.0,
        *,
        block_size: int | None = None,
        sliding_window_size: int | None = None,
        seed: int | None = None,
        beyond_trained: bool = False,
    ) -> Any:
        """Prompt and new ids [1, prompt + new] of a prompt [1, prompt].

        `stop_token_ids` are the only end tokens, and the one that ended the output is in it; None
        takes the target's own, where upstream takes none. The window of the call goes before the
        draft's own.
        """
        made = dflash_generate(
            self,
            target,
            input_ids,
            max_new_tokens,
            stop_token_ids,
            temperature,
            block_size=block_size,
            return_stats=True,
            sliding_window_size=sliding_window_size,
            seed=seed,
            beyond_trained=beyond_trained,
        )
        return made.output_ids


def dflash_generate(
    draft: Draft,
    target: Any,
    input_ids: Any,
    max_new_tokens: int = 128,
    stop_token_ids: Sequence[int] | None = None,
    temperature: float = 0.0,
    *,
    block_size: int | None = None,
    return_stats: bool = False,
    sliding_window_size: int | None = None,
    seed: int | None = None,
    beyond_trained: bool = False,
) -> Any:
    """`spec_generate` as a function; with `return_stats` a `GenerationStats` instead of the ids."""
    config = DecodeConfig(
        block_size=block_size,
        draft_window=draft.window(sliding_window_size),
        max_new_tokens=max_new_tokens,
        stop_tokens=tuple(stop_token_ids or ()),
        ignore_end=stop_token_ids is not None,
        temperature=temperature,
        seed=seed,
        beyond_trained=beyond_trained,
    )
    prompt = one_prompt(input_ids)
    pair = joined(draft, target)
    with draft.working(target):
        trace = decode(pair, prompt, config)
    output_ids = draft.ids_like(input_ids, [*trace.prompt_ids, *trace.tokens])
    return stats(trace, output_ids) if return_stats else output_ids


def stream_generate(
    model: Any,
    draft: Draft,
    tokenizer: Any,
    prompt: str | Sequence[int] | Any,
    block_size: int | None = None,
    max_tokens: int = 256,
    temperature: float = 0.0,
    *,
    sliding_window_size: int | None = None,
    seed: int | None = None,
    stop_strings: Sequence[str] = (),
    beyond_trained: bool = False,
) -> Iterator[GenerationResponse]:
    """Decode a prompt and yield its text as it comes, a response for each record of the loop.

    Text is taken as it is, without a chat template, and ends before the first of `stop_strings`.
    Settings and prompt are checked at the call.
    """
    config = DecodeConfig(
        block_size=block_size,
        draft_window=draft.window(sliding_window_size),
        max_new_tokens=max_tokens,
        stop_tokens=ends_of(tokenizer),
        stop_strings=stop_strings,
        temperature=temperature,
        seed=seed,
        beyond_trained=beyond_trained,
    )
    pair = joined(draft, model, tokenizer)
    request = resolve_request(pair, config)
    ids = pair.checked_ids(encoded(pair, prompt))
    check_prompt(pair, ids)
    return _responses(pair, ids, request, lambda: draft.working(model))


def read_draft(id_or_path: str | Path, revision: str | None = None) -> tuple[Path, DraftConfig]:
    """Folder and configuration of a draft; what its user should see is a warning."""
    folder = resolve(str(id_or_path), revision, "draft", DRAFT_FILES)
    config = read_draft_config(folder)
    check_headers(config, read_headers(folder))
    for note in config.notes:
        warnings.warn(note, DraftConfigWarning, stacklevel=3)
    return folder, config


def joined(draft: Draft, target: Any, tokenizer: Any = None) -> Pair:
    """A draft and a target that the caller loaded, as a pair."""
    return Pair(
        spec=PairSpec(target="the caller's own", draft=str(draft.folder)),
        models=draft.models(target),
        draft_config=draft.config,
        tokenizer=tokenizer,
        fingerprint={},
    )


def one_prompt(input_ids: Any) -> tuple[int, ...]:
    """The ids of an array [1, length]; ValueError for another shape."""
    shape = list(getattr(input_ids, "shape", ()))
    if len(shape) != 2 or shape[0] != 1:
        raise ValueError(
            f"input_ids has the shape {shape}; expected an array [1, length], one prompt at a time."
        )
    return flat_ids(input_ids)


def stats(trace: Trace, output_ids: Any) -> GenerationStats:
    """The figures of a trace by upstream's names."""
    after_first = len(trace.tokens) - 1
    return GenerationStats(
        output_ids=output_ids,
        num_input_tokens=len(trace.prompt_ids),
        num_output_tokens=len(trace.tokens),
        time_to_first_token=trace.ttft_s,
        time_per_output_token=trace.decode_s / after_first if after_first else None,
        acceptance_lengths=[block.acceptance_length for block in trace.blocks],
        trace=trace,
    )


def ends_of(tokenizer: Any) -> tuple[int, ...]:
    """What a tokenizer calls its end tokens: several in mlx-lm, one or none in transformers."""
    ends = getattr(tokenizer, "eos_token_ids", None)
    return (ends,) if isinstance(ends, int) else tuple(ends or ())


def encoded(pair: Pair, prompt: Any) -> Sequence[int]:
    """Ids of text, special tokens put first unless it begins with them; ids as they are."""
    if isinstance(prompt, str):
        start = getattr(pair.tokenizer, "bos_token", None)
        add = start is None or not prompt.startswith(start)
        return flat_ids(pair.tokenizer.encode(prompt, add_special_tokens=add))
    if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], Mapping):
        return pair.encode(prompt).ids
    return flat_ids(prompt)


def _responses(
    pair: Pair, ids: Sequence[int], request: DecodeRequest, working: Any
) -> Iterator[GenerationResponse]:
    blocks: list[BlockRecord] = []
    text, prompt_s, decode_s, peak = TextStream(pair, request), 0.0, 0.0, None
    pair.models.peak_bytes()
    with closing(run_session(pair, ids, request)) as records:
        while True:
            with working():
                record = next(records, None)
            if record is None:
                break
            if isinstance(record, BlockRecord):
                new, accepted = record.tokens, record.accepted
                decode_s += record.seconds.total
                blocks.append(record)
            else:
                new, accepted, prompt_s = (record.token,), None, record.seconds
            text.add(new)
            ended = finish_reason(text.tokens, len(ids), request, stopped=text.stopped)
            peak = max((n for n in (peak, pair.models.peak_bytes()) if n), default=None)
            yield GenerationResponse(
                text=text.piece(ended is not None),
                tokens=new,
                accepted=accepted,
                prompt_tokens=len(ids),
                prompt_tps=len(ids) / prompt_s,
                generation_tokens=len(text.tokens),
                generation_tps=(len(text.tokens) - 1) / decode_s if blocks else 0.0,
                peak_memory=peak and peak / 1e9,
                finish_reason=ended,
                record=record,
            )
    complain(blocks)
