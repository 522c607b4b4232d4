"""The explorer: its controls choose, its view follows, and nothing fails in silence."""

import json
import re
import sys
import time

import pytest

import dflash_lab.explorer
from dflash_lab.analyse import cell_frame
from dflash_lab.costs import CostTable, write_costs
from dflash_lab.explorer import ALL, FURTHER, LatestOnly, explore
from dflash_lab.panels import Panels
from dflash_lab.store import open_run
from dflash_lab.tests.pages import read_page, shown_text
from dflash_lab.tests.runs import HARDWARE, block, prompt, request_of, write_cell, write_run
from dflash_lab.tests.test_what_if import cost
from dflash_lab.tokens import SHOWN_AS

SIZES, WINDOW = (1, 4, 8), 16  # the window is measured at block size 4 alone


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "explored"
    return open_run(
        write_run(
            path, prompts=3, block_sizes=SIZES, windows=(WINDOW,), windowed=(4,), hostile=True
        )
    )


@pytest.fixture(scope="module")
def read_once():
    """`Panels`, and what was read and drawn by it, kept for all tests."""
    made = {}

    def panels(run, arm=None, task=None, length=None, costs=None):
        key = (run.path, arm and arm.id, task, length, str(costs))
        if key not in made:
            made[key] = Panels(run, arm, task, length, costs)
        return made[key]

    return panels


@pytest.fixture
def quick(monkeypatch, read_once):
    """Explorers that draw nothing ahead, and nothing that an earlier test drew."""
    monkeypatch.setattr(dflash_lab.explorer, "AHEAD_S", 0)
    monkeypatch.setattr(dflash_lab.explorer, "Panels", read_once)


@pytest.fixture
def panel(run, quick):
    """An explorer at block size 8 and the full window."""
    made = explore(run)
    made.block_size.value, made.draft_window.value = 8, "full"
    settle(made)
    return made


def settle(panel, limit=20.0):
    """Wait until the view shows what the controls say."""
    end = time.monotonic() + limit
    while not shows(panel) and time.monotonic() < end:
        time.sleep(0.01)
    assert shows(panel)


def shows(panel):
    found = panel.found
    if found.words not in read_page(panel.view.value).text:
        return False
    drawn = [p.alt for p in panel.panels.pictures(found.cell, panel.names)]
    return [alt for _, alt in pictures(panel)] == drawn


def pictures(panel):
    images = read_page(panel.view.value).all("img")
    return [(image.attributes["src"], image.attributes["alt"]) for image in images]


def test_sliders_offer_what_was_measured(panel):
    assert [value for _, value in panel.block_size.options] == list(SIZES)
    assert [value for _, value in panel.draft_window.options] == [WINDOW, "full"]
    assert panel.block_size.description == "block size"
    assert panel.draft_window.description == "sliding-window size (draft)"


def test_the_block_size_slider_changes_pictures_their_words_and_figures(panel, run):
    before = pictures(panel)
    panel.block_size.value = 4
    settle(panel)
    after = pictures(panel)
    assert len(before) == len(after) == 3
    assert all(
        old[0] != new[0] and old[1] != new[1] for old, new in zip(before, after, strict=True)
    )
    frame = cell_frame(run).set_index("cell")
    values = {part.attributes["value"] for part in read_page(panel.html).all("data")}
    assert str(float(frame.loc[panel.found.cell, "tokens_per_s"])) in values


def test_the_window_slider_changes_pictures_and_their_words(panel):
    panel.block_size.value = 4
    settle(panel)
    before = pictures(panel)
    panel.draft_window.value = WINDOW
    settle(panel)
    assert all(
        old[0] != new[0] and old[1] != new[1]
        for old, new in zip(before, pictures(panel), strict=True)
    )


def test_a_hole_is_named_and_the_nearest_cell_is_shown(panel):
    panel.draft_window.value = WINDOW
    settle(panel)
    assert "Block size 8 with window 16: not measured." in read_page(panel.html).text
    assert panel.found.cell == panel.panels.grid.cells[4, WINDOW]
    assert all(alt for _, alt in pictures(panel))


