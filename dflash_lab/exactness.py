"""Does the draft change the text? Our tokens beside the library's own, and why where they part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dflash_lab.backends import LIBRARIES
from dflash_lab.config import DTYPES, DecodeConfig, PairSpec, one_of
from dflash_lab.decoding import decode, library_decode
from dflash_lab.load import Pair, load_spec, pair_spec
from dflash_lab.prompts import Prompt, check_ids, load_prompts
from dflash_lab.provenance import ROOT, code_state
from dflash_lab.store import Run, plain
from dflash_lab.trace import DecodeRequest, Trace

# How far below the target's best a token may stand and still be a matter of rounding: so many
# steps between neighbouring numbers of the dtype at the size of the row's largest logit. In 16 bits
# the head writes its logits in that dtype: each of two is rounded by up to half a step, in each of
# two passes of unlike shape, so their gap moves by up to two; the third is for what comes in from
# below. Measured between one pass and cached steps: 1.5 steps at most with the tiny pair in both
# 16-bit dtypes, 2 with the embedded one (0.5 logits, where the largest are above 32). In float32
# sums in another order weigh more than the last rounding: 9 and 22 steps at most (under 1e-4
# logits). Public threads quote 0.25 logits for bfloat16, and faults of state from 0.6 on.
STEPS = {"float32": 32, "float16": 3, "bfloat16": 3}
DIGITS = {"float32": 23, "float16": 10, "bfloat16": 7}  # binary ones after the first


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedPrompt:
    """How one prompt went. Places count new tokens from 0; gaps and margins are in logits.

    The target's logits are those of a pass of its own over the text, by teacher forcing.
    """

    prompt_id: str
    label: str  # "equal", "near tie" or "mismatch"
    tokens: int  # how many of ours
    smallest_margin: float  # of the target's best two, over the text up to the first difference
    first_difference: int | None = None  # place; this and the next ones None where equal
    ours: int | None = None  # the token there; None where the text had ended
    reference_token: int | None = None
    margin: float | None = None  # best less second best there
    # Of both tokens there and of ours after it, the one that rounding explains least:
    gap: float | None = None  # how far it stands below the target's best
    gap_at: int | None = None  # its place
    tolerance: float | None = None  # what is allowed there

    @property
    def told(self) -> str:
        """Where it parts from the reference and by how much; empty where it does not."""
        if self.first_difference is None:
            return ""
        place = f"{self.label} at new token {self.first_difference}, counted from 0"
        if self.gap is None:
            return f"{place}: one of the two texts ends there"
        return (
            f"{place}: token {self.ours} beside {self.reference_token}, the target's best two "
            f"{self.margin:.2g} logits apart; {self.gap:.2g} below its best at token {self.gap_at}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What a comparison with the library's greedy generator found, prompt by prompt."""

    dtype: str
    reference: str  # "transformers generate" or "mlx-lm generate"
    block_size: int
    draft_window: int | None
    max_new_tokens: int
    tolerance: float | None  # logits, where one was named; else that of `tolerance_of`
    prompts: tuple[AuditedPrompt, ...]

    def count(self, label: str) -> int:
        return sum(prompt.label == label for prompt in self.prompts)

    @property
    def sentence(self) -> str:
        """The outcome in words, never without its dtype and its reference."""
        of, told = len(self.prompts), [*self._parted()]
        where = f"{_genitive(self.reference)} at block size {self.block_size}"
        if not told:
            exact = "exact in float32" if self.dtype == "float32" else f"in {self.dtype}"
            return f"{exact}: {of} of {of} prompts equal to {where}, token for token"
        return f"in {self.dtype} {' and '.join(told)}, beside {where}"

    def _parted(self) -> Iterable[str]:
        of = len(self.prompts)
        if count := self.count("near tie"):
            ties = (row for row in self.prompts if row.label == "near tie")
            widest = max(ties, key=lambda row: row.gap - row.tolerance)
            yield (
                f"{count} of {of} prompts {_verb('part', count)} at a near tie ({widest.gap:.2g} "
                f"logits below the best at most, {widest.tolerance:.2g} allowed for rounding)"
            )
        if count := self.count("mismatch"):
            yield f"{count} of {of} {_verb('differ', count)} by more than rounding explains"


