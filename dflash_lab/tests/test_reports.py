"""The report: one file that needs nothing else, with the numbers of the frames and literal text."""

import json
import re
from dataclasses import replace
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

from dflash_lab import reports
from dflash_lab.analyse import cell_frame, choose, records
from dflash_lab.exactness import read_audits, write_audit
from dflash_lab.figures import FIGURES
from dflash_lab.panels import Panels
from dflash_lab.reports import gallery, inline, packed, page, report
from dflash_lab.store import open_run
from dflash_lab.tests.pages import Element, data_of, read_page, shown_text, unpacked
from dflash_lab.tests.runs import HARDWARE, block, prompt, request_of, write_cell, write_run
from dflash_lab.tokens import SHOWN_AS

FEW = ("acceptance", "pairs", "clipped")  # figures enough to see how they are shown
GRID = {"prompts": 3, "block_sizes": (1, 4, 8), "windows": (16,), "windowed": (4,)}
SMALL = {"prompts": 2, "block_sizes": (1, 4), "windows": ()}


@pytest.fixture(scope="module", autouse=True)
def few_figures():
    """Of the figures beside the sliders a few; drawing them all takes seconds a report."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gallery, "FIGURES", {name: FIGURES[name] for name in FEW})
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with a hole at block size 8 and window 16, and with hostile text."""
    path = tmp_path_factory.mktemp("runs") / "reported"
    return open_run(write_run(path, hostile=True, **GRID))


@pytest.fixture(scope="module")
def source(run):
    return page(run)


@pytest.fixture(scope="module")
def made(source):
    return read_page(source)


def written_page(path, **settings):
    return read_page(page(open_run(write_run(path, **SMALL | settings))))


# One file, by itself


def test_the_report_lies_in_the_run_unless_told_otherwise(run, tmp_path, monkeypatch):
    monkeypatch.setattr(reports, "page", lambda run: f"of {run.path.name}")
    assert report(run) == run.path / "report.html"
    assert report(run.path, tmp_path / "new" / "mine.html") == tmp_path / "new" / "mine.html"
    assert (tmp_path / "new" / "mine.html").read_text() == "of reported"


def test_a_folder_is_no_place_for_the_report(run, tmp_path):
    with pytest.raises(ValueError, match=r"is a folder; give the report's file"):
        report(run, tmp_path)


LINK = re.compile(
    r"""(?:\b(?:src|href|srcset|poster|action|data)\s*=\s*\\?["']?|url\(\s*["']?|@import\s*["']?
    |\bimport\s*\(?\s*["']|\bfrom\s+["'])(?=\s*(?:[a-z]+:)?//)""",
    re.VERBOSE | re.IGNORECASE,
)


@pytest.mark.parametrize(
    "outside",
    [
        '<script src="https://cdn.example/x.js">',
        "<img src='//cdn.example/x.png'>",
        "<link href=http://cdn.example/x.css>",
        "a { background: url(https://cdn.example/x.png) }",
        '@import "//cdn.example/x.css";',
        'import x from "https://cdn.example/x.js"',
        'import("https://cdn.example/x.js")',
    ],
)
def test_a_link_that_leaves_the_file_is_noticed(outside):
    assert LINK.search(outside)


def test_nothing_in_the_file_comes_from_outside(source, made):
    assert not LINK.search(source)
    assert all(image.attributes["src"].startswith("data:image/") for image in made.all("img"))
    assert not list(made.all("link"))
    assert not [script for script in made.all("script") if "src" in script.attributes]


def test_a_picture_in_the_page_is_the_one_that_was_drawn(made, run):
    start = made.by_id("readout").attributes["data-cell"]
    for name, drawn in zip(("throughput", "survival"), Panels(run).pictures(start), strict=True):
        address = made.by_id(name).attributes["src"]
        assert "#" not in address  # it would end the address
        assert as_xml(unquote(address.removeprefix("data:image/svg+xml,"))) == as_xml(drawn.svg)


def as_xml(svg):
    return ElementTree.canonicalize(svg, strip_text=True)


