"""The explorer's notebook in a real JupyterLab in a real browser, on two generations of kernels."""

import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import nbformat
import pytest

import dflash_lab
from dflash_lab.tests.browsers import missing, open_browser
from dflash_lab.tests.runs import HOSTILE, write_run
from dflash_lab.tokens import SHOWN_AS

pytestmark = pytest.mark.slow

NOTEBOOK = Path(dflash_lab.__file__).parents[1] / "notebooks" / "05_explorer.ipynb"
OURS = version("ipykernel").split(".")[0]
KERNELS = {
    "6": ("ipykernel>=6.31,<7", "nest-asyncio"),
    "7": ("ipykernel>=7,<8", "nest-asyncio2"),
}  # the latest of each generation, with what only that one needs
SETTINGS = {
    "notebook-extension/tracker": {"autoStartDefaultKernel": True},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}  # no question in the way, no request for news
PARAMETERS = """pair = "tiny"
results = "../results/explorer{generation}"
block_sizes = (1, 4, 8)
draft_windows = (None, 16)
prompts = 2
new_tokens = 16"""
SLOW = """import time
from dflash_lab.racing import Lane

step = Lane.step
Lane.step = lambda lane: (time.sleep(0.1), step(lane))  # or nobody could press Stop in time"""
TYPED = "</script><img src=x onerror=alert(1)> $x$ <think> \u05e9\u05dc\u05d5\u05dd &amp;"
ECHO = f"""from dflash_lab.tests.toys import ORACLE, replay_target, scripted_pair

typed = {TYPED!r}
pair = scripted_pair(ORACLE, block_size=16, vocabulary=512)
pair.models.target = replay_target(len(pair.encode(typed, False).ids), list(typed.encode()))
dl.live(pair, chat=False)"""
KERNEL = "import ipykernel\n\nipykernel.__version__"
LIMIT_MS, WAIT_MS = 120_000, 30_000


@pytest.fixture(scope="module")
def browser():
    with open_browser() as made:
        yield made


# A server whose notebooks run on either generation


def kernel_folder(generation: str) -> Path | None:
    """Where that generation lies: None for the installed one, else a folder that is kept."""
    if generation == OURS:
        return None
    name = f"dflash-lab-ipykernel-{generation}-py{sys.version_info[0]}{sys.version_info[1]}"
    folder = Path(tempfile.gettempdir()) / name
    if not folder.exists():
        made = tempfile.mkdtemp(prefix=name)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", made]
        done = subprocess.run([*pip, *KERNELS[generation]], capture_output=True, text=True)
        if done.returncode:
            missing(f"ipykernel {generation} cannot be installed: {done.stderr[-500:]}")
        os.replace(made, folder)
    return folder


def write_kernel(folder: Path, generation: str) -> None:
    """A kernel that runs on this Python, with that generation before the installed one."""
    elsewhere = kernel_folder(generation)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {
        "argv": command,
        "display_name": f"Generation {generation}",
        "language": "python",
        "env": {"OMP_NUM_THREADS": "1"} | ({"PYTHONPATH": str(elsewhere)} if elsewhere else {}),
    }
    (folder / f"generation{generation}").mkdir(parents=True)
    (folder / f"generation{generation}" / "kernel.json").write_text(json.dumps(spec))


