"""Leases: one living process a cell, dead ones replaced."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dflash_lab import lease
from dflash_lab.lease import Leases, is_leased


def test_two_leases_of_one_process_exclude_each_other(tmp_path):
    first, second = Leases(cells=tmp_path), Leases(cells=tmp_path)
    assert first.take(tmp_path / "cell")
    assert not second.take(tmp_path / "cell")
    first.close()
    assert second.take(tmp_path / "cell")
    second.close()


def test_heartbeats_keep_a_lease_alive(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "HEARTBEAT_S", 0.01)
    leases = Leases(cells=tmp_path)
    leases.take(tmp_path / "cell")
    path = tmp_path / "cell" / "lease.json"
    os.utime(path, (1, 1))
    deadline = time.monotonic() + 10
    while path.stat().st_mtime < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    leases.close()
    assert not path.exists()
    assert time.monotonic() < deadline


def test_what_is_given_back_can_be_taken_and_the_rest_cannot(tmp_path):
    ours, theirs = Leases(cells=tmp_path), Leases(cells=tmp_path)
    for name in ("one", "two"):
        assert ours.take(tmp_path / name)
    ours.give_back(tmp_path / "one")
    assert (theirs.take(tmp_path / "one"), theirs.take(tmp_path / "two")) == (True, False)
    assert (ours.holds(tmp_path / "one"), ours.holds(tmp_path / "two")) == (False, True)
    ours.close()
    assert is_leased(tmp_path / "one")
    theirs.close()


def test_a_lease_dies_with_its_process(tmp_path):
    code = "import sys; from dflash_lab.lease import Leases; from pathlib import Path\n"
    code += "p = Path(sys.argv[1]); print(Leases(cells=p).take(p / 'cell'), flush=True); input()"
    command = [sys.executable, "-c", code, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(Path(lease.__file__).parents[1])}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment) as process:
        assert process.stdout.readline() == b"True\n"
        ours = Leases(cells=tmp_path)
        assert not ours.take(tmp_path / "cell")
        process.kill()
    assert ours.take(tmp_path / "cell")
    ours.close()


def test_of_many_that_want_a_dead_ones_cell_one_gets_it(tmp_path):
    cell = tmp_path / "cell"
    for _ in range(20):
        cell.mkdir(exist_ok=True)
        owner = {"pid": 1, "machine": "another", "token": "dead"}
        (cell / lease.LEASE).write_text(json.dumps(owner))
        os.utime(cell / lease.LEASE, (1, 1))
        rivals = [Leases(cells=tmp_path) for _ in range(6)]
        with ThreadPoolExecutor(max_workers=6) as pool:
            got = list(pool.map(lambda rival: rival.take(tmp_path / "cell"), rivals))
        assert sorted(got) == [False] * 5 + [True]
        for rival in rivals:
            rival.close()


@pytest.mark.parametrize("content", [b"", b"[]", b"{half"])
def test_a_lease_that_cannot_be_read_holds_until_it_is_old(tmp_path, content):
    cell = tmp_path / "cell"
    cell.mkdir()
    (cell / lease.LEASE).write_bytes(content)
    assert is_leased(cell)
    os.utime(cell / lease.LEASE, (1, 1))
    assert not is_leased(cell)


def test_a_lease_names_no_host(tmp_path, monkeypatch):
    monkeypatch.setattr(lease.platform, "node", lambda: "a-host-of-that-name")
    ours = Leases(cells=tmp_path)
    ours.take(tmp_path / "cell")
    text = (tmp_path / "cell" / lease.LEASE).read_text()
    assert "a-host-of-that-name" not in text
    assert json.loads(text)["pid"] == os.getpid()
    ours.close()
