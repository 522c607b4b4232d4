"""The command line: thin, and one clear line for what a user can mend."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from dflash_lab import cli
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
    monkeypatch.setattr("dflash_lab.sweeps.load_spec", lambda spec, progress=None: pair)
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
        (("sweep", "--out", "o", "--block-sizes", "4,x"), "block size is 'x'"),
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


def test_a_sweep_takes_the_variable_where_no_flag_is_given(call, monkeypatch, tmp_path):
    monkeypatch.setenv("DFLASH_BLOCK_SIZE", "4")
    call("sweep", "--out", tmp_path / "run", "--max-prompts", 1, "--max-new-tokens", 8)
    _, rows, _ = call("status", tmp_path / "run")
    assert [row.split("block_size=")[1][0] for row in rows.splitlines()] == ["4"]


def test_an_empty_or_bad_variable_stops_the_command_with_its_name(call, monkeypatch):
    for value in ("", "twelve", "0"):
        monkeypatch.setenv("DFLASH_BLOCK_SIZE", value)
        code, _, err = call("decode", "hello")
        assert code == 1
        assert "error: DFLASH_BLOCK_SIZE is" in err


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
    for name in ("decode", "sweep", "status", "report", "pair", "demo"):
        assert name in listed
