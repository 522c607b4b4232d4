"""What the sliders point at, and how its figures are written."""

import pytest

from dflash_lab.kinds import tasks
from dflash_lab.panels import (
    FIGURES,
    Grid,
    Panels,
    facts,
    make_grid,
    place_name,
    with_interval,
    written,
)
from dflash_lab.store import open_run
from dflash_lab.tests.runs import prompt, request_of, write_cell, write_run

GRID = Grid(
    cells={(1, None): "a", (4, None): "b", (8, None): "c", (16, None): "d", (4, 64): "e"},
    failed={(16, 64): "out of memory"},
)


def test_values_of_the_sliders_are_the_measured_ones_and_full_is_the_last_window():
    assert GRID.block_sizes == (1, 4, 8, 16)
    assert GRID.draft_windows == (64, None)


def test_a_measured_position_shows_its_own_cell():
    found = GRID.find(4, 64)
    assert (found.cell, found.measured) == ("e", True)
    assert found.words == "Shown: block size 4 with window 64."


def test_a_hole_shows_the_nearest_cell_of_the_same_window_and_says_so():
    found = GRID.find(8, 64)
    assert (found.cell, found.measured) == ("e", False)
    assert found.words == (
        "Block size 8 with window 64: not measured. "
        "Shown instead is the nearest measured, block size 4 with window 64."
    )


def test_a_failed_cell_says_why():
    assert "window 64: failed (out of memory)." in GRID.find(16, 64).words


def test_plain_decoding_is_the_same_at_every_window():
    found = GRID.find(1, 64)
    assert (found.cell, found.measured) == ("a", True)
    assert "the window plays no part" in found.words


def test_the_nearest_block_size_is_so_by_ratio():
    grid = Grid(cells={(2, 8): "small", (16, 8): "large"}, failed={})
    assert grid.find(8, 8).cell == "large"
    assert grid.find(4, 8).cell == "small"


def test_block_size_1_is_called_plain_decoding():
    assert place_name(1, None) == "block size 1, plain decoding"


def test_a_grid_holds_no_cell_of_another_kind(tmp_path):
    ids = {
        name: write_cell(tmp_path, request_of(["p0"], **settings), [prompt()])
        for name, settings in {
            "this": {"block_size": 4},
            "window": {"block_size": 4, "draft_window": 16},
            "plain": {"block_size": 1},
            "dtype": {"block_size": 8, "dtype": "float32"},
            "longer": {"block_size": 8, "max_new_tokens": 96},
            "machine": {"block_size": 8, "hardware": "another"},
            "draft": {"block_size": 8, "draft_sha": "d" * 16},
            "engine": {"block_size": 1, "engine": "transformers"},
        }.items()
    }
    run = open_run(tmp_path)
    grid = make_grid(run, run.cell(ids["this"]))
    assert dict(grid.cells) == {
        (4, None): ids["this"],
        (4, 16): ids["window"],
        (1, None): ids["plain"],
    }


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (25.04, "25.0"),
        (1.6359, "1.64"),
        (0.0123, "0.0123"),
        (123.4, "123"),
        (12345.6, "12,346"),
        (0, "0"),
        (None, "n/a"),
    ],
)
def test_a_number_is_written_with_three_digits_and_no_exponent(value, text):
    assert written(value) == text


def test_an_interval_is_written_where_there_is_one():
    row = {"tau": 1.5, "tau_low": 1.25, "tau_high": 1.75}
    assert with_interval(row, "tau") == "1.50 [1.25, 1.75]"
    assert with_interval(row | {"tau_low": None}, "tau") == "1.50 (no interval)"
    assert with_interval(row | {"tau": None}, "tau") == "n/a"


@pytest.fixture(scope="module")
def panels(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "small"
    return Panels(
        open_run(write_run(path, prompts=3, block_sizes=(1, 4, 8), windows=(16,), windowed=(4,)))
    )


def test_the_sliders_start_at_the_recommended_cell(panels):
    assert panels.start.cell == panels.choice.cell


def test_figures_of_a_cell_are_those_of_the_frame(panels):
    cell = panels.grid.cells[8, None]
    row = panels.frame.set_index("cell").loc[cell]
    shown = {fact.name: fact.value for fact in facts(panels.rows[cell])}
    assert shown["tokens/s"] == row["tokens_per_s"]
    assert shown["tau"] == row["tau"]
    assert shown["draft rate"] == row["draft_rate"]
    assert shown["cell"] == cell


def test_without_drafts_there_is_no_draft_rate_rather_than_zero(panels):
    shown = {fact.name: fact for fact in facts(panels.rows[panels.grid.cells[1, None]])}
    assert (shown["draft rate"].text, shown["draft rate"].value) == ("n/a", None)


def test_each_cell_is_drawn_once(panels, monkeypatch):
    cell = panels.grid.cells[4, 16]
    first = panels.pictures(cell)
    monkeypatch.setattr(panels, "_draw", lambda name, cell: pytest.fail("drawn again"))
    assert panels.pictures(cell) == first


def test_pictures_of_two_cells_differ_and_say_so(panels):
    one, two = (panels.pictures(panels.grid.cells[size, None]) for size in (4, 8))
    assert one[0].svg != two[0].svg
    assert one[1].svg != two[1].svg
    assert {image.alt for image in one}.isdisjoint({image.alt for image in two})


def test_a_run_without_a_finished_cell_is_refused(tmp_path):
    (tmp_path / "cells").mkdir()
    with pytest.raises(ValueError, match="no finished cell"):
        Panels(open_run(tmp_path))


def test_figures_of_a_task_are_those_of_its_prompts_alone(panels):
    task = tasks(panels.run)[0]
    rows = [row for row in panels.run.prompts().to_pylist() if row["task"] == task]
    part = Panels(panels.run, task=task)
    cell = part.grid.cells[8, None]
    mine = [row for row in rows if row["cell"] == cell]
    seconds = sum(row["decode_s"] for row in mine)
    tokens = sum(len(row["new_ids"]) - 1 for row in mine)
    assert part.rows[cell]["tokens_per_s"] == pytest.approx(tokens / seconds)
    assert {prompt.task for prompt in part.traces.prompts} == {task}


def test_every_figure_can_be_drawn_where_nothing_is_drafted_and_says_what_it_shows(panels):
    cell = panels.grid.cells[1, None]
    assert all(image.alt for image in panels.pictures(cell, tuple(FIGURES)))
