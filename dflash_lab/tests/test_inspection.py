"""A checkpoint explained: every figure from config.json and headers, and nothing else read."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from dflash_lab import checkpoint, cli, inspect_draft
from dflash_lab.inspection import size_text
from dflash_lab.load import ModelUnavailable
from dflash_lab.tests.drafts import PUBLISHED, S, save_random, shrunken
from dflash_lab.tests.toys import draft_json

NEW = "Qwen3.5-4B-DFlash"
MUSE = "Muse-Glimmer-30B-DFlash2"


@pytest.fixture
def draft(tmp_path):
    """A function that writes a draft folder and names it."""

    def write(raw, **settings):
        save_random(tmp_path / "draft", raw, **settings)
        return tmp_path / "draft"

    return write


def target_folder(path, **changes):
    path.mkdir(parents=True)
    config = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 512} | changes
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_form_is_explained(name, draft):
    raw = shrunken(PUBLISHED[name])
    seen = inspect_draft(draft(raw, shards=2, prefix="model."))
    config = checkpoint.parse_draft_config(raw)
    assert seen.kind == config.kind
    assert seen.parameters == config.parameters
    assert seen.tensors == len(config.tensor_shapes)
    assert seen.memory.draft_weights == 4 * config.parameters
    assert [layer.window for layer in seen.layers] == list(config.layer_windows)
    assert [layer.causal for layer in seen.layers] == list(config.layer_causal)
    assert json.loads(json.dumps(seen.to_json(), allow_nan=False))["kind"] == seen.kind
    text = json.dumps(seen.sections())
    assert ", ".join(map(str, config.target_layer_ids)) in text
    assert config.sources["block_size"] in text


@pytest.mark.parametrize(
    ("windows", "user", "context", "cached"),
    [
        ([None, None], None, 100, 100),
        ([None, None], 30, 100, 30),
        ([None, None], 300, 100, 100),
        ([16, 16], None, 100, 15),
        ([16, None], None, 100, 100),
        ([16, None], 30, 100, 30),
        ([None, None], None, 0, 0),
    ],
)
def test_memory_is_that_of_the_positions_some_layer_sees(windows, user, context, cached, draft):
    types = ["full_attention" if window is None else S for window in windows]
    raw = draft_json(layer_types=types, sliding_window=16)
    memory = inspect_draft(draft(raw), block_size=4, draft_window=user, context=context).memory
    assert memory.cached_positions == cached
    assert memory.draft_cache == cached * 2 * 2 * 2 * 16 * 4  # layers, k and v, heads, size, bytes
    assert memory.verify_logits == 4 * 512 * 4


def test_the_published_figures_for_memory_come_out(draft):
    """dflash.md 1.6: 20,480 bytes a token in bf16, 9.7 MB of logits at block size 16."""
    config = checkpoint.parse_draft_config(PUBLISHED["Qwen3-4B-DFlash-b16"])
    assert config.context_bytes_per_token(2) == 20_480
    assert size_text(16 * config.vocab_size * 4) == "9.72 MB"
    assert size_text(2 * config.parameters) == "1.07 GB"
    assert (size_text(999), size_text(1500)) == ("999 bytes", "1.5 kB")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, "fits"),
        ({"hidden_size": 8, "text_config": {"hidden_size": 64}}, "fits"),
        ({"hidden_size": 128}, "the draft's hidden size is 64, the target's is 128"),
        ({"num_hidden_layers": 2}, "layers 0 to 1"),
        ({"vocab_size": 300}, "the draft's mask token is 511"),
    ],
)
def test_a_target_is_checked_by_its_config_alone(changes, problem, draft, tmp_path):
    folder = target_folder(tmp_path / "t", **changes)
    seen = inspect_draft(draft(draft_json()), target=folder)
    assert seen.target.fits == (problem == "fits")
    *_, (name, told) = seen.sections()["targets"]
    assert name == str(folder)
    assert problem in told


def test_a_target_without_a_config_or_without_a_width_is_an_error(draft, tmp_path):
    folder = draft(draft_json())
    with pytest.raises(ModelUnavailable, match=r"no config\.json"):
        inspect_draft(folder, target=tmp_path / "nothing")
    with pytest.raises(checkpoint.CheckpointError, match="hidden_size"):
        inspect_draft(folder, target=target_folder(tmp_path / "t", hidden_size=None))


def verdicts(raw, draft):
    return {fit.engine: fit for fit in inspect_draft(draft(raw)).engines}


def test_which_programs_can_load_a_form_is_told_with_the_reason(draft):
    old = verdicts(draft_json(num_target_layers=4), draft)
    assert {name: fit.verdict for name, fit in old.items()} == {
        "dflash_lab": "yes",
        "z-lab/dflash of April 2026": "yes",
        "dflash 0.1.0, PyTorch": "yes",
        "dflash 0.1.0, MLX": "yes",
        "dflash_mlx 0.1.8": "differs",
        "mlx-vlm": "yes",
        "mlx_dspark": "yes",
    }
    new = verdicts(shrunken(PUBLISHED[NEW]), draft)
    assert new["z-lab/dflash of April 2026"].verdict == "no"
    assert "block_size inside dflash_config" in new["z-lab/dflash of April 2026"].reason
    assert new["dflash_mlx 0.1.8"].verdict == "no"
    assert "sliding layers bidirectional" in new["mlx-vlm"].reason
    assert "num_target_layers" in new["dflash 0.1.0, PyTorch"].reason
    bias = verdicts(draft_json(attention_bias=True), draft)
    for name in ("dflash 0.1.0, MLX", "mlx-vlm", "mlx_dspark"):
        assert (bias[name].verdict, "biases" in bias[name].reason) == ("no", True)
    muse = verdicts(shrunken(PUBLISHED[MUSE]) | {"num_target_layers": 52}, draft)
    assert muse["mlx_dspark"].verdict == "unknown"
    assert "bidirectional" not in muse["mlx-vlm"].reason  # as the checkpoint has it
    assert "use_sliding_window" in muse["dflash 0.1.0, PyTorch"].reason


def test_a_size_above_the_trained_one_and_a_window_below_the_size_are_noted(draft):
    raw = draft_json(layer_types=[S, S], sliding_window=12, block_size=4, trained_block_size=8)
    folder = draft(raw)
    assert inspect_draft(folder).notes == ()
    notes = inspect_draft(folder, block_size=16).notes
    assert "16 is above the 8" in notes[0]
    assert "layer 0 slides over 12 positions" in notes[1]
    assert "trained with 8" in json.dumps(inspect_draft(folder).sections())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"draft_window": 0}, "draft_window is 0"),
        ({"context": -1}, "context is -1"),
        ({"revision": "main"}, "a folder on disk"),
    ],
)
def test_settings_are_checked(settings, words, draft):
    with pytest.raises(ValueError, match=words):
        inspect_draft(draft(draft_json()), **settings)


def test_a_faulty_checkpoint_is_the_error_that_loading_would_raise(draft):
    folder = draft(draft_json())
    (folder / "config.json").write_text(json.dumps(draft_json(intermediate_size=96)))
    with pytest.raises(checkpoint.TensorMismatch, match=r"mlp\.down_proj\.weight is \(64, 128\)"):
        inspect_draft(folder)
    (folder / "config.json").unlink()
    with pytest.raises(checkpoint.CheckpointError, match=r"no config\.json"):
        inspect_draft(folder)
    with pytest.raises(ModelUnavailable, match="neither a folder here nor a hub id"):
        inspect_draft("not/a/draft")


class Hub:
    """The client's three calls on one folder: config.json and headers, no weights."""

    def __init__(self, folder, reachable=True, cached=True):
        self.folder, self.reachable, self.cached = folder, reachable, cached

    def hf_hub_download(self, repository, name, revision=None):
        assert (repository, name, revision) == ("owner/draft", "config.json", "abc")
        if not self.reachable:
            raise OSError("no network")
        return str(self.folder / name)

    def get_safetensors_metadata(self, repository, revision=None):
        found = checkpoint.read_header(self.folder / "model.safetensors")
        tensors = {
            f"model.{name}": SimpleNamespace(dtype=info.dtype, shape=list(info.shape))
            for name, info in found.items()
        }
        return SimpleNamespace(
            files_metadata={"model.safetensors": SimpleNamespace(tensors=tensors)}
        )

    def snapshot_download(self, repository, revision, allow_patterns, local_files_only):
        assert local_files_only
        if not self.cached:
            raise OSError("not cached")
        return str(self.folder)


