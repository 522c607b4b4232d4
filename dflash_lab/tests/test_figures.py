"""All figures of a run as files: the same bytes everywhere, and a check that notices changes."""

import json
import os
import shutil
import subprocess
import sys

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from packaging.requirements import Requirement

from dflash_lab import plot
from dflash_lab.analyse import (
    break_even_frame,
    cell_frame,
    depth_frame,
    prompt_pairs,
    stage_frame,
    task_frame,
    timeline_frame,
)
from dflash_lab.figures import (
    FIGURES,
    MANIFEST,
    Material,
    NothingToDraw,
    check_figures,
    latex_table,
    write_figures,
)
from dflash_lab.store import open_run
from dflash_lab.tests.runs import block, prompt, request_of, write_cell, write_run

FORMS = ("svg", "pdf", "png", "csv")
BESIDE = {MANIFEST, "captions.md", "cells.tex", "requirements.txt"}
DRAW = """
import sys
from pathlib import Path
from dflash_lab.figures import write_figures
from dflash_lab.store import open_run
write_figures(open_run(Path(sys.argv[1])), Path(sys.argv[2]))
"""


SOME = ("cost", "survival")  # drawn where one figure would do as well as all
LEFT_OUT = {"stages", "clipped", "predicted", "policies"}  # a made-up run has nothing for these


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "demo"
    return open_run(write_run(path, prompts=3, block_sizes=(1, 4, 8), windows=(16,), windowed=(4,)))


