"""The report in a real browser: from disk, with everything that leaves the file refused."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from dflash_lab.reports import report
from dflash_lab.store import open_run
from dflash_lab.tests.browsers import grave_faults, open_browser
from dflash_lab.tests.runs import HOSTILE, write_run
from dflash_lab.tokens import SHOWN_AS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser():
    with open_browser() as made:
        yield made


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Block sizes 1, 4 and 8; the window is measured at 4 alone; the first prompt is hostile."""
    path = tmp_path_factory.mktemp("runs") / "shown"
    return open_run(
        write_run(
            path, prompts=3, block_sizes=(1, 4, 8), windows=(16,), windowed=(4,), hostile=True
        )
    )


@pytest.fixture(scope="module")
def address(run):
    return report(run).as_uri()


@dataclass
class Visit:
    """A page that is open, and everything it did that it may not do."""

    page: object
    refused: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def attribute(self, selector: str, name: str) -> str:
        return self.page.get_attribute(selector, name)

    def text(self, selector: str) -> str:
        return self.page.text_content(selector)

    def state(self) -> dict[str, str]:
        """What the two sliders change."""
        return {
            "throughput": self.attribute("#throughput", "src"),
            "survival": self.attribute("#survival", "src"),
            "words": self.attribute("#throughput", "alt"),
            "readout": self.text("#readout"),
        }


READY = "!document.getElementById('data') || document.documentElement.matches('.live')"


def visit(browser, address: str, **settings) -> Iterator[Visit]:
    context = browser.new_context(**settings)
    made = Visit(page=context.new_page())

    def guard(route):
        if route.request.url == address:
            route.continue_()
        else:
            made.refused.append(route.request.url)
            route.abort()

    context.route("**/*", guard)
    made.page.on("console", lambda m: made.errors.append(m.text) if m.type == "error" else None)
    made.page.on("pageerror", lambda error: made.errors.append(str(error)))
    made.page.on("dialog", lambda dialog: made.errors.append(dialog.message) or dialog.dismiss())
    made.page.goto(address)
    if settings.get("java_script_enabled", True):
        made.page.wait_for_function(READY)
    yield made
    made.page.wait_for_timeout(100)
    assert [url for url in made.refused if not url.startswith("data:")] == []
    assert made.errors == []
    context.close()


@pytest.mark.parametrize(
    "fault",
    [
        '<img src="https://cdn.example/x.png">',
        "<style>body { background: url(//cdn.example/x.png) }</style>",
        "<script>fetch('other.json')</script>",
        "<script>throw new Error('oops')</script>",
    ],
)
def test_a_request_or_an_error_is_noticed(browser, tmp_path, fault):
    (tmp_path / "page.html").write_text(f"<!doctype html><p>{fault}</p>", encoding="utf-8")
    with pytest.raises(AssertionError):
        list(visit(browser, (tmp_path / "page.html").as_uri()))


@pytest.fixture
def shown(browser, address):
    """The report as most people see it; at the end nothing was refused and nothing went wrong."""
    yield from visit(browser, address, viewport={"width": 1280, "height": 900})


@pytest.fixture
def without_scripts(browser, address):
    yield from visit(browser, address, java_script_enabled=False)


def at_the_left(shown, name):
    shown.page.focus(f"#{name}")
    shown.page.keyboard.press("Home")


@pytest.mark.parametrize(
    ("name", "first", "second"), [("block-size", "1", "4"), ("draft-window", "16", "full")]
)
def test_an_arrow_key_moves_a_slider_and_changes_pictures_and_figures(shown, name, first, second):
    at_the_left(shown, "block-size")
    shown.page.keyboard.press("ArrowRight")  # both windows were measured at block size 4
    at_the_left(shown, name)
    before = shown.state()
    assert shown.text(f"#{name}-value") == first
    shown.page.keyboard.press("ArrowRight")
    assert shown.text(f"#{name}-value") == second
    assert shown.attribute(f"#{name}", "aria-valuetext") == second
    after = shown.state()
    assert all(after[key] != before[key] for key in before)


@pytest.mark.parametrize(("name", "last"), [("block-size", "8"), ("draft-window", "full")])
def test_the_mouse_moves_a_slider_and_changes_pictures_and_figures(shown, name, last):
    at_the_left(shown, "draft-window")
    at_the_left(shown, "block-size")
    shown.page.keyboard.press("ArrowRight")
    before = shown.state()
    box = shown.page.locator(f"#{name}").bounding_box()
    middle = box["y"] + box["height"] / 2
    start = box["x"] + (box["width"] / 2 if name == "block-size" else 8)
    shown.page.mouse.move(start, middle)
    shown.page.mouse.down()
    shown.page.mouse.move(box["x"] + box["width"] - 4, middle, steps=8)
    shown.page.mouse.up()
    assert shown.text(f"#{name}-value") == last
    if name == "draft-window":  # at window 16 block size 8 is a hole: the pictures stay
        after = shown.state()
        assert all(after[key] != before[key] for key in before)


