"""What is committed under results/reference is what its stored cells say."""

from pathlib import Path

import matplotlib
import pytest

import dflash_lab as dl
from dflash_lab.exactness import read_audits
from dflash_lab.figures import write_figures

RESULTS = Path(__file__).resolve().parents[2] / "results"
MATPLOTLIB = "3.11.2"  # drew the committed figures; other versions may write other bytes


@pytest.fixture(scope="module")
def run():
    return dl.open_run(RESULTS / "reference" / "demo")


def test_the_log_quotes_the_choice_that_the_stored_cells_give(run):
    assert dl.choose(run).sentence in (RESULTS / "README.md").read_text()


def test_the_reference_run_is_the_demos(run):
    from dflash_lab.demo import SWEEP

    sizes = {cell.block_size for cell in run.cells if cell.draft_window is None}
    assert sizes == set(SWEEP.block_sizes)
    assert len(run.cells) == 16
    exact = next(made for made in read_audits(run) if made.dtype == "float32")
    assert (exact.count("equal"), len(exact.prompts)) == (12, 12)
    assert not any(made.count("mismatch") for made in read_audits(run))


@pytest.mark.slow
@pytest.mark.skipif(
    matplotlib.__version__ != MATPLOTLIB,
    reason=f"the figures were drawn by matplotlib {MATPLOTLIB}",
)
def test_the_readmes_figure_is_rebuilt_from_the_stored_cells_byte_for_byte(run, tmp_path):
    write_figures(run, tmp_path)
    for name in ("throughput.svg", "survival.svg"):
        assert (tmp_path / name).read_bytes() == (RESULTS / "reference" / name).read_bytes()
