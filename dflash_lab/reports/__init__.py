"""A stored run as one HTML file that needs nothing else: no network, no script to be readable."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from dflash_lab.reports.content import content
from dflash_lab.store import Run, open_run, to_json, write_atomic
from dflash_lab.viewer import script, viewer_styles


def report(run: Run | str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a run, `report.html` in its folder unless `out` names another file.

    The same run gives the same bytes. Raises ValueError for a run without a finished cell, and
    where `out` is a folder.
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
    return _template().render(
        made
        | {"data": script_json(made["data"]), "css": _own("report.css"), "js": _own("report.js")},
        token_css=Markup(viewer_styles()),
        viewer=Markup(script()),
    )


def script_json(value: object) -> Markup:
    """JSON that can stand in a script element: no text in it ends the element."""
    return Markup(to_json(value).replace("<", "\\u003c"))


def _own(name: str) -> Markup:
    return Markup(files("dflash_lab.reports").joinpath(name).read_text(encoding="utf-8"))


def _template():
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(str(_own("report.html.j2")))


__all__ = ["page", "report"]
