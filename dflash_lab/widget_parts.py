"""What the panels of a notebook share: the import, room for a control, an error in words."""

from __future__ import annotations

import html
import traceback
from typing import Any

from dflash_lab.viewer import INSTALL


def import_widgets(what: str, otherwise: str = "") -> Any:
    """ipywidgets, or an ImportError that names the install line and what works without it."""
    try:
        import ipywidgets
    except ImportError as error:
        message = f"{what} needs ipywidgets: {INSTALL}. {otherwise}".rstrip()
        raise ImportError(message) from error
    return ipywidgets


def wide(widgets: Any) -> dict[str, Any]:
    """Room for the whole description of a control."""
    return {
        "style": {"description_width": "16em"},
        "layout": widgets.Layout(width="min(100%, 46em)"),
    }


def problem_html(error: BaseException, hint: str) -> str:
    """An error inside a panel: its kind and message, the way out, the trace folded away."""
    kind, message = type(error).__name__, str(error)
    trace = "".join(traceback.format_exception(error))
    return (
        f'<div role="alert"><p><b>{html.escape(kind)}</b>: {html.escape(message)}</p>'
        f"<p>{html.escape(hint)}</p><details><summary>where it happened</summary>"
        f"<pre>{html.escape(trace)}</pre></details></div>"
    )
