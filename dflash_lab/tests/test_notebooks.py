"""Every notebook: clean in git, one set of parameters, and runs from top to bottom."""

import ast
import copy
import re
from pathlib import Path

import nbformat
import pytest

import dflash_lab
from dflash_lab.load import EMBEDDED

ROOT = Path(dflash_lab.__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PARAMETERS = {"pair", "results"}  # at least these, so that a test can point both elsewhere
MAX_CODE_CELLS = 29
CELL_LIMIT_S = 900
ABSOLUTE = re.compile(r"""(?:["'(\s]|^)(?:/(?:home|Users|root|tmp|work|mnt|opt|data)/|[A-Z]:\\)""")


def tagged(notebook: nbformat.NotebookNode, tag: str) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if tag in cell.metadata.get("tags", ())]


def code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def assigned(cell: nbformat.NotebookNode) -> dict[str, object]:
    """Names that a parameters cell gives plain values; anything else in it is an error."""
    values = {}
    for node in ast.parse(cell.source).body:
        if not (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)):
            raise ValueError(f"{ast.unparse(node)!r} in the parameters cell is no assignment")
        values[node.targets[0].id] = ast.literal_eval(node.value)
    return values


def private_names(source: str) -> list[str]:
    """Names with a leading underscore that a cell takes from somewhere else."""
    nodes = list(ast.walk(ast.parse(source)))
    taken = [node.attr for node in nodes if isinstance(node, ast.Attribute)]
    taken += [alias.name for n in nodes if isinstance(n, ast.ImportFrom) for alias in n.names]
    return [name for name in taken if name.startswith("_") and not name.startswith("__")]


def faults(notebook: nbformat.NotebookNode) -> list[str]:
    """What keeps a notebook from being committed, one sentence each."""
    found, code = [], code_cells(notebook)
    if notebook.metadata.get("kernelspec", {}).get("name") != "python3":
        found.append("its kernel is not python3")
    if any(cell.outputs for cell in code):
        found.append("it has outputs")
    if any(cell.execution_count is not None for cell in code):
        found.append("it has execution counts")
    if len(code) > MAX_CODE_CELLS:
        found.append(f"it has {len(code)} code cells, more than {MAX_CODE_CELLS}")
    first = notebook.cells[0]
    if first.cell_type != "markdown" or not re.search(r"\bminutes?\b", first.source):
        found.append("its first cell does not say in prose what it is for and how long it takes")
    if any(ABSOLUTE.search(cell.source) for cell in notebook.cells):
        found.append("it names an absolute path")
    if any(private_names(cell.source) for cell in code):
        found.append("it uses a private name")
    return found + parameter_faults(notebook)


def parameter_faults(notebook: nbformat.NotebookNode) -> list[str]:
    cells = tagged(notebook, "parameters")
    if len(cells) != 1:
        return [f"it has {len(cells)} parameters cells instead of one"]
    try:
        values = assigned(cells[0])
    except ValueError as error:
        return [str(error)]
    return [f"it has no parameter {name!r}" for name in sorted(PARAMETERS - values.keys())]


def sample() -> nbformat.NotebookNode:
    """A notebook without a fault, to be damaged in one place."""
    v4 = nbformat.v4
    cells = [
        v4.new_markdown_cell("# A question\n\nNeeds nothing; under a minute on a CPU."),
        v4.new_code_cell(
            'pair = "smollm2"\nresults = "../results"', metadata={"tags": ["parameters"]}
        ),
        v4.new_code_cell("import dflash_lab as dl\n\ndl.__name__"),
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})


def add_output(notebook):
    notebook.cells[2].outputs = [nbformat.v4.new_output("stream", text="hello")]


def add_count(notebook):
    notebook.cells[2].execution_count = 1


def add_cells(notebook):
    notebook.cells += [nbformat.v4.new_code_cell("1") for _ in range(MAX_CODE_CELLS)]


def other_kernel(notebook):
    notebook.metadata.kernelspec.name = "my-env"