def write_notebook(path: Path, generation: str, hostile: Path) -> None:
    """The notebook on the tiny pair, with blocks that take their time and cells for the test."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (first,) = (c for c in notebook.cells if "parameters" in c.metadata.get("tags", ()))
    first.source = PARAMETERS.format(generation=generation)
    code = nbformat.v4.new_code_cell
    notebook.cells.insert(notebook.cells.index(first) + 1, code(SLOW))
    again = f"import dflash_lab as dl\n\ndl.explore({str(hostile)!r})"
    notebook.cells += [code(KERNEL), code(ECHO), code(again)]
    notebook.metadata.kernelspec = {
        "name": f"generation{generation}",
        "display_name": f"Generation {generation}",
        "language": "python",
    }
    nbformat.write(notebook, path)


def settings_of(root: Path) -> dict[str, str]:
    """An environment in which the server sees this folder and nothing of the user's."""
    for name, values in SETTINGS.items():
        path = root / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    names = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "IPYTHONDIR": "ipython",
    }
    return os.environ | {name: str(root / folder) for name, folder in names.items()}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def start(root: Path) -> tuple[subprocess.Popen, str]:
    """A server of that folder once it answers, and its address."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1"),
        *(f"--port={port}", "--IdentityProvider.token=t", f"--ServerApp.root_dir={root}"),
    ]
    with open(root / "server.log", "a") as log:
        server = subprocess.Popen(command, cwd=root, env=settings_of(root), stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    end = time.monotonic() + LIMIT_MS / 1000
    while time.monotonic() < end and server.poll() is None:
        try:
            urllib.request.urlopen(f"{address}/api/status?token=t", timeout=5).close()
            return server, address
        except OSError:
            time.sleep(0.2)
    server.kill()
    server.wait()
    raise RuntimeError(f"JupyterLab did not start:\n{(root / 'server.log').read_text()[-2000:]}")


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The address of a JupyterLab over a copy of the notebook for each generation."""
    root = tmp_path_factory.mktemp("lab")
    hostile = root / "hostile"
    write_run(hostile, prompts=2, block_sizes=(1, 4), windows=(16,), windowed=(4,), hostile=True)
    (root / "notebooks").mkdir()
    for generation in KERNELS:
        write_kernel(root / "data" / "kernels", generation)
        write_notebook(root / "notebooks" / f"on{generation}.ipynb", generation, hostile)
    try:
        server, address = start(root)
    except RuntimeError:  # the port may have been taken meanwhile
        server, address = start(root)
    yield address
    server.terminate()
    server.wait(60)


# A notebook that ran from top to bottom


@dataclass
class Opened:
    """A notebook in the browser, and what went wrong in its page."""

    page: object
    generation: str
    errors: list[str] = field(default_factory=list)

    def output(self, inside: str, place: int = 0):
        """The output that holds such an element, the first one of them unless told otherwise."""
        return self.page.locator(f".jp-OutputArea-output:has({inside})").nth(place)

    def run(self, menu: str, entry: str) -> None:
        self.page.locator(".lm-MenuBar-item", has_text=menu).first.click()
        self.page.locator(
            ".lm-Menu-itemLabel", has_text=re.compile(rf"^{entry}(…|\.\.\.)?$")
        ).click()

    def idle(self):
        return self.page.get_by_text(f"Generation {self.generation} | Idle")

    def ran(self) -> None:
        """Wait until no cell is at work or waits."""
        done = r"""() => [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')]
            .every(prompt => /\[\d+\]/.test(prompt.textContent))"""
        self.page.wait_for_function(done, timeout=LIMIT_MS)


@pytest.fixture(scope="module")
def notebooks(browser, lab):
    """Both notebooks on their way: the tests of the first run while the second is at work."""
    made = {generation: open_notebook(browser, lab, generation) for generation in KERNELS}
    for opened in made.values():
        opened.idle().wait_for(timeout=LIMIT_MS)
        opened.run("Run", "Run All Cells")
    yield made
    for opened in made.values():
        opened.page.context.close()


def open_notebook(browser, lab: str, generation: str) -> Opened:
    context = browser.new_context(viewport={"width": 1400, "height": 2400})
    context.set_default_timeout(WAIT_MS)
    made = Opened(page=context.new_page(), generation=generation)
    page = made.page
    page.on("console", lambda m: made.errors.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: made.errors.append(str(error)))
    page.on("dialog", lambda dialog: made.errors.append(dialog.message) or dialog.dismiss())
    page.on("request", lambda sent: _note_elsewhere(made, sent.url, lab))
    tree = f"{lab}/lab/workspaces/on{generation}/tree/notebooks/on{generation}.ipynb"
    page.goto(f"{tree}?reset&token=t")
    return made


@pytest.fixture(scope="module", params=list(KERNELS))
def opened(request, notebooks):
    """A notebook that ran from top to bottom."""
    made = notebooks[request.param]
    made.page.locator(".dl-view").nth(1).wait_for(timeout=LIMIT_MS)
    made.ran()
    return made


def _note_elsewhere(made: Opened, url: str, lab: str) -> None:
    if not url.startswith((lab, lab.replace("http", "ws"), "data:", "blob:")):
        made.errors.append(f"requested {url}")


@pytest.fixture
def shown(opened):
    """The notebook; after each test no cell, no panel and no console holds an error."""
    yield opened
    broken = ".jp-RenderedText:is([data-mime-type$='.stderr'], [data-mime-type$='.error'])"
    assert opened.page.locator(broken).all_text_contents() == []
    assert opened.page.locator("[role=alert]").all_text_contents() == []
    assert opened.errors == []


@pytest.fixture
def explorer(shown):
    return shown.output(".dl-view")


@pytest.fixture
def panel(shown):
    return shown.output("button:text-is('Stop')")


