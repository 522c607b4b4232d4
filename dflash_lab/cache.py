"""The project's folder in the user's cache: converted targets and fetched data sets."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """The project's folder in the user's cache; DFLASH_LAB_CACHE names another one."""
    chosen = os.environ.get("DFLASH_LAB_CACHE")
    return Path(chosen or platformdirs.user_cache_dir("dflash_lab")).expanduser().resolve()
