"""What is shipped is what lies in the tree, under one version."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import edgelm
from tests.order import LONG_FILES

ROOT = Path(__file__).resolve().parents[1]
MAPPED = ("kernels", "models", "tui")


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def packages_under(folder: Path, name: str) -> set[str]:
    """Return the package `name` in `folder` and all below it: each folder that holds Python code."""
    found = {name} if any(folder.glob("*.py")) else set()
    for child in folder.iterdir():
        if child.is_dir() and not child.is_symlink() and child.name != "__pycache__":
            found |= packages_under(child, f"{name}.{child.name}")
    return found


def packages_in_tree() -> set[str]:
    found = packages_under(ROOT / "edgelm", "edgelm")
    return found.union(*(packages_under(ROOT / name, f"edgelm.{name}") for name in MAPPED))


def test_the_declared_packages_are_those_of_the_tree(pyproject: dict[str, Any]) -> None:
    declared = pyproject["tool"]["setuptools"]["packages"]
    assert sorted(declared) == sorted(packages_in_tree())


def test_every_package_of_the_tree_has_its_init_and_can_be_imported(pyproject: dict[str, Any]) -> None:
    for name in packages_in_tree():
        spec = importlib.util.find_spec(name)
        assert spec is not None, name
        assert spec.origin is not None, f"{name} has no __init__.py"
        assert spec.origin.endswith("__init__.py"), name
        assert importlib.import_module(name).__doc__, f"{name} does not say what it is"


@pytest.mark.parametrize("name", MAPPED)
def test_a_top_level_package_is_linked_and_mapped(name: str, pyproject: dict[str, Any]) -> None:
    link = ROOT / "edgelm" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..", name)
    assert pyproject["tool"]["setuptools"]["package-dir"][f"edgelm.{name}"] == name


def test_the_folder_packaging_is_no_package() -> None:
    assert not (ROOT / "packaging" / "__init__.py").exists()  # it would shadow the library of that name


def test_the_version_is_the_head_of_the_changelog() -> None:
    head = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert head is not None
    assert head[1] == edgelm.__version__


def test_the_plain_install_brings_no_gpu_stack(pyproject: dict[str, Any]) -> None:
    names = {re.split(r"[<>=!~;\[ ]", line)[0] for line in pyproject["project"]["dependencies"]}
    assert "llama-cpp-python" in names
    assert not names & {"torch", "triton"}


def test_a_checkout_requires_nothing_that_is_on_no_index(pyproject: dict[str, Any]) -> None:
    project = pyproject["project"]
    for line in chain(project["dependencies"], *project["optional-dependencies"].values()):
        assert not line.startswith("edgelm"), line


def test_the_pin_of_llama_cpp_is_the_same_everywhere(pyproject: dict[str, Any]) -> None:
    llama = tomllib.loads((ROOT / "packaging" / "llama" / "pyproject.toml").read_text(encoding="utf-8"))
    assert llama["project"]["dependencies"][0] in pyproject["project"]["dependencies"]


def test_every_dependency_has_an_upper_bound(pyproject: dict[str, Any]) -> None:
    project = pyproject["project"]
    for line in chain(project["dependencies"], *project["optional-dependencies"].values()):
        assert "<" in line, line


def requirement(lines: list[str], name: str) -> Requirement:
    return next(found for line in lines if (found := Requirement(line)).name == name)


def test_pip_takes_no_triton_that_the_tests_do_not_run(pyproject: dict[str, Any]) -> None:
    extras = pyproject["project"]["optional-dependencies"]
    allowed, installed = (requirement(extras[extra], "triton").specifier for extra in ("cuda", "dev"))
    others = re.search(r"^TRITONS .*\),(.*)\)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert others is not None
    releases = ("3.5.1", "3.6.0", "3.7.0", "3.7.1", "3.8.0", "3.9.0")
    tested = {*others[1].split(), *(release for release in releases if release in installed)}
    taken = {release for release in releases if release in allowed}
    assert taken == {"3.6.0", "3.7.1"}  # of torch 2.10 and 2.13
    assert taken <= tested
    torch = requirement(extras["cuda"], "torch").specifier
    assert [minor for minor in range(8, 16) if f"2.{minor}.0" in torch] == [10, 13]


def test_the_files_that_begin_first_are_there() -> None:
    assert [name for name in LONG_FILES if not (ROOT / name).is_file()] == []
    assert len(set(LONG_FILES)) == len(LONG_FILES)


LONG, MOST_LONG, LONGEST = 50, 14, 80  # lines of a body: lists of routes, tables, and one straight sequence


def long_functions() -> Iterator[tuple[int, str]]:
    """Yield the lines and the name of each function with a long body; one in Triton cannot be divided at will."""
    for folder in (ROOT / "edgelm", ROOT / "models", ROOT / "tui"):
        for file in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    length = (node.end_lineno or 0) - node.body[0].lineno + 1
                    if length > LONG and "kernels" not in file.relative_to(ROOT).parts:
                        yield length, f"{file.relative_to(ROOT)}: {node.name}"


def test_few_functions_are_long() -> None:
    functions = sorted(set(long_functions()), reverse=True)
    assert len(functions) <= MOST_LONG, f"split one where a part of it has a name of its own: {functions}"
    assert all(length <= LONGEST for length, _ in functions), functions