def code_first(notebook):
    notebook.cells.insert(0, nbformat.v4.new_code_cell("1"))


def no_minutes(notebook):
    notebook.cells[0].source = "# A question"


def absolute_path(notebook):
    notebook.cells[2].source = 'open("/home/me/run.json")'


def private_name(notebook):
    notebook.cells[2].source = "from dflash_lab.store import _secret"


def no_tag(notebook):
    notebook.cells[1].metadata.tags = []


def two_tags(notebook):
    notebook.cells[2].metadata["tags"] = ["parameters"]


def lost_parameter(notebook):
    notebook.cells[1].source = 'pair = "smollm2"'


def computed_parameter(notebook):
    notebook.cells[1].source = 'pair = "smollm2"\nresults = max("a", "b")'


DAMAGES = [
    *(add_output, add_count, add_cells, other_kernel, code_first, no_minutes, absolute_path),
    *(private_name, no_tag, two_tags, lost_parameter, computed_parameter),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_each_fault_of_a_notebook_is_noticed(damage):
    assert faults(sample()) == []
    damaged = copy.deepcopy(sample())
    damage(damaged)
    assert len(faults(damaged)) == 1


def test_the_notebooks_of_the_readme_are_there():
    names = {path.stem for path in NOTEBOOKS}
    assert set(re.findall(r"notebooks/(\w+)\.ipynb", (ROOT / "README.md").read_text())) == names


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_clean(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert faults(notebook) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_a_pair_that_comes_along_unless_told_otherwise(path):
    (cell,) = tagged(nbformat.read(path, as_version=4), "parameters")
    assert assigned(cell)["pair"] in EMBEDDED
    assert str(assigned(cell)["results"]).startswith("../results")


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=lambda path: path.stem)
def executed(request, tmp_path_factory) -> Path:
    """The folder in which one notebook ran: its copy with outputs, and what it wrote.

    As it stands, but on the tiny pair: what the embedded one needs more is time.
    """
    import papermill

    folder = tmp_path_factory.mktemp(request.param.stem)
    (folder / "notebooks").mkdir()
    papermill.execute_notebook(
        str(request.param),
        str(folder / "notebooks" / "executed.ipynb"),
        parameters={"results": str(folder / "results"), "pair": "tiny"},
        kernel_name="python3",
        cwd=str(folder / "notebooks"),
        execution_timeout=CELL_LIMIT_S,
        progress_bar=False,
        store_widget_state=False,
    )
    return folder


def pictures(notebook: nbformat.NotebookNode) -> int:
    """Outputs that show a picture, whether plain or inside a piece of HTML."""
    data = [output.get("data", {}) for cell in code_cells(notebook) for output in cell.outputs]
    return sum(
        any(kind.startswith("image/") for kind in bundle)
        or bool(re.search(r"<(?:img|svg)\b", bundle.get("text/html", "")))
        for bundle in data
    )


@pytest.mark.slow
def test_a_notebook_runs_from_top_to_bottom_and_shows_pictures(executed):
    notebook = nbformat.read(executed / "notebooks" / "executed.ipynb", as_version=4)
    assert all(cell.execution_count for cell in code_cells(notebook) if cell.source.strip())
    assert pictures(notebook) >= 1


@pytest.mark.slow
def test_a_notebook_writes_below_results_and_nothing_elsewhere(executed):
    finished = [*(executed / "results").rglob("cell.json")]
    assert finished or list((executed / "results").rglob("training.json"))
    assert [path.name for path in (executed / "notebooks").iterdir()] == ["executed.ipynb"]
    assert {path.name for path in executed.iterdir()} == {"notebooks", "results"}


@pytest.mark.slow
def test_an_exported_notebook_shows_pictures_where_it_had_sliders(executed):
    from nbconvert import HTMLExporter

    page, _ = HTMLExporter().from_filename(str(executed / "notebooks" / "executed.ipynb"))
    assert not re.findall(r"\b\w*Slider\(value=|\bVBox\(children=|\bHBox\(children=", page)
    assert re.search(r"<(?:img|svg)\b", page)