def test_a_hole_is_named_and_the_nearest_cell_stays_in_the_picture(shown):
    at_the_left(shown, "draft-window")
    at_the_left(shown, "block-size")
    shown.page.keyboard.press("End")
    assert shown.text("#shown").startswith("Block size 8 with window 16: not measured.")
    assert "block size 4 with window 16" in shown.text("#shown")
    assert shown.page.evaluate("document.querySelector('#throughput').naturalWidth") > 0


def test_every_picture_that_a_slider_can_choose_is_drawn(shown):
    for window in ("Home", "End"):
        shown.page.focus("#draft-window")
        shown.page.keyboard.press(window)
        at_the_left(shown, "block-size")
        for _ in range(3):
            for image in ("#throughput", "#survival"):
                loaded = f"""async () => {{ const image = document.querySelector('{image}');
                    await image.decode(); return image.naturalWidth; }}"""
                assert shown.page.evaluate(loaded) > 300
            shown.page.keyboard.press("ArrowRight")


def test_the_page_shows_the_same_before_and_after_its_script_ran(shown, without_scripts):
    bare = "#text pre bdi:not(.dl-drafts bdi)"
    texts = [side.page.locator(bare).all_text_contents() for side in (shown, without_scripts)]
    assert texts[0] == texts[1] != []
    assert shown.text("#readout") == without_scripts.text("#readout")


def test_without_scripts_the_recommended_cell_is_there_and_no_dead_control(without_scripts):
    page = without_scripts.page
    for name in ("#throughput", "#survival", "#readout", "#text pre", ".answer"):
        assert page.locator(name).is_visible()
    assert not page.locator("#block-size").is_visible()
    assert not page.locator("#prompt").is_visible()
    page.locator("summary", has_text="Throughput and acceptance").click()
    assert page.locator("table").first.is_visible()


@pytest.mark.parametrize("text", ["<script>alert(1)</script>", "$x$", "onerror=alert(1)>", "</td>"])
def test_what_a_model_wrote_is_seen_literally(shown, run, text):
    assert any(text in hostile for hostile in HOSTILE)
    assert text in shown.page.locator("#text pre").inner_text()
    assert shown.page.locator("#text script, #text img, #text think").count() == 0


def test_the_prompt_picker_shows_the_text_of_each_prompt(shown, run):
    cell = shown.attribute("#readout", "data-cell")
    rows = [row for row in run.prompts().to_pylist() if row["cell"] == cell]
    for number, row in enumerate(rows):
        shown.page.select_option("#prompt", str(number))
        pieces = shown.page.locator("#text pre bdi:not(.dl-drafts bdi)").all_text_contents()
        assert "".join(pieces) == row["text"].translate(SHOWN_AS)


STEP, SAID, ROWS = "#text .dl-step", "#text .dl-said", "#text .dl-rows tbody tr"


def test_arrow_keys_step_through_the_blocks(shown):
    shown.page.focus(STEP)
    for number in (1, 2, 3):
        assert shown.text(SAID).startswith(f"block {number} of ")
        assert shown.attribute(STEP, "aria-valuetext") == shown.text(SAID)
        assert shown.text("#text caption") == shown.text(SAID)
        assert shown.page.locator("#text .dl-block.dl-current").count() == 1
        shown.page.keyboard.press("ArrowRight")


def test_a_click_on_a_block_chooses_it_and_arrow_keys_go_on_from_there(shown):
    shown.page.select_option("#prompt", "1")
    shown.page.locator("#text .dl-block").nth(4).locator("> bdi").first.click()
    assert shown.text(SAID).startswith("block 5 of ")
    shown.page.keyboard.press("ArrowLeft")
    assert shown.text(SAID).startswith("block 4 of ")


