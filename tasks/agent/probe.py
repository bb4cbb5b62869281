"""What this host is, before anything is changed on it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
from typing import Any, Dict, List, Optional

from . import current, gpus, hidden, lease, machine, previous, runs
from .desk import Desk, Refused, want
from .root import TEMPORARY, Root, expand, program, root_of

PYTHON_S = 30.0
ASK_PYTHON = """
import importlib.metadata as m, json, platform, sys
found = {}
for name in ("torch", "pyarrow", "transformers", "numpy", "safetensors"):
    try: found[name] = m.version(name)
    except m.PackageNotFoundError: found[name] = None
print(json.dumps({"version": platform.python_version(), "prefix": sys.prefix, "packages": found}))
"""


def probe(desk: Desk, arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Everything that could stop a deployment, asked at once; changes nothing."""
    del desk
    root = root_of(arguments)
    warnings: List[str] = []
    smi = gpus.ask()
    python = want(arguments, "python", str, default=None)
    asked = _ask_python(program(python, "python"), warnings) if python else None
    disks = [_disk("root", root.path, write=True)]
    for what in ("target", "data", "output"):
        path = want(arguments, what, str, default=None)
        if path:
            disks.append(_disk(what, expand(path, what), write=what == "output"))
    warnings += [f"{disk['path']}: {disk['error']}" for disk in disks if "error" in disk]
    doubt = root.doubt()
    warnings += [] if doubt is None else [doubt]
    login = machine.linger()
    if login["systemd"] and login["kills"] and not login["linger"]:
        warnings.append("logind ends processes at logout; run `loginctl enable-linger` once")
    number = want(arguments, "port", int, default=None)
    held = lease.present(root)
    run = runs.describe(runs.latest(root))
    return {
        "host": machine.host_name(),
        "machine_id": machine.machine_id(),
        "boot_id": machine.boot_id(),
        "uid": os.getuid(),
        "user": os.environ.get("USER"),
        "python": _python(asked, python, warnings),
        "agent_python": ".".join(map(str, sys.version_info[:3])),
        "gpus": gpus.answer(smi, warnings),
        "disks": disks,
        "port": None if number is None else port(number),
        "linger": login,
        "pid1_reaps": machine.pid1_reaps(),
        "lease": None if held is None else lease.public(held),
        "release": current.on_host(root)[0],
        "run": {"id": run["run_id"], "state": run["state"]},
        "fallback": _fallback(root, want(arguments, "new_run", str, default=None)),
        "warnings": warnings,
    }


def _fallback(root: Root, instead_of: Optional[str]) -> Optional[Dict[str, Any]]:
    """What would be put back if the run `instead_of`, not yet launched, made no step."""
    if instead_of is None:
        return None
    try:
        record = previous.choose(root, {"instead_of": instead_of}).spec
    except Refused:
        return None
    return {"release": record.get("release"), "secret_names": hidden.needed(record)}


def _ask_python(path: str, warnings: List[str]) -> Optional[subprocess.Popen[bytes]]:
    try:
        return subprocess.Popen(
            [path, "-B", "-c", ASK_PYTHON],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
    except OSError as error:
        warnings.append(f"{path}: cannot be started: {error.strerror}; set `python` in hosts.yaml")
        return None


def _python(
    asked: Optional[subprocess.Popen[bytes]], path: Optional[str], warnings: List[str]
) -> Optional[Dict[str, Any]]:
    if asked is None:
        return None
    try:
        text, trouble = asked.communicate(timeout=PYTHON_S)
    except subprocess.TimeoutExpired:
        asked.kill()
        asked.communicate()
        warnings.append(f"{path}: no answer after {PYTHON_S:g} s")
        return None
    try:
        return {"path": path, **json.loads(text)}
    except ValueError:
        words = trouble.decode("utf-8", "replace").strip().splitlines()[-1:] or ["said nothing"]
        warnings.append(f"{path}: exit {asked.returncode}: {words[0][:300]}")
        return None


def _disk(what: str, path: str, *, write: bool) -> Dict[str, Any]:
    """Free space where `path` is or would be, and whether we can really write there."""
    there = path
    while not os.path.exists(there) and there != "/":
        there = os.path.dirname(there)
    disk = os.statvfs(there)
    found: Dict[str, Any] = {
        "what": what,
        "path": path,
        "free": disk.f_bavail * disk.f_frsize,
        "inodes": disk.f_favail,
    }
    if not write:
        if there != path:
            found["error"] = "is not there"
        elif not os.access(path, os.R_OK):
            found["error"] = "is not readable for this user"
        return found
    problem = trial_write(there)
    found["writable"] = problem is None
    if problem is not None:
        found["error"] = f"cannot be written: {problem}"
    return found


def trial_write(folder: str, size: int = 4096) -> Optional[str]:
    """Write and remove a file of `size` bytes; what went wrong, or None.

    Access bits do not show a full, read-only or broken disk, nor what root may do over a network.
    """
    if not os.path.isdir(folder):
        return "is no folder"
    path = os.path.join(folder, f"{TEMPORARY}trial-{os.getpid()}")
    try:
        with open(path, "xb") as file:
            file.write(b"\0" * size)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror
    finally:
        with contextlib.suppress(OSError):  # it may never have been made
            os.unlink(path)
    return None


def port(number: int) -> Dict[str, Any]:
    """Whether a TCP port is free for a listener on this host."""
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("0.0.0.0", number))  # noqa: S104  # never listens; torch binds so too
        except OSError as error:
            free = error.errno != errno.EADDRINUSE
            return {"number": number, "free": free, "error": error.strerror, "pid": _holder(number)}
    return {"number": number, "free": True}


def _holder(number: int) -> Optional[int]:
    """Pid of the listener on a port, if this user may see it."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table, encoding="ascii") as lines:
            for line in lines:
                cells = line.split()
                if cells[1].endswith(f":{number:04X}") and cells[3] == "0A":
                    inodes.add(f"socket:[{cells[9]}]")
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):  # gone, or another user's
                for file in os.listdir(f"/proc/{name}/fd"):
                    if os.readlink(f"/proc/{name}/fd/{file}") in inodes:
                        return int(name)
    return None
