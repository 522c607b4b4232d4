"""What is wrong with this installation or this pair: findings in words, each with the way out.

A pair is judged by its own reference: the tau that its draft had on the bundled prompts when it was
made, kept in the draft's folder. Where tau is lower now, settings are changed one at a time, and
the one that brings it back is named.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from packaging.version import Version

from dflash_lab.backends import LIBRARIES
from dflash_lab.checkpoint import CheckpointError, DraftConfig
from dflash_lab.config import DecodeConfig, PairSpec
from dflash_lab.decoding import decode
from dflash_lab.inspection import inspect_draft, size_text
from dflash_lab.load import DRAFT_FILES, Pair, find_target, load_pair, load_spec, resolve
from dflash_lab.prompts import load_prompts
from dflash_lab.provenance import memory_gb, versions
from dflash_lab.replay import Text, acceptance_map
from dflash_lab.store import to_json, write_atomic

REFERENCE = "reference.json"
SCHEMA = 1
PROMPTS, TOKENS, BLOCK_SIZE = 6, 48, 8  # of a reference
KEPT = 0.75  # of the reference's accepted drafts a block: below that something is wrong
BROUGHT_BACK = 1.15  # times the accepted drafts: a change that explains a low figure
OK, WRONG, NOTE = "ok", "wrong", "note"
USUAL_BASES = (10_000.0, 500_000.0, 1_000_000.0, 10_000_000.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing looked at."""

    name: str
    state: str  # OK, WRONG or NOTE
    text: str  # what was found
    way_out: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All findings, and tau as measured and as it should be, where that is known."""

    findings: tuple[Finding, ...]
    tau: float | None = None
    expected_tau: float | None = None

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    @property
    def faults(self) -> tuple[Finding, ...]:
        """What is wrong."""
        return tuple(finding for finding in self.findings if finding.state == WRONG)


# The installation


def check_installation() -> list[Finding]:
    """Libraries, backends and combinations of versions that are known to fail together."""
    there = versions()
    told = ", ".join(f"{name} {version}" for name, version in there.items() if version)
    found = [Finding(name="versions", state=OK, text=told)]
    for backend, library in LIBRARIES.items():
        found.append(_backend(backend, library))
    found += [
        Finding(name="versions", state=WRONG, text=text, way_out=way)
        for applies, text, way in KNOWN_BAD
        if applies(_installed)
    ]
    return [*found, _notebooks()]


def _installed(name: str) -> Version | None:
    try:
        return Version(metadata.version(name))
    except metadata.PackageNotFoundError:
        return None


def _backend(backend: str, library: str) -> Finding:
    missing = [name for name in (backend, library.replace("-", "_")) if not _importable(name)]
    if missing:
        return Finding(
            name=f"backend {backend}",
            state=NOTE,
            text=f"not installed: {', '.join(missing)}",
            way_out=f"pip install {library}; the other backend works without it.",
        )
    try:
        pair = load_pair("tiny", backend=backend, dtype="float32", device="cpu")
        trace = decode(pair, "Hello.", DecodeConfig(max_new_tokens=8))
        return Finding(
            name=f"backend {backend}", state=OK, text=f"decodes, {len(trace.tokens)} tokens on cpu"
        )
    except Exception as error:  # whatever a half-working library raises
        return Finding(
            name=f"backend {backend}",
            state=WRONG,
            text=f"{type(error).__name__}: {str(error).splitlines()[0]}",
            way_out="On Linux install mlx[cpu] (or mlx[cuda12], mlx[cuda13]); plain mlx is empty.",
        )


def _importable(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _older(name: str, version: str) -> Callable[[Callable[[str], Version | None]], bool]:
    def applies(installed: Callable[[str], Version | None]) -> bool:
        found = installed(name)
        return found is not None and found < Version(version)

    return applies


KNOWN_BAD: tuple[tuple[Callable[..., bool], str, str], ...] = (
    (
        _older("transformers", "5.15"),
        "transformers before 5.15 takes tokens back from a cache by another rule",
        "pip install 'transformers>=5.15,<6'",
    ),
    (
        _older("torch", "2.13"),
        "torch before 2.13 was never tried with this version",
        "pip install 'torch>=2.13,<3'",
    ),
    (
        _older("jupyterlab", "4.4"),
        "JupyterLab before 4.4 does not know the setting that the sliders need",
        "pip install 'jupyterlab>=4.4'",
    ),
)


def _notebooks() -> Finding:
    told = {name: _installed(name) for name in ("jupyterlab", "ipykernel", "ipywidgets")}
    missing = [name for name, version in told.items() if version is None]
    if missing:
        return Finding(
            name="notebooks",
            state=NOTE,
            text=f"not installed: {', '.join(missing)}",
            way_out="Notebooks and sliders need them; the command line does not.",
        )
    text = ", ".join(f"{name} {version}" for name, version in told.items())
    return Finding(name="notebooks", state=OK, text=text)


# The reference of a pair


def write_reference(pair: Pair, folder: str | Path) -> Path:
    """Measure a pair's tau on bundled prompts and keep it in the draft's folder.

    The pair should be in float32, with nothing changed: what it says here is taken for right.
    """
    texts = _texts(pair, None)
    made = {
        "schema": SCHEMA,
        "target_weights_sha": _weights_sha(pair),
        "template_sha": pair.fingerprint.get("template"),
        "prompt_ids_sha": _ids_sha(texts),
        "dtype": pair.models.dtype,
        "block_size": _block_size(pair),
        "max_new_tokens": TOKENS,
        "prompts": [text.prompt_id for text in texts],
        "tau": round(1 + _accepted(pair, texts, None), 4),
    }
    path = Path(folder) / REFERENCE
    write_atomic(path, to_json(made, indent=1) + "\n")
    return path


def _texts(pair: Pair, thinking: bool | None) -> list[Text]:
    """The target's own greedy answers to the bundled prompts."""
    plain = DecodeConfig(block_size=1, max_new_tokens=TOKENS)
    texts = []
    for prompt in load_prompts(limit=PROMPTS):
        trace = decode(pair, prompt.turns[0], plain, thinking=thinking)
        texts.append(Text(prompt_id=prompt.id, prompt_ids=trace.prompt_ids, tokens=trace.tokens))
    return texts


