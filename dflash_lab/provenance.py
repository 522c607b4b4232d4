"""Where a result comes from: code, versions, machine, pair; no host name, no absolute path."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from dflash_lab import __version__
from dflash_lab.load import Pair

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = ("torch", "transformers", "mlx", "mlx-lm", "datasets", "numpy")
NOTABLE = (("amx_tile", "AMX"), ("avx512f", "AVX-512"), ("avx2", "AVX2"), ("sve", "SVE"))


def provenance(pair: Pair) -> dict[str, Any]:
    """Everything a reader later needs beside a cell's request to judge its numbers."""
    facts = pair.models.describe()
    return {
        "code": code_state(ROOT),
        "versions": versions(),
        "hardware": hardware(facts.get("gpu")),
        "os": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "models": facts,
        "target": short_name(pair.spec.target),
        "target_revision": pair.spec.target_revision,
        "draft": short_name(pair.spec.draft),
        "draft_revision": pair.spec.draft_revision,
        "fingerprint": dict(pair.fingerprint),
        "config_sources": dict(pair.draft_config.sources),
        "config_notes": list(pair.draft_config.notes),
        "trained_block_size": pair.draft_config.trained_block_size,
        "stop_tokens": sorted(pair.stop_tokens),
        "argv": [short_name(argument) for argument in sys.argv],
        "started_utc": utc_now(),
    }


def pair_names(pair: Pair) -> dict[str, Any]:
    """What a stored result says of its pair: backend, names without paths, fingerprints."""
    return {
        "backend": pair.spec.backend,
        "pair": pair.spec.name,
        "target": short_name(pair.spec.target),
        "target_sha": pair.fingerprint.get("target"),
        "draft": short_name(pair.spec.draft),
        "draft_sha": pair.fingerprint.get("draft"),
    }


def utc_now() -> str:
    """The time now, to the second, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def short_name(text: str) -> str:
    """A path on this disk as its last part; anything else (a hub id, an option) as it is."""
    # An option's value, a set's rows in a file ("gsm8k=FILE"), a folder that stands for a hub set.
    before, value = re.fullmatch(r"(-[^=]*=|[\w-]+=|hf:)?(.*)", text, re.DOTALL).groups("")
    if before.startswith("-"):
        return before + short_name(value)
    value, colon, after = value.partition(":") if before == "hf:" else (value, "", "")
    path = os.path.expanduser(value)
    if os.path.isabs(path) or value.startswith(("./", "../", "~")) or os.path.isdir(path):
        value = os.path.basename(os.path.abspath(path))
    return f"{before}{value}{colon}{after}"


def versions() -> dict[str, str | None]:
    """Versions of Python, of this package and of the libraries, none of which is imported."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "dflash_lab": __version__,
    }
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def code_state(root: Path) -> dict[str, Any]:
    """Commit of the checkout, whether it was changed since, and a hash of the changes.

    All None where `root` is no checkout: an installed package.
    """
    state: dict[str, Any] = {"commit": None, "dirty": None, "diff_sha": None}
    status = _git(root, "status", "--porcelain") if (root / ".git").exists() else None
    if status is None:
        return state
    commit = _git(root, "rev-parse", "--verify", "--quiet", "HEAD")
    state["commit"] = commit.strip() if commit else None
    state["dirty"] = bool(status.strip())
    if state["dirty"]:
        changes = status + ((_git(root, "diff", "HEAD") if commit else None) or "")
        state["diff_sha"] = hashlib.sha256(changes.encode()).hexdigest()[:16]
    return state


def _git(root: Path, *command: str) -> str | None:
    return _output(["git", "-C", str(root), *command])


def _output(command: Sequence[str]) -> str | None:
    """What a command prints; None where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")


def hardware(gpu: str | None = None) -> dict[str, Any]:
    """The kind of machine: what times depend on, and nothing that names this one."""
    facts = {
        "arch": platform.machine().replace("_", "-"),
        "cpu": cpu_model(),
        "isa": notable_isa(),
        "cores": usable_cores(),
        "memory_gb": memory_gb(),
        "gpu": gpu,
    }
    machine = f"{facts['cores']}-core {facts['arch']} {facts['cpu']}"
    memory = f"{facts['memory_gb']} GB" if facts["memory_gb"] else None
    parts = (machine, facts["isa"], memory, gpu)
    return {"class": ", ".join(part for part in parts if part), **facts}


def cpu_model() -> str:
    """The processor's name without trademarks and clock, "Intel Xeon"."""
    if sys.platform == "darwin":
        name = _output(["sysctl", "-n", "machdep.cpu.brand_string"]) or ""
    else:
        found = re.search(r"^model name\s*:\s*(.+)$", _cpuinfo(), flags=re.MULTILINE)
        name = found[1] if found else ""
    name = re.sub(r"\((?:R|TM|C)\)|@.*$|\bCPU\b|\bProcessor\b", " ", name, flags=re.IGNORECASE)
    return " ".join(name.split()) or "unknown CPU"


def notable_isa() -> str | None:
    """The one instruction set that matters most for speed here, where it can be told."""
    flags = set(_cpuinfo().split())
    return next((name for flag, name in NOTABLE if flag in flags), None)


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def usable_cores() -> int:
    """Cores that this process may use: its affinity, or its group's quota where that is less."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
        if quota != "max":
            cores = min(cores, math.ceil(int(quota) / int(period)))
    return cores


def memory_gb() -> int | None:
    """Memory of the machine in whole GB."""
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30)
    except (OSError, ValueError):
        size = _output(["sysctl", "-n", "hw.memsize"])
        return round(int(size) / 2**30) if size else None
