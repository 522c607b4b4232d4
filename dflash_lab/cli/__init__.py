"""The command line: a command parses, calls one library function, prints.

`pairs`, `measuring`, `training` and `reading` hold the commands, `flags` what they share;
`settings` reads flags, `printing` writes.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from dflash_lab.cli import measuring, pairs, reading, training  # noqa: F401, each adds its commands
from dflash_lab.cli.flags import app
from dflash_lab.cli.printing import say


def show_warning(message: Warning | str, category: type[Warning], *rest: Any) -> None:
    """Our own warnings as one line each; a library's are for its developers."""
    if category.__module__.startswith("dflash_lab"):
        say(f"warning: {message}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; an error that a user can mend is one line, not a traceback."""
    warnings.showwarning = show_warning
    try:
        app(None if arguments is None else list(arguments))
    except (ValueError, OSError, RuntimeError, NotImplementedError) as error:
        if os.environ.get("DFLASH_LAB_TRACEBACK"):
            raise
        say(f"error: {' '.join(str(error).split())}")
        sys.exit(1)
    except SystemExit as end:
        if end.code == 130:  # typer's own answer to Ctrl-C
            say("stopped; what was finished is kept, the same command goes on from there.")
        raise
