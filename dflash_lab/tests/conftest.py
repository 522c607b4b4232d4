"""Fixtures, shape checks of the network files, and the line that says which backends ran.

`qwen3_toy`, `untied_toy` and `llama_toy` are made once a session; what they hold is in `toys.py`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jaxtyping import install_import_hook

if "PYTEST_XDIST_WORKER" in os.environ:
    # Set before torch is loaded: workers share the cores, more threads would wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import dflash_lab.backends
import dflash_lab.load
from dflash_lab.backends import Backend, Models
from dflash_lab.config import BACKENDS
from dflash_lab.load import Pair
from dflash_lab.tests.toys import Toy, toy_models

TESTS = Path(__file__).parent
RAN: set[str] = set()  # backends that loaded a pair in this test run

# Nothing above imports these; from here on the shapes in their signatures are checked at each call.
NETWORKS = [f"dflash_lab.backends.{path.stem}" for path in TESTS.parent.glob("backends/*_*.py")]
install_import_hook([name for name in NETWORKS if "__" not in name], "beartype.beartype")
install_import_hook("dflash_lab.train", "beartype.beartype")


@pytest.fixture
def quiet() -> Iterator[None]:
    """Toy drafts accept little; nobody needs to be warned of it."""
    from dflash_lab.decoding import AcceptanceWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AcceptanceWarning)
        yield


@pytest.fixture(scope="session")
def qwen3_toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """A Qwen3-type toy whose head is its embedding; its template has a thinking switch."""
    return toy_models(tmp_path_factory.mktemp("qwen3"), switch=True)


@pytest.fixture(scope="session")
def untied_toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """A Qwen3-type toy with a head of its own."""
    return toy_models(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="session")
def llama_toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """A Llama-type toy."""
    return toy_models(tmp_path_factory.mktemp("llama"), kind="llama")


@pytest.fixture(scope="session", params=["qwen3_toy", "untied_toy", "llama_toy"])
def toy(request: pytest.FixtureRequest) -> Toy:
    """Each of the toys in turn."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def toy_pair(qwen3_toy: Toy) -> Pair:
    """The Qwen3-type toy in memory, float32; tests share it and must leave it as they found it."""
    return qwen3_toy.load()


class Recorded:
    """A backend that notes that it loaded a pair."""

    def __init__(self, name: str, backend: Backend):
        self.name, self.backend = name, backend

    def load(self, *args: Any, **settings: Any) -> Models:
        models = self.backend.load(*args, **settings)
        RAN.add(self.name)
        return models


@pytest.fixture(scope="session", autouse=True)
def backends_noted() -> Iterator[None]:
    """Every `open_backend` of the tests gives a backend that is noted once it has loaded a pair."""
    opener = dflash_lab.backends.open_backend
    with pytest.MonkeyPatch.context() as patch:
        for module in (dflash_lab.backends, dflash_lab.load):
            patch.setattr(module, "open_backend", lambda name: Recorded(name, opener(name)))
        yield


def is_whole(config: pytest.Config) -> bool:
    """Whether every test file was asked for: no -k, no single file, no single test."""
    option = config.option
    narrowed = option.keyword or option.deselect or option.collectonly or option.ignore
    repeated = getattr(option, "lf", False) or getattr(option, "stepwise", False)
    asked = {Path(arg).resolve() for arg in config.args if "::" not in arg}
    return not (narrowed or repeated) and bool(asked & {TESTS, TESTS.parent, TESTS.parents[1]})


def idle(config: pytest.Config) -> list[str]:
    """Backends that this run had to show at work and did not."""
    return sorted(set(BACKENDS) - RAN) if is_whole(config) else []


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    """One of several test processes ended: what ran there, ran."""
    RAN.update(getattr(node, "workeroutput", {}).get("backends", ()))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["backends"] = sorted(RAN)
    elif idle(session.config) and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    terminalreporter.write_line(f"backends that ran: {', '.join(sorted(RAN)) or 'none'}")
    if missing := idle(config):
        names = ", ".join(missing)
        terminalreporter.write_line(f"FAILED: expected to run and did not: {names}", red=True)