def test_a_cell_seen_before_is_shown_again_in_under_100_ms(panel):
    panel.block_size.value = 4
    settle(panel)
    seconds = []
    for size in (8, 4) * 4:
        began = time.perf_counter()
        panel.block_size.value = size
        assert panel.found.words in panel.html
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.1


@pytest.mark.slow
def test_thirty_quick_changes_draw_three_times_at_most_and_end_at_the_last(panel, monkeypatch):
    made, drawn = panel.panels.pictures, []

    def slowly(cell, names):
        time.sleep(0.2)
        drawn.append(cell)
        return made(cell, names)

    with monkeypatch.context() as patch:
        patch.setattr(panel.panels, "pictures", slowly)
        patch.setattr(panel.panels, "drawn", lambda cell, names: False)
        panel._jobs.quiet = 2.0  # a busy machine must not take its own pauses for the user's
        for size in [8, 1, 4] * 10:
            panel.block_size.value = size
        for _ in range(1000):
            if panel.found.words in panel.view.value:
                break
            time.sleep(0.01)
    settle(panel)
    assert panel.block_size.value == 4
    assert 1 <= len(drawn) <= 3


class FakeTimer:
    """A timer that rings when a test says so."""

    made: list["FakeTimer"]
    daemon = False

    def __init__(self, seconds, function, arguments):
        self.ring = lambda: None if self.cancelled else function(*arguments)
        self.cancelled = False
        self.made.append(self)

    def start(self):
        assert self.daemon

    def cancel(self):
        self.cancelled = True


@pytest.fixture
def jobs(monkeypatch):
    monkeypatch.setattr(FakeTimer, "made", [], raising=False)
    return LatestOnly(quiet=3600, timer=FakeTimer)


def test_jobs_that_follow_each_other_closely_leave_the_last(jobs):
    done = []
    for number in range(10):
        jobs.submit(lambda number=number: done.append(number))
    assert done == [0]
    for timer in FakeTimer.made:
        timer.ring()
    assert done == [0, 9]


def test_a_job_after_a_pause_is_done_at_once(jobs):
    done = []
    jobs.quiet = 0
    for number in range(3):
        jobs.submit(lambda number=number: done.append(number))
    assert done == [0, 1, 2]
    assert FakeTimer.made == []


def test_a_cancelled_job_is_not_done(jobs):
    done = []
    for number in range(2):
        jobs.submit(lambda number=number: done.append(number))
    jobs.cancel()
    FakeTimer.made[0].ring()
    assert done == [0]


def test_an_exception_appears_in_the_panel_and_is_gone_after_the_next_change(panel, monkeypatch):
    shown = panel.html
    with monkeypatch.context() as patch:
        patch.setattr(panel.panels, "pictures", fail)
        panel.block_size.value = 4
        for _ in range(500):
            if panel.problem.value:
                break
            time.sleep(0.01)
    page = read_page(panel.problem.value)
    assert "MemoryError" in page.text
    assert "no room for <b>$x$</b>" in page.text
    assert "in fail" in next(page.all("details")).text
    assert panel.html == shown
    panel.block_size.value = 1
    settle(panel)
    assert panel.problem.value == ""


def fail(cell, names):
    raise MemoryError("no room for <b>$x$</b>")


def test_the_prompt_picker_changes_the_text_and_shows_it_literally(panel, run):
    texts = {row["prompt_id"]: row["text"] for row in run.prompts().to_pylist()}
    seen = []
    for label, key in panel.prompt.options:
        panel.prompt.value = key
        settle(panel)
        text = read_page(panel.html).by_class("dl-text")
        assert shown_text(text) == texts[label].translate(SHOWN_AS)
        seen.append(shown_text(text))
        told = panel.viewer.trace
        taken = [t for block in told["blocks"] for t in (*block["kept"], block["own"] or "")]
        assert told["first"] + "".join(taken) == texts[label].translate(SHOWN_AS)
    assert len(set(seen)) == len(panel.prompt.options) == 3
    assert not list(read_page(panel.html).all("script"))


