"""A notebook as one HTML file: parameters checked, failures named, nothing fetched."""

import nbformat
import pytest

from dflash_lab.reports import export_notebook, read_parameters
from dflash_lab.reports.notebooks import body
from dflash_lab.tests.browsers import grave_faults, open_browser
from dflash_lab.tests.pages import read_page
from dflash_lab.tests.test_report_browser import visit
from dflash_lab.tests.test_reports import LINK


def notebook(path, *sources, tag=True):
    cells = [nbformat.v4.new_markdown_cell("# What is $x^2$?")]
    cells += [nbformat.v4.new_code_cell(source) for source in sources]
    if tag:
        cells[1].metadata["tags"] = ["parameters"]
    made = nbformat.v4.new_notebook(cells=cells)
    made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(made, path)
    return path


def test_values_are_python_literals_or_else_text():
    words = ("pair=tiny", "sizes=(1, 4)", "fast=True", "note=a=b", "empty=")
    assert read_parameters(words) == {
        "pair": "tiny",
        "sizes": (1, 4),
        "fast": True,
        "note": "a=b",
        "empty": "",
    }


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["pair"], "'pair' is no parameter; expected name=value"),
        (["a b=1"], "is no parameter"),
        (["a=1", "a=2"], "-p a is given twice"),
    ],
)
def test_a_word_that_is_no_parameter_is_an_error(words, why):
    with pytest.raises(ValueError, match=why):
        read_parameters(words)


def test_a_notebook_that_is_not_there_is_an_error_before_anything_runs(tmp_path):
    with pytest.raises(ValueError, match=r"there is no notebook .*gone.ipynb"):
        export_notebook(tmp_path / "gone.ipynb")
    with pytest.raises(ValueError, match="there is no notebook"):
        export_notebook(tmp_path)


def test_an_unknown_parameter_is_an_error_that_lists_those_there_are(tmp_path):
    path = notebook(tmp_path / "asks.ipynb", 'pair = "tiny"\nsizes = 4')
    with pytest.raises(ValueError, match=r"asks.ipynb has no parameter pear; it has pair, sizes"):
        export_notebook(path, parameters={"pear": 1})
    bare = notebook(tmp_path / "bare.ipynb", "1", tag=False)
    with pytest.raises(ValueError, match="it has no cell tagged parameters"):
        export_notebook(bare, parameters={"pear": 1})


def test_the_page_of_a_notebook_fetches_nothing_and_shows_text_literally(tmp_path):
    made = nbformat.read(notebook(tmp_path / "n.ipynb", "said"), as_version=4)
    text = "</script><img src=x onerror=alert(1)> $x$ <think>"
    made.cells[1].outputs = [nbformat.v4.new_output("stream", name="stdout", text=text)]
    nbformat.write(made, tmp_path / "n.ipynb")
    page = body(tmp_path / "n.ipynb")
    assert not LINK.search(page)
    shown = read_page(page)
    assert text in shown.text and "$x^2$" in shown.text
    assert not list(shown.all("script")) and not list(shown.all("img"))


@pytest.mark.slow
def test_a_notebook_runs_with_its_parameters_and_becomes_a_page_in_the_reports_style(tmp_path):
    path = notebook(tmp_path / "asks.ipynb", "size = 4", "print(f'size is {size}')")
    out = export_notebook(path, tmp_path / "new" / "page.html", {"size": 9})
    page = read_page(out.read_text(encoding="utf-8"))
    assert "size is 9" in page.text and "size = 9" in page.text
    assert next(page.all("title")).text == "What is $x^2$?"
    assert not LINK.search(out.read_text(encoding="utf-8"))
    assert {each.name for each in tmp_path.iterdir()} == {"asks.ipynb", "new"}
    with open_browser() as browser:
        for scheme in ("light", "dark"):
            for shown in visit(browser, out.as_uri(), color_scheme=scheme):
                assert grave_faults(shown.page) == []


@pytest.mark.slow
def test_a_cell_that_fails_is_named_with_its_beginning_and_its_error(tmp_path):
    path = notebook(tmp_path / "asks.ipynb", "size = 4", "\nshare = size / 0")
    why = r"cell 2 of asks.ipynb failed, the one that begins 'share = size / 0': ZeroDivisionError"
    with pytest.raises(ValueError, match=why):
        export_notebook(path, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