def test_the_timeline_has_a_field_a_block_and_the_mouse_scrubs_along_it(shown):
    fields = shown.page.locator("#text .dl-seg[data-block]")
    assert fields.count() == shown.page.locator("#text .dl-block").count()
    shown.page.locator("#text .dl-time").scroll_into_view_if_needed()
    boxes = [fields.nth(place).bounding_box() for place in (2, 5)]
    places = [(box["x"] + box["width"] / 2, box["y"] + 4) for box in boxes]
    shown.page.mouse.move(*places[0])
    shown.page.mouse.down()
    assert shown.text(SAID).startswith("block 3 of ")
    shown.page.mouse.move(*places[1], steps=4)
    shown.page.mouse.up()
    assert shown.text(SAID).startswith("block 6 of ")


def test_pointing_at_a_block_shows_what_was_drafted_in_it_and_leaves_the_choice(shown):
    shown.page.select_option("#prompt", "1")
    shown.page.locator("#text .dl-block").nth(2).locator("> bdi").first.hover()
    assert shown.text("#text caption").startswith("block 3 of ")
    assert shown.text(SAID).startswith("block 1 of ")
    shown.page.mouse.move(1, 1)
    assert shown.text("#text caption").startswith("block 1 of ")


def test_each_row_has_both_choices_and_what_became_of_the_draft(shown, run):
    cell = shown.attribute("#readout", "data-cell")
    shown.page.select_option("#prompt", "1")
    prompt = run.prompts(("prompt_id",))["prompt_id"].to_pylist()[1]
    rows = [r for r in run.blocks().to_pylist() if (r["cell"], r["prompt_id"]) == (cell, prompt)]
    shown.page.focus(STEP)
    for row in sorted(rows, key=lambda row: row["index"]):
        fates = shown.page.locator(f"{ROWS} td:nth-last-child(2)").all_text_contents()
        kept, own = min(row["accepted"], row["emitted"]), not row["cut"]
        assert [fate for fate in fates if fate == "✓ accepted"] == ["✓ accepted"] * kept
        assert fates.count("✗ rejected") == (row["accepted"] < len(row["drafted"]))
        assert shown.page.locator("#text .dl-rows .dl-own").count() == own
        shown.page.keyboard.press("ArrowRight")


def test_a_box_puts_every_block_on_a_line_of_its_own(shown):
    shown.page.check("#text .dl-toggle input")
    drafts = shown.page.locator("#text .dl-drafts")
    assert all(drafts.nth(i).is_visible() for i in range(drafts.count()))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_its_window(browser, address, scheme, width):
    size = {"width": width, "height": 844}
    for made in visit(browser, address, viewport=size, color_scheme=scheme):
        assert made.page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious_or_critical(browser, address, scheme):
    for made in visit(browser, address, color_scheme=scheme):
        made.page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert grave_faults(made.page) == []


def test_axe_notices_a_picture_without_words(browser, tmp_path):
    page = "<!doctype html><html lang=en><title>t</title><main><img src='data:,'></main></html>"
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    for made in visit(browser, (tmp_path / "page.html").as_uri()):
        (fault,) = grave_faults(made.page)
        assert fault.startswith("image-alt")


PAPER = 688  # pixels of an A4 page between its margins
SEEN = "all => all.map(e => e.checkVisibility({ contentVisibilityAuto: true }))"
CONTROLS = "#block-size, #draft-window, #prompt, #text .dl-step, #text .dl-toggle"


@pytest.fixture
def printed(browser, address):
    """The report on paper, printed by somebody whose screen is dark."""
    size = {"width": PAPER, "height": 1000}
    for made in visit(browser, address, viewport=size, color_scheme="dark"):
        made.page.emulate_media(media="print", color_scheme="dark")
        yield made


def test_paper_is_white_and_so_is_every_figure(printed):
    style = "getComputedStyle(e)"
    ground = printed.page.locator("body").evaluate(f"e => {style}.backgroundColor")
    assert ground == "rgb(255, 255, 255)"
    filters = printed.page.locator("figure img").evaluate_all(
        f"all => all.map(e => {style}.filter)"
    )
    assert set(filters) == {"none"}


def test_nothing_is_wider_than_paper(printed):
    wide = "all => all.map(e => e.getBoundingClientRect().right)"
    for kind, least in (("figure img", 5), ("table", 3), ("dl", 3)):
        ends = printed.page.locator(kind).evaluate_all(wide)
        assert len(ends) >= least
        assert max(ends) <= PAPER


def test_paper_shows_no_control_and_all_that_is_folded_on_a_screen(printed):
    controls = printed.page.locator(CONTROLS)
    assert controls.count() == 5
    assert not any(controls.evaluate_all(SEEN))
    folded = printed.page.locator("details table, details dl, details .points, details code")
    assert folded.count() > 10
    assert all(folded.evaluate_all(SEEN))
    assert printed.page.locator("#prompt-name").is_visible()
