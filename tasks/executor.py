"""`fab -H gpu1,gpu2 TASK`, and the order of `fab --list`: where `fab` itself is taught."""

from __future__ import annotations

import functools
from typing import Any

import fabric.main
from fabric.executor import Executor as FabricExecutor
from invoke.exceptions import Exit

from tasks import cli

Pages = tuple[tuple[str, tuple[str, ...]], ...]
"""Headings, each with the names of its tasks in the order in which they are needed."""


class Executor(FabricExecutor):  # type: ignore[misc]  # Fabric ships no types
    """Gives `-H` to the task as its hosts, so that it is one plan over all of them.

    Fabric would call the task once a host, one after another, each with a connection of its own
    making: no barrier, no lease, and any host key accepted.
    """

    def expand_calls(self, calls: list[Any], apply_hosts: bool = True) -> list[Any]:
        """Fill each task's `host` from `-H`; no call is multiplied by hosts."""
        # Without any task, `fab -H x -- command` reads no fabric.yaml and is Fabric's own.
        if self.core.remainder:
            cli.refuse(
                f"fab -- {self.core.remainder}: only tasks run here, and they touch only recorded "
                "runs; for a command of your own use `ssh HOST COMMAND`"
            )
        hosts = self.core[0].args.hosts.value
        for call in calls if hosts and apply_hosts else ():
            given = call.kwargs.get("host")
            if given and given != hosts:
                cli.refuse(f"fab: -H says {hosts} and --host says {given}; give one of them")
            call.kwargs["host"] = hosts
        expanded: list[Any] = super().expand_calls(calls, apply_hosts=False)
        return expanded


def list_in_order(pages: Pages) -> None:
    """Make `fab --list`, and `fab` alone, show tasks by use instead of by alphabet."""
    # Invoke sorts names and offers no setting. This overrides two public methods of the one object
    # that runs; `--list NAME`, the other formats and `--help` stay Invoke's.
    program = fabric.main.program
    program.list_flat = functools.partial(_list, program, pages, program.list_flat)
    program.no_tasks_given = functools.partial(_list_alone, program)


def _list_alone(program: Any) -> None:
    if not program.core.remainder:
        program.list_tasks()
        raise Exit


def _list(program: Any, pages: Pages, otherwise: Any) -> None:
    tasks = program.scoped_collection.tasks
    names = [name for _, names in pages for name in names]
    if program.list_root or not all(name in tasks for name in names):
        otherwise()
        return
    cli.show_manual(
        [(title, [(name, tasks[name].__doc__) for name in names]) for title, names in pages]
    )
