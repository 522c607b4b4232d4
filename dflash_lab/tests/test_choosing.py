"""The guide's session from a sweep to a locked size, and the notebook of its questions."""

import os
import re
from pathlib import Path

import nbformat
import pytest

import dflash_lab as dl
from dflash_lab import cli
from dflash_lab.load import EMBEDDED
from dflash_lab.prompts import DATA

ROOT = Path(dl.__file__).parents[1]
DATASETS = os.environ.get("DFLASH_LAB_DATASETS")
QUESTIONS = (
    "What if it is too high?",
    "Can I change it without touching files?",
    "How do I know it is optimal?",
    "Does it cost memory?",
)


def test_row_14_the_notebook_answers_each_question_with_a_measurement():
    notebook = nbformat.read(ROOT / "notebooks" / "04_choosing_a_block_size.ipynb", as_version=4)
    text = "\n".join(
        ("\n" if cell.cell_type == "markdown" else "\n>code\n") + cell.source
        for cell in notebook.cells
    )
    for question in QUESTIONS:
        assert question in notebook.cells[0].source
        (part,) = re.findall(rf"^## {re.escape(question)}$(.*?)(?=^## |\Z)", text, re.M | re.S)
        assert ">code" in part, f"nothing is measured for {question!r}"


def session(say, draft_folder, models, questions, samples, tokens):
    """What a user types, one call a line; `say` runs a command and gives back what it printed."""
    draft = ("--draft-model", draft_folder)
    for size in (4, 8, 12, 16):
        shown = say(
            *("benchmark", "--backend", "torch", *models, *draft),
            *("--block-size", size, "--dataset", questions, "--max-samples", samples),
            *("--max-new-tokens", tokens, "--dtype", "float32", "--out", "run"),
        )
        assert f"prompts: {samples} of the" in shown
    run = dl.open_run("run")
    own = [cell for cell in run.cells if cell.engine == "dflash_lab"]
    assert sorted(cell.block_size for cell in own) == [1, 4, 8, 12, 16]
    frame = dl.cell_frame(run)
    for row in frame.to_dict("records"):
        assert f"{row['tokens_per_s']:.2f}" in shown
    found = dl.recommend(run)
    assert found.choice.sentence in say("recommend", "run")
    before = (draft_folder / "config.json").read_bytes()
    assert f"= {found.block_size}" in say("recommend", "run", "--lock", *draft)
    asked = ("decode", "Hello.", *models, *draft, "--dtype", "float32")
    short = ("--max-new-tokens", 4)
    assert f"block size {found.block_size} (from draft config" in say(*asked, *short)
    os.environ["DFLASH_BLOCK_SIZE"] = "6"
    assert "block size 6 (from DFLASH_BLOCK_SIZE)" in say(*asked, *short)
    del os.environ["DFLASH_BLOCK_SIZE"]
    say("recommend", "run", "--unlock", *draft)
    assert (draft_folder / "config.json").read_bytes() == before


@pytest.fixture
def say(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DFLASH_BLOCK_SIZE", raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments):
        try:
            cli.main([str(argument) for argument in arguments])
        except SystemExit as end:
            assert not end.code, capsys.readouterr()
        told = capsys.readouterr()
        return told.out + told.err

    yield run
    os.environ.pop("DFLASH_BLOCK_SIZE", None)


def copied(folder, tmp_path):
    made = tmp_path / "draft"
    made.mkdir()
    for name in ("config.json", "model.safetensors"):
        (made / name).write_bytes((folder / name).read_bytes())
    return made


@pytest.mark.slow
def test_the_guides_session_on_the_tiny_pair(say, tmp_path):
    rows = [f'{{"question": "What is {n} and {n}?", "answer": "#### {2 * n}"}}' for n in range(5)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    models = ("--model", DATA / "tiny_pair" / "target")
    session(say, copied(EMBEDDED["tiny"], tmp_path), models, "gsm8k=rows.jsonl", 3, 24)


@pytest.mark.slow
@pytest.mark.skipif(DATASETS is None, reason="DFLASH_LAB_DATASETS is not set: no gsm8k rows here")
def test_the_guides_session_on_gsm8k_rows_with_the_embedded_pair(say, tmp_path):
    questions = f"gsm8k={DATASETS}/gsm8k/test-sample.jsonl"
    draft = copied(EMBEDDED["smollm2"], tmp_path)
    session(say, draft, ("--model", "smollm2"), questions, 2, 24)
