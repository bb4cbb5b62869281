"""Many cycles of deploy, restart and kill, and what they leave: counts that must not grow."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

from tasks import plans
from tasks import release as releases
from tasks.fleet import carry_out
from tasks.link import Link
from tasks.operations import By, Run, new_run_id
from tests.hosts.ground import until
from tests.hosts.machine import settings
from tests.hosts.promises import temporary


class Soak:
    """A desk whose trainer changes all the time, and one host."""

    def __init__(self, machine, trainer: Path) -> None:
        self.machine, self.trainer = machine, trainer
        self.host = machine.host(run=settings(step_seconds=0.01))
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._text = (trainer / "loop.py").read_text()
        self._made = 0
        self._threads = threading.active_count()

    def cycle(self) -> None:
        """Deploy a tree that is new, restart it, and kill it."""
        self._made += 1
        (self.trainer / "loop.py").write_text(f"{self._text}\n# edit {self._made}\n")
        release = releases.read_tree(self.trainer)
        self._do("deploy", plans.DEPLOY, release=release)
        self._do("restart", plans.RESTART, fresh=True)
        self._do("kill", plans.KILL, fresh=True)

    def _do(self, name, plan, **more):
        run = Run(
            id=new_run_id(datetime.now(UTC)),
            by=By(who="tester", host="desk", why=f"fab {name}"),
            **more,
        )
        began = time.monotonic()
        done = carry_out(
            plan,
            [self.host],
            run,
            links=lambda host: Link(host, notify=lambda _: None),
            on_outcome=lambda _: None,
        )
        self.seconds[name].append(time.monotonic() - began)
        failed = [str(each.error) for each in done if each.error]
        assert not failed, f"cycle {self._made}, {name}: {failed}"

    def counts(self) -> dict[str, int]:
        """What there is of everything, once the connections have ended."""
        machine, root, output = self.machine, self.machine.home / "fab", self.machine.home / "out"
        until(lambda: not machine.sessions(), 30, what="end of all connections")
        # paramiko's threads see the end of a connection a moment after it.
        until(lambda: threading.active_count() <= self._threads, 10, what="end of its threads")
        return {
            "processes on the host": len(machine.processes()),
            "zombies on the host": len(machine.zombies()),
            "descriptors of its sshd": descriptors(self._listener()),
            "descriptors of the desk": descriptors(os.getpid()),
            "threads of the desk": threading.active_count(),
            "runs": len(list((root / "runs").glob("2*"))),
            "releases": len(list((root / "releases").iterdir())),
            "blobs": len(list((root / "blobs").iterdir())),
            "files of the root": len(list(root.iterdir())),
            "checkpoints": len(list(output.glob("step-*"))),
            "files of the output": len(list(output.iterdir())),
            "temporary files": len(temporary(root)) + len(temporary(output)),
            "known_hosts lines": machine.lab.known_hosts.read_text().count("\n"),
        }

    def _listener(self) -> int:
        if self.machine.mode == "shared":
            return self.machine.first()
        return next(p.pid for p in self.machine._all() if "[listener]" in p.words)


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
