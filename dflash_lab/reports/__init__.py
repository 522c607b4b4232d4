"""A stored run as one HTML file that needs nothing else: no network, no script to be readable."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from dflash_lab.reports.content import content
from dflash_lab.reports.differences import Difference, compare, difference_content
from dflash_lab.reports.notebooks import body, executed, read_parameters, title_of
from dflash_lab.store import Run, open_run, to_json, write_atomic
from dflash_lab.viewer import script, viewer_styles


def report(run: Run | str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a run, `report.html` in its folder unless `out` names another file.

    The same run and library versions give the same bytes. Raises ValueError for a run without a
    finished cell, and where `out` is a folder.
    """
    run = run if isinstance(run, Run) else open_run(run)
    path = run.path / "report.html" if out is None else Path(out)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the report's file, such as {path}/report.html.")
    text = page(run)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text)
    return path


def page(run: Run) -> str:
    """The report of a run as HTML."""
    made = content(run)
    return filled(
        "report.html.j2",
        **made | {"data": packed(made["data"])},
        subject=": block size and draft window",
        viewer=Markup(script()),
        js=_own("report.js"),
    )


def write_difference(made: Difference, out: str | Path) -> Path:
    """Write the comparison of two runs, as from `compare`, as one HTML file."""
    path = Path(out)
    values = difference_content(made)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, filled("difference.html.j2", subject=": two runs", **values))
    return path


def export_notebook(
    notebook: str | Path,
    out: str | Path | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> Path:
    """Run a notebook and write it as one HTML file: no network, no kernel, the reports' style.

    It runs in its own folder; the file is `NAME.html` here unless `out` names another. Raises
    ValueError for a notebook or a parameter that there is not, and names a cell that fails.
    """
    path, given = Path(notebook), dict(parameters or {})
    target = Path(f"{path.stem}.html") if out is None else Path(out)
    with TemporaryDirectory(prefix="dflash-lab-") as folder:
        made = body(executed(path, given, Path(folder)))
    text = filled(
        "notebook.html.j2",
        title=title_of(path, made),
        subject="",
        file=path.name,
        parameters=given,
        body=Markup(made),
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(target, text)
    return target


def filled(template: str, **values: object) -> str:
    """One of this folder's templates with these values; all of them share a head and a style."""
    environment = Environment(
        loader=FunctionLoader(_own),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["inline"] = inline
    css = _own("report.css")
    made = environment.get_template(template)
    return made.render(token_css=Markup(viewer_styles()), css=css, **values)


def packed(value: object) -> str:
    """JSON as text that can stand in a script element: deflated, a tenth of it, in base64."""
    return base64.b64encode(zlib.compress(to_json(value).encode(), 9)).decode()


def inline(svg: str) -> Markup:
    """A picture as the source of an image, for an attribute in double quotes.

    Not in base64, which is a third longer. Its attributes quote their values with ' instead of ",
    and words in them hold neither, being escaped.
    """
    text = svg.replace("\n", " ").replace('"', "'")
    for character, code in (("%", "%25"), ("#", "%23"), ("&", "&amp;")):
        text = text.replace(character, code)
    return Markup(f"data:image/svg+xml,{text}")


def _own(name: str) -> Markup:
    return Markup(files("dflash_lab.reports").joinpath(name).read_text(encoding="utf-8"))


__all__ = [
    "Difference",
    "compare",
    "export_notebook",
    "page",
    "read_parameters",
    "report",
    "write_difference",
]
