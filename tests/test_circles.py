"""No import goes in a circle: between files, and between the rooms of edgelm/; lazy and type-checking ones included."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAPPED = ("kernels", "models", "tui")  # edgelm has links to them


def modules() -> dict[str, Path]:
    """Return each file by the name of its module."""
    files = {}
    for folder, name in [(ROOT / "edgelm", "edgelm"), *((ROOT / mapped, f"edgelm.{mapped}") for mapped in MAPPED)]:
        for file in folder.rglob("*.py"):
            below = file.relative_to(folder)
            if folder.name == "edgelm" and below.parts[0] in MAPPED:
                continue
            files[".".join([name, *below.with_suffix("").parts]).removesuffix(".__init__")] = file
    return files


def named(tree: ast.AST, files: Mapping[str, Path]) -> Iterator[str]:
    """Yield the module of edgelm of each import; relative imports are banned by ruff."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [name if (name := f"{node.module}.{alias.name}") in files else node.module for alias in node.names]
        yield from (name for name in names if name in files)


@cache
def imports() -> dict[str, set[str]]:
    """Return what each module imports of edgelm."""
    files = modules()
    # `from edgelm import __version__` is no import of a room.
    return {
        module: set(named(ast.parse(file.read_text(encoding="utf-8")), files)) - {module, "edgelm"}
        for module, file in files.items()
    }


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the nodes of a circle; none where there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        nodes: list[str] = error.args[1]
        return nodes
    return []


def test_no_circle_between_files() -> None:
    assert len(imports()) > 400  # all rooms are read
    assert circle(imports()) == []


def test_no_circle_between_rooms() -> None:
    rooms: dict[str, set[str]] = {}
    for module, imported in imports().items():
        if module.count(".") >= 1:
            room = module.split(".")[1]
            others = {name.split(".")[1] for name in imported if name.count(".") >= 1}
            rooms.setdefault(room, set()).update(others - {room})
    assert {"server", "engine", "tui", "kernels", "models"} <= set(rooms)
    assert circle(rooms) == []


def test_a_circle_is_found() -> None:
    files = dict.fromkeys(("edgelm.a", "edgelm.a.b", "edgelm.c"), ROOT)
    lazy = ast.parse("def f():\n    from edgelm.a import b, other")
    typed = ast.parse("if TYPE_CHECKING:\n    import edgelm.c")
    assert list(named(lazy, files)) == ["edgelm.a.b", "edgelm.a"]
    assert list(named(typed, files)) == ["edgelm.c"]
    assert circle({"edgelm.a": {"edgelm.c"}, "edgelm.c": {"edgelm.a"}}) != []