def test_words_of_a_picture_survive_its_address():
    words = "50 % of &lt;b&gt; &quot;a&#x27;s&quot; #1 &amp;amp;"
    address = str(inline(f'<svg role="img"\naria-label="{words}"/>'))
    (image,) = read_page(f'<img src="{address}">').all("img")
    svg = unquote(image.attributes["src"].partition(",")[2])
    assert ElementTree.fromstring(svg).get("aria-label") == '50 % of <b> "a\'s" #1 &amp;'


def test_the_same_run_gives_the_same_bytes(run, source):
    assert page(open_run(run.path)) == source


@pytest.mark.slow
def test_a_run_of_the_demos_size_with_all_figures_takes_less_than_2_mb(tmp_path, monkeypatch):
    monkeypatch.setattr(gallery, "FIGURES", FIGURES)
    assert report(write_run(tmp_path)).stat().st_size < 2_000_000


def test_every_picture_and_control_is_named(made):
    assert all(image.attributes["alt"].strip() for image in made.all("img"))
    labels = {label.attributes.get("for") for label in made.all("label")}
    controls = [*made.all("input"), *made.all("select")]
    unnamed = [
        control
        for control in controls
        if control.attributes.get("id") not in labels and control.parent.tag != "label"
    ]
    assert unnamed == []
    ids = [part.attributes["id"] for part in made.all() if "id" in part.attributes]
    assert len(ids) == len(set(ids))


# Sliders


def test_both_sliders_move_over_the_measured_values(made):
    size, window = made.by_id("block-size"), made.by_id("draft-window")
    for slider, values in ((size, "1 4 8"), (window, "16 full")):
        assert slider.attributes["type"] == "range"
        assert slider.attributes["step"] == "1"
        assert slider.attributes["data-values"] == values
        assert int(slider.attributes["max"]) == len(values.split()) - 1
        assert "disabled" not in slider.attributes
    labels = {label.attributes.get("for"): label.text for label in made.all("label")}
    assert labels["block-size"] == "Block size"
    assert labels["draft-window"] == "Sliding-window size (draft)"


def test_the_page_opens_at_the_recommended_cell(made, run):
    choice = choose(run)
    value = made.by_id("block-size").attributes
    assert value["aria-valuetext"] == made.by_id("block-size-value").text == str(choice.block_size)
    assert made.by_id("readout").attributes["data-cell"] == choice.cell
    assert choice.cell in made.by_id("readout").text


def test_every_position_has_pictures_or_says_that_it_was_not_measured(made, run):
    data, grid = data_of(made), Panels(run).grid
    for size, row in zip(grid.block_sizes, data["positions"], strict=True):
        for window, position in zip(grid.draft_windows, row, strict=True):
            assert position["cell"] in data["pictures"]
            assert position["measured"] == ((size, window) in grid.cells or size == 1)
            assert ("not measured" in position["words"]) == (not position["measured"])
    assert data["positions"][2][0]["words"].startswith("Block size 8 with window 16: not measured")


def test_pictures_of_the_sliders_are_those_of_their_cells(made, run):
    data, panels = data_of(made), Panels(run)
    for cell, (throughput, _) in data["pictures"].items():
        drawn = panels.pictures(cell)[0]
        svg = "\n".join(data["lines"][line] for line in throughput["svg"])
        assert svg == drawn.svg.rstrip("\n")
        assert throughput["alt"] == drawn.alt
    alts = {tuple(shown["alt"] for shown in pair) for pair in data["pictures"].values()}
    assert len(alts) == len(data["pictures"])


def test_without_windows_the_window_slider_says_full_and_cannot_be_moved(tmp_path):
    slider = written_page(tmp_path).by_id("draft-window").attributes
    assert slider["data-values"] == slider["aria-valuetext"] == "full"
    assert "disabled" in slider


# Numbers


def cells_table(made: Element):
    """Rows of the first table: heading to (written, full value)."""
    table = next(made.all("table"))
    heads = [head.text for head in table.all("th") if head.attributes["scope"] == "col"]
    for row in next(table.all("tbody")).all("tr"):
        values = [(next(row.all("th")).text,) * 2]
        values += [(value.text, value.attributes["value"]) for value in row.all("data")]
        yield dict(zip(heads, values, strict=True))


