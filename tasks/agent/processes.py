"""Processes by recorded identity, read from /proc; never by the text of a command line."""

from __future__ import annotations

import os
import signal
from typing import Dict, Iterable, List, NamedTuple, Optional

from .machine import boot_id, first_line


class Stat(NamedTuple):
    """What /proc/PID/stat says."""

    pid: int
    state: str
    parent: int
    session: int
    threads: int
    start: int
    """Clock ticks since boot; together with the boot id no other process ever has the same pair."""

    @property
    def gone(self) -> bool:
        """A zombie does nothing and holds nothing; PID 1 of a container may keep it for ever.

        A zombie whose threads still live is not gone: one of them may hang in a driver.
        """
        return self.state in "ZXx" and self.threads <= 1


class Identity(NamedTuple):
    """A process for good: the number alone is given out again."""

    pid: int
    start: int
    boot: str

    def stat(self) -> Optional[Stat]:
        """The process as it is now, or None when another or none has its number."""
        found = read(self.pid)
        if found is None or found.start != self.start or self.boot != boot_id():
            return None
        return found

    def alive(self) -> bool:
        """Whether it runs; zombies do not."""
        found = self.stat()
        return found is not None and not found.gone


def identity(value: object) -> Optional[Identity]:
    """An identity from JSON, or None for anything that does not name a process for certain."""
    if not isinstance(value, dict):
        return None
    pid, start, boot = value.get("pid"), value.get("start"), value.get("boot_id")
    # 0 and -1 would mean a group or everybody to kill(2), and 1 is never a run of ours.
    if type(pid) is not int or type(start) is not int or pid < 2 or start < 0:
        return None
    return Identity(pid, start, boot) if isinstance(boot, str) and boot else None


def read(pid: int) -> Optional[Stat]:
    """Stat of one process, or None when there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name stands in parentheses and may hold any character: the fields follow the last one.
    fields = text[text.rindex(b")") + 2 :].split()
    return Stat(
        pid,
        fields[0].decode(),
        int(fields[1]),
        int(fields[3]),
        int(fields[17]),
        int(fields[19]),
    )


def everything() -> Dict[int, Stat]:
    """All processes that can be seen."""
    found = (read(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {stat.pid: stat for stat in found if stat is not None}


def me() -> Identity:
    """This process."""
    return identify(os.getpid())


def identify(pid: int) -> Identity:
    """The identity of a process that is known to exist (ourselves, or our unreaped child)."""
    found = read(pid)
    assert found is not None, f"/proc/{pid} is not there; is /proc mounted?"
    return Identity(pid, found.start, boot_id())


def owner(pid: int) -> Optional[int]:
    """Real uid, or None when the process is gone."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("Uid:"):
                    return int(line.split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None


def environment(pid: int) -> Dict[bytes, bytes]:
    """The environment a process was started with; empty when gone, a zombie or not readable."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            pairs = file.read().split(b"\0")
    except OSError:
        return {}
    return {name: value for name, _, value in (pair.partition(b"=") for pair in pairs) if name}


def tagged(stats: Dict[int, Stat], name: bytes) -> Dict[int, Dict[bytes, bytes]]:
    """Environments of the living processes that carry the variable `name`."""
    found = {}
    for pid, stat in stats.items():
        if not stat.gone:
            variables = environment(pid)
            if name in variables:
                found[pid] = variables
    return found


def descendants(stats: Dict[int, Stat], roots: Iterable[int]) -> List[int]:
    """Children of `roots`, their children, and so on; without the roots."""
    children: Dict[int, List[int]] = {}
    for stat in stats.values():
        children.setdefault(stat.parent, []).append(stat.pid)
    found: List[int] = []
    todo = list(roots)
    seen = set(todo)
    while todo:
        for child in children.get(todo.pop(), []):
            if child not in seen:
                seen.add(child)
                found.append(child)
                todo.append(child)
    return found


def send(who: Identity, number: int) -> bool:
    """Signal exactly this process; False when it is gone.

    The descriptor is opened first and the start time compared after: from then on the number
    cannot come to mean another process. Kernels before 5.3 and Python 3.8 have no descriptor, and
    a gap of microseconds between comparison and signal.

    Raises:
        PermissionError: it belongs to another user.
    """
    if not hasattr(os, "pidfd_open"):
        if who.stat() is None:
            return False
        os.kill(who.pid, number)
        return True
    try:
        descriptor = os.pidfd_open(who.pid)
    except ProcessLookupError:
        return False
    except OSError:  # ENOSYS, or a sandbox that forbids the call
        if who.stat() is None:
            return False
        os.kill(who.pid, number)
        return True
    try:
        if who.stat() is None:
            return False
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def where_stuck(who: Identity) -> str:
    """Owner, state and kernel function of a process that will not go, for people."""
    found = who.stat()
    waits = first_line(f"/proc/{who.pid}/wchan")
    state = found.state if found else "gone"
    return f"pid {who.pid}, uid {owner(who.pid)}, state {state}, wchan {waits or 'unknown'}"
