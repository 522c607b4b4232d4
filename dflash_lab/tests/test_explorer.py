"""The explorer: its controls choose, its view follows, and nothing fails in silence."""

import json
import re
import sys
import time

import pytest

import dflash_lab.explorer
from dflash_lab.analyse import cell_frame
from dflash_lab.explorer import LatestOnly, explore
from dflash_lab.store import open_run
from dflash_lab.tests.pages import read_page, shown_text
from dflash_lab.tests.runs import prompt, request_of, write_cell, write_run
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


@pytest.fixture
def panel(run, monkeypatch):
    """An explorer that drew nothing ahead, at block size 8 and the full window."""
    monkeypatch.setattr(dflash_lab.explorer, "AHEAD_S", 0)
    made = explore(run)
    made.block_size.value, made.draft_window.value = 8, "full"
    settle(made)
    return made


def settle(panel, limit=20.0):
    """Wait until the view shows what the controls say."""
    end = time.monotonic() + limit
    while panel.found.words not in read_page(panel.html).text and time.monotonic() < end:
        time.sleep(0.01)
    assert panel.found.words in read_page(panel.html).text


def pictures(panel):
    return [(i.attributes["src"], i.attributes["alt"]) for i in read_page(panel.html).all("img")]


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
    assert len(before) == len(after) == 2
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


def test_thirty_quick_changes_draw_three_times_at_most_and_end_at_the_last(panel, monkeypatch):
    draw, drawn = panel.panels._draw, []

    def slowly(cell):
        time.sleep(0.2)
        drawn.append(cell)
        return draw(cell)

    monkeypatch.setattr(panel.panels, "_draw", slowly)
    monkeypatch.setattr(panel.panels, "drawn", lambda cell: False)
    panel.panels._drawn.clear()
    panel._jobs.quiet = 2.0  # a busy machine must not take its own pauses for the user's
    for size in [8, 1, 4] * 10:
        panel.block_size.value = size
        panel.panels._drawn.clear()
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


def fail(cell):
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
    assert len(set(seen)) == len(panel.prompt.options) == 3
    assert not list(read_page(panel.html).all("script"))


def test_blocks_stay_on_lines_of_their_own_while_sliders_move(panel):
    panel.lines.value = True
    panel.block_size.value = 4
    settle(panel)
    assert list(read_page(panel.html).all("div", "dl-lines"))


def test_the_panel_is_a_widget_with_a_twin_in_html_and_words(panel):
    bundle = panel._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert bundle["text/html"] == panel.html
    assert len(list(read_page(bundle["text/html"]).all("img"))) == 2
    assert not re.search(r"(VBox|Slider|Dropdown)\(", bundle["text/plain"])
    assert "block sizes 1, 4, 8" in bundle["text/plain"]
    json.dumps(bundle, allow_nan=False)


def test_every_cell_of_a_small_grid_is_drawn_ahead(run, monkeypatch):
    monkeypatch.setattr(dflash_lab.explorer, "AHEAD_S", 600)
    panels = explore(run).panels
    assert all(panels.drawn(cell) for cell in panels.grid.cells.values())


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


def test_without_ipywidgets_the_error_says_what_to_install(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(ImportError, match=r'pip install "ipywidgets.*dl\.report'):
        explore(run)


def test_a_frame_drawn_by_the_panel_leaves_pyplot_alone(panel):
    assert "matplotlib.pyplot" not in dflash_lab.explorer.__dict__
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or pyplot.get_fignums() == []
