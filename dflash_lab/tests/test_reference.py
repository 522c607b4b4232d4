"""What is committed under results/reference is what its stored cells say."""

from pathlib import Path

import matplotlib
import pytest

import dflash_lab as dl
from dflash_lab.exactness import read_audits
from dflash_lab.figures import write_figures
from dflash_lab.panels import Panels
from dflash_lab.reports.content import exactness, tables
from dflash_lab.store import to_json
from dflash_lab.tests.pages import data_of, read_page

FIGURES = ("throughput", "survival")
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
    write_figures(run, tmp_path, names=FIGURES)
    for name in (f"{figure}.svg" for figure in FIGURES):
        assert (tmp_path / name).read_bytes() == (RESULTS / "reference" / name).read_bytes()


@pytest.mark.slow
def test_the_committed_report_says_what_the_stored_cells_say(run):
    page = (run.path / "report.html").read_text(encoding="utf-8")
    made, panels = read_page(page), Panels(run)
    assert made.by_class("answer").text == dl.choose(run).sentence
    assert exactness(run)["sentence"] in " ".join(made.text.split())
    for shown, (name, table) in zip(made.all("table"), tables(panels).items(), strict=True):
        assert next(shown.all("caption")).text == name
        rows = list(next(shown.all("tbody")).all("tr"))
        texts = [tuple(cell.text for cell in (*row.all("th"), *row.all("td"))) for row in rows]
        assert texts == [tuple(text for text, _ in row) for row in table.rows]


@pytest.mark.parametrize("private", ["/home/", "/root/", "/tmp/", "/work/", "/Users/"])
def test_the_committed_report_names_no_folder_of_the_machine_that_wrote_it(run, private):
    page = (run.path / "report.html").read_text(encoding="utf-8")
    assert private not in page + to_json(data_of(read_page(page)))
