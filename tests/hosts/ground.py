"""What this machine can do for the tests, and what runs on it."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def needs(ability: str) -> None:
    """Skip the test, counted, when this machine lacks `ability`; in CI that is a failure."""
    why = _lacking(ability)
    if not why:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI must be able to run this: {why}")
    pytest.skip(f"not run: {why}")


def able(ability: str) -> bool:
    """Say whether this machine has `ability`: sshd, pidns, or network (of its own, and TUN)."""
    return not _lacking(ability)


@functools.cache
def _lacking(ability: str) -> str:
    if SSHD is None:
        return "no sshd here (openssh-server)"
    if ability == "sshd":
        return ""
    if ability == "network":
        return _lacking("pidns") or _lacking_network()
    assert ability == "pidns"
    if os.geteuid() != 0:
        return "no PID namespace of its own: not root"
    tried = subprocess.run(
        ["unshare", "--pid", "--mount", "--fork", "--mount-proc", "true"],
        capture_output=True,
        timeout=20,
        check=False,
    )
    return "no PID namespace of its own: unshare is not allowed" if tried.returncode else ""


def _lacking_network() -> str:
    make = "ip tuntap add probe0 mode tun && ip link set probe0 up"
    tried = subprocess.run(
        ["unshare", "--net", "sh", "-c", make], capture_output=True, timeout=20, check=False
    )
    return "no network of its own: TUN devices or iproute2 are missing" if tried.returncode else ""


def until(truth, seconds: float = 10.0, what: str = "it") -> object:
    """Poll `truth` until it is true, and give it; a test never sleeps for a guessed time."""
    end = time.monotonic() + seconds
    while not (value := truth()):
        if time.monotonic() > end:
            raise AssertionError(f"{what} did not come true in {seconds:g} s")
        time.sleep(0.01)
    return value


class Process:
    """A process as /proc shows it, from outside of every host."""

    def __init__(self, pid: int) -> None:
        # The name stands in parentheses and may hold some: count from behind the last one.
        name, _, rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
        fields = rest.split()
        self.pid, self.name = pid, name.partition("(")[2]
        self.state, self.parent, self.started = fields[0], int(fields[1]), int(fields[19])

    @functools.cached_property
    def words(self) -> str:
        """Its command line, "" when it ended meanwhile."""
        with suppress(OSError):
            line = Path(f"/proc/{self.pid}/cmdline").read_bytes()
            return line.replace(b"\0", b" ").decode(errors="replace").strip()
        return ""

    def __repr__(self) -> str:
        return f"{self.pid} {self.state} {self.words or self.name}"

    def carries(self, text: str) -> bool:
        """Say whether its environment holds `text`."""
        with suppress(OSError):
            return os.fsencode(text) in Path(f"/proc/{self.pid}/environ").read_bytes()
        return False


def everyone(wanted: Callable[[int], bool] = lambda _: True) -> list[Process]:
    """Give the processes of this machine whose pid is `wanted`."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            if entry.name.isdigit() and wanted(int(entry.name)):
                found.append(Process(int(entry.name)))
    return found


def space_of(pid: int) -> str:
    """Name the PID namespace of a process, "" when it is gone."""
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return ""
