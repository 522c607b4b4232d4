"""Two processes that share every step of a fit give one process's result."""

import subprocess
import sys

import pytest
import torch

from dflash_lab.train.fit import FitConfig
from dflash_lab.train.recipe import TrainConfig, train_draft

PROGRAM = """
import sys
from dflash_lab.tests.test_train_processes import config
from dflash_lab.train.recipe import train_draft
train_draft(config(sys.argv[1], sys.argv[2], sys.argv[3]), lambda line: None)
"""


def config(target, out, work):
    """A short fit over rows that are there already."""
    return TrainConfig(
        target=target,
        out=out,
        work=work,
        framed_prompts=0,
        written_prompts=10,
        answer_tokens=300,
        max_new_tokens=40,
        slots=8,
        held_out=1,
        layers=1,
        block_size=8,
        device="cpu",
        dtype="float32",
        fit=FitConfig(
            steps=8,
            rows_a_step=4,
            labels_a_step=112,
            learning_rate=6e-4,
            frequent=64,
            sampled=8,
            evaluate_every=4,
            bfloat16=False,
        ),
    )


@pytest.mark.slow
def test_two_processes_give_the_result_of_one_within_rounding(llama_toy, tmp_path):
    target = str(llama_toy.target)
    train_draft(config(target, str(tmp_path / "one"), str(tmp_path / "work")))
    for name in ("checkpoint.pt", "best.pt"):
        (tmp_path / "work" / "fit" / name).rename(tmp_path / name)
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    arguments = [str(script), target, str(tmp_path / "two"), str(tmp_path / "work")]
    done = subprocess.run(
        [*launch, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    one = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    two = torch.load(tmp_path / "work" / "fit" / "checkpoint.pt", weights_only=True)
    assert two["state"]["step"] == one["state"]["step"] == 8
    for name, value in one["network"].items():
        torch.testing.assert_close(two["network"][name], value, atol=2e-5, rtol=1e-4)