def test_the_panel_is_a_widget_with_a_twin_in_html_and_words(panel):
    bundle = panel._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert bundle["text/html"] == panel.html
    assert len(list(read_page(bundle["text/html"]).all("img"))) == 3
    assert not re.search(r"(VBox|Slider|Dropdown)\(", bundle["text/plain"])
    assert "block sizes 1, 4, 8" in bundle["text/plain"]
    json.dumps(bundle, allow_nan=False)


@pytest.mark.slow
def test_every_cell_of_a_small_grid_is_drawn_ahead(run, monkeypatch):
    monkeypatch.setattr(dflash_lab.explorer, "AHEAD_S", 600)
    panels = explore(run).panels
    assert all(panels.drawn(cell) for cell in panels.grid.cells.values())


@pytest.mark.slow
def test_inside_a_notebook_cells_are_drawn_while_it_is_idle(run):
    import asyncio

    async def notebook():
        panels = explore(run).panels
        cells = panels.grid.cells.values()
        at_once = sum(map(panels.drawn, cells))
        while not all(map(panels.drawn, cells)):
            await asyncio.sleep(0.02)
        return at_once

    assert asyncio.run(asyncio.wait_for(notebook(), 60)) == 1


def test_without_windows_the_window_slider_says_full_and_cannot_be_moved(tmp_path):
    write_run(tmp_path, prompts=2, block_sizes=(1, 4), windows=())
    made = explore(tmp_path)
    assert made.draft_window.options == (("full", "full"),)
    assert made.draft_window.disabled


def test_a_run_of_the_library_alone_has_nothing_to_explore(tmp_path):
    write_cell(tmp_path, request_of(["p0"], engine="transformers", block_size=1), [prompt()])
    with pytest.raises(ValueError, match="own loop"):
        explore(tmp_path)


@pytest.mark.parametrize("name", FURTHER.values(), ids=str)
def test_each_further_figure_can_be_put_beside_the_two(panel, name):
    panel.figure.value = name
    settle(panel)
    assert panel.problem.value == ""
    alts = [alt for _, alt in pictures(panel)]
    assert len(set(alts)) == len(alts) == 3
    assert all(alts)


def test_the_grid_of_sizes_and_windows_marks_the_place_that_is_looked_at(panel):
    panel.figure.value = "heatmap"
    panel.block_size.value = 4
    settle(panel)
    before = pictures(panel)[2]
    assert before[1].startswith("Looked at: block size 4, full window, dashed frame.")
    panel.draft_window.value = WINDOW
    settle(panel)
    assert pictures(panel)[2] != before


def test_acceptance_is_shown_with_the_lines_of_the_rules_of_thumb(panel):
    panel.figure.value = "acceptance"
    settle(panel)
    assert "Rules of thumb at 60 % and 30 %" in pictures(panel)[2][1]


def test_a_run_of_one_kind_has_no_picker_of_cells(panel):
    assert panel.kind == {}
    assert panel.task in panel.widget.children
    assert panel.length not in panel.widget.children