def test_numbers_of_the_table_are_those_of_the_frame(made, run):
    frame = {row["cell"]: row for row in records(cell_frame(run))}
    rows = list(cells_table(made))
    assert {row["cell"][0] for row in rows} == set(frame)
    columns = {
        "tokens/s": "tokens_per_s",
        "tau": "tau",
        "draft rate, %": "draft_rate",
        "tokens per block": "tokens_per_block",
        "ms per block": "seconds_per_block",
        "prompts": "prompts",
    }
    for row in rows:
        for head, name in columns.items():
            value = frame[row["cell"][0]][name]
            assert row[head][1] == ("" if value is None else str(value))


def test_intervals_stand_beside_their_figure(made, run):
    frame = {row["cell"]: row for row in records(cell_frame(run))}
    for row in cells_table(made):
        low, high = (frame[row["cell"][0]][f"tokens_per_s_{end}"] for end in ("low", "high"))
        assert row["tokens/s"][0].endswith(f"[{low:.1f}, {high:.1f}]")


def test_figures_beside_the_pictures_are_those_of_the_frame(made, run):
    for row in records(cell_frame(run)):
        if row["cell"] in data_of(made)["pictures"]:
            template = made.by_id(f"facts-{row['cell']}")
            values = [value.attributes["value"] for value in template.all("data")]
            assert values[:2] == [str(row["tokens_per_s"]), str(row["tau"])]
            assert values[-1] == row["cell"]


def test_json_holds_no_number_that_is_none(made):
    assert data_of(made)["lines"]
    assert unpacked(packed({"x": float("nan")})) == {"x": None}


def test_json_cannot_end_its_script():
    text = "</script><!-- <script> é 👩\u200d👧"
    assert "<" not in packed({text: text})
    assert unpacked(packed({text: text})) == {text: text}


# Text


def test_text_of_every_cell_and_prompt_is_shown_literally(made, run):
    rows = run.prompts().to_pylist()
    texts = {(row["cell"], row["prompt_id"]): row["text"].translate(SHOWN_AS) for row in rows}
    labels = [option.text for option in made.by_id("prompt").all("option")]
    assert labels == list(dict.fromkeys(row["prompt_id"] for row in rows))
    for cell, traces in data_of(made)["traces"].items():
        for trace, label in zip(traces, labels, strict=True):
            taken = [text for b in trace["blocks"] for text in (*b["kept"], b["own"] or "")]
            assert trace["first"] + "".join(taken) == texts[cell, label]
    start = made.by_id("readout").attributes["data-cell"]
    assert shown_text(made.by_id("text").by_class("dl-text")) == texts[start, labels[0]]


def test_hostile_text_makes_no_element_and_no_handler(source, made):
    assert len(list(made.all("script"))) == source.count("<script") == 2
    handlers = [name for part in made.all() for name in part.attributes if name.startswith("on")]
    assert handlers == []
    assert not list(made.all("i"))
    assert [bold.text for bold in made.all("b") if "$x$" in bold.text] == []
    assert "chat-01 <b>$x$</b>" in made.by_id("prompt").text


def test_blocks_show_what_was_drafted_in_vain(made, run):
    cell = made.by_id("readout").attributes["data-cell"]
    rows = [row for row in run.blocks().to_pylist() if row["cell"] == cell]
    first = [row for row in rows if row["prompt_id"] == run.prompts()["prompt_id"][0].as_py()]
    blocks = list(made.by_id("text").all("span", "dl-block"))
    assert len(blocks) == len(first)
    for shown, row in zip(blocks, first, strict=True):
        struck = [t for t in shown.all("bdi") if t.within("dl-rejected")]
        assert len(struck) == len(row["drafted"]) - row["accepted"]


# What it says


def test_the_answer_comes_first_in_the_words_of_the_choice(made, run):
    first = next(part for part in made.all("section"))
    assert first.by_class("answer").text == choose(run).sentence
    assert choose(run).cell in first.text


