"""The house rules: who may import whom, and what may stand where."""

from __future__ import annotations

import ast
import functools
import re
import sys
from typing import TYPE_CHECKING

from tests import imports

if TYPE_CHECKING:
    from pathlib import Path

LONGEST = 320
"""Lines of a file; about 300 is where it asks to be two."""
NOWHERE_NAMES = {"util", "utils", "common", "helper", "helpers", "base", "manager"}

# Upper floors may import any lower one; rooms on one floor do not know each other.
TASKS = (
    {"fabfile"},
    {"lifecycle", "inspection", "upkeep", "executor"},
    {"plans", "cli"},
    {"fleet"},
    {"operations"},
    {"link", "release", "report"},
    {"inventory", "outcome"},
    {"errors"},
)
TRAINER = (
    {"__main__"},
    {"train"},
    {"build"},
    {"prepare", "speculate", "export", "features"},
    {"data", "model", "update", "record"},
    {"pipeline", "world", "config"},
    {"stop", "flags"},
    {"errors"},
)
INVOKE_ROOMS = {
    "fabfile",
    "tasks.lifecycle",
    "tasks.inspection",
    "tasks.upkeep",
    "tasks.executor",
}
# What only these modules may import: (what, by whom).
DOORS = (
    ("paramiko", {"tasks.link"}),
    ("tenacity", {"tasks.link"}),
    ("fabric", INVOKE_ROOMS | {"tasks.link"}),
    ("invoke", INVOKE_ROOMS | {"tasks.link", "tasks.cli"}),
    ("yaml", {"tasks.inventory"}),
    ("pyarrow", {"trainer.data.arrow", "trainer.prepare"}),
    ("transformers", {"trainer.model.target", "trainer.prepare"}),
    ("torch.distributed", {"trainer.world"}),
    ("threading", {"trainer.pipeline", "tasks.fleet"}),
    ("_thread", {"trainer.pipeline", "tasks.fleet"}),
    ("concurrent.futures", {"trainer.pipeline", "tasks.fleet"}),
)
# Names of invoke and fabric that have doors of their own.
NAMES = {"Connection": {"tasks.link"}} | dict.fromkeys(
    ("task", "Collection", "Executor"), INVOKE_ROOMS
)
SPEECH = {"print", "exit", "quit", "sys.exit", "os._exit", "SystemExit"}
SPEAKERS = {"tasks.cli", "trainer.__main__"}
STANDARD_LIBRARY_ONLY = {
    "trainer.config",
    "trainer.errors",
    "trainer.flags",
    "trainer.stop",
    "tasks.errors",
}
NO_TORCH = {"trainer.pipeline"}


def breaches(root: Path) -> list[str]:
    """Every breach of the house rules in the tree at `root`, one line each."""
    modules = imports.read_tree(root)
    graph = imports.arrows(modules)
    return [
        *(line for name in sorted(graph) for line in forbidden_arrows(name, graph[name])),
        *(line for module in modules.values() for line in of_one_module(module)),
        *(
            f"cycle: {' > '.join(circle)}"
            for circle in imports.cycles(imports.arrows(modules, run=True))
        ),
        *file_rules(root),
    ]


@functools.cache
def of_one_module(module: imports.Module) -> tuple[str, ...]:
    """What can be seen in one file alone."""
    return (*closed_doors(module), *speaks_or_exits(module), *agent_rules(module))


def floor_of(name: str) -> tuple[tuple[set[str], ...], int] | None:
    """The house a module stands in and its floor there; None when the table does not know it."""
    house, _, inside = name.partition(".")
    floors = TRAINER if house == "trainer" else TASKS
    room = inside.partition(".")[0] or house
    return next(((floors, at) for at, rooms in enumerate(floors) if room in rooms), None)


def forbidden_arrows(name: str, reached: set[str]) -> list[str]:
    if name == "tasks.agent" or name.startswith("tasks.agent."):
        return [f"{name} > {each}" for each in reached if not each.startswith("tasks.agent")]
    lines = [f"{name} > {each}" for each in reached if each.startswith("tasks.agent")]
    if name in {"tasks", "trainer"}:  # only what marks a folder as a package
        return lines + [f"{name} > {each}" for each in reached]
    here = floor_of(name)
    if here is None:
        return [*lines, f"{name}: is no room of the table"]
    for each in sorted(reached - {"tasks", "trainer"}):
        there = floor_of(each)
        same_room = room_of(each) == room_of(name)
        if not same_room and (there is None or there[0] is not here[0] or there[1] <= here[1]):
            lines.append(f"{name} > {each}")
    return lines


