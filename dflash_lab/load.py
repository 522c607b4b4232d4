"""From a name, folders or hub ids to a pair in memory."""

from __future__ import annotations

import hashlib
import io
import json
import operator
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from dflash_lab.backends import Models, open_backend
from dflash_lab.checkpoint import CheckpointError, DraftConfig, draft_fingerprint, read_draft_config
from dflash_lab.config import PairSpec
from dflash_lab.embedded import MANIFEST, embedded_target
from dflash_lab.prompts import DATA

# The drafts of the pairs that come with the project, and those of their targets that do.
EMBEDDED = {
    "smollm2": DATA / "drafts" / "smollm2-135m-dflash-b16",
    "tiny": DATA / "tiny_pair" / "draft",
}
TARGETS = {"tiny": DATA / "tiny_pair" / "target"}
FINGERPRINTED = ("*.json", "*.safetensors", "*.bin", "*.jinja")
WRITTEN_BY = re.compile(rb'"transformers_version":\s*"[^"]*",?\s*')

Message = Mapping[str, str]
PromptLike = str | Sequence[Message] | Sequence[int]


class DraftConfigWarning(UserWarning):
    """Something in a draft's configuration that its user should see."""


class ModelUnavailable(OSError):
    """A model that is neither a folder here nor to be had from the hub."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A prompt as token ids, and how its template's thinking switch stood."""

    ids: tuple[int, ...]
    thinking: str  # "on", "off", "template default", "no template"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pair:
    """A target and the draft trained for it, loaded."""

    spec: PairSpec
    models: Models
    draft_config: DraftConfig
    tokenizer: Any  # a transformers tokenizer; None where only token ids are used
    fingerprint: Mapping[str, str]  # hashes and revisions of target, draft and template

    @property
    def stop_tokens(self) -> frozenset[int]:
        """End tokens of the model's configurations and of the tokenizer, joined."""
        end = getattr(self.tokenizer, "eos_token_id", None)
        return self.models.end_tokens | ({end} if end is not None else set())

    def encode(
        self, prompt: PromptLike, chat: bool = True, thinking: bool | None = None
    ) -> Encoded:
        """Token ids of text (through the chat template unless `chat=False`), messages, or ids.

        Raises ValueError for an empty prompt, and for `thinking` where the template has no switch.
        """
        if len(prompt) == 0:
            raise ValueError("the prompt is empty; give text, chat messages or token ids.")
        as_ids = not isinstance(prompt, str) and not isinstance(prompt[0], Mapping)
        if thinking is not None and (as_ids or not chat):
            raise ValueError(
                f"thinking is {thinking}, but this prompt does not go through the chat template, "
                "which alone knows it. Leave it out."
            )
        if as_ids:
            return Encoded(ids=self.checked_ids(prompt), thinking="no template")
        if self.tokenizer is None:
            raise ValueError(
                "this pair has no tokenizer: the target's folder holds no tokenizer.json. Add it, "
                "or give the prompt as token ids."
            )
        if not chat and not isinstance(prompt, str):
            raise ValueError("chat=False takes text or token ids; chat messages need the template.")
        if not chat:
            return Encoded(ids=flat_ids(self.tokenizer(prompt)), thinking="no template")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        switch = {} if thinking is None else {"enable_thinking": thinking}
        template = getattr(self.tokenizer, "chat_template", None)
        if not template:
            raise ValueError("this tokenizer has no chat template; pass chat=False.")
        if switch and "enable_thinking" not in str(template):
            raise ValueError(
                f"thinking is {thinking}, but this chat template has no such switch. Leave it out."
            )
        ids = self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=True, **switch
        )
        named = {None: "template default", True: "on", False: "off"}[thinking]
        return Encoded(ids=flat_ids(ids), thinking=named)

    def checked_ids(self, ids: Sequence[Any]) -> tuple[int, ...]:
        """Token ids as plain whole numbers that the target's embedding has a row for."""
        try:
            checked = tuple(operator.index(token) for token in ids)
        except TypeError as error:
            raise ValueError(f"a prompt of token ids holds whole numbers only: {error}.") from error
        rows = self.models.vocabulary
        outside = [token for token in checked if not 0 <= token < rows]
        if outside:
            raise ValueError(f"token id {outside[0]} is not in this target's 0 to {rows - 1}.")
        return checked

    def text(self, tokens: Sequence[int], stop_tokens: Collection[int] | None = None) -> str:
        """The tokens as text, a stop token at the end left out; special tokens are shown.

        `stop_tokens` are those that ended the output; without them, the pair's own.
        """
        stops = self.stop_tokens if stop_tokens is None else stop_tokens
        if tokens and tokens[-1] in stops:
            tokens = tokens[:-1]
        return self.text_so_far(tokens)

    def pieces(
        self, tokens: Sequence[int], stop_tokens: Collection[int] | None = None
    ) -> tuple[str, ...]:
        """What each token adds to the text: the pieces joined are `text(tokens, stop_tokens)`.

        A character split over several tokens belongs to the last of them, the others add nothing.
        """
        whole, pieces, shown = self.text(tokens, stop_tokens), [], 0
        for count in range(1, len(tokens) + 1):
            text = whole if count == len(tokens) else self.text_so_far(tokens[:count])
            if count < len(tokens) and (text.endswith("\ufffd") or not whole.startswith(text)):
                text = whole[:shown]
            pieces.append(text[shown:])
            shown = max(shown, len(text))
        return tuple(pieces)

    def text_so_far(self, tokens: Sequence[int]) -> str:
        """The text of a beginning, a stop token at its end included."""
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=False)


