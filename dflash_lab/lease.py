"""Who is filling a cell: a lease file, so that two sweeps on one run folder do not share a cell."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

LEASE = "lease.json"
HEARTBEAT_S = 15.0
STALE_S = 120.0  # without a heartbeat for so long, the owner counts as dead wherever it runs

_LIVE: set[str] = set()  # tokens of this process: its number may have been another's before


@dataclass(slots=True, kw_only=True)
class Leases:
    """The cells that this process fills. A thread keeps their heartbeats going until `close`."""

    cells: Path  # the run's folder of cells
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    held: set[Path] = field(default_factory=set)  # folders
    _over: threading.Event = field(default_factory=threading.Event)
    _beat: threading.Thread | None = None

    def __post_init__(self) -> None:
        _LIVE.add(self.token)

    def take(self, folder: Path) -> bool:
        """Lease a cell's folder; False where a living process has it."""
        folder.mkdir(parents=True, exist_ok=True)
        with gate(self.cells):
            if is_leased(folder):
                return False
            (folder / LEASE).unlink(missing_ok=True)
            self._write(folder / LEASE)
        self.held.add(folder)
        self._start()
        return True

    def holds(self, folder: Path) -> bool:
        """Whether the lease is still ours: a process that slept too long may have lost it."""
        return folder in self.held and _owner(folder).get("token") == self.token

    def give_back(self, folder: Path) -> None:
        if self.holds(folder):
            (folder / LEASE).unlink(missing_ok=True)
        self.held.discard(folder)

    def close(self) -> None:
        """Give everything back."""
        self._over.set()
        _LIVE.discard(self.token)
        for folder in tuple(self.held):
            self.give_back(folder)

    def _write(self, path: Path) -> None:
        owner = {"pid": os.getpid(), "machine": machine(), "token": self.token}
        beside = path.with_name(f"{path.name}.tmp.{os.getpid()}")
        try:
            beside.write_text(json.dumps(owner), encoding="utf-8")
            os.link(beside, path)  # exclusive, and never there without its owner
        finally:
            beside.unlink(missing_ok=True)

    def _start(self) -> None:
        if self._beat is None:
            self._beat = threading.Thread(target=self._keep_alive, daemon=True)
            self._beat.start()

    def _keep_alive(self) -> None:
        while not self._over.wait(HEARTBEAT_S):
            for folder in tuple(self.held):
                with suppress(OSError):
                    if self.holds(folder):
                        os.utime(folder / LEASE)


def is_leased(folder: Path) -> bool:
    """Whether a living process fills this cell."""
    try:
        age = time.time() - (folder / LEASE).stat().st_mtime
    except FileNotFoundError:
        return False
    owner = _owner(folder)
    if age > STALE_S:
        return False
    if owner.get("machine") == machine() and owner.get("pid") == os.getpid():
        return owner.get("token") in _LIVE
    return owner.get("machine") != machine() or is_alive(owner.get("pid"))


def remove_dead(folder: Path) -> None:
    """Take away the lease of a process that is no more."""
    if (folder / LEASE).exists() and not is_leased(folder):
        (folder / LEASE).unlink(missing_ok=True)


def is_alive(pid: object) -> bool:
    """Whether a process of this number runs on this machine."""
    if not isinstance(pid, int) or pid < 1:
        return False
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno == errno.EPERM  # it is there, and another user's
    return True


def machine() -> str:
    """A short hash that tells two machines apart and names neither."""
    return hashlib.sha256(platform.node().encode()).hexdigest()[:12]


def _owner(folder: Path) -> dict[str, object]:
    try:
        owner = json.loads((folder / LEASE).read_bytes())
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


@contextmanager
def gate(cells: Path) -> Iterator[None]:
    """One process at a time looks at leases and takes one."""
    handle = os.open(cells, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems lock no folders
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