def _verb(verb: str, count: int) -> str:
    return f"{verb}s" if count == 1 else verb


def _genitive(reference: str) -> str:
    library, what = reference.split(" ", 1)
    ending = "'" if library.endswith("s") else "'s"
    return f"{library}{ending} {what}"


def tolerance_of(dtype: str, size: float) -> float:
    """Logits that rounding explains in a row whose largest one, its sign aside, is `size`."""
    return STEPS[dtype] * 2.0 ** (math.frexp(size)[1] - 1 - DIGITS[dtype])


def label_of(gap: float, tolerance: float) -> str:
    """What a token is called that stands so many logits below the target's best."""
    return "near tie" if gap <= tolerance else "mismatch"


def audit(
    pair: Pair | PairSpec | str,
    prompts: Sequence[Prompt] | str = "mini",
    dtype: str | None = None,
    config: DecodeConfig | None = None,
    tolerance: float | None = None,
    chat: bool = True,
    thinking: bool | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Audit:
    """Decode the first turn of every prompt with the draft and by the library alone, and compare.

    The library's own greedy generator shares no code with the loop here. A prompt is *equal* token
    for token; a *near tie* where both tokens at the first difference, and each of ours after it,
    stand at most `tolerance` logits below the target's best by teacher forcing; else a *mismatch*,
    an output that ends too early among them. Without `tolerance` it is three steps of a 16-bit
    dtype, 32 of float32, at the size of the logits there (`STEPS` tells where that comes from).

    `pair` is a loaded pair, the description of one, or a name; in another `dtype` it is loaded
    anew. `prompts` are those, or what `load_prompts` takes. ValueError where `config` draws tokens
    or penalises repetition, which the reference does not.
    """
    config = config or DecodeConfig()
    check_greedy(config)
    pair = in_dtype(pair, dtype)
    if tolerance is not None and not tolerance >= 0:
        raise ValueError(f"tolerance is {tolerance}; name logits from 0 on, None for the dtype's.")
    prompts = load_prompts(prompts) if isinstance(prompts, str) else prompts
    if not prompts:
        raise ValueError("there is no prompt to audit.")
    check_ids([prompt.id for prompt in prompts])
    rows, request = [], None
    for number, prompt in enumerate(prompts, start=1):
        trace = decode(pair, prompt.turns[0], config, chat=chat, thinking=thinking)
        request = trace.request
        rows.append(audited(pair, prompt.id, trace, tolerance))
        progress(number, len(prompts))
    return Audit(
        dtype=pair.models.dtype,
        reference=f"{LIBRARIES[pair.spec.backend]} generate",
        block_size=request.block_size,
        draft_window=request.draft_window,
        max_new_tokens=config.max_new_tokens,
        tolerance=tolerance,
        prompts=tuple(rows),
    )


def check_greedy(config: Any) -> None:
    """Raise ValueError unless a decode or sweep configuration asks for plain greedy text."""
    if getattr(config, "stop_strings", ()):
        raise ValueError("an audit compares tokens, which stop_strings end elsewhere; drop them.")
    if config.temperature > 0 or config.repetition_penalty != 1:
        raise ValueError(
            f"an audit compares greedy text, but temperature is {config.temperature:g} and "
            f"repetition_penalty {config.repetition_penalty:g}. Use 0 and 1."
        )


def in_dtype(pair: Pair | PairSpec | str, dtype: str | None) -> Pair:
    """The pair in that dtype, loaded where it is not; its own where none is named."""
    if dtype is not None:
        one_of("dtype", dtype, DTYPES)
    if isinstance(pair, Pair):
        if dtype in (None, "auto", pair.models.dtype):
            return pair
        return load_spec(replace(pair.spec, dtype=dtype))
    spec = pair_spec(pair) if isinstance(pair, str) else pair
    return load_spec(spec if dtype is None else replace(spec, dtype=dtype))


def audited(pair: Pair, prompt_id: str, trace: Trace, tolerance: float | None) -> AuditedPrompt:
    """One decoded prompt beside the library's text."""
    reference = reference_tokens(pair, trace.prompt_ids, trace.request)
    place = first_difference(trace.tokens, reference)
    read = pair.models.anchors(trace.prompt_ids, trace.tokens)
    row = {"prompt_id": prompt_id, "tokens": len(trace.tokens)}
    if place is None:
        return AuditedPrompt(**row, label="equal", smallest_margin=min(read.leads))
    row |= {"first_difference": place, "smallest_margin": min(read.leads[: place + 1])}
    ours, theirs = (next(iter(text[place:]), None) for text in (trace.tokens, reference))
    if ours is None or theirs is None:
        return AuditedPrompt(**row, label="mismatch", ours=ours, reference_token=theirs)
    changed = (*trace.tokens[:place], theirs)
    gaps = list(read.margins[place:])
    gaps[0] = max(gaps[0], pair.models.anchors(trace.prompt_ids, changed).margins[place])
    allowed = [
        tolerance_of(pair.models.dtype, size) if tolerance is None else tolerance
        for size in read.sizes[place:]
    ]
    worst = max(range(len(gaps)), key=lambda n: gaps[n] - allowed[n])
    return AuditedPrompt(
        **row,
        label=label_of(gaps[worst], allowed[worst]),
        ours=ours,
        reference_token=theirs,
        margin=read.leads[place],
        gap=gaps[worst],
        gap_at=place + worst,
        tolerance=allowed[worst],
    )


def reference_tokens(
    pair: Pair, prompt_ids: Sequence[int], request: DecodeRequest
) -> tuple[int, ...]:
    """What the library's own generator makes of a prompt under the same ends."""
    return tuple(library_decode(pair, prompt_ids, request).tokens)


def first_difference(ours: Sequence[int], reference: Sequence[int]) -> int | None:
    """Index of the first token that differs, a missing one included; None where all are equal."""
    for index, (a, b) in enumerate(zip(ours, reference, strict=False)):
        if a != b:
            return index
    return None if len(ours) == len(reference) else min(len(ours), len(reference))


# --- beside a run -------------------------------------------------------------------------------


def keep_audit(
    run: Run,
    pair: Pair,
    prompts: Sequence[Prompt],
    config: DecodeConfig,
    of: Mapping[str, Any],
    chat: bool = True,
    thinking: bool | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Audit:
    """Audit a pair and keep that beside a run, one a dtype; what it has of just this stays.

    `of` says what an audit depends on beside `config` and the code.
    """
    of = plain({**of, "decode": asdict(config), "code": code_state(ROOT)})
    record = run.check(_check_name(pair.models.dtype))
    if record is not None and record["of"] == of:
        return _audit_from(record)
    made = audit(pair, prompts, config=config, chat=chat, thinking=thinking, progress=progress)
    write_audit(run, made, of)
    return made


def write_audit(run: Run, made: Audit, of: Mapping[str, Any] | None = None) -> None:
    """Keep an audit beside a run, one a dtype."""
    run.write_check(_check_name(made.dtype), asdict(made) | {"of": of})


def read_audits(run: Run) -> list[Audit]:
    """The audits kept beside a run, float32 first."""
    kept = (run.check(_check_name(dtype)) for dtype in STEPS)
    return [_audit_from(record) for record in kept if record is not None]


def _audit_from(record: dict[str, Any]) -> Audit:
    prompts = tuple(AuditedPrompt(**row) for row in record["prompts"])
    told = {name: value for name, value in record.items() if name != "of"}
    return Audit(**told | {"prompts": prompts})


def _check_name(dtype: str) -> str:
    return f"audit-{dtype}"