@pytest.mark.parametrize("reachable", [True, False])
def test_a_hub_id_is_explained_from_its_headers_or_from_the_cache(reachable, draft, monkeypatch):
    folder = draft(draft_json())
    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub(folder, reachable))
    seen = inspect_draft("owner/draft", revision="abc")
    here = inspect_draft(folder)
    assert (seen.draft, seen.parameters, seen.config) == (
        "owner/draft",
        here.parameters,
        here.config,
    )


def test_a_hub_id_that_is_nowhere_names_the_local_way(draft, monkeypatch):
    hub = Hub(draft(draft_json()), reachable=False, cached=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    with pytest.raises(ModelUnavailable, match=r"OSError: no network.*give its folder"):
        inspect_draft("owner/draft", revision="abc")


def test_no_framework_is_loaded_and_no_weight_is_read(draft):
    folder = draft(draft_json())
    path = folder / "model.safetensors"
    content = path.read_bytes()
    length = 8 + int.from_bytes(content[:8], "little")
    path.write_bytes(content[:length] + b"\xff" * (len(content) - length))  # NaN, all of them
    code = (
        "import sys, dflash_lab; seen = dflash_lab.inspect_draft(sys.argv[1]); "
        "print(seen.parameters, *sys.modules.keys() & {'torch', 'mlx', 'transformers', 'numpy'})"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code, str(folder)], check=True, capture_output=True, text=True
    )
    assert shown.stdout.split() == [str(inspect_draft(folder).parameters)]


