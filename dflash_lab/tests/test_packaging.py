"""What the package needs, said three times (pyproject, environment.yml, imports) and once meant."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

import dflash_lab

PACKAGE = Path(dflash_lab.__file__).parent
ROOT = PACKAGE.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ENVIRONMENT = (ROOT / "environment.yml").read_text(encoding="utf-8")


class Names(NamedTuple):
    """One dependency under its three names; None where nothing of the kind exists."""

    module: str
    pip: str
    conda: str | None


# Imported by the library; `USED_ONLY` says what else is needed, and by whom.
IMPORTED = (
    Names("accelerate", "accelerate", "accelerate"),
    Names("anywidget", "anywidget", "anywidget"),
    Names("datasets", "datasets", "datasets"),
    Names("huggingface_hub", "huggingface_hub", "huggingface_hub"),
    Names("ipywidgets", "ipywidgets", "ipywidgets"),
    Names("jaxtyping", "jaxtyping", "jaxtyping"),
    Names("jinja2", "jinja2", "jinja2"),
    Names("markupsafe", "markupsafe", "markupsafe"),
    Names("matplotlib", "matplotlib", "matplotlib"),
    Names("mlx", "mlx", "mlx"),
    Names("mlx_lm", "mlx-lm", "mlx-lm"),
    Names("numpy", "numpy", "numpy"),
    Names("packaging", "packaging", "packaging"),
    Names("nbconvert", "nbconvert", "nbconvert"),
    Names("pandas", "pandas", "pandas"),
    Names("papermill", "papermill", "papermill"),
    Names("platformdirs", "platformdirs", "platformdirs"),
    Names("pyarrow", "pyarrow", "pyarrow"),
    Names("rich", "rich", "rich"),
    Names("safetensors", "safetensors", "safetensors"),
    Names("tokenizers", "tokenizers", "tokenizers"),
    Names("torch", "torch", "pytorch"),
    Names("traitlets", "traitlets", "traitlets"),
    Names("transformers", "transformers", "transformers"),
    Names("typer", "typer", "typer"),
)
USED_ONLY = {
    Names("gguf", "gguf", "gguf"): "transformers reads the embedded target's GGUF file with it",
    Names("ipykernel", "ipykernel", "ipykernel"): "the notebooks' kernel",
    Names("jupyterlab", "jupyterlab", "jupyterlab"): "make lab",
    Names("seaborn", "seaborn", "seaborn"): "a reader's own figures, in notebooks",
}
FOR_SERVING = (
    Names("fastapi", "fastapi", "fastapi"),
    Names("prometheus_client", "prometheus_client", "prometheus_client"),
    Names("uvicorn", "uvicorn", "uvicorn"),
)
FOR_TESTS = (
    Names("axe_playwright_python", "axe-playwright-python", None),
    Names("beartype", "beartype", None),
    Names("dflash_lab", "dflash-lab", None),  # with the extra [serve]
    Names("httpx", "httpx", None),
    Names("nbformat", "nbformat", None),
    Names("nbstripout", "nbstripout", None),
    Names("openai", "openai", None),
    Names("playwright", "playwright", None),
    Names("pytest", "pytest", None),
    Names("xdist", "pytest-xdist", None),
    Names("ruff", "ruff", None),
    Names("yaml", "pyyaml", None),
)
CORE = (*IMPORTED, *USED_ONLY)
ASKED_FOR = {  # what environment.yml must name in any case
    *("jupyterlab", "ipywidgets", "matplotlib", "seaborn", "pandas", "datasets"),
    *("pytorch", "transformers", "mlx", "mlx-lm"),
}

LINUX = {"platform_system": "Linux", "platform_machine": "x86_64", "sys_platform": "linux"}
APPLE = {"platform_system": "Darwin", "platform_machine": "arm64", "sys_platform": "darwin"}
INTEL_MAC = {"platform_system": "Darwin", "platform_machine": "x86_64", "sys_platform": "darwin"}
WINDOWS = {"platform_system": "Windows", "platform_machine": "AMD64", "sys_platform": "win32"}

VERSION = r"(?:>=|<=|==|!=|~=|>|<|=)\d+(?:\.\d+)*(?:\.\*)?"
CONDA_SPEC = re.compile(rf"([a-z0-9][a-z0-9._-]*)((?:{VERSION})(?:,{VERSION})*)?")


def core_requirements() -> list[Requirement]:
    return [Requirement(line) for line in PYPROJECT["project"]["dependencies"]]


def extra_requirements(extra: str) -> list[Requirement]:
    return [Requirement(line) for line in PYPROJECT["project"]["optional-dependencies"][extra]]


def faults(text: str) -> list[str]:
    """What is wrong with the form of an environment file, one sentence each."""
    document = yaml.safe_load(text)
    if not isinstance(document, dict):
        return ["the file is no mapping"]
    found = [
        f"unknown key {key!r}"
        for key in document
        if key not in {"name", "channels", "dependencies"}
    ]
    if document.get("channels") != ["conda-forge", "nodefaults"]:
        found.append(f"channels are {document.get('channels')}, not conda-forge and nodefaults")
    if not re.fullmatch(r"[a-z][a-z0-9-]*", str(document.get("name"))):
        found.append(f"{document.get('name')!r} is no name of an environment")
    lines = document.get("dependencies") or []
    conda = [line for line in lines if not isinstance(line, dict)]
    nested = [line for line in lines if isinstance(line, dict)]
    found += [f"{line!r} is no spec" for line in conda if not CONDA_SPEC.fullmatch(str(line))]
    names = [re.split(r"[^a-z0-9._-]", str(line))[0] for line in conda]
    found += [f"{name} is named twice" for name in sorted(set(names)) if names.count(name) > 1]
    if nested and [list(entry) for entry in nested] != [["pip"]]:
        return [*found, f"{nested} is not one list of pip lines"]
    found += [fault for entry in nested for line in entry["pip"] if (fault := pip_fault(line))]
    if nested and "pip" not in names:
        found.append("there are pip lines, but pip is not a dependency")
    return found + comment_faults(text)


def pip_fault(line: str) -> str | None:
    if line.startswith("-"):
        return None if line == "-e ." else f"{line!r} is an option other than '-e .'"
    try:
        Requirement(line)
    except InvalidRequirement as error:
        return f"{line!r}: {error}"
    return None


def comment_faults(text: str) -> list[str]:
    """Selectors of conda-build look like comments, and conda takes them for that."""
    return [
        f"{line.strip()!r}: a selector is only a comment here"
        for line in text.splitlines()
        if re.search(r"-.*#\s*\[", line)
    ]


def conda_specs(text: str) -> dict[str, str]:
    lines = [line for line in yaml.safe_load(text)["dependencies"] if isinstance(line, str)]
    matches = [CONDA_SPEC.fullmatch(line) for line in lines]
    return {match[1]: match[2] or "" for match in matches if match}


def imported_modules(paths: list[Path]) -> set[str]:
    """First names of what some files import, less the standard library and ourselves."""
    found = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(str(node.module).split(".")[0])
    return found - set(sys.stdlib_module_names) - {"dflash_lab", "conftest"}


def library_imports() -> set[str]:
    return imported_modules([p for p in PACKAGE.rglob("*.py") if "tests" not in p.parts])


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`make -n` as from a fresh shell, whatever make this test itself was started by."""
    inherited = ("MAKE", "PYTHON", "VENV", "TORCH", "RUN")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(inherited)}
    return subprocess.run(
        ["make", "-n", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def test_every_import_of_the_library_is_in_the_table_and_every_entry_is_imported():
    assert library_imports() == {names.module for names in (*IMPORTED, *FOR_SERVING)}


def test_every_import_of_the_tests_is_installed_by_the_dev_extra():
    known = {names.module for names in (*CORE, *FOR_TESTS)}
    assert imported_modules(list((PACKAGE / "tests").rglob("*.py"))) <= known


def test_what_is_used_without_an_import_is_imported_nowhere():
    assert not library_imports() & {names.module for names in USED_ONLY}


def test_pyproject_and_the_table_name_the_same_packages():
    assert {req.name for req in core_requirements()} == {names.pip for names in CORE}
    serving, testing = extra_requirements("serve"), extra_requirements("dev")
    assert {req.name for req in serving} == {names.pip for names in FOR_SERVING}
    assert {req.name for req in testing} == {names.pip for names in FOR_TESTS}
    assert {"serve"} in [req.extras for req in testing]


def test_environment_yml_and_the_table_name_the_same_packages():
    named = {names.conda for names in (*CORE, *FOR_SERVING)}
    assert set(conda_specs(ENVIRONMENT)) == named | {"python", "pip"}


def test_environment_yml_names_what_a_reader_expects_there():
    assert set(conda_specs(ENVIRONMENT)) >= ASKED_FOR


@pytest.mark.parametrize("names", (*CORE, *FOR_SERVING), ids=lambda names: names.pip)
def test_pip_and_conda_ask_for_the_same_versions(names):
    asked = (*core_requirements(), *extra_requirements("serve"))
    specs = {req.specifier for req in asked if req.name == names.pip}
    assert specs == {SpecifierSet(conda_specs(ENVIRONMENT)[names.conda])}


def test_environment_yml_is_well_formed():
    assert faults(ENVIRONMENT) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("- numpy", "- numpy=2.4.6=py311h0123_0"),
        ("- numpy", "- numpy; platform_system == 'Linux'"),
        ("- numpy", "- numpy  # [linux]"),
        ("- numpy", "- numpy\n  - numpy>=2"),
        ("- numpy", "- Numpy"),
        ("- numpy", "- numpy>=>2"),
        ("- -e .", "- mlx[cpu"),
        ("- -e .", "- --no-deps ."),
        ("  - pip\n", ""),
        ("  - nodefaults", "  - defaults"),
        ("name: dflash-lab", "name: dflash-lab\nprefix: /opt/envs/dflash-lab"),
    ],
)
def test_a_fault_in_the_form_of_environment_yml_is_noticed(old, new):
    assert old in ENVIRONMENT
    assert len(faults(ENVIRONMENT.replace(old, new, 1))) == 1


