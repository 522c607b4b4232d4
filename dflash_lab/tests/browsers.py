"""Chromium for tests that need a real browser; where it is missing, CI fails and others skip."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
GRAVE = ("serious", "critical")


def missing(reason: str) -> None:
    """What a test needs is not here: a failure in CI, elsewhere a skip."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


@contextmanager
def open_browser() -> Iterator[Any]:
    """A Chromium with a profile of its own, which is thrown away."""
    if not CHROMIUM.exists():
        missing(f"{CHROMIUM} is missing; install it, as by apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        yield browser
        browser.close()


def grave_faults(page: Any, within: str | None = None) -> list[str]:
    """What axe finds serious or critical in a page, or in one part of it."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page, within).response["violations"]
    return [
        f"{fault['id']}: {node['target']} {node['html'][:200]} {node.get('failureSummary', '')}"
        for fault in found
        if fault["impact"] in GRAVE
        for node in fault["nodes"]
    ]