@pytest.fixture(scope="module")
def two_dtypes(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "two"
    for dtype, sizes in (("bfloat16", (1, 4, 8)), ("float32", (1, 2))):
        for size in sizes:
            rows = [block(1, size, prompt_id=p) for p in ("p0", "p1")] if size > 1 else []
            write_cell(
                path,
                request_of(["p0", "p1"], block_size=size, dtype=dtype),
                [prompt(p, task=task, decode_s=0.1 + size / 50) for p, task in TASKS.items()],
                rows,
                {f"{p}|0|0": [" the", " a", " of", " to"] for p in TASKS},
            )
    return open_run(path)


TASKS = {"p0": "chat", "p1": "code"}


@pytest.fixture
def picked(two_dtypes, quick):
    return explore(two_dtypes)


def test_another_kind_of_cells_brings_its_own_sizes_pictures_and_texts(picked):
    assert list(picked.kind) == ["dtype"]
    assert picked.kind["dtype"].options == ("bfloat16", "float32")
    for dtype, sizes in (("float32", [1, 2]), ("bfloat16", [1, 4, 8])):
        picked.kind["dtype"].value = dtype
        settle(picked)
        assert [value for _, value in picked.block_size.options] == sizes
        assert picked.panels.run.cell(picked.found.cell).dtype == dtype
        assert picked.problem.value == ""


def test_a_task_leaves_its_prompts_and_figures_alone(picked, two_dtypes):
    picked.task.value = "code"
    settle(picked)
    assert [label for label, _ in picked.prompt.options] == ["p1"]
    assert set(picked.panels.frame["prompts"]) == {1}
    assert "shown are those of task code alone" in read_page(picked.view.value).text
    picked.task.value = ALL
    settle(picked)
    assert set(picked.panels.frame["prompts"]) == {2}


@pytest.fixture(scope="module")
def many_kinds(tmp_path_factory):
    """Three kinds of four that dtype and temperature allow; a long prompt and a short one."""
    path = tmp_path_factory.mktemp("runs") / "many"
    for told in ({}, {"dtype": "float32"}, {"dtype": "float32", "temperature": 0.7}):
        for size in (1, 4):
            ids, rows = list(TASKS), [block(1, 4, prompt_id=p) for p in TASKS] if size > 1 else []
            prompts = [
                prompt(p, task=task, prompt_ids=[7] * (200 if p == "p0" else 300))
                for p, task in TASKS.items()
            ]
            texts = {f"{p}|0|0": [" the", " a", " of", " to"] for p in TASKS}
            write_cell(path, request_of(ids, block_size=size, **told), prompts, rows, texts)
    return open_run(path)


@pytest.fixture
def many(many_kinds, quick):
    made = explore(many_kinds)
    made.kind["temperature"].value = "0.7"  # of float32 alone
    made.kind["dtype"].value = "float32"
    settle(made)
    return made


def told(panel):
    return {name: picker.value for name, picker in panel.kind.items()}


def test_a_picker_for_each_property_that_differs_and_for_no_other(many):
    pickers = [part.description for part in many.widget.children if part in many.pickers]
    assert pickers == ["dtype", "temperature", "task", "context length"]


def test_where_the_run_lacks_a_combination_the_picker_just_moved_wins_and_says_so(many):
    many.kind["dtype"].value = "bfloat16"
    settle(many)
    assert told(many) == {"dtype": "bfloat16", "temperature": "0.0"}
    assert many.panels.run.cell(many.found.cell).dtype == "bfloat16"
    said = read_page(many.view.value).text
    line = "No cells have dtype bfloat16 with temperature 0.7; shown is temperature 0.0."
    assert line in said
    many.kind["dtype"].value = "float32"
    settle(many)
    assert "No cells have" not in many.view.value
    many.kind["dtype"].value = "bfloat16"
    many.kind["temperature"].value = "0.7"
    settle(many)
    assert told(many) == {"dtype": "float32", "temperature": "0.7"}


SHORT, LONG = "under 256 tokens", "256 to 1,023 tokens"


def test_a_length_leaves_its_prompts_and_figures_alone(many):
    assert many.length.options == (ALL, SHORT, LONG)
    many.length.value = LONG
    settle(many)
    assert [label for label, _ in many.prompt.options] == ["p1"]
    assert set(many.panels.frame["prompts"]) == {1}
    assert f"shown are those {LONG} long alone" in read_page(many.view.value).text


def test_no_prompt_of_a_task_and_a_length_is_said_in_one_line_until_there_is_one(many):
    many.task.value = "code"
    many.length.value = SHORT
    settle(many)
    said = read_page(many.view.value).text
    assert f"No prompt of these cells is of task code and {SHORT} long." in said
    assert "of task code alone" in said
    assert many.problem.value == ""
    many.length.value = LONG
    settle(many)
    assert "No prompt" not in read_page(many.view.value).text
    assert [label for label, _ in many.prompt.options] == ["p1"]


def test_what_cannot_be_read_of_another_kind_is_told_in_the_panel(picked, monkeypatch):
    dtype = picked.kind["dtype"]
    other = next(value for value in dtype.options if value != dtype.value)
    monkeypatch.setattr(dflash_lab.explorer, "Panels", broken)
    dtype.value = other
    assert "this cell is damaged" in read_page(picked.problem.value).text


def broken(*args, **settings):
    raise ValueError("this cell is damaged")


# What if


def cost_table(draft_s=0.02, **facts):
    shapes = [(1, None), *((size, window) for size in (4, 8) for window in (None, WINDOW))]
    costs = tuple(cost(*shape, draft_s=draft_s) for shape in shapes)
    return CostTable(costs=costs, facts={"dtype": "bfloat16", "hardware": HARDWARE} | facts)


def test_the_predicted_curve_lies_over_the_measured_one_and_is_named(run, quick):
    made = explore(run, costs=cost_table())
    made.block_size.value = 8
    settle(made)
    foretold = made.panels.predicted
    values = foretold[foretold["draft_window"].isna()]["predicted_tokens_per_s"].map(
        "{:.1f}".format
    )
    curve = [f"{value} at {size}" for value, size in zip(values, SIZES, strict=True)]
    words = "predicted, full window: " + ", ".join(curve).replace(" at ", " at block size ", 1)
    assert words in pictures(made)[0][1]


def test_a_table_of_another_machine_draws_nothing_over_this_one_and_says_so(run, quick):
    made = explore(run, costs=cost_table(hardware="another"))
    assert "predicted, " not in pictures(made)[0][1]
    assert "it predicts nothing here" in read_page(made.view.value).text
    assert made.problem.value == ""


def test_a_table_stored_beside_the_run_is_read(tmp_path, quick):
    write_run(tmp_path, prompts=2, block_sizes=(1, 4), windows=())
    write_costs(cost_table(), tmp_path / "costs.json")
    assert "predicted, full window: " in pictures(explore(tmp_path))[0][1]


def test_without_stage_times_or_a_table_the_what_if_rests_and_says_what_it_needs(panel):
    assert all(slider.disabled for slider in panel.costs.sliders.values())
    assert "dl.measure_costs" in read_page(panel.costs.picture.value).text


def test_a_cheaper_draft_moves_the_predicted_optimum(run, quick):
    made = explore(run, costs=cost_table(draft_s=0.2))
    (before,) = read_page(made.costs.picture.value).all("img")
    assert before.attributes["alt"].startswith("The fastest stays block size 1")
    made.costs.sliders["draft"].value = 0.1
    (after,) = read_page(made.costs.picture.value).all("img")
    assert (
        "The fastest moves from block size 1, plain decoding to block size"
        in (after.attributes["alt"])
    )
    assert "drafting takes 0.1 times as long" in after.attributes["alt"]
    assert made.problem.value == ""


def test_the_what_if_follows_its_slider_in_under_100_ms(run, quick):
    made = explore(run, costs=cost_table())
    seconds = []
    for factor in (0.5, 2.0, 4.0):
        shown, began = made.costs.picture.value, time.perf_counter()
        made.costs.sliders["verify"].value = factor
        seconds.append(time.perf_counter() - began)
        assert made.costs.picture.value != shown
    assert min(seconds) < 0.1


def test_an_error_of_the_what_if_is_told_in_the_panel(run, quick, monkeypatch):
    made = explore(run, costs=cost_table())
    monkeypatch.setattr("dflash_lab.scaling.scaled_frame", broken)
    made.costs.sliders["other"].value = 2.0
    assert "this cell is damaged" in read_page(made.problem.value).text


def test_without_ipywidgets_the_error_says_what_to_install(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(ImportError, match=r'pip install "ipywidgets.*dl\.report'):
        explore(run)


def test_a_frame_drawn_by_the_panel_leaves_pyplot_alone(panel):
    assert "matplotlib.pyplot" not in dflash_lab.explorer.__dict__
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or pyplot.get_fignums() == []