@pytest.mark.parametrize(
    ("platform", "wanted"),
    [
        (LINUX, {("mlx", "cpu"), ("mlx-lm", "")}),
        (LINUX | {"platform_machine": "aarch64"}, {("mlx", "cpu"), ("mlx-lm", "")}),
        (APPLE, {("mlx", ""), ("mlx-lm", "")}),
        (INTEL_MAC, set()),
        (WINDOWS, set()),
    ],
)
def test_mlx_is_asked_for_where_it_runs_and_with_the_backend_of_that_platform(platform, wanted):
    asked = [
        req
        for req in core_requirements()
        if req.name.startswith("mlx") and (req.marker is None or req.marker.evaluate(platform))
    ]
    assert {(req.name, ",".join(req.extras)) for req in asked} == wanted


def test_only_mlx_depends_on_the_platform():
    assert {req.name for req in core_requirements() if req.marker} == {"mlx", "mlx-lm"}


def test_the_licence_is_apache_2_0_in_full():
    text = (ROOT / "LICENSE").read_text()
    assert PYPROJECT["project"]["license"] == "Apache-2.0"
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_version_is_said_once_and_is_the_one_installed():
    assert "version" not in PYPROJECT["project"]
    assert distribution("dflash-lab").version == dflash_lab.__version__