def call(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["dflash-lab", "inspect", *map(str, arguments)])
    monkeypatch.delenv("DFLASH_BLOCK_SIZE", raising=False)
    try:
        cli.main()
        code = 0
    except SystemExit as end:
        code = end.code or 0
    out, err = capsys.readouterr()
    return code, out, err


def test_the_command_prints_every_section_or_one_json_object(draft, tmp_path, monkeypatch, capsys):
    folder = draft(shrunken(PUBLISHED[NEW]))
    target = target_folder(tmp_path / "t", hidden_size=32)
    asked = (folder, "--block-size", 4, "--window", 100, "--context", 500, "--target", target)
    code, out, err = call(monkeypatch, capsys, *asked)
    assert (code, err) == (0, "")
    for words in (
        "dflash_config.block_size",
        "sliding, 4096 positions",
        "causal in the block",
        "100 of 500 positions",
        "layers 0 to 3",
        "fails on a block_size inside dflash_config",
    ):
        assert words in " ".join(out.split())
    code, out, _ = call(monkeypatch, capsys, *asked, "--json")
    seen = json.loads(out)
    assert (code, seen["memory"]["cached_positions"], seen["memory"]["block_size"]) == (0, 100, 4)
    assert seen["target"]["problem"].startswith("the draft reads target layers")


def test_the_command_takes_the_block_size_of_the_variable(draft, monkeypatch, capsys):
    folder = draft(draft_json())
    monkeypatch.setattr(sys, "argv", ["dflash-lab", "inspect", str(folder), "--json"])
    monkeypatch.setenv("DFLASH_BLOCK_SIZE", "3")
    with pytest.raises(SystemExit):
        cli.main()
    assert json.loads(capsys.readouterr().out)["memory"]["block_size"] == 3


def test_the_command_answers_a_fault_in_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    (tmp_path / "config.json").write_text(json.dumps(draft_json()))
    code, out, err = call(monkeypatch, capsys, tmp_path)
    assert (code, out) == (1, "")
    assert err.startswith("error: there is no *.safetensors file")
    assert "run code" in err
    assert len(err.splitlines()) == 1