def _weights_sha(pair: Pair) -> str:
    """A hash of the target's weights alone: its config.json differs with the library's version."""
    folder = find_target(pair.spec.target, pair.spec.target_revision)
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def _ids_sha(texts: Sequence[Text]) -> str:
    ids = json.dumps([list(text.prompt_ids) for text in texts])
    return hashlib.sha256(ids.encode()).hexdigest()[:16]


def _block_size(pair: Pair) -> int:
    return min(BLOCK_SIZE, pair.draft_config.trained_block_size)


def _accepted(pair: Pair, texts: Sequence[Text], draft_window: int | None) -> float:
    """Mean accepted drafts a block, over the blocks that decoding would make; NaN if not finite."""
    made = acceptance_map(pair, texts, (_block_size(pair),), (draft_window,))
    if not all(entry.finite for entry in made.prompts):
        return float("nan")
    counts = []
    for entry in made.prompts:
        column, n = entry.accepted[0, 0], 0
        while n < len(column):
            if column[n] + 1 <= len(column) - n:  # not cut
                counts.append(int(column[n]))
            n += int(column[n]) + 1
    return float(np.mean(counts)) if counts else float("nan")


# A pair


def examine(
    spec: PairSpec,
    *,
    draft_window: int | None = None,
    thinking: bool | None = None,
    context: int = 2048,
) -> Diagnosis:
    """Load a pair as a user would and say what is wrong with it, if anything.

    Files, memory at `context` positions, target, template and thinking mode against the draft's
    reference, then tau on the bundled prompts with this window. Where tau is too low the causes
    that can be tried are tried. Without a reference the trials alone can tell.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pair = load_spec(spec)
    except (ValueError, ArithmeticError, OSError, RuntimeError) as error:
        way = "Fetch the files again, or name the pair that belongs together."
        text = f"{type(error).__name__}: {error}"
        return Diagnosis(findings=(Finding(name="files", state=WRONG, text=text, way_out=way),))
    folder = resolve(spec.draft, spec.draft_revision, "draft", DRAFT_FILES)
    found = [Finding(name="files", state=OK, text="every tensor is there, of the right shape")]
    found.append(_memory(pair, folder, draft_window, context))
    told = read_reference(folder)
    if told is None:
        text = f"the draft's folder holds no {REFERENCE}, so only trials can tell"
        found.append(Finding(name="reference", state=NOTE, text=text))
    return _measured(pair, told, draft_window, thinking, found)


def read_reference(folder: Path) -> dict[str, Any] | None:
    """What the draft's makers measured; None where the folder holds nothing of it."""
    path = folder / REFERENCE
    if not path.is_file():
        return None
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}. Delete it.") from error
    return told if told.get("schema") == SCHEMA else None