def test_jupyterlab_is_told_to_keep_widget_messages_off_subshells():
    """Callbacks would otherwise run beside a cell, in a thread of their own."""
    installed = Path(sys.prefix, "share/jupyter/lab/settings/overrides.d/dflash-lab.json")
    shipped = PACKAGE / "jupyter" / "overrides.d" / "dflash-lab.json"
    kernels = json.loads(installed.read_text())["@jupyterlab/apputils-extension:kernels-settings"]
    assert kernels == {"commsOverSubshells": "disabled"}
    assert installed.read_text() == shipped.read_text()


@pytest.mark.parametrize(
    "target", ["demo", "test", "test-slow", "lab", "lint", "format", "report", "clean"]
)
def test_make_knows(target):
    assert make(target).returncode == 0


@pytest.mark.parametrize("target", ["demo", "test"])
def test_a_new_environment_is_set_up_in_order_with_the_python_and_torch_that_were_given(
    target, tmp_path
):
    venv = tmp_path / "env"
    plan = make(target, f"VENV={venv}", "PYTHON=python9", "TORCH=torch==2.13.1").stdout
    steps = (
        f"python9 -m venv {venv}",
        "pip install $TORCH_WANTED",
        'pip install -e ".[dev]"',
        "pair smollm2",
    )
    places = [plan.index(step) for step in steps]
    assert places == sorted(places)
    assert plan.rindex(f"> {venv}/.installed") < plan.index("pair smollm2")


def test_what_is_set_up_is_not_set_up_again(tmp_path):
    venv = tmp_path / "env"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    (venv / ".installed").write_text(f"{ROOT}\n")
    assert "pip install" not in make("demo", f"VENV={venv}").stdout
    assert "pip install" in make("demo", f"VENV={venv}", "TORCH=torch==2.14.0").stdout


def test_a_torch_that_is_there_stays_unless_another_is_given(tmp_path):
    kept = "pip show --quiet torch 2>/dev/null || { set -f;"
    assert kept in make("demo", f"VENV={tmp_path}").stdout
    assert kept not in make("demo", f"VENV={tmp_path}", "TORCH=torch>=2.13").stdout


@pytest.mark.parametrize("damage", ["no stamp", "no python", "another clone"])
def test_a_half_made_environment_is_set_up_again(damage, tmp_path):
    venv = tmp_path / "env"
    (venv / "bin").mkdir(parents=True)
    target = "/nowhere/python" if damage == "no python" else sys.executable
    (venv / "bin" / "python").symlink_to(target)
    if damage != "no stamp":
        (venv / ".installed").write_text(
            "/elsewhere\n" if damage == "another clone" else f"{ROOT}\n"
        )
    assert "pip install -e" in make("test", f"VENV={venv}").stdout


def test_the_makefile_uses_nothing_that_make_3_81_lacks():
    text = (ROOT / "Makefile").read_text()
    for word in (".ONESHELL", "$(file", "!=", "&:", "--touch", "sed -i", "readlink -f", "cp --"):
        assert word not in text


def test_the_readme_says_that_there_is_no_prompt_cache():
    assert "There is no prompt cache" in (ROOT / "README.md").read_text(encoding="utf-8")
