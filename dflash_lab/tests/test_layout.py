"""Where things lie and who imports whom: the tree of the README, held by tests."""

import ast
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dflash_lab

PACKAGE = Path(dflash_lab.__file__).parent
ROOT = PACKAGE.parent

TOP_LEVEL = {
    "LICENSE",
    "Makefile",
    "README.md",
    "data",
    "dflash_lab",
    "environment.yml",
    "notebooks",
    "pyproject.toml",
    "results",
}

# A module imports only what stands above it. A new module gets its place here.
ORDER = (
    "config",
    "cache",
    "public_sets",
    "prompts",
    "sampling",
    "accept",
    "trace",
    "checkpoint",
    "backends",
    "embedded",
    "load",
    "inspection",
    "policies",
    "texts",
    "decoding",
    "provenance",
    "serving",
    "lease",
    "store",
    "exactness",
    "locking",
    "sweeps",
    "scoring",
    "tokens",
    "viewer",
    "widget_parts",
    "racing",
    "live_panel",
    "analyse",
    "imports",
    "replay",
    "costs",
    "forecast",
    "recommendation",
    "plot",
    "figures",
    "what_if",
    "kinds",
    "panels",
    "scaling",
    "explorer",
    "reports",
    "doctor",
    "train",
    "demo",
    "benchmarking",
    "benchmark_text",
    "cli",
    "calls",
    "model",
    "model_mlx",
    "benchmark",
    "__main__",
)

FROM_ANALYSE_ON = frozenset(ORDER[ORDER.index("analyse") :])
HOMES = {
    "torch": {"backends", "train"},
    "mlx": {"backends", "train"},
    "mlx_lm": {"backends", "train"},
    "pandas": FROM_ANALYSE_ON,
    "matplotlib": {"plot"},
    "seaborn": {"plot"},
    "ipywidgets": {"widget_parts"},
    "anywidget": {"viewer"},
    "traitlets": {"viewer"},
    "fastapi": {"serving"},
    "uvicorn": {"serving"},
    "prometheus_client": {"serving"},
    "typer": {"cli"},
    "rich": {"cli"},
}
HEAVY = ("torch", "mlx", "transformers", "pandas", "matplotlib")


def parts(path: Path) -> tuple[str, ...]:
    """Dotted name of a file in the package, without the package: ("backends", "torch_model")."""
    names = path.relative_to(PACKAGE).with_suffix("").parts
    return names[:-1] if names[-1] == "__init__" else names


def modules() -> list[Path]:
    """The library's files. Tests and the package's own __init__ may import from everywhere."""
    found = (path for path in sorted(PACKAGE.rglob("*.py")) if parts(path))
    return [path for path in found if parts(path)[0] != "tests"]