def _machine_bytes() -> int:
    """Memory of the machine; 0 where the system does not tell."""
    return (memory_gb() or 0) << 30


def _memory(pair: Pair, folder: Path, draft_window: int | None, context: int) -> Finding:
    context = min(context, pair.models.context_limit)
    need = inspect_draft(
        folder, block_size=_block_size(pair), draft_window=draft_window, context=context
    ).memory
    total = need.draft_cache + need.verify_logits
    room = _machine_bytes()
    window = "full window" if draft_window is None else f"window {draft_window}"
    at = f"block size {_block_size(pair)}, {window}, {context} positions"
    text = f"beside the models {size_text(total)} at {at}"
    if room and total > room / 2:
        way = "Take a smaller block size or --draft-window."
        return Finding(
            name="memory", state=WRONG, text=f"{text}, of {size_text(room)}", way_out=way
        )
    return Finding(name="memory", state=OK, text=text)


def _measured(
    pair: Pair,
    told: Mapping[str, Any] | None,
    draft_window: int | None,
    thinking: bool | None,
    found: list[Finding],
) -> Diagnosis:
    try:
        texts = _texts(pair, thinking)
    except ArithmeticError as error:
        way = "Load the pair with dtype bfloat16 or float32."
        found.append(Finding(name="dtype", state=WRONG, text=str(error), way_out=way))
        return Diagnosis(findings=tuple(found))
    found += _against(pair, texts, told, thinking)
    accepted = _accepted(pair, texts, draft_window)
    expected = None if told is None else told["tau"] - 1
    if np.isnan(accepted):
        text = f"the draft's numbers overflow in {pair.models.dtype}"
        way = "Load the pair with dtype bfloat16 or float32."
        found.append(Finding(name="dtype", state=WRONG, text=text, way_out=way))
    else:
        found += _judged(pair, texts, accepted, expected, draft_window)
    return Diagnosis(
        findings=tuple(found),
        tau=None if np.isnan(accepted) else 1 + accepted,
        expected_tau=None if expected is None else 1 + expected,
    )


def _against(
    pair: Pair, texts: Sequence[Text], told: Mapping[str, Any] | None, thinking: bool | None
) -> Iterator[Finding]:
    """Target, template and thinking mode beside those of the reference."""
    if told is None:
        return
    if told["target_weights_sha"] != _weights_sha(pair):
        yield Finding(
            name="target",
            state=WRONG,
            text="this is not the target that the draft was made for",
            way_out="Load the target that the draft's card names, at that revision.",
        )
    else:
        yield Finding(name="target", state=OK, text="the one that the draft was made for")
    if told["template_sha"] != pair.fingerprint.get("template"):
        yield Finding(
            name="template",
            state=WRONG,
            text="the chat template is not the one that the draft was measured with",
            way_out="Take the tokenizer files of the target that the draft's card names.",
        )
    elif told["prompt_ids_sha"] != _ids_sha(texts):
        switched = {None: "as the template has it", True: "on", False: "off"}[thinking]
        yield Finding(
            name="thinking",
            state=WRONG,
            text=f"the prompts come out as other tokens: thinking is {switched}",
            way_out="Leave the thinking switch as the template has it.",
        )
    else:
        yield Finding(name="template", state=OK, text="the one that the draft was measured with")


