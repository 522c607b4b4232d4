"""Two runs side by side: paired by prompt, intervals of differences, machines never mixed."""

import pytest

from dflash_lab.analyse import diff_frame, paired_frame, run_differences
from dflash_lab.reports import compare, write_difference
from dflash_lab.store import open_run
from dflash_lab.tests.browsers import grave_faults, open_browser
from dflash_lab.tests.pages import read_page
from dflash_lab.tests.runs import block, prompt, request_of, write_cell, write_run
from dflash_lab.tests.test_report_browser import visit


def small(path, seconds=0.1, ids=("p0", "p1", "p2"), accepted=2, size=4, **settings):
    """A run of one cell in which every prompt takes so many seconds; its texts go by its ids."""
    write_cell(
        path,
        request_of(list(ids), block_size=size, **settings),
        [prompt(p, decode_s=seconds, prompt_ids=[ord(c) for c in p]) for p in ids],
        [block(accepted, size, prompt_id=p) for p in ids],
    )
    return open_run(path)


def test_twice_the_throughput_is_a_ratio_of_two_with_its_cells_named(tmp_path):
    slow, fast = small(tmp_path / "slow", 0.2), small(tmp_path / "fast", 0.1, accepted=3)
    (row,) = diff_frame(slow, fast).to_dict("records")
    assert (row["cell"], row["other_cell"]) == (slow.cells[0].id, fast.cells[0].id)
    assert row["speedup"] == row["speedup_low"] == row["speedup_high"] == pytest.approx(2)
    assert (row["tau"], row["other_tau"], row["tau_difference"]) == (3, 4, 1)
    assert row["prompts"] == 3


def test_only_prompts_that_both_hold_count_whatever_the_others_took(tmp_path):
    one = small(tmp_path / "one", ids=("p0", "p1"))
    write_cell(
        tmp_path / "other",
        request_of(["p1", "p2"], block_size=4),
        [
            prompt("p1", decode_s=0.05, prompt_ids=[112, 49]),
            prompt("p2", decode_s=9.0, prompt_ids=[112, 50]),
        ],
        [block(2, 4, prompt_id=p) for p in ("p1", "p2")],
    )
    (row,) = diff_frame(one, open_run(tmp_path / "other")).to_dict("records")
    assert row["prompts"] == 1
    assert row["speedup"] == pytest.approx(2)
    assert row["speedup_low"] is None or row["speedup_low"] != row["speedup_low"]


def test_the_same_id_over_another_text_is_another_prompt(tmp_path):
    one = small(tmp_path / "one", ids=("p0",))
    write_cell(
        tmp_path / "other",
        request_of(["p0"], block_size=4),
        [prompt("p0", decode_s=0.05, prompt_ids=[1, 2, 3])],
        [block(2, 4)],
    )
    made = compare(one, tmp_path / "other")
    assert made.frame["prompts"].tolist() == [0]
    assert made.frame["speedup"].isna().all()
    assert "no prompt in common" in made.lines[0]


def test_runs_of_two_machines_are_said_to_be_so_and_their_times_in_no_ratio(tmp_path):
    one = small(tmp_path / "one", hardware="small machine")
    other = small(tmp_path / "other", 0.01, accepted=3, hardware="large machine")
    made = compare(one, other)
    (row,) = made.frame.to_dict("records")
    assert made.frame["speedup"].isna().all() and made.frame["speedup_low"].isna().all()
    assert row["tau_difference"] == 1  # acceptance does not depend on the machine
    assert "different hardware classes (small machine; large machine)" in made.sentences[-1]
    assert "ratio n/a" in made.lines[0]
    assert made.race is None


def test_a_timing_mode_of_its_own_is_no_ground_for_a_ratio(tmp_path):
    one, other = small(tmp_path / "one"), small(tmp_path / "other", timing="stages")
    assert diff_frame(one, other)["speedup"].isna().all()


def test_intervals_are_those_of_pairs_inside_one_run(tmp_path):
    path = write_run(tmp_path / "run", prompts=4, block_sizes=(1, 4), windows=())
    run = open_run(path)
    plain, drafting = (
        run.select(engine="dflash_lab", dtype="bfloat16", block_size=size) for size in (1, 4)
    )
    (inside,) = (
        row
        for row in paired_frame(run, plain.cells[0].id).to_dict("records")
        if row["cell"] == drafting.cells[0].id
    )
    for cell in (*plain.cells, *drafting.cells):
        cell.request["block_size"] = 4  # as if both had asked for the same
    (row,) = diff_frame(plain, drafting).to_dict("records")
    for name in ("speedup", "speedup_low", "speedup_high", "tau_difference_low"):
        assert row[name] == pytest.approx(inside[name])


def test_runs_that_share_no_setting_are_refused_with_what_makes_a_pair(tmp_path):
    one, other = small(tmp_path / "one"), small(tmp_path / "other", size=8)
    with pytest.raises(ValueError, match=r"no cells that asked for the same .*block size, window"):
        compare(one, other)


def test_settings_that_differ_are_told_and_those_that_make_a_pair_are_not(tmp_path):
    one = small(tmp_path / "one", max_new_tokens=48)
    other = small(tmp_path / "other", max_new_tokens=96)
    assert run_differences(one, other) == {"max_new_tokens": ("48", "96")}


def test_the_page_shows_every_number_and_names_literally(tmp_path):
    one, other = small(tmp_path / "a <b>", 0.2), small(tmp_path / "c $x$", 0.1)
    path = write_difference(compare(one, other), tmp_path / "diff.html")
    made = read_page(path.read_text(encoding="utf-8"))
    assert next(made.all("h1")).text == "c $x$ beside a <b>"
    values = [value.attributes["value"] for value in next(made.all("tbody")).all("data")]
    assert str(compare(one, other).frame["speedup"].iloc[0]) in values
    assert other.cells[0].id in values
    assert all(image.attributes["alt"] for image in made.all("img"))
    assert len(list(made.all("img"))) == 1  # the race


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser_the_page_asks_for_nothing_and_axe_finds_nothing_grave(tmp_path, scheme):
    made = compare(small(tmp_path / "one", 0.2), small(tmp_path / "other", max_new_tokens=96))
    address = write_difference(made, tmp_path / "diff.html").as_uri()
    with open_browser() as browser:
        for shown in visit(browser, address, color_scheme=scheme):
            assert grave_faults(shown.page) == []
            width = shown.page.evaluate("document.documentElement.scrollWidth")
            assert width <= shown.page.viewport_size["width"]