@pytest.fixture(scope="module")
def written(run, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        quick_pdf(patch)
        yield write_figures(run, tmp_path_factory.mktemp("figures"), names=SOME)


def quick_pdf(patch):
    """A PDF takes a second, most of it for its fonts; the slow tests write them."""
    patch.setattr(plot.files, "to_pdf", lambda figure: plot.to_svg(figure, "pdf").encode())


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    """A run of the demo's size and all its figures."""
    path = tmp_path_factory.mktemp("runs") / "demo"
    return write_figures(open_run(write_run(path)), path / "figures")


@pytest.mark.slow
def test_every_figure_is_there_in_every_form_or_its_absence_has_a_reason(every):
    assert every.left_out.keys() == LEFT_OUT
    assert "timing = stages" in every.left_out["stages"]
    drawn = [name for name in FIGURES if name not in every.left_out]
    wanted = {f"{name}.{form}" for name in drawn for form in FORMS} | BESIDE
    assert {path.name for path in every.files} == wanted
    assert {path.name for path in every.folder.iterdir()} == wanted
    captions = (every.folder / "captions.md").read_text()
    assert all(f"## {name}\n" in captions for name in drawn)
    assert "2-core x86-64 Intel Xeon, AMX, 24 GB" in captions


def test_figures_that_were_asked_for_are_there_in_every_form_and_no_others(written):
    assert written.left_out == {}
    wanted = {f"{name}.{form}" for name in SOME for form in FORMS} | BESIDE
    assert {path.name for path in written.folder.iterdir()} == wanted


def test_a_figure_or_a_size_that_there_is_not_is_an_error_that_lists_those_that_are(run, tmp_path):
    with pytest.raises(ValueError, match=r"the figure is 'costs'; expected one of throughput, .*"):
        write_figures(run, tmp_path, names=["costs"])
    with pytest.raises(ValueError, match=r"size is 'poster'; expected one of page, column, slide"):
        write_figures(run, tmp_path, names=SOME, size="poster")


@pytest.mark.parametrize(("size", "width"), [("column", 3.25 * 300), ("slide", 1920)])
def test_a_size_has_its_width_in_pixels(run, size, width):
    with plot.sized(size):
        figure = FIGURES["survival"](Material(run)).figure
    data = plot.to_png(figure)
    assert int.from_bytes(data[16:20]) == int(width)  # the header's width
    assert int.from_bytes(data[20:24]) == (1080 if size == "slide" else 750)


@pytest.mark.slow
def test_two_processes_write_the_same_bytes(every, tmp_path):
    folders = []
    for seed, zone, place in (("1", "UTC", "a"), ("77", "Asia/Tokyo", "b")):
        here = tmp_path / place
        here.mkdir()
        settings = {
            "PYTHONHASHSEED": seed,
            "TZ": zone,
            "LC_ALL": "C.UTF-8" if place == "a" else "C",
        }
        command = [sys.executable, "-W", "error", "-c", DRAW, str(every.folder.parent), "figures"]
        subprocess.run(command, check=True, cwd=here, env=os.environ | settings)
        folders.append(here / "figures")
    names = sorted(path.name for path in folders[0].iterdir())
    assert len(names) > 50
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name


def test_a_check_finds_nothing_where_nothing_changed(run, written):
    found = check_figures(run, written.folder)
    assert not found.different and not found.cells_changed and not found.versions_changed
    assert len(found.equal) == len(written.files) - 1  # all but the manifest
    assert found.sentences == (f"{len(found.equal)} of {len(found.equal)} files are the same",)


def copied(written, tmp_path):
    return shutil.copytree(written.folder, tmp_path / "figures")


def test_a_check_notices_a_changed_cell(run, written, tmp_path):
    path = shutil.copytree(run.path, tmp_path / "run")
    cell = next(cell for cell in open_run(path).cells if cell.block_size == 8)
    file = path / "cells" / cell.id / "blocks.parquet"
    table = pq.read_table(file)
    times = [2 * seconds for seconds in table["total_s"].to_pylist()]
    place = table.schema.get_field_index("total_s")
    column = pa.array(times, table.schema.field(place).type)
    pq.write_table(table.set_column(place, table.schema.field(place), column), file)
    found = check_figures(open_run(path), written.folder)
    assert found.cells_changed
    assert found.different["cost.svg"] == "is drawn differently now"
    assert "survival.svg" in found.equal
    assert "the run's cells are not those that were drawn" in found.sentences


def test_a_check_names_a_library_of_another_version_and_leaves_png_alone(run, written, tmp_path):
    folder = copied(written, tmp_path)
    told = json.loads((folder / MANIFEST).read_text())
    told["versions"]["matplotlib"] = "3.0.0"
    (folder / MANIFEST).write_text(json.dumps(told))
    found = check_figures(run, folder)
    then, now = found.versions_changed["matplotlib"]
    assert then == "3.0.0" and now != then
    assert f"matplotlib was 3.0.0 and is {now}" in found.sentences
    assert not [name for name in found.equal if name.endswith(".png")]
    assert "cost.svg" in found.equal


def test_a_check_names_files_that_were_edited_or_are_gone(run, written, tmp_path):
    folder = copied(written, tmp_path)
    (folder / "cost.svg").write_text("mine")
    (folder / "cost.csv").unlink()
    assert check_figures(run, folder).different == {
        "cost.svg": "was changed on disk",
        "cost.csv": "is missing",
    }
    with pytest.raises(ValueError, match="holds no MANIFEST"):
        check_figures(run, tmp_path)


def test_the_requirements_can_be_installed_and_name_what_was_measured_with(run, written):
    lines = (written.folder / "requirements.txt").read_text().splitlines()
    pins = {r.name: r for r in map(Requirement, (x for x in lines if not x.startswith("#")))}
    told = run.cells[0].provenance["versions"]
    assert {"torch", "transformers", "numpy"} <= pins.keys()
    assert str(pins["torch"].specifier) == f"=={told['torch'].partition('+')[0]}"
    assert f"# python {told['python']}" in lines


def test_a_latex_table_escapes_what_latex_would_read(run):
    cells = cell_frame(run).head(2).assign(engine=["a_b&c%", r"d\e~f^{g}"])
    text = latex_table(cells)
    assert r"a\_b\&c\%" in text
    assert r"d\textbackslash{}e\textasciitilde{}f\textasciicircum{}\{g\}" in text


def test_a_run_without_a_draft_leaves_out_what_needs_one(tmp_path):
    request = request_of(["p0"], block_size=1)
    write_cell(tmp_path / "run", request, [prompt()], [block(0, 1), block(0, 1, index=1)])
    material = Material(open_run(tmp_path / "run"))
    with pytest.raises(NothingToDraw, match="no cell drafts anything"):
        FIGURES["heatmap"](material)
    assert FIGURES["throughput"](material).figure.alt


# The frames behind them


def staged(tmp_path):
    rows = [
        block(1, 4, draft_s=0.01, verify_s=0.03, commit_s=0.002, total_s=0.05, start=10),
        block(1, 4, draft_s=0.03, verify_s=0.03, commit_s=0.004, total_s=0.07, index=1),
    ]
    write_cell(tmp_path / "run", request_of(["p0"], timing="stages"), [prompt()], rows)
    return open_run(tmp_path / "run")


def test_stages_are_means_of_blocks_and_what_is_left_is_other(tmp_path):
    run = staged(tmp_path)
    row = stage_frame(run).iloc[0]
    found = [row[name] for name in ("draft_s", "verify_s", "commit_s", "total_s", "other_s")]
    assert found == pytest.approx([0.02, 0.03, 0.003, 0.06, 0.007])
    figure = plot.stages(stage_frame(run))
    assert "block size 4: draft 20.0, verify 30.0, other 10.0" in figure.alt
    assert FIGURES["stages"](Material(run)).figure.alt == figure.alt


def test_break_even_is_the_time_of_a_block_in_the_fastest_plain_steps(run):
    cells = cell_frame(run)
    own = cells[cells.engine == "dflash_lab"]
    fastest = own[own.block_size == 1].seconds_per_block.min()
    frame = break_even_frame(cells)
    row = frame[(frame.block_size == 8) & frame.draft_window.isna()].iloc[0]
    wanted = own[own.cell == row.cell].seconds_per_block.iloc[0] / fastest
    assert row.round_cost == pytest.approx(wanted)
    assert set(frame.block_size) == set(own.block_size) - {1}


def test_tasks_split_a_cell_into_parts_that_add_up(run):
    frame, prompts = task_frame(run), run.prompts().to_pandas()
    cell = frame.cell.iloc[0]
    mine = prompts[(prompts.cell == cell) & (prompts.task == "math")]
    row = frame[(frame.cell == cell) & (frame.task == "math")].iloc[0]
    tokens = sum(len(ids) - 1 for ids in mine.new_ids)
    assert row.tokens_per_s == pytest.approx(tokens / mine.decode_s.sum())
    assert frame[frame.cell == cell].prompts.sum() == prompts[prompts.cell == cell].shape[0]


def test_pairs_hold_each_shared_prompt_once_and_the_worst_first(run):
    cells = cell_frame(run)
    own = cells[(cells.engine == "dflash_lab") & (cells.dtype == "bfloat16")]
    plain, drafting = (own[own.block_size == size].cell.iloc[0] for size in (1, 8))
    frame = prompt_pairs(run, drafting, plain)
    assert frame.prompt_id.is_unique and frame.speedup.is_monotonic_increasing
    wanted = frame.tokens_per_s / frame.against_per_s
    assert frame.speedup.tolist() == pytest.approx(wanted.tolist())
    figure = plot.pairs(frame, "block size 8", "plain decoding")
    assert f"{(frame.speedup > 1).sum()} gain" in figure.alt


def test_depth_cuts_all_cells_at_the_same_positions(run):
    frame, blocks = depth_frame(run, depths=3), run.blocks().to_pandas()
    cell = frame.cell.iloc[0]
    mine = blocks[blocks.cell == cell]
    assert frame[frame.cell == cell].blocks.sum() == len(mine)
    weights = frame[frame.cell == cell]
    mean = (weights.context * weights.blocks).sum() / weights.blocks.sum()
    assert mean == pytest.approx(mine.start.mean())


def test_a_timeline_begins_with_the_first_token_and_ends_with_the_output(run):
    cells = cell_frame(run)
    cell = cells[(cells.engine == "dflash_lab") & (cells.block_size == 8)].cell.iloc[0]
    row = next(r for r in run.prompts().to_pylist() if r["cell"] == cell)
    frame = timeline_frame(run, cell, row["prompt_id"])
    assert frame.begin_s.iloc[0] == pytest.approx(row["ttft_s"])
    assert frame.tokens.iloc[-1] == len(row["new_ids"])
    assert frame.begin_s.iloc[1:].tolist() == pytest.approx(frame.end_s.iloc[:-1].tolist())
    with pytest.raises(ValueError, match="holds no prompt 'nobody'"):
        timeline_frame(run, cell, "nobody")


def test_a_clipped_estimate_is_drawn_beside_the_truth():
    rows = [
        {
            "from_block_size": 8,
            "block_size": size,
            "draft_window": None,
            "kind": kind,
            "tau": tau,
            "wrong_share": 0.25,
        }
        for size, kind, tau in (
            (2, "estimate", 1.5),
            (2, "re-draft", 1.6),
            (4, "estimate", 2.0),
            (4, "re-draft", 2.4),
        )
    ]
    figure = plot.clipped(pd.DataFrame(rows).astype({"draft_window": "Int64"}))
    assert "drafted anew: 1.60 at 2, 2.40 at 4" in figure.alt
    assert "25 %" in figure.notes[0]
