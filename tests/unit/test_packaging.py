"""The package's promises: light import, public names, data that travels, pins in one file, twins of the Makefile."""

import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import cbserve
from cbserve import cli

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def lines(name: str) -> list[str]:
    text = (ROOT / name).read_text(encoding="utf-8")
    return [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def package(requirement: str) -> str:
    return re.match(r"[A-Za-z0-9._-]+", requirement).group().lower().replace("_", "-")


@pytest.mark.parametrize("name", cbserve.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(cbserve, name) is not None
    assert name in dir(cbserve)


def test_no_module_is_named_like_a_public_name() -> None:
    """Names are looked up when they are used: a module that is imported meanwhile would stand in their place."""
    assert not set(cbserve.PUBLIC) & {module.name for module in pkgutil.iter_modules(cbserve.__path__)}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Sheduler'"):
        cbserve.Sheduler  # noqa: B018


def test_importing_cbserve_imports_neither_torch_nor_numpy() -> None:
    script = "import sys, cbserve, cbserve.cli; print(sorted({'torch', 'numpy', 'IPython'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"


def test_the_core_imports_the_standard_library_only() -> None:
    modules = sorted(path.stem for path in (ROOT / "cbserve" / "core").glob("*.py") if path.stem != "__init__")
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        f"for name in {modules!r}: __import__('cbserve.core.' + name)\n"
        "own = {name.split('.')[0] for name in sys.modules}\n"
        "print(sorted(own - set(sys.stdlib_module_names) - {'cbserve', '__main__'}))"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", script, str(ROOT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_exact_pins_stand_in_the_constraints_only() -> None:
    assert all("==" in line for line in lines("constraints.txt"))
    optional = PROJECT["project"]["optional-dependencies"]
    bounds = [*PROJECT["project"]["dependencies"], *(item for extra in optional.values() for item in extra)]
    assert all(re.fullmatch(r"[A-Za-z0-9-]+>=[0-9.]+", bound) for bound in bounds)
    for name in ("requirements.txt", "requirements-dev.txt"):
        assert lines(name)[0] == "-c constraints.txt"
        assert not any("==" in line.split(";")[0] for line in lines(name))


def test_everything_that_is_asked_for_is_pinned() -> None:
    pinned = {package(line) for line in lines("constraints.txt")}
    optional = PROJECT["project"]["optional-dependencies"]
    asked = [*PROJECT["project"]["dependencies"], *(item for extra in optional.values() for item in extra)]
    asked += [line for line in lines("requirements.txt") if not line.startswith("-")]
    assert {package(requirement) for requirement in asked} - pinned == set()


def test_a_learner_can_run_pytest_on_a_lab() -> None:
    # --strict-config refuses an option whose plugin is not there; `pytest --nbval-lax` must work in a learner's .venv
    needs = {"timeout": "pytest-timeout"}
    options = needs.keys() & PROJECT["tool"]["pytest"]["ini_options"].keys()
    assert {"nbval"} | {needs[option] for option in options} <= set(lines("requirements.txt"))


def test_binder_agrees_with_the_constraints_and_takes_cpu_torch_without_triton() -> None:
    pins = dict(line.split(";")[0].split("==") for line in lines("constraints.txt"))
    binder = dict(line.split("==") for line in lines("binder/requirements.txt") if "==" in line)
    assert binder.pop("torch") == pins["torch"].strip() + "+cpu"
    assert "triton" not in binder
    assert {name: pins[name].strip() for name in binder} == binder


def test_lower_bounds_admit_colab() -> None:
    colab = {"numpy": (2, 1, 3), "torch": (2, 11), "ipywidgets": (7, 7, 1), "ipython": (7, 34)}
    bounds = dict(bound.split(">=") for bound in PROJECT["project"]["dependencies"])
    for name, version in colab.items():
        assert tuple(map(int, bounds[name].split("."))) <= version


def test_every_make_target_has_a_twin() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = set(re.search(r"^\.PHONY: (.*)$", makefile, re.M).group(1).split()) - {"help"}
    choices = cli.build_parser()._subparsers._group_actions[0].choices
    assert phony == {"lab", "test", "test-fast", "demo", "notebooks", "lint", "clean"}
    assert phony <= set(choices)


def test_data_files_of_the_package_are_declared() -> None:
    declared = {pattern.rsplit(".", 1)[1] for pattern in PROJECT["tool"]["setuptools"]["package-data"]["cbserve"]}
    present = {path.suffix[1:] for path in (ROOT / "cbserve").rglob("*") if path.is_file()} - {"py", "pyc"}
    assert present - declared - {"typed"} == set()


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml"])
def test_the_texts_are_utf8_with_a_final_newline(name: str) -> None:
    assert (ROOT / name).read_text(encoding="utf-8").endswith("\n")