def test_the_exactness_check_is_told_with_its_reference_and_dtype(made):
    text = " ".join(made.text.split())
    assert (
        "Exact in float32: 3 of 3 prompts equal to transformers' generate at block size 8, "
        "token for token. bfloat16 was not audited."
    ) in text
    assert "lossless" not in text


def test_a_check_that_was_not_made_is_said_to_be_missing(tmp_path):
    write_run(tmp_path, **GRID)
    (tmp_path / "checks" / "audit-float32.json").unlink()
    text = page(open_run(tmp_path))
    assert "Whether the draft changes the text was not audited in this run." in text
    assert "token for token" not in text


def test_near_ties_and_mismatches_are_told_apart_with_place_tokens_and_margin(tmp_path):
    run = open_run(write_run(tmp_path, **GRID))
    (exact,) = read_audits(run)
    parted = replace(
        exact.prompts[1],
        label="near tie",
        first_difference=17,
        ours=5,
        reference_token=6,
        margin=0.1,
        gap=0.1,
        gap_at=17,
        tolerance=0.375,
    )
    write_audit(run, replace(exact, dtype="bfloat16", prompts=(exact.prompts[0], parted)))
    text = " ".join(read_page(page(run)).text.split())
    assert "Exact in float32: 3 of 3 prompts equal" in text
    assert (
        "in bfloat16 1 of 2 prompts parts at a near tie (0.1 logits below the best at most, 0.38 "
        "allowed for rounding)"
    ) in text
    assert f"{parted.prompt_id} (bfloat16): near tie at new token 17, counted from 0" in text
    assert "token 5 beside 6, the target's best two 0.1 logits apart" in text
    wrong = replace(parted, label="mismatch", gap=2.5)
    write_audit(run, replace(exact, prompts=(wrong,)))
    text = " ".join(read_page(page(run)).text.split())
    assert "In float32 1 of 1 differs by more than rounding explains" in text
    assert f"{parted.prompt_id} (float32): mismatch at new token 17" in text


def heads(made):
    return [next(part.all("h2")).text for part in made.all("section")]


def test_the_answer_comes_first_then_why_then_how_then_figures_tables_and_terms(made):
    assert heads(made) == [
        "The answer",
        "Why: what a block yields and what it costs",
        "How it was measured",
        "Throughput against block size, cell by cell",
        "The text, coloured by what the draft got right",
        "Every other figure",
        "Tables",
        "Terms",
    ]


def test_figures_name_the_cells_they_are_drawn_from_and_absent_ones_their_reason(made, run):
    ids = {cell.id for cell in run.cells}
    captions = [part for part in made.all("figcaption") if list(part.all("details"))]
    assert [next(part.all("summary")).text for part in captions] == [
        "3 cells",
        "2 cells",
    ]
    assert all({code.text for code in part.all("code")} <= ids for part in captions)
    assert "clipped: no acceptance map is stored" in made.text


def test_machine_versions_day_and_drift_are_told_before_any_setting(made):
    how = next(part for part in made.all("section") if "How it was measured" in part.text)
    text = " ".join(how.text.split())
    assert text.startswith(f"How it was measured Measured on {HARDWARE}, with torch 2.13.0+cpu, ")
    assert "Drift: rank correlation of residual time and order" in text


@pytest.mark.parametrize("term", ["speed-up, break-even", "audit, margin, near tie", "drift"])
def test_a_term_that_the_report_uses_is_explained(made, term):
    assert term in [name.text for name in next(made.all("dl", "terms")).all("dt")]


def test_outputs_that_repeat_themselves_are_flagged(made, tmp_path):
    assert "1 of 3 outputs repeat themselves" in made.text
    assert "repeat themselves" not in written_page(tmp_path).text


def test_settings_versions_and_order_are_told(made):
    rows = [row for part in made.all("dl", "settings") for row in part.all("div")]
    told = {next(row.all("dt")).text: next(row.all("dd")).text for row in rows}
    assert told["hardware"] == HARDWARE
    assert told["max new tokens"] == "48"
    assert told["block size"] == "1; 4; 8"
    assert told["versions torch"] == "2.13.0+cpu"
    assert "The cells were interleaved" in made.text


