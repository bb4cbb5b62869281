"""The agent's source as text: what a verb needs of it, deflated. Nothing of it is imported here."""

from __future__ import annotations

import ast
import functools
import zlib
from pathlib import Path

AGENT = Path(__file__).resolve().parent.parent / "agent"

BOOT = (
    "exec {python} -I -S -B -c "
    "'import sys,zlib,_signal;_signal.alarm(90);"
    "i=sys.stdin.buffer;exec(zlib.decompress(i.read(int(i.readline()))))'"
)
"""All that ever stands on a host's command line: constant, so nothing there can be matched, quoted
wrongly or read by others. bash, dash, fish and tcsh read it alike.

The alarm ends what waits for a program that never comes whole: the path died, and no server may
ever notice. The agent switches it off when it has the request, which brings its own deadline. It is
of _signal, because `signal` costs 4 ms for its enums."""


@functools.cache
def program(verb: str, agent: Path = AGENT) -> bytes:
    """Give the deflated program that answers `verb`: the modules it reaches, and the loader.

    Args:
        verb: a key of VERBS in the agent's verbs.py.
        agent: folder of the agent's modules.
    """
    home = _verbs(agent)[verb].partition(".")[0]
    names = _closure({"verbs", home}, agent)
    sources = {"agent": _source("__init__", agent)}
    sources.update((f"agent.{name}", _source(name, agent)) for name in sorted(names))
    text = f"SOURCES = {sources!r}\n{_source('loader', agent)}"
    return zlib.compress(text.encode(), level=9)


def verbs(agent: Path = AGENT) -> frozenset[str]:
    """Give the verbs that the agent understands."""
    return frozenset(_verbs(agent))


@functools.cache
def _source(name: str, agent: Path) -> str:
    path = agent / (f"{name.replace('.', '/')}.py")
    if not path.is_file():
        path = agent / name.replace(".", "/") / "__init__.py"
    return path.read_text(encoding="utf-8")


@functools.cache
def _verbs(agent: Path) -> dict[str, str]:
    for node in ast.parse(_source("verbs", agent)).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "VERBS" for target in targets):
            assert isinstance(node, ast.Assign | ast.AnnAssign)
            assert node.value is not None
            table: dict[str, str] = ast.literal_eval(node.value)
            return table
    raise AssertionError("agent/verbs.py has no VERBS")


def _closure(names: set[str], agent: Path) -> set[str]:
    reached: set[str] = set()
    waiting = set(names)
    while waiting:
        name = waiting.pop()
        reached.add(name)
        waiting |= _imports(name, agent) - reached
    return reached


@functools.cache
def _imports(name: str, agent: Path) -> frozenset[str]:
    """Give the agent modules that module `name` imports, by its text."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(_source(name, agent))):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            found |= {node.module} if node.module else {alias.name for alias in node.names}
    return frozenset(found)
