"""Finds, by what /proc says of them, processes that a test session started and did not end."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Process:
    """A living process; `started`, in clock ticks since boot, tells it from a later namesake."""

    pid: int
    parent: int
    started: int
    words: str


def alive(*, tag: str, folder: Path, spared: frozenset[int] = frozenset()) -> list[Process]:
    """Those of our processes that live.

    Ours is what descends from this process, what carries `tag` in its environment, and what has
    its working folder, or a value of its environment, below `folder`: an agent's child has a clean
    environment and another parent, but the paths of the test that deployed it.

    Args:
        tag: `NAME=value` as it stands in the environment of what this session starts.
        folder: where this session's tests keep their files.
        spared: pids that live as long as this process does, and end with it.
    """
    everyone = [each for each in map(_read, _pids()) if each is not None]
    parents = {each.pid: each.parent for each in everyone}
    us = os.getpid()

    def descends(pid: int) -> bool:
        seen = set()
        while pid in parents and pid not in seen:
            seen.add(pid)
            pid = parents[pid]
            if pid == us:
                return True
        return False

    return [
        each
        for each in everyone
        if each.pid != us
        and each.pid not in spared
        and (descends(each.pid) or _carries(each.pid, tag, folder))
    ]


def end(processes: list[Process]) -> None:
    """Kill them, each only if it is still the one that was found."""
    for each in processes:
        now = _read(each.pid)
        if now is not None and now.started == each.started:
            try:
                os.kill(each.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it ended by itself meanwhile


def wait_for_none(seconds: float, **where: object) -> list[Process]:
    """What still lives after at most `seconds`; what is about to end gets the time to do so."""
    until = time.monotonic() + seconds
    while (left := alive(**where)) and time.monotonic() < until:  # type: ignore[arg-type]
        time.sleep(0.05)
    return left


def _pids() -> list[int]:
    return [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]


def _read(pid: int) -> Process | None:
    """The process, or None when it is gone, a zombie, or not to be looked at."""
    try:
        # The name stands in parentheses and may hold some: counted from behind the last one.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        words = (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    if fields[0] in "ZX":
        return None
    return Process(pid, int(fields[1]), int(fields[19]), words.strip())


def _carries(pid: int, tag: str, folder: Path) -> bool:
    below = os.fsencode(f"{folder}/")
    try:
        values = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        place = os.fsencode(Path(f"/proc/{pid}/cwd").readlink()) + b"/"
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
    return (
        os.fsencode(tag) in values
        or place.startswith(below)
        or any(below in each + b"/" for each in values if b"=/" in each)
    )