def _judged(
    pair: Pair,
    texts: Sequence[Text],
    accepted: float,
    expected: float | None,
    draft_window: int | None,
) -> Iterator[Finding]:
    """Whether tau is as it should be; where it is not, or nobody knows, the trials that help."""
    said = f"tau {1 + accepted:.2f} on {len(texts)} bundled prompts"
    if expected is not None and accepted >= KEPT * expected:
        yield Finding(name="acceptance", state=OK, text=f"{said}, expected {1 + expected:.2f}")
        return
    helped = [
        (gained, finding)
        for gained, finding in _trials(pair, texts, draft_window)
        if gained > BROUGHT_BACK * accepted and gained > accepted + 0.05
    ]
    yield from (finding for _, finding in sorted(helped, key=lambda one: -one[0])[:1])
    if expected is not None:
        yield Finding(
            name="acceptance",
            state=WRONG,
            text=f"{said}, expected {1 + expected:.2f}",
            way_out="See the findings above." if helped else "No single setting explains it.",
        )
    elif not helped:
        yield Finding(name="acceptance", state=NOTE, text=f"{said}; no setting tried does better")


def _trials(
    pair: Pair, texts: Sequence[Text], draft_window: int | None
) -> Iterator[tuple[float, Finding]]:
    """Accepted drafts a block with one setting changed, and what that would mean."""
    if draft_window is not None:
        text = f"the draft window {draft_window} hides what the draft goes by"
        finding = Finding(
            name="window", state=WRONG, text=text, way_out="Take a larger window, or none."
        )
        yield _accepted(pair, texts, None), finding
    config = pair.draft_config
    for name, changed, text, way in _changed_configs(pair):
        if changed != config:
            other = replace(pair, models=pair.models.redrafted(changed), draft_config=changed)
            finding = Finding(name=name, state=WRONG, text=text, way_out=way)
            yield _accepted(other, texts, draft_window), finding


def _changed_configs(pair: Pair) -> Iterator[tuple[str, DraftConfig, str, str]]:
    """What is changed, the configuration with it, what it would mean, and the way out."""
    if not hasattr(pair.models, "redrafted"):  # MLX: the torch backend tells the same
        return
    config, layers = pair.draft_config, pair.models.target_layers
    for shift in (-1, 1):
        taps = tuple(tap + shift for tap in config.target_layer_ids)
        if min(taps) >= 0 and max(taps) < layers:
            here = _list(config.target_layer_ids)
            text = f"the draft reads layers {here} and does better with {_list(taps)}"
            yield (
                "taps",
                replace(config, target_layer_ids=taps),
                text,
                "Put right target_layer_ids in the draft's config.json: they are 0-based blocks.",
            )
    bases = {rope.theta for rope in config.layer_ropes}
    for base in sorted({*USUAL_BASES, *pair.models.rope_bases} - bases):
        ropes = tuple(replace(rope, theta=base) for rope in config.layer_ropes)
        text = f"the rope base is {_list(bases)}, and the draft does better with {base:g}"
        way = "Put right rope_theta in the draft's config.json."
        yield "rope", replace(config, layer_ropes=ropes), text, way
    if any(window is not None for window in config.layer_windows):
        text = "the draft does better without its layers' own windows"
        way = "Compare layer_types and sliding_window in config.json with the original's."
        yield "window", replace(config, layer_windows=(None,) * config.num_layers), text, way


def _list(values: Any) -> str:
    return ", ".join(f"{value:g}" for value in sorted(values))