def flat_ids(encoded: Any) -> tuple[int, ...]:
    """One flat tuple of ids from a list, a nested list, a tensor or a mapping."""
    if isinstance(encoded, Mapping) or hasattr(encoded, "keys"):
        encoded = encoded["input_ids"]
    if hasattr(encoded, "tolist"):
        encoded = encoded.tolist()
    while len(encoded) == 1 and isinstance(encoded[0], list | tuple):
        encoded = encoded[0]
    return tuple(int(token) for token in encoded)


def load_pair(
    name: str | None = None,
    *,
    target: str | Path | None = None,
    draft: str | Path | None = None,
    target_revision: str | None = None,
    draft_revision: str | None = None,
    backend: str = "torch",
    dtype: str = "auto",
    device: str = "auto",
    draft_bits: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> Pair:
    """Load a pair by name (`smollm2`, `tiny`), or by the folders or hub ids of its two models.

    Settings are checked before anything is read. Raises ValueError for an unknown name or models
    that do not fit together, `CheckpointError` kinds for a faulty draft, `ModelUnavailable` where a
    model cannot be had.
    """
    spec = pair_spec(
        name,
        target=target,
        draft=draft,
        target_revision=target_revision,
        draft_revision=draft_revision,
        backend=backend,
        dtype=dtype,
        device=device,
        draft_bits=draft_bits,
    )
    return load_spec(spec, progress)


def pair_spec(
    name: str | None = None,
    *,
    target: str | Path | None = None,
    draft: str | Path | None = None,
    target_revision: str | None = None,
    draft_revision: str | None = None,
    backend: str = "torch",
    dtype: str = "auto",
    device: str = "auto",
    draft_bits: int | None = None,
) -> PairSpec:
    """The checked description of a pair; nothing is loaded."""
    if name is not None and (target is not None or draft is not None):
        raise ValueError(f"give a pair's name ({name!r}) or target= and draft=, not both.")
    if name is not None and name not in EMBEDDED:
        raise ValueError(
            f"there is no pair {name!r}; known are {', '.join(map(repr, EMBEDDED))}. "
            "Any other pair is named by target= and draft=, folders or hub ids."
        )
    if name is not None and (target_revision is not None or draft_revision is not None):
        raise ValueError(f"the pair {name!r} has no revisions to choose from; leave them out.")
    if name is None and (target is None or draft is None):
        raise ValueError("a pair needs a name, or both target= and draft=.")
    return PairSpec(
        target=name if name is not None else str(target),
        draft=str(EMBEDDED[name]) if name is not None else str(draft),
        target_revision=target_revision,
        draft_revision=draft_revision,
        name=name,
        backend=backend,
        dtype=dtype,
        device=device,
        draft_bits=draft_bits,
    )


def spec_of_draft(draft: str | Path, **settings: Any) -> PairSpec:
    """The pair of a draft alone: the target is the one that its card or its config names.

    `settings` are backend, dtype, device and draft_bits of `pair_spec`. Raises ValueError saying
    how to name the target where the draft names none, or several.
    """
    where = Path(draft).expanduser()
    for name, folder in EMBEDDED.items():
        if where.resolve() == folder.resolve():
            return pair_spec(name, **settings)
    folder = resolve(str(draft), None, "draft", ("config.json", "README.md"))
    named = targets_named(folder)
    if len(named) != 1:
        said = f"names {' and '.join(named)}" if named else "names none"
        raise ValueError(
            f"which target is {str(draft)!r} for? base_model in its README.md or config.json "
            f"{said}. Say it: target=, or --model on the command line, a folder or a hub id."
        )
    return pair_spec(target=named[0], draft=draft, **settings)


def targets_named(folder: Path) -> list[str]:
    """What a draft calls its base model, in its card's front matter, else in its config."""
    from huggingface_hub import metadata_load

    card, config = folder / "README.md", folder / "config.json"
    try:
        told = (metadata_load(card) or {}) if card.is_file() else {}
        named = told.get("base_model")
        if named is None and config.is_file():
            named = json.loads(config.read_text(encoding="utf-8")).get("base_model")
    except Exception as error:  # of YAML, of JSON, or not a mapping at all
        raise ValueError(f"the card or the config in {folder} cannot be read: {error}") from error
    return [named] if isinstance(named, str) else [str(one) for one in named or ()]


def load_spec(spec: PairSpec, progress: Callable[[str], None] | None = None) -> Pair:
    """Load what a `PairSpec` describes."""
    draft_folder = resolve(spec.draft, spec.draft_revision, "draft", DRAFT_FILES)
    config = read_draft_config(draft_folder)
    for note in config.notes:
        warnings.warn(note, DraftConfigWarning, stacklevel=3)
    target_folder = find_target(spec.target, spec.target_revision, progress)
    if not (target_folder / "config.json").is_file():
        raise ModelUnavailable(f"there is no config.json in {target_folder}: not a model folder.")
    bits = {} if spec.draft_bits is None else {"draft_bits": spec.draft_bits}
    models = open_backend(spec.backend).load(
        target_folder, draft_folder, config, spec.dtype, spec.device, **bits
    )
    quantised = f", {spec.draft_bits} bits" if bits else ""
    tokenizer = load_tokenizer(target_folder)
    folders = {"target": target_folder, "draft": draft_folder}
    return Pair(
        spec=spec,
        models=models,
        draft_config=config,
        tokenizer=tokenizer,
        fingerprint={
            "target": target_fingerprint(target_folder),
            "draft": draft_fingerprint(draft_folder) + quantised,
            "template": _sha(str(getattr(tokenizer, "chat_template", None))),
            **{f"{what}_commit": p.name for what, p in folders.items() if is_snapshot(p)},
        },
    )


DRAFT_FILES = ("config.json", "*.safetensors", "*.safetensors.index.json", "reference.json")
TARGET_FILES = (
    *DRAFT_FILES,
    "generation_config.json",
    "tokenizer*",
    "*.jinja",
    "vocab*",
    "merges*",
)


def find_target(
    where: str, revision: str | None = None, progress: Callable[[str], None] | None = None
) -> Path:
    """The folder of a target: of a pair that comes with the project, by its name, or `resolve`d."""
    if where in EMBEDDED and not Path(where).is_dir():
        return TARGETS.get(where) or embedded_target(progress=progress)
    return resolve(where, revision, "target", TARGET_FILES)


def resolve(where: str, revision: str | None, what: str, files: Sequence[str]) -> Path:
    """The folder of a model: one on this disk, or a snapshot of a hub repository.

    Raises `ModelUnavailable` naming the local way where the hub cannot be reached.
    """
    folder = Path(where).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ValueError(f"{what}_revision is {revision!r}, but {where} is a folder on disk.")
        return folder
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", where):
        raise ModelUnavailable(
            f"the {what} {where!r} is neither a folder here nor a hub id (owner/name)."
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(where, revision=revision, allow_patterns=list(files)))
    except Exception as error:  # the hub client raises a dozen kinds; every one means the same here
        raise ModelUnavailable(
            f"the {what} {where!r} is no folder here, not in the hub's cache, and cannot be "
            f"fetched ({type(error).__name__}). Download the repository elsewhere and give its "
            f"folder as {what}=."
        ) from error


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer, or None where it has none."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def is_snapshot(folder: Path) -> bool:
    """Whether a folder is a commit in the hub's cache, and so bears its name."""
    return folder.parent.name == "snapshots"


def target_fingerprint(folder: Path) -> str:
    """A hash of everything that decides what the target says: settings, tokenizer, all weights."""
    digest = hashlib.sha256()
    for path in sorted(p for pattern in FINGERPRINTED for p in folder.glob(pattern)):
        if path.name != MANIFEST:  # dates and versions of the making, not of the model
            with path.open("rb") as file:
                content = hashlib.file_digest(_without_version(file), "sha256").hexdigest()
            digest.update(f"{path.name} {content}\n".encode())
    return digest.hexdigest()


def _without_version(file: BinaryIO) -> BinaryIO:
    """A configuration less the version of the library that wrote it; any other file as it is.

    The same weights saved by another version of transformers are the same target.
    """
    if not Path(file.name).name.endswith("config.json"):
        return file
    return io.BytesIO(WRITTEN_BY.sub(b"", file.read()))


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


__all__ = [
    "CheckpointError",
    "DraftConfigWarning",
    "Encoded",
    "ModelUnavailable",
    "Pair",
    "load_pair",
    "load_spec",
    "pair_spec",
]