def room_of(name: str) -> str:
    """`trainer.model` for trainer.model.drafter: inside a room, files know each other."""
    return ".".join(name.split(".")[:2])


def closed_doors(module: imports.Module) -> list[str]:
    if module.name.startswith("tasks.agent"):
        return []  # standard library only, threads included: a program of its own
    lines = []
    here = {module.name, module.name.rpartition(".")[0], room_of(module.name)}
    for each in module.imports:
        where = f"{module.name}:{each.line}"
        full = f"{each.module}.{each.name}" if each.name else each.module
        package = each.module.partition(".")[0]
        lines += [
            f"{where}: imports {full}"
            for what, doors in DOORS
            if not here & doors and f"{full}.".startswith(f"{what}.")
        ]
        if package in {"fabric", "invoke"} and not here & NAMES.get(each.name, here):
            lines.append(f"{where}: imports {each.name} of {package}")
        foreign = package not in sys.stdlib_module_names and not each.relative
        own = package in {"tasks", "trainer"}
        if module.name in STANDARD_LIBRARY_ONLY and foreign and not own:
            lines.append(f"{where}: imports {full}, and knows the standard library only")
        if module.name in NO_TORCH and package == "torch":
            lines.append(f"{where}: imports torch, and knows none")
        if package in FOREIGN.get(module.name.partition(".")[0], set()):
            lines.append(f"{where}: imports {full}")
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Attribute):
            continue
        said = ast.unparse(node)
        if said == "torch.distributed" and module.name != "trainer.world":
            lines.append(f"{module.name}:{node.lineno}: uses torch.distributed")
        package, _, name = said.partition(".")
        if package in {"fabric", "invoke"} and not here & NAMES.get(name, here):
            lines.append(f"{module.name}:{node.lineno}: uses {said}")
    return lines


# What a whole house never imports: they share files on the host.
FOREIGN = {
    "tasks": {"torch", "trainer"},
    "fabfile": {"torch", "trainer"},
    "trainer": {"tasks", "fabric", "invoke", "fabfile"},
}


def speaks_or_exits(module: imports.Module) -> list[str]:
    room = ".".join(module.name.split(".")[:2])
    if room in SPEAKERS or module.name.startswith("tasks.agent"):
        return []
    lines = []
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            said = ast.unparse(node.func)
            if said in SPEECH or re.match(r"sys\.(stdout|stderr)\.", said):
                lines.append(f"{module.name}:{node.lineno}: calls {said}")
        elif isinstance(node, ast.Raise) and ast.unparse(node).startswith("raise SystemExit"):
            lines.append(f"{module.name}:{node.lineno}: raises SystemExit")
    return lines


def agent_rules(module: imports.Module) -> list[str]:
    """It runs from memory on any host: what it needs must be known from its text alone."""
    if not module.name.startswith("tasks.agent."):
        return []
    lines = []
    for each in module.imports:
        where = f"{module.name}:{each.line}"
        package = each.module.partition(".")[0]
        if each.relative and not each.top_level:
            lines.append(f"{where}: imports its own below the top level")
        # On a host the loader finds its own under the name `agent`.
        known = sys.stdlib_module_names | (
            {"agent"} if module.name == "tasks.agent.loader" else set()
        )
        if not each.relative and package not in known:
            lines.append(f"{where}: imports {each.module}, and knows the standard library only")
    try:
        ast.parse(module.path.read_text(encoding="utf-8"), feature_version=(3, 8))
    except SyntaxError as error:
        lines.append(f"{module.name}:{error.lineno}: is no Python 3.8")
    return lines


def file_rules(root: Path) -> list[str]:
    lines = []
    for path in sorted(root.rglob("*.py")):
        below = path.relative_to(root)
        if any(part.startswith(".") for part in below.parts):
            continue
        length = len(path.read_text(encoding="utf-8").splitlines())
        if length > LONGEST:
            lines.append(f"{below}: has {length} lines; {LONGEST} is the most")
        lines += [
            f"{below}: {part} says nothing of what is in it"
            for part in below.with_suffix("").parts
            if NOWHERE_NAMES & set(part.lower().split("_"))
        ]
    return lines
