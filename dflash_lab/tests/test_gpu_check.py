"""The check for accelerators, run on the CPU with small shapes."""

import json

import pytest

from dflash_lab.backends import torch_session
from dflash_lab.backends.torch_target import take_back
from dflash_lab.tests import gpu_check
from dflash_lab.tests.gpu_check import SMALL, DeviceCheck, Findings, main, write_pair

pytestmark = pytest.mark.slow


def test_every_check_holds_and_its_figures_are_written(tmp_path, capsys):
    out = tmp_path / "found.json"
    assert main(["--device", "cpu", "--small", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert [check["held"] for check in found["checks"]] == [True] * 5
    assert found["checks"][0]["texts"] == 25
    assert "FAILED" not in capsys.readouterr().out


def test_a_decoder_that_keeps_a_rejected_row_is_noticed(tmp_path, monkeypatch):
    write_pair(SMALL, tmp_path, "cpu")
    findings = Findings(tmp_path / "found.json", {})
    check = DeviceCheck(SMALL, "cpu", tmp_path, findings)
    monkeypatch.setattr(
        torch_session, "take_back", lambda cache, tokens: take_back(cache, max(0, tokens - 1))
    )
    monkeypatch.setattr(gpu_check, "SIZES", (8, 16))
    check.exactness(check.load("float32"))
    assert not findings.held
    assert findings.checks[0]["mismatch"] > 0