def expect(locator):
    """An assertion that waits until it holds."""
    from playwright.sync_api import expect as waits

    waits.set_options(timeout=WAIT_MS)
    return waits(locator)


def slider(output, name: str):
    label = output.page.get_by_text(name, exact=True)
    return output.locator(".widget-slider", has=label).locator(".noUi-handle")


def picture(output):
    return output.locator(".dl-view .pictures img").first


def waits_for(output, words: str) -> None:
    """Wait until the first picture says so, and is really drawn."""
    output.locator(f".dl-view .pictures img[alt^='{words}']").first.wait_for()
    assert picture(output).evaluate("image => image.decode().then(() => image.naturalWidth)") > 300


BLOCK, WINDOW = "block size", "sliding-window size (draft)"
PLAIN = "Block size 1, plain decoding"
AT_4, AT_8 = "Block size 4, full window:", "Block size 8, full window:"
BACK, ON = "ArrowLeft", "ArrowRight"


def test_both_generations_of_the_kernel_are_at_work(shown):
    told = shown.page.locator(".jp-OutputArea-output pre", has_text=re.compile(r"^'\d+\.\d+"))
    assert told.first.inner_text().strip("'").split(".")[0] == shown.generation


def test_the_installed_settings_keep_callbacks_on_the_main_thread(lab):
    name = "@jupyterlab/apputils-extension:kernels-settings"
    with urllib.request.urlopen(f"{lab}/lab/api/settings/{name}?token=t") as answer:
        schema = json.load(answer)["schema"]
    assert schema["properties"]["commsOverSubshells"]["default"] == "disabled"


def test_the_keyboard_moves_both_sliders_and_the_figure_follows(shown, explorer):
    for name, key, words in (
        (BLOCK, "Home", PLAIN),
        (WINDOW, "End", PLAIN),
        (BLOCK, ON, AT_4),
        (WINDOW, BACK, "Block size 4, window 16:"),
        (BLOCK, ON, "Block size 8, window 16:"),
    ):
        slider(explorer, name).focus()
        shown.page.keyboard.press(key)
        waits_for(explorer, words)


WATCH = """(handle) => {
    const output = handle.closest('.jp-OutputArea-output');
    const picture = () => output.querySelector('.dl-view .pictures img');
    let began = null, before = null;
    window.dlTimes = [];
    handle.addEventListener('keydown', () => {
        [began, before] = [performance.now(), picture().src];
    }, true);
    new MutationObserver(async () => {
        if (began === null || picture() === null || picture().src === before) return;
        const since = began;
        began = null;
        await picture().decode();
        requestAnimationFrame(() => window.dlTimes.push(performance.now() - since));
    }).observe(output, { childList: true, subtree: true });
}"""  # milliseconds from each key to the picture that it brings, loaded and about to be painted


def test_a_drawn_cell_is_on_the_screen_soon_after_the_key(shown, explorer, capsys):
    moves = 9
    slider(explorer, WINDOW).focus()
    shown.page.keyboard.press("End")
    handle = slider(explorer, BLOCK)
    handle.focus()
    shown.page.keyboard.press("Home")
    for key, words in ((BACK, PLAIN), (ON, AT_4), (ON, AT_8)):
        shown.page.keyboard.press(key)
        waits_for(explorer, words)
    handle.evaluate(WATCH)
    for count in range(1, moves + 1):
        shown.page.keyboard.press(BACK if count % 2 else ON)
        shown.page.wait_for_function(f"() => window.dlTimes.length === {count}")
    times = shown.page.evaluate("() => window.dlTimes")
    with capsys.disabled():
        print(f" {statistics.median(times):.0f} ms from key to picture ", end="")
    assert statistics.median(times) < 300


def drag(handle, share: float) -> None:
    """Take a slider's handle to that share of its track."""
    handle.scroll_into_view_if_needed()
    track = handle.locator("xpath=ancestor::*[contains(@class, 'noUi-base')]").bounding_box()
    own = handle.bounding_box()
    middle, mouse = own["y"] + own["height"] / 2, handle.page.mouse
    mouse.move(own["x"] + own["width"] / 2, middle)
    mouse.down()
    mouse.move(track["x"] + share * track["width"], middle, steps=10)
    mouse.up()


def test_the_mouse_moves_both_sliders_and_the_figure_follows(explorer):
    drag(slider(explorer, WINDOW), 1)
    drag(slider(explorer, BLOCK), 0)
    waits_for(explorer, PLAIN)
    drag(slider(explorer, BLOCK), 2 / 3)  # 1, 4, 8 and 16
    waits_for(explorer, AT_8)
    drag(slider(explorer, WINDOW), 0)
    waits_for(explorer, "Block size 8, window 16:")


