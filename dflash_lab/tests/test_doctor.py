"""The doctor: a healthy pair is called healthy, and each planted fault is found by its name."""

import json
import shutil

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file, save_file

from dflash_lab import doctor
from dflash_lab.config import PairSpec
from dflash_lab.doctor import KNOWN_BAD, REFERENCE, check_installation, examine, write_reference
from dflash_lab.load import load_pair
from dflash_lab.prompts import DATA


@pytest.fixture
def folders(tmp_path):
    """The tiny pair, to be spoiled."""
    return shutil.copytree(DATA / "tiny_pair", tmp_path / "pair")


def spec(folders, **settings):
    where = {"target": str(folders / "target"), "draft": str(folders / "draft")}
    return PairSpec(**where, dtype=settings.pop("dtype", "float32"), device="cpu", **settings)


def names(found):
    return {finding.name for finding in found.faults}


def edit(path, **changes):
    raw = json.loads(path.read_text())
    for name, value in changes.items():
        holder = raw["dflash_config"] if name in raw.get("dflash_config", {}) else raw
        holder[name] = value
    path.write_text(json.dumps(raw))


def test_a_healthy_pair_is_called_healthy(folders):
    found = examine(spec(folders))
    assert found.healthy and found.tau == pytest.approx(found.expected_tau, abs=1e-3)
    assert {"files", "memory", "target", "template", "acceptance"} <= {
        f.name for f in found.findings
    }


@pytest.mark.slow
def test_the_draft_of_another_target_is_found(folders):
    path = folders / "target" / "model.safetensors"
    dice = torch.Generator().manual_seed(0)
    spoiled = {
        name: value + 0.02 * torch.randn(value.shape, generator=dice).to(value.dtype)
        for name, value in load_file(path).items()
    }
    save_file(spoiled, path, metadata={"format": "pt"})
    assert "target" in names(examine(spec(folders)))


@pytest.mark.slow
def test_numbers_that_overflow_in_float16_are_found(folders):
    path = folders / "draft" / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if "down_proj" in name)
    tensors[name] = tensors[name] * 3e6
    save_file(tensors, path, metadata={"format": "pt"})
    found = examine(spec(folders, dtype="float16"))
    assert "dtype" in names(found)
    assert "float32" in next(f.way_out for f in found.faults if f.name == "dtype")


@pytest.mark.slow
def test_shifted_taps_are_found_and_the_right_ones_named(folders):
    edit(folders / "draft" / "config.json", target_layer_ids=[1, 2, 3])
    found = examine(spec(folders))
    assert names(found) == {"taps", "acceptance"}
    text = next(f.text for f in found.faults if f.name == "taps")
    assert "1, 2, 3 and does better with 0, 1, 2" in text


@pytest.mark.slow
def test_a_wrong_rope_base_is_found_and_the_targets_own_named(folders):
    config = folders / "draft" / "config.json"
    raw = json.loads(config.read_text())
    text = config.read_text().replace(str(_theta(raw)), "500000.0")
    assert text != config.read_text()
    config.write_text(text)
    found = examine(spec(folders))
    assert names(found) == {"rope", "acceptance"}
    assert "does better with 1000" in next(f.text for f in found.faults if f.name == "rope")


def _theta(raw):
    return raw["rope_theta"] if "rope_theta" in raw else raw["rope_parameters"]["rope_theta"]


@pytest.mark.slow
def test_a_window_of_four_is_found(folders):
    found = examine(spec(folders), draft_window=4)
    assert names(found) == {"window", "acceptance"}


@pytest.mark.slow
def test_another_template_is_found(folders):
    path = folders / "target" / "chat_template.jinja"
    path.write_text(path.read_text() + "{# new #}\nOK. ")
    assert "template" in names(examine(spec(folders)))


@pytest.mark.slow
def test_thinking_switched_is_found(folders):
    path = folders / "target" / "chat_template.jinja"
    path.write_text(
        path.read_text()
        + "{% if enable_thinking is defined and not enable_thinking %}Ada{% endif %}"
    )
    write_reference(
        load_pair(target=folders / "target", draft=folders / "draft"), folders / "draft"
    )
    assert examine(spec(folders)).healthy
    found = examine(spec(folders), thinking=False)
    assert "thinking" in names(found)
    assert "thinking is off" in next(f.text for f in found.faults if f.name == "thinking")


@pytest.mark.parametrize("part", ["draft", "target"])
def test_a_half_downloaded_file_is_found(folders, part):
    path = folders / part / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    found = examine(spec(folders))
    assert names(found) == {"files"}


@pytest.mark.slow
def test_without_a_reference_trials_still_name_the_cause_and_health_is_not_denied(folders):
    (folders / "draft" / REFERENCE).unlink()
    found = examine(spec(folders))
    assert found.healthy and found.expected_tau is None
    edit(folders / "draft" / "config.json", target_layer_ids=[1, 2, 3])
    assert names(examine(spec(folders))) == {"taps"}


@pytest.mark.slow
def test_a_pair_that_does_not_fit_in_memory_is_found(folders, monkeypatch):
    monkeypatch.setattr(doctor, "_machine_bytes", lambda: 600_000)
    found = examine(spec(folders))
    assert names(found) == {"memory"}
    assert "smaller block size" in found.faults[0].way_out


def test_the_installation_is_described_and_both_backends_decode():
    found = {finding.name: finding for finding in check_installation()}
    assert found["backend torch"].state == found["backend mlx"].state == "ok"
    assert "torch 2." in found["versions"].text
    assert "ipykernel" in found["notebooks"].text


@pytest.mark.parametrize("number", range(len(KNOWN_BAD)))
def test_a_known_bad_version_is_noticed_and_the_present_ones_are_not(number):
    applies, text, _ = KNOWN_BAD[number]
    assert applies(lambda name: Version("0.1"))
    assert not applies(lambda name: None)
    assert not applies(doctor._installed), text