def imports(source: str, package: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Every import in a source text, inside functions too; what is relative is made absolute."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (tuple(alias.name.split(".")) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            here = package[: len(package) - node.level + 1] if node.level else ()
            base = (*here, *(node.module.split(".") if node.module else ()))
            # `from dflash_lab import store` names a module in its last part
            yield from ((*base, alias.name) if len(base) == 1 else base for alias in node.names)


def imports_of(path: Path) -> set[tuple[str, ...]]:
    names = ("dflash_lab", *parts(path))
    package = names if path.name == "__init__.py" else names[:-1]
    return set(imports(path.read_text(encoding="utf-8"), package))


def faults(home: str, imported: set[tuple[str, ...]]) -> list[str]:
    """What a module of the library imports although it may not, one sentence each."""
    found = []
    for name in sorted(imported):
        if name[0] in HOMES and home not in HOMES[name[0]]:
            found.append(f"{home} imports {name[0]}, which belongs in {sorted(HOMES[name[0]])}")
        if name[0] == "dflash_lab" and name[1:2] not in ((home,), ("__version__",)):
            if len(name) == 1 or name[1] not in ORDER:
                found.append(f"{home} imports {'.'.join(name)}: name the module instead")
            elif ORDER.index(name[1]) > ORDER.index(home):
                found.append(f"{home} imports {name[1]}, which stands below it")
    return found


def visible_top_level() -> set[str]:
    """Top-level names that git keeps or would keep; what it ignores is no part of the project."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode == 0 and listing.stdout:
        names = {entry.split("/")[0] for entry in listing.stdout.split("\0") if entry}
    else:  # an unpacked archive
        names = {path.name for path in ROOT.iterdir()}
    shown = {name for name in names if not name.startswith(".") and (ROOT / name).exists()}
    return {name for name in shown if not (ROOT / name / "pyvenv.cfg").exists()}


def quickest(command: list[str], tries: int = 12) -> float:
    """Seconds of work of the fastest of several runs: another process's load does not count.

    Work is time on a processor: the run's own wait for its turn is not the command's.
    """
    times = []
    for _ in range(tries):
        began = worked()
        subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
        times.append(worked() - began)
    return min(times)


def worked() -> float:
    """Processor seconds of all subprocesses so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_top_level_holds_exactly_what_the_readme_lists():
    assert visible_top_level() == TOP_LEVEL


def test_every_module_has_a_place_in_the_order():
    assert {parts(path)[0] for path in modules()} <= set(ORDER)


@pytest.mark.parametrize("path", modules(), ids=lambda path: ".".join(parts(path)))
def test_a_module_imports_only_what_stands_above_it_and_keeps_frameworks_at_home(path):
    assert faults(parts(path)[0], imports_of(path)) == []


@pytest.mark.parametrize(
    ("home", "source"),
    [
        ("trace", "from dflash_lab.decoding import decode"),
        ("trace", "from dflash_lab import store"),
        ("trace", "from . import store"),
        ("trace", "from .store import write"),
        ("store", "def read():\n    import pandas as pd"),
        ("analyse", "import matplotlib.pyplot as plt"),
        ("plot", "from ipywidgets import HTML"),
        ("load", "import torch.nn.functional as F"),
        ("decoding", "import mlx.core as mx"),
        ("demo", "from rich.progress import Progress"),
        ("sweeps", "from dflash_lab import decode"),
        ("sweeps", "import dflash_lab as dl"),
    ],
)
def test_a_forbidden_import_is_noticed(home, source):
    assert len(faults(home, set(imports(source, ("dflash_lab",))))) == 1


@pytest.mark.parametrize(
    ("home", "source"),
    [
        ("decoding", "from dflash_lab import trace"),
        ("decoding", "from .trace import Trace"),
        ("backends", "from dflash_lab.backends.torch_session import TorchSession"),
        ("backends", "import torch"),
        ("analyse", "import pandas as pd"),
        ("cli", "import typer\nfrom dflash_lab.demo import demo"),
        ("store", "from dflash_lab import __version__"),
    ],
)
def test_an_allowed_import_is_let_through(home, source):
    assert faults(home, set(imports(source, ("dflash_lab",)))) == []


def test_no_module_bears_the_name_of_a_public_function():
    files = {path.stem for path in PACKAGE.glob("*.py")}
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    assert not set(dflash_lab.__all__) & (files | folders)


def test_every_public_name_can_be_imported():
    missing = [name for name in dflash_lab.__all__ if not hasattr(dflash_lab, name)]
    assert dflash_lab.__all__
    assert missing == []


def test_importing_the_package_loads_no_framework():
    code = f"import sys, dflash_lab; print(*(sys.modules.keys() & set({HEAVY})))"
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert shown.stdout.split() == []


def test_importing_the_package_takes_under_0_3_s():
    empty = quickest([sys.executable, "-c", ""])
    assert quickest([sys.executable, "-c", "import dflash_lab"]) - empty < 0.3


def test_the_command_line_answers_help_in_under_0_5_s():
    assert quickest([str(Path(sys.executable).parent / "dflash-lab"), "--help"]) < 0.5
