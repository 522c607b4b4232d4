"""Where results come from: told completely, and nothing that names a machine or a folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_lab import provenance
from dflash_lab.provenance import code_state, hardware, short_name, versions
from dflash_lab.tests.toys import scripted_pair

CPUINFO = """processor\t: 0
model name\t: {name}
flags\t\t: fpu sse2 {flags}
processor\t: 1
"""


def git(folder: Path, *command: str) -> None:
    who = ["-c", "user.name=x", "-c", "user.email=x@x"]
    subprocess.run(["git", "-C", str(folder), *who, *command], check=True, capture_output=True)


def test_code_is_a_commit_and_a_hash_of_what_was_changed_since(tmp_path):
    assert code_state(tmp_path) == {"commit": None, "dirty": None, "diff_sha": None}
    git(tmp_path, "init")
    (tmp_path / "a.py").write_text("a")
    assert code_state(tmp_path)["commit"] is None
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "x")
    clean = code_state(tmp_path)
    assert re.fullmatch(r"[0-9a-f]{40}", clean["commit"])
    assert (clean["dirty"], clean["diff_sha"]) == (False, None)
    hashes = set()
    for text in ("b", "c"):
        (tmp_path / "a.py").write_text(text)
        changed = code_state(tmp_path)
        assert (changed["commit"], changed["dirty"]) == (clean["commit"], True)
        hashes.add(changed["diff_sha"])
    assert len(hashes) == 2


def test_a_machine_without_git_gives_no_commit(tmp_path, monkeypatch):
    git(tmp_path, "init")
    monkeypatch.setenv("PATH", "")
    assert code_state(tmp_path)["dirty"] is None


def test_a_library_that_is_not_installed_has_no_version(monkeypatch):
    monkeypatch.setattr(provenance, "LIBRARIES", ("numpy", "no-such-library"))
    found = versions()
    assert found["numpy"][0].isdigit()
    assert found["no-such-library"] is None


def test_versions_are_told_without_importing_a_framework():
    code = (
        "import sys; from dflash_lab.provenance import versions; print(versions()['torch'] and 1)"
    )
    code += "; print([m for m in ('torch', 'transformers', 'mlx', 'numpy') if m in sys.modules])"
    root = str(Path(provenance.__file__).parents[1])
    shown = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": root},
        check=True,
        capture_output=True,
        text=True,
    )
    assert shown.stdout.splitlines() == ["1", "[]"]


@pytest.mark.parametrize(
    ("name", "flags", "shown"),
    [
        ("Intel(R) Xeon(R) Processor", "avx2 avx512f amx_tile", "Intel Xeon, AMX"),
        ("Intel(R) Core(TM) i7-8550U CPU @ 1.80GHz", "avx2", "Intel Core i7-8550U, AVX2"),
        ("AMD EPYC 7763 64-Core Processor", "avx2 avx512f", "AMD EPYC 7763 64-Core, AVX-512"),
    ],
)
def test_a_machine_is_known_by_its_kind(monkeypatch, name, flags, shown):
    monkeypatch.setattr(provenance, "_cpuinfo", lambda: CPUINFO.format(name=name, flags=flags))
    monkeypatch.setattr(provenance.sys, "platform", "linux")
    monkeypatch.setattr(provenance, "usable_cores", lambda: 2)
    monkeypatch.setattr(provenance, "memory_gb", lambda: 24)
    monkeypatch.setattr(provenance.platform, "machine", lambda: "x86_64")
    assert hardware()["class"] == f"2-core x86-64 {shown}, 24 GB"
    assert hardware("NVIDIA H200")["class"] == f"2-core x86-64 {shown}, 24 GB, NVIDIA H200"


def test_a_mac_is_asked_in_its_own_way(monkeypatch):
    answers = {"machdep.cpu.brand_string": "Apple M2 Pro\n", "hw.memsize": "17179869184\n"}
    monkeypatch.setattr(provenance.sys, "platform", "darwin")
    monkeypatch.setattr(provenance, "_output", lambda command: answers[command[-1]])
    monkeypatch.setattr(provenance, "_cpuinfo", lambda: "")
    monkeypatch.setattr(provenance.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(provenance, "usable_cores", lambda: 10)
    monkeypatch.setattr(provenance.os, "sysconf", _no_sysconf)
    assert hardware()["class"] == "10-core arm64 Apple M2 Pro, 16 GB"


def _no_sysconf(name: str) -> int:
    raise ValueError(name)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/somewhere/models/smol", "smol"),
        ("~/models/smol/", "smol"),
        ("../models/smol", "smol"),
        ("org/model", "org/model"),
        ("smollm2", "smollm2"),
        ("--out=/somewhere/run", "--out=run"),
        ("--block-size=8", "--block-size=8"),
        ("x" * 5000, "x" * 5000),
        ("gsm8k=/data/rows.jsonl", "gsm8k=rows.jsonl"),
        ("--dataset=gsm8k=/data/rows.jsonl", "--dataset=gsm8k=rows.jsonl"),
        ("hf:/data/set::train", "hf:set::train"),
        ("hf:org/set:main:test", "hf:org/set:main:test"),
    ],
)
def test_a_path_is_known_by_its_last_part_and_a_hub_id_stays(text, shown):
    assert short_name(text) == shown


def test_a_relative_folder_counts_as_a_path(tmp_path, monkeypatch):
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert short_name("org/model") == "model"


def test_provenance_holds_the_sources_of_the_drafts_settings():
    said = provenance.provenance(scripted_pair())
    assert said["config_sources"] == {
        "block_size": "block_size",
        "rope_theta": "rope_theta",
        "layer_types": "default",
    }
    assert (said["target"], said["draft"]) == ("scripted-target", "scripted-draft")
