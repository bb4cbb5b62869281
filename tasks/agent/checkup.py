"""Rows of a check-up, and what is asked of the machine itself: python, paths, disks, clock."""

from __future__ import annotations

import contextlib
import locale
import os
import shutil
import sys
import tempfile
import time
from typing import Any, Callable, Dict, Iterator, List, Optional

from . import machine, probe
from .desk import Refused
from .root import TEMPORARY, Root

LOW_BYTES = 2 << 30
LOW_INODES = 2000
TRIAL_BYTES = 4 << 20
"""A quota, unlike a full disk, shows only when something is written."""


class Rows:
    """What was found, in the order in which it was asked."""

    def __init__(self) -> None:
        self.found: List[Dict[str, str]] = []

    def ok(self, check: str, detail: str) -> None:
        """Note that all is well."""
        self._add(check, "ok", detail, "")

    def warn(self, check: str, detail: str, mend: str) -> None:
        """Note what may do harm one day."""
        self._add(check, "warn", detail, mend)

    def broken(self, check: str, detail: str, mend: str) -> None:
        """Note what a deployment would fail at."""
        self._add(check, "broken", detail, mend)

    def _add(self, check: str, state: str, detail: str, mend: str) -> None:
        row = {"check": check, "state": state, "detail": detail[:500], "mend": mend}
        self.found.append(row)

    @contextlib.contextmanager
    def asking(self, check: str) -> Iterator[None]:
        """Let one question that the host refuses be a row, so that the others are still asked."""
        try:
            yield
        except Refused as refused:
            if refused.code in ("deadline", "bad-request"):
                raise
            self.broken(check, refused.text, "put that right on the host")
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            self.broken(check, f"{where}{error.strerror}", "put that right on the host")


def existing(path: str) -> str:
    """The nearest folder above `path`, or itself, that is there."""
    while not os.path.exists(path) and path != "/":
        path = os.path.dirname(path)
    return path


def machine_rows(rows: Rows, environment: Dict[str, str]) -> None:
    """Ask about the login and the system. Raises nothing for what a host can be."""
    version = ".".join(map(str, sys.version_info[:3]))
    rows.ok("python", f"{version} at {sys.executable or 'an unknown path'}")
    with rows.asking("home"):
        _home(rows)
    _locale(rows, environment)
    path = environment.get("PATH", "")
    python = shutil.which("python3", path=path)
    words = f"{path or '(empty)'}; python3 there is {python or 'missing'}"
    if python:
        rows.ok("PATH", words)
    else:
        rows.warn("PATH", words, "name interpreters by their whole path in hosts.yaml")
    absent = [
        tool for tool in ("ps", "awk", "pgrep", "setsid", "flock", "rsync") if not _there(tool)
    ]
    words = f"none is needed; missing here: {', '.join(absent)}" if absent else "none is needed"
    rows.ok("tools", words)
    with rows.asking("logout"):
        _logout(rows)
    reaps = machine.pid1_reaps()
    name = machine.first_line("/proc/1/comm") or "unknown"
    if reaps is False:
        rows.warn(
            "PID 1",
            f"is `{name}`, which collects no dead processes; the keeper of a run collects its own",
            "start the container with `docker run --init` to have none left of others",
        )
    else:
        rows.ok("PID 1", f"is `{name}`")


def _there(tool: str) -> bool:
    return shutil.which(tool) is not None


def _home(rows: Rows) -> None:
    home = os.path.expanduser("~")
    if not os.path.isdir(home):
        rows.broken("home", f"{home} is not there", "give absolute paths in hosts.yaml")
    elif not os.access(home, os.W_OK):
        rows.warn("home", f"{home} cannot be written", "give a `root` elsewhere in hosts.yaml")
    else:
        rows.ok("home", home)


def _locale(rows: Rows, environment: Dict[str, str]) -> None:
    names = ("LC_ALL", "LC_CTYPE", "LANG")
    said = ", ".join(f"{name}={environment[name]}" for name in names if environment.get(name))
    try:
        locale.setlocale(locale.LC_ALL, "")
    except locale.Error:
        rows.warn(
            "locale",
            f"{said} is not installed here, so programs complain; a run gets C.UTF-8",
            "remove `SendEnv LC_*` from your ssh configuration, or install that locale",
        )
    else:
        rows.ok("locale", f"{said or 'none set'}; a run gets C.UTF-8")