def test_a_sweep_of_the_mouse_leaves_one_set_of_figures_and_the_last_value(explorer):
    drag(slider(explorer, WINDOW), 0)
    for share in (0, 1, 0, 1):
        drag(slider(explorer, BLOCK), share)
    waits_for(explorer, "Block size 16, window 16:")
    expect(explorer.locator(".dl-view")).to_have_count(1)
    expect(explorer.locator(".dl-view .pictures img")).to_have_count(3)


def test_another_figure_can_be_chosen(explorer):
    explorer.locator(".widget-dropdown", has_text="beside").locator("select").select_option(
        "memory"
    )
    explorer.locator(".dl-view .pictures img[alt*='emory']").wait_for()


def test_the_viewer_steps_through_the_blocks_by_key_and_by_mouse(shown, explorer):
    step, said = explorer.locator(".dl-step"), explorer.locator(".dl-said")
    first, second = (re.compile(f"^block {number} of ") for number in (1, 2))
    step.focus()
    shown.page.keyboard.press("Home")
    expect(said).to_have_text(first)
    shown.page.keyboard.press(ON)
    expect(said).to_have_text(second)
    explorer.locator(".dl-block").first.locator("> bdi").first.click()
    expect(said).to_have_text(first)
    expect(explorer.locator(".dl-rows caption")).to_have_text(said.inner_text())


def buttons(panel):
    return [panel.get_by_role("button", name=name) for name in ("Run", "Stop")]


def field(panel, name: str):
    """The box that a prompt or a number is typed into."""
    label = panel.page.get_by_text(name, exact=True)
    return panel.locator(".widget-textarea, .widget-text", has=label).locator("textarea, input")


def test_the_live_panel_starts_writes_and_stops(panel):
    run, stop = buttons(panel)
    expect(run).to_be_enabled()
    expect(stop).to_be_disabled()
    field(panel, "new tokens").fill("200")  # many enough to be stopped amid them
    field(panel, "new tokens").press("Tab")
    run.click()
    panel.locator(".dl-block").nth(1).wait_for()
    expect(run).to_be_disabled()
    expect(stop).to_be_enabled()
    stop.click()
    panel.get_by_text(re.compile(r"Stopped after \d+ tokens in \d+ blocks")).wait_for()
    expect(run).to_be_enabled()
    expect(stop).to_be_disabled()
    expect(panel.locator(".dl-race")).to_contain_text("plain decoding")
    panel.locator(".dl-notes", has_text="Stopped before its end.").wait_for()


def test_what_is_typed_and_what_a_model_says_to_it_is_seen_literally(shown):
    panel = shown.output("button:text-is('Stop')", 1)
    run, stop = buttons(panel)
    field(panel, "prompt").fill(TYPED)
    field(panel, "new tokens").fill(str(len(TYPED.encode())))
    field(panel, "new tokens").press("Tab")
    run.click()
    expect(panel.locator("pre.dl-text")).to_contain_text(TYPED, use_inner_text=True)
    stop.click()
    expect(run).to_be_enabled()
    expect(field(panel, "prompt")).to_have_value(TYPED)
    assert panel.locator("script, img, think, mjx-container").count() == 0


@pytest.mark.parametrize("text", [*HOSTILE[:2], "$x$", "<think>", "\u05e9\u05dc\u05d5\u05dd"])
def test_what_a_model_wrote_is_seen_literally(shown, text):
    explorer = shown.output(".dl-view", 1)
    assert text.translate(SHOWN_AS) in explorer.locator("pre.dl-text").inner_text()
    assert explorer.locator(".dl-viewer").locator("script, img, think, mjx-container").count() == 0


def test_after_a_restart_of_the_kernel_the_stored_run_is_explored_again(shown):
    explorer = shown.output(".dl-view", 1)
    shown.page.locator(".jp-Notebook .jp-CodeCell").last.locator(".jp-InputPrompt").click()
    shown.run("Kernel", "Restart Kernel")
    shown.page.locator(".jp-Dialog .jp-mod-accept").click()
    shown.idle().wait_for()
    shown.run("Run", "Run Selected Cell")
    slider(explorer, BLOCK).focus()
    shown.page.keyboard.press("Home")
    waits_for(explorer, PLAIN)
    shown.page.keyboard.press("End")
    waits_for(explorer, "Block size 4, ")
