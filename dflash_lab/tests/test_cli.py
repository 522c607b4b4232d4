"""The command line: thin, and one clear line for what a user can mend."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from dflash_lab import PairSpec, cli, load, open_run
from dflash_lab.accept import RULES
from dflash_lab.exactness import read_audits
from dflash_lab.tests.toys import cut, scripted_pair


def run(*arguments, **environment):

    return subprocess.run(
        [sys.executable, "-m", "dflash_lab.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.fixture
def call(monkeypatch, capsys):
    """Run a command in this process on a scripted pair; its exit code, stdout and stderr."""
    pair = scripted_pair(cut(3), block_size=8)
    monkeypatch.setattr("dflash_lab.load.load_spec", lambda spec, progress=None: pair)
    monkeypatch.setattr("dflash_lab.sweeps.pairs.load_spec", lambda spec, progress=None: pair)
    monkeypatch.delenv("DFLASH_BLOCK_SIZE", raising=False)

    def main(*arguments):
        monkeypatch.setattr(sys, "argv", ["dflash-lab", *map(str, arguments)])
        with warnings.catch_warnings():
            warnings.simplefilter("default")  # as in a process of its own: shown, not raised
            try:
                cli.main()
                code = 0
            except SystemExit as end:
                code = end.code
        out, err = capsys.readouterr()
        return code or 0, out, err

    return main


def test_decode_prints_the_text_and_says_where_the_block_size_came_from(call, monkeypatch):
    code, out, err = call("decode", "hello", "--max-new-tokens", 20)
    assert code == 0
    assert out.strip()
    assert "20 tokens (length)" in err
    assert "block size 8 (from draft config: block_size)" in err
    _, _, err = call("decode", "hello", "--block-size", 4)
    assert "block size 4 (from flag --block-size)" in err
    monkeypatch.setenv("DFLASH_BLOCK_SIZE", "6")
    _, _, err = call("decode", "hello")
    assert "block size 6 (from DFLASH_BLOCK_SIZE)" in err
    _, _, err = call("decode", "hello", "--block-size", 4)
    assert "block size 4 (from flag --block-size)" in err


def test_a_run_without_a_draft_says_so(call):
    _, _, err = call("decode", "hello", "--block-size", 1, "--max-new-tokens", 4)
    assert (
        "block size 1 (from flag --block-size), which is plain decoding: nothing is drafted" in err
    )


@pytest.mark.parametrize("flag", [None, "2"])
@pytest.mark.parametrize("variable", [None, "4"])
@pytest.mark.parametrize("file", [None, "[6]"])
def test_a_sweep_takes_flag_before_variable_before_file_before_the_usual_sizes(
    call, monkeypatch, tmp_path, flag, variable, file
):
    made = tmp_path / "sweep.toml"
    made.write_text("" if file is None else f"block_sizes = {file}\n")
    if variable is not None:
        monkeypatch.setenv("DFLASH_BLOCK_SIZE", variable)
    flags = [] if flag is None else ["--block-sizes", flag]
    small = ("--max-prompts", 1, "--max-new-tokens", 3)
    call("sweep", "--out", tmp_path / "run", "--config", made, *flags, *small)
    sizes = [cell.block_size for cell in open_run(tmp_path / "run").cells]
    assert sizes == ([2] if flag else [4] if variable else [6] if file else [1, 2, 4, 6, 8])


def test_flags_go_before_a_sweep_file_and_the_rest_of_it_holds(call, monkeypatch, tmp_path):
    loaded = []
    scripted = load.load_spec(None)
    monkeypatch.setattr(
        "dflash_lab.sweeps.pairs.load_spec",
        lambda spec, say=None: (loaded.append(spec), scripted)[1],
    )
    made = tmp_path / "sweep.toml"
    made.write_text(
        "block_sizes = [4]\ndraft_windows = [16]\nmax_prompts = 3\nmax_new_tokens = 3\n"
        '[pair]\ntarget = "t"\ndraft = "d"\ndtype = "bfloat16"\n'
    )
    call(
        "sweep", "--out", tmp_path / "run", "--config", made, "--max-prompts", 1, "--device", "cpu"
    )
    (cell,) = open_run(tmp_path / "run").cells
    assert (cell.draft_window, cell.request["prompts"]["count"]) == (16, 1)
    assert loaded == [PairSpec(target="t", draft="d", dtype="bfloat16", device="cpu")]
    call("sweep", "--out", tmp_path / "run", "--config", made, "--pair", "smollm2")
    assert (loaded[1].name, loaded[1].dtype) == ("smollm2", "bfloat16")


def test_a_block_size_above_the_trained_one_is_lowered_in_sight(call):
    _, _, err = call("decode", "hello", "--block-size", 32)
    assert "warning: block size 32 is above the 8" in err
    assert "block size 8 (from flag --block-size)" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("decode", "hi", "--block-size", "0"), "--block-size is '0'; expected a whole number"),
        (("decode", "hi", "--block-size", "x"), "--block-size is 'x'; expected a whole number"),
        (("decode", "hi", "--draft-window", "0"), "draft window is '0'; expected a whole number"),
        (("decode", ""), "the prompt is empty"),
        (("decode", "hi " * 3000), "the target's context holds 4096"),
        (("decode", "hi", "--pair", "smolm"), "there is no pair 'smolm'"),
        (("decode", "hi", "--draft", "d"), "both target= and draft="),
        (("sweep", "--out", "o", "--block-sizes", "4,x"), "--block-size is 'x'"),
        (("sweep", "--out", "o", "--block-sizes", ""), "--block-size is ''"),
        (("sweep", "--out", "o", "--config", "gone.toml"), "gone.toml"),
        (("benchmark", "mlx", "--backend", "torch"), "the backend is 'mlx' and --backend 'torch'"),
        (("benchmark", "--backend", "jax"), "backend is 'jax'"),
        (("benchmark", "--block-size", "4,12.5"), "--block-size is '12.5'"),
        (("benchmark", "--dataset", "gsm9k"), "prompts are 'gsm9k'; expected mini, one of gsm8k"),
        (("benchmark", "--max-samples", "0"), "max_prompts is 0"),
        (("sweep", "--out", "o", "--prompts", "gone.jsonl"), "no prompt file gone.jsonl"),
        (("status", "nowhere"), "nowhere"),
        (("report", "nowhere"), "nowhere"),
    ],
)
def test_what_a_user_can_mend_is_one_line(call, monkeypatch, tmp_path, arguments, words):
    monkeypatch.chdir(tmp_path)
    code, _, err = call(*arguments)
    assert code == 1
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert words in errors[0]
    assert "Traceback" not in err


@pytest.mark.parametrize("command", [("decode", "hello"), ("sweep", "--out", "o"), ("benchmark",)])
def test_an_empty_or_bad_variable_stops_a_command_with_its_name(
    call, monkeypatch, tmp_path, command
):
    monkeypatch.chdir(tmp_path)
    for value in ("", "twelve", "0", "12.5"):
        monkeypatch.setenv("DFLASH_BLOCK_SIZE", value)
        code, _, err = call(*command)
        assert code == 1
        assert f"error: DFLASH_BLOCK_SIZE is {value!r}; expected a whole number from 1" in err
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_a_status_and_a_report_work_together(call, tmp_path):
    out = tmp_path / "run"
    arguments = ("sweep", "--out", out, "--block-sizes", "1,4,8", "--draft-windows", "full,16")
    code, table, _ = call(*arguments, "--max-prompts", 3, "--max-new-tokens", 12)
    assert code == 0
    assert "tokens/s" in table
    code, rows, _ = call("status", out)
    assert code == 0
    assert len(rows.splitlines()) == 5  # 1, 4 and 8 at full window, 4 and 8 at 16
    code, path, _ = call("report", out)
    assert code == 0
    assert "<html" in Path(path.strip()).read_text()


def test_an_unknown_command_and_help_answer_without_a_framework():
    made = run("nonsense")
    assert made.returncode != 0
    assert "nonsense" in made.stderr
    assert "Traceback" not in made.stderr
    listed = run("--help").stdout
    for name in ("decode", "sweep", "benchmark", "status", "report", "pair", "demo"):
        assert name in listed


@pytest.fixture
def small_run(call, tmp_path):
    """A run of a scripted pair whose draft is a real folder on disk."""
    call(
        *("sweep", "--out", tmp_path / "run", "--block-sizes", "1,2,8"),
        *("--max-prompts", 3, "--max-new-tokens", 20, "--first-again"),
    )
    return tmp_path / "run"


def test_recommend_says_what_to_run_and_how_to_set_it(call, small_run):
    code, out, _ = call("recommend", small_run)
    assert code == 0
    assert "over 3 prompts" in out and "Rule of thumb" in out
    assert "the first cell measured again at the end took" in out
    size = out.split("variable: DFLASH_BLOCK_SIZE=")[1].split()[0]
    assert f"python: DecodeConfig(block_size={size})" in out and f"--block-size {size}\n" in out
    code, out, err = call("recommend", small_run, "--json", "--objective", "latency")
    assert json.loads(out)["choice"]["objective"] == "latency"
    assert "variable: DFLASH_BLOCK_SIZE=" in err


def test_a_cost_table_of_one_machine_serves_a_recommendation_on_another(call, small_run, tmp_path):
    code, out, _ = call(
        *("costs", "--out", tmp_path / "costs.json", "--block-sizes", "2,8"),
        *("--contexts", "32", "--repeats", 2),
    )
    assert code == 0 and "breaks even at tau" in out
    code, out, _ = call("recommend", small_run, "--costs", tmp_path / "costs.json")
    assert code == 0
    assert "predicted tokens/s" in out and "Prediction beside 3 measured cells" in out
    code, _, err = call("recommend", small_run, "--map", "m")
    assert code == 1 and "--map gives acceptance and no seconds; give --costs too." in err
    code, _, err = call("costs", "--out", tmp_path / "costs.txt")
    assert code == 1 and "expected a .json or .parquet file" in err


def test_lock_writes_the_chosen_size_and_unlock_takes_it_out(call, small_run, tmp_path, qwen3_toy):
    from dflash_lab.checkpoint import draft_fingerprint, read_draft_config

    draft = tmp_path / "draft"
    shutil.copytree(qwen3_toy.draft, draft)
    before = (draft / "config.json").read_bytes()
    code, _, err = call("recommend", small_run, "--lock", "--draft-model", draft)
    assert code == 1 and "is not the one that this run measured" in err
    code, _, err = call("recommend", small_run, "--lock")
    assert code == 1 and "which draft? Name its folder: --draft-model." in err
    for cell in small_run.glob("cells/*/cell.json"):
        cell.write_text(cell.read_text().replace("d" * 64, draft_fingerprint(draft)))
    code, out, _ = call("recommend", small_run, "--lock", "--draft-model", draft)
    assert code == 0 and "locked: block_size = " in out
    assert f"block_size={read_draft_config(draft).block_size})" in out
    code, out, _ = call("recommend", small_run, "--unlock", "--draft-model", draft)
    assert code == 0 and "restored: " in out
    assert (draft / "config.json").read_bytes() == before


def test_a_shape_needs_both_configs_and_takes_nothing_that_a_loaded_pair_has(call, tmp_path):
    file = tmp_path / "costs.json"
    code, _, err = call("costs", "--out", file, "--shape", "config.json")
    assert code == 1 and "--shape and --draft-shape go together" in err
    both = ("--shape", "t.json", "--draft-shape", "d.json")
    code, _, err = call("costs", "--out", file, *both, "--pair", "smollm2")
    assert code == 1 and "random weights in torch; leave out pair" in err


def test_audit_says_what_was_compared_and_keeps_it_beside_a_run(call, tmp_path):
    assert call("sweep", "--out", tmp_path, "--max-prompts", 2, "--block-sizes", 8)[0] == 0
    asked = ("audit", "--max-prompts", 2, "--max-new-tokens", 9, "--dtype", "float32")
    code, out, _ = call(*asked, "--out", tmp_path)
    assert code == 0
    assert "exact in float32: 2 of 2 prompts equal to transformers' generate" in out
    (kept,) = read_audits(open_run(tmp_path))
    assert (kept.count("equal"), kept.max_new_tokens) == (2, 9)


def test_an_audit_with_a_mismatch_ends_in_1_and_names_prompt_and_place(call, monkeypatch):
    right = RULES["match"]
    monkeypatch.setitem(RULES, "match", lambda v: min(right(v) + 1, len(v.drafted)))
    code, out, _ = call("audit", "--max-prompts", 1, "--max-new-tokens", 9)
    assert code == 1
    assert "in float32 1 of 1 differs by more than rounding explains" in out
    assert "mismatch at new token 4" in out


def test_a_sweep_is_audited_where_asked(call, tmp_path):
    asked = ("sweep", "--max-prompts", 2, "--max-new-tokens", 9, "--block-sizes", 8)
    _, _, err = call(*asked, "--out", tmp_path / "with", "--audit")
    assert "exact in float32: 2 of 2 prompts equal" in err
    call(*asked, "--out", tmp_path / "without")
    assert read_audits(open_run(tmp_path / "without")) == []


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "wide"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("decode", "hi", "--draft-window"),
        ("sweep", "--out", "o", "--draft-windows"),
        ("benchmark", "--draft", "d", "--target", "t", "--draft-sliding-window-size"),
        ("serve", "tiny", "--draft-window"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_bad_window_is_refused_before_anything_is_loaded(
    call, monkeypatch, tmp_path, arguments, value
):
    def load(*_):
        raise AssertionError("loaded")

    monkeypatch.chdir(tmp_path)
    for home in ("load", "sweeps.pairs"):
        monkeypatch.setattr(f"dflash_lab.{home}.load_spec", load)
    code, _, err = call(*arguments, value)
    assert code == 1
    assert f"error: draft window is '{value}'; expected a whole number from 1" in err


def test_sampling_flags_have_their_effect_on_a_real_pair(call, monkeypatch, toy_pair):
    monkeypatch.setattr("dflash_lab.load.load_spec", lambda spec, progress=None: toy_pair)

    def said(*flags):
        code, out, err = call("decode", "hi", "--max-new-tokens", 5, *flags)
        assert code == 0, err
        return out

    greedy = said()
    assert len({said("--temperature", 1, "--seed", seed) for seed in range(1, 6)}) > 1
    assert said("--temperature", 1, "--seed", 1) == said("--temperature", 1, "--seed", 1)
    assert said("--temperature", 2, "--top-k", 1) == greedy
    penalised = said("--repetition-penalty", 2.0)
    assert penalised == said("--repetition-penalty", 2.0, "--block-size", 1)


@pytest.mark.parametrize("flag", ["--logit-bias", "--logprobs", "--presence-penalty", "--n"])
@pytest.mark.parametrize("command", [("decode", "hi"), ("benchmark",), ("sweep", "--out", "o")])
def test_a_flag_that_nothing_honours_is_refused_by_its_name(call, command, flag):
    code, _, err = call(*command, flag, "1")
    assert code == 2
    assert flag in err
