"""Any notebook as one HTML file, run afresh: no network, no kernel, the style of the reports."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

CELL_LIMIT_S = 3600


def read_parameters(pairs: Iterable[str]) -> dict[str, Any]:
    """Values by name, from words such as "pair=tiny" or "sizes=(1, 4)".

    A Python literal is taken as such, anything else as text. Raises ValueError for a word without
    "=" and for a name that comes twice.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if not sign or not name.isidentifier():
            raise ValueError(
                f"-p {pair!r} is no parameter; expected name=value, as in -p pair=tiny."
            )
        if name in found:
            raise ValueError(f"-p {name} is given twice.")
        try:
            found[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            found[name] = text
    return found


def parameter_names(path: Path) -> list[str]:
    """What the cells tagged "parameters" give values to."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    tagged = (c for c in cells if "parameters" in c.get("metadata", {}).get("tags", ()))
    nodes = (node for cell in tagged for node in ast.parse("".join(cell["source"])).body)
    return [
        target.id
        for node in nodes
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]


def executed(path: Path, parameters: Mapping[str, Any], folder: Path) -> Path:
    """A copy of the notebook with outputs, run in its own folder with these parameters.

    Raises ValueError for a notebook that is not there, parameters that it has not, and a cell that
    fails, which it names.
    """
    import papermill

    if not path.is_file() or path.suffix != ".ipynb":
        raise ValueError(f"there is no notebook {path}; expected a file that ends in .ipynb.")
    known = parameter_names(path)
    if unknown := sorted(set(parameters) - set(known)):
        has = f"it has {', '.join(known)}" if known else "it has no cell tagged parameters"
        raise ValueError(f"{path.name} has no parameter {', '.join(unknown)}; {has}.")
    out = folder / path.name
    try:
        papermill.execute_notebook(
            str(path),
            str(out),
            parameters=dict(parameters),
            kernel_name="python3",
            language="python",
            cwd=str(path.parent.resolve()),
            execution_timeout=CELL_LIMIT_S,
            progress_bar=False,
            store_widget_state=False,
        )
    except papermill.PapermillExecutionError as error:
        first = next((line for line in error.source.splitlines() if line.strip()), "")
        raise ValueError(
            f"cell {error.exec_count} of {path.name} failed, the one that begins {first!r}: "
            f"{error.ename}: {error.evalue}"
        ) from error
    return out


def body(path: Path) -> str:
    """Cells and outputs of a notebook as HTML without a head; nothing in it is fetched."""
    from nbconvert import HTMLExporter
    from nbconvert.preprocessors import TagRemovePreprocessor

    exporter = HTMLExporter(template_name="basic", embed_images=True)
    hidden = TagRemovePreprocessor(remove_input_tags={"hide-input"}, enabled=True)
    exporter.register_preprocessor(hidden, enabled=True)
    return str(exporter.from_filename(str(path))[0])


def title_of(path: Path, page: str) -> str:
    """The first heading; the file's name where there is none."""
    found = re.search(r"<h1[^>]*>(.*?)(?:<a\b|</h1>)", page, re.DOTALL)
    return re.sub(r"<[^>]+>", "", found[1]).strip() if found else path.stem
