"""Reads which module of this repository imports which, without importing any."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

ROOMS = ("fabfile.py", "tasks", "trainer")


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name: `from module import name` has both, `import module` has an empty name."""

    module: str
    name: str
    line: int
    top_level: bool
    relative: bool
    for_types: bool
    """Only a type checker follows it: it stands below `if TYPE_CHECKING`."""


@dataclass(frozen=True, slots=True, eq=False)
class Module:
    """One file: its dotted name, its tree, and what it imports."""

    name: str
    path: Path
    tree: ast.Module
    imports: tuple[Import, ...]


def read_file(path: Path, root: Path) -> Module:
    """Parse one file below `root`.

    Raises:
        SyntaxError: it is no Python.
    """
    return _parsed(path.relative_to(root), path, path.read_text(encoding="utf-8"))


@functools.cache
def _parsed(below: Path, path: Path, text: str) -> Module:
    parts = below.with_suffix("").parts
    is_package = parts[-1] == "__init__"
    name = ".".join(parts[:-1] if is_package else parts)
    tree = ast.parse(text, str(path))
    package = name.split(".") if is_package else name.split(".")[:-1]
    return Module(name, path, tree, tuple(_imports(tree, package)))


def read_tree(root: Path, rooms: tuple[str, ...] = ROOMS) -> dict[str, Module]:
    """Parse every module of the rooms that are there, by dotted name."""
    paths = [
        path
        for room in rooms
        for path in ([root / room] if room.endswith(".py") else sorted((root / room).rglob("*.py")))
        if path.exists()
    ]
    return {module.name: module for module in (read_file(path, root) for path in paths)}


def _imports(tree: ast.Module, package: list[str]) -> list[Import]:
    top_level = {id(node) for node in tree.body}
    for_types = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test).endswith("TYPE_CHECKING")
        for node in block.body
    }
    found = []
    for node in ast.walk(tree):
        place = {"top_level": id(node) in top_level, "for_types": id(node) in for_types}
        if isinstance(node, ast.Import):
            found += [
                Import(each.name, "", node.lineno, relative=False, **place) for each in node.names
            ]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            found += [
                Import(module, each.name, node.lineno, relative=node.level > 0, **place)
                for each in node.names
            ]
    return found


def resolve(wanted: Import, modules: dict[str, Module]) -> str:
    """The dotted name of the module it reaches: `from tasks import link` reaches tasks.link."""
    longer = f"{wanted.module}.{wanted.name}"
    return longer if wanted.name and longer in modules else wanted.module


def arrows(modules: dict[str, Module], *, run: bool = False) -> dict[str, set[str]]:
    """Who imports whom among these modules; with `run`, only what Python itself follows."""
    return {
        name: {resolve(each, modules) for each in module.imports if not (run and each.for_types)}
        & (modules.keys() - {name})
        for name, module in modules.items()
    }


def outside(start: Module, modules: dict[str, Module]) -> set[str]:
    """Top-level names of the foreign packages that importing `start` may bring in."""
    seen: set[str] = set()
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for each in waiting.pop().imports:
            if each.for_types:
                continue
            reached = resolve(each, modules)
            if reached not in modules:
                found.add(reached.partition(".")[0])
                continue
            # Importing a.b.c also runs a and a.b.
            parts = reached.split(".")
            for size in range(1, len(parts) + 1):
                name = ".".join(parts[:size])
                if name in modules and name not in seen:
                    seen.add(name)
                    waiting.append(modules[name])
    return found


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Every set of modules that reach each other, as sorted lists."""

    def reached_from(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for each in graph[waiting.pop()] - seen:
                seen.add(each)
                waiting.append(each)
        return seen

    reach = {name: reached_from(name) for name in graph}
    circles = {
        tuple(sorted({name} | {each for each in reach[name] if name in reach[each]}))
        for name in graph
        if name in reach[name]
    }
    return [list(circle) for circle in sorted(circles)]