def _logout(rows: Rows) -> None:
    login = machine.linger()
    if not login["systemd"]:
        rows.ok("logout", "no systemd here that would end processes at logout")
    elif login["kills"] and not login["linger"]:
        rows.broken(
            "logout",
            "logind has KillUserProcesses=yes, and ends the run with the last login of its user",
            "loginctl enable-linger",
        )
    elif not login["linger"] and os.getuid() != 0:
        rows.warn(
            "logout",
            "this user does not linger; processes stay, as KillUserProcesses is off",
            "loginctl enable-linger",
        )
    else:
        rows.ok("logout", "a run outlives its login")


def disk_rows(rows: Rows, root: Root, output: Optional[str]) -> None:
    """Ask about the disks under the root and the output folder, by writing to them."""
    places = [("root", root.path)] + ([("output", output)] if output else [])
    for what, path in places:
        there = existing(path)
        with rows.asking(f"disk ({what})"):
            _disk(rows, what, path, there)
        with rows.asking(f"write ({what})"):
            _write(rows, what, there)
    with rows.asking("exec (tmp)"):
        _exec(rows, "tmp", tempfile.gettempdir())  # where compilers put kernels
    if os.access(existing(root.path), os.W_OK):
        with rows.asking("exec (root)"):
            _exec(rows, "root", existing(root.path))


def _disk(rows: Rows, what: str, path: str, there: str) -> None:
    disk = os.statvfs(there)
    free, inodes = disk.f_bavail * disk.f_frsize, disk.f_favail
    # File systems that make inodes as they go (btrfs, some network ones) tell 0 of 0.
    counted = disk.f_files > 0
    words = f"{path}: {free >> 20:,} MiB free" + (f", {inodes:,} inodes" if counted else "")
    if there != path:
        words += f" (on {there}; it is not there yet)"
    mend = f"make room: `du -xh -d2 {there} | sort -h | tail`, or `fab prune`"
    if free < TRIAL_BYTES or (counted and inodes < 100):
        rows.broken(f"disk ({what})", words, mend)
    elif free < LOW_BYTES or (counted and inodes < LOW_INODES):
        rows.warn(f"disk ({what})", words, mend)
    else:
        rows.ok(f"disk ({what})", words)


def _write(rows: Rows, what: str, there: str) -> None:
    problem = probe.trial_write(there, TRIAL_BYTES)
    if problem is None:
        rows.ok(f"write ({what})", f"{TRIAL_BYTES >> 20} MiB written to {there} and removed")
    else:
        mend = f"see `df -h {there}`, `quota`, `mount`, and the owner: `ls -ld {there}`"
        rows.broken(f"write ({what})", f"{there}: {problem}", mend)


def _exec(rows: Rows, what: str, there: str) -> None:
    path = os.path.join(there, f"{TEMPORARY}exec-{os.getpid()}")
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700)
        os.close(descriptor)
        # root may execute what has the bit; noexec is refused to root too, and access() knows it.
        allowed = os.access(path, os.X_OK)
    finally:
        with contextlib.suppress(OSError):  # it may never have been made
            os.unlink(path)
    if allowed:
        rows.ok(f"exec ({what})", f"{there} may hold programs")
    else:
        rows.warn(
            f"exec ({what})",
            f"{there} is mounted noexec: compiled kernels cannot be loaded from there",
            f"mount -o remount,exec {there}, or point TMPDIR elsewhere in the run's env",
        )


def port_rows(rows: Rows, number: Optional[int], ours: Callable[[int], bool]) -> None:
    """Ask whether the port of the run is free, or held by the run itself."""
    if number is None:
        rows.ok("run port", "the run names none; torch's launcher takes a free one")
        return
    with rows.asking("run port"):
        found = probe.port(number)
        pid = found.get("pid")
        if found["free"] or (pid is not None and ours(pid)):
            rows.ok("run port", f"{number} is {'free' if found['free'] else 'held by our run'}")
        else:
            mend = f"end that, or set MASTER_PORT: `ss -ltnp sport = :{number}`"
            rows.broken("run port", f"{number} is taken by pid {pid or 'unknown'}", mend)


def clock() -> Dict[str, Any]:
    """The host's time, for the desk to compare with its own."""
    return {"utc": time.time(), "boot_id": machine.boot_id()}