def test_cells_one_after_the_other_are_said_to_be_so(tmp_path):
    for size in (1, 4):
        blocks = [block(1, size)] if size > 1 else []
        write_cell(
            tmp_path,
            request_of(["p0"], block_size=size),
            [prompt(order=size)],
            blocks,
            {"p0|0|0": [" the", " a", " of", " to"]},
        )
    assert "The cells were not all interleaved" in page(open_run(tmp_path))


def test_one_prompt_makes_a_report_that_says_so(tmp_path):
    made = written_page(tmp_path, prompts=1)
    assert "One prompt only" in made.text
    assert "(no interval)" in made.by_id("readout").text
    assert all("nan" not in image.attributes["alt"].lower() for image in made.all("img"))


def test_failed_cells_are_named_with_their_reason_and_their_place(tmp_path):
    write_run(tmp_path, **GRID)
    ids = open_run(tmp_path).cells[0].request["prompts"]["ids"]
    request = request_of(ids, block_size=8, draft_window=16)
    folder = tmp_path / "cells" / ("f" * 16)
    folder.mkdir()
    failed = {"error": "<b>out of memory</b>", "traceback": "...", "request": request}
    (folder / "failed.json").write_text(json.dumps(failed))
    made = read_page(page(open_run(tmp_path)))
    assert "1 cell failed" in made.text
    assert "<b>out of memory</b>" in next(made.all("section")).text
    assert "failed (<b>out of memory</b>)" in data_of(made)["positions"][2][0]["words"]


def test_several_hardware_classes_get_an_answer_each(tmp_path):
    for hardware, seconds in (("small machine", 0.2), ("large machine", 0.1)):
        for size in (1, 4):
            write_cell(
                tmp_path,
                request_of(["p0", "p1"], block_size=size, hardware=hardware),
                [prompt(p, decode_s=seconds * size) for p in ("p0", "p1")],
                [block(2, size, prompt_id=p) for p in ("p0", "p1")] if size > 1 else [],
                {f"{p}|0|0": [" the", " a", " of", " to"] for p in ("p0", "p1")},
            )
    first = next(read_page(page(open_run(tmp_path))).all("section"))
    assert [head.text for head in first.all("h3")] == ["large machine", "small machine"]
    assert len(list(first.all("p", "answer"))) == 2


def test_a_run_of_the_library_alone_has_tables_and_no_sliders(tmp_path):
    request = request_of(["p0"], engine="transformers", block_size=1)
    write_cell(tmp_path, request, [prompt()], pieces={"p0|0|0": ["a"] * 4})
    made = read_page(page(open_run(tmp_path)))
    assert "No recommendation" in made.text
    assert not list(made.all("input"))
    assert len(list(cells_table(made))) == 1


def test_a_run_without_a_finished_cell_is_refused(tmp_path):
    (tmp_path / "cells").mkdir()
    with pytest.raises(ValueError, match="no finished cell"):
        report(tmp_path)


# Colours


def colours(css, scheme):
    """Names and values of one colour scheme's variables."""
    blocks = re.findall(r":root\s*\{([^}]*)\}", css)
    found = {}
    for part in blocks[: 1 if scheme == "light" else 2]:
        found |= dict(re.findall(r"(--[\w-]+):\s*(#[0-9a-f]{3,6})", part))
    return found


def luminance(colour):
    digits = colour.lstrip("#")
    digits = "".join(d * 2 for d in digits) if len(digits) == 3 else digits
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, two):
    low, high = sorted((luminance(one), luminance(two)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(source, scheme):
    css = source[source.index("color-scheme: light dark") - 200 : source.index("</style>")]
    found = colours(css, scheme)
    for ground in ("--page", "--panel"):
        for ink in ("--ink", "--quiet", "--warn", "--accent"):
            assert contrast(found[ink], found[ground]) >= 4.5
    for line in ("--dl-accepted-line", "--dl-own-line", "--dl-quiet-line"):
        assert contrast(found[line], found["--page"]) >= 3
