"""One host of the lab: what the desk is told of it, what the test sees of it, and its accidents."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.inventory import Host, RunSettings
from tests.hosts.ground import Process, everyone, space_of, until

if TYPE_CHECKING:
    from tests.hosts.lab import Lab


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def settings(**trainer) -> RunSettings:
    """Give what the stub trainer is started with: short steps, output under the host's home."""
    flags = {"output-dir": "~/out", "steps": 100_000, "step-seconds": 0.02, **trainer}
    return RunSettings(
        trainer={name.replace("_", "-"): value for name, value in flags.items()},
        grace_seconds=10,
        first_step_seconds=20,
    )


class Machine:
    """One host: an sshd, its folder, and the view from outside."""

    def __init__(self, lab: Lab, name: str, mode: str, init: str) -> None:
        self.lab, self.name, self.mode, self._init = lab, name, mode, init
        self.folder = lab.folder / name
        self.home = self.folder / "home"
        self.port = _free_port()
        self.process: subprocess.Popen[bytes] | None = None

    # -- for the desk --------------------------------------------------------------------------

    def host(self, **changes) -> Host:
        """Give this machine as hosts.yaml would, with `changes`."""
        facts = {
            "name": self.name,
            "address": "127.0.0.1",
            "port": self.port,
            "user": getpass.getuser(),
            "identity_file": str(self.lab.key),
            "ssh_config": str(self.lab.config),
            "known_hosts": str(self.lab.known_hosts),
            "python": sys.executable,
            "if_down": "start the lab",
            "run": settings(),
        }
        return Host(**{**facts, **changes})

    @property
    def host_key(self) -> str:
        """Give its public host key as `type base64`."""
        return " ".join((self.folder / "host_key.pub").read_text().split()[:2])

    # -- from outside --------------------------------------------------------------------------

    def inside(self, argv: list[str], **options) -> subprocess.CompletedProcess[str]:
        """Run argv on the host without ssh: the test's own view of it."""
        usual = {"capture_output": True, "text": True, "timeout": 20, "env": self.env}
        return subprocess.run([*self._enter(), *argv], check=False, **{**usual, **options})

    def start(self, argv: list[str], **options) -> subprocess.Popen[bytes]:
        """Start argv on the host, as something that was there before the desk came."""
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        return subprocess.Popen(
            [*self._enter(), *argv],
            **{**quiet, "stderr": subprocess.DEVNULL, "env": self.env, **options},
        )

    @property
    def env(self) -> dict[str, str]:
        """What a program there gets."""
        return {"HOME": str(self.home), "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"}

    def _enter(self) -> list[str]:
        if self.mode == "shared":
            return []
        return ["nsenter", "-t", str(self.first()), "-p", "-m", f"-w{self.home}"]

    def first(self) -> int:
        """Give its PID 1 (pidns) or its listening sshd (shared), as numbered outside."""
        assert self.process is not None
        if self.mode == "shared":
            return self.process.pid
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return int(until(children.read_text, what=f"PID 1 of {self.name}").split()[0])

    def processes(self) -> list[Process]:
        """Give what runs there, but for PID 1, sshd and its sessions."""
        return [p for p in self._all() if not self._is_house(p) and p.state != "Z"]

    def zombies(self) -> list[Process]:
        """Give what ended there and was not reaped."""
        return [p for p in self._all() if p.state == "Z"]

    def sessions(self) -> list[Process]:
        """Give the sshd processes of open connections."""
        return [p for p in self._all() if p.name.startswith("sshd") and not self._listens(p)]

    def verbs(self) -> list[Process]:
        """Give the programs that answer a desk right now. A keeper was one, and has left."""
        seen = self._all()
        sessions = {p.pid for p in seen if p.name.startswith("sshd")}
        return [p for p in seen if p.parent in sessions and "zlib.decompress" in p.words]

    def _is_house(self, process: Process) -> bool:
        if process.pid == self.first() or process.name.startswith("sshd"):
            return True
        return process.name == "sleep" and process.words == "sleep 3600"

    def _listens(self, process: Process) -> bool:
        return process.pid == self.first() or "[listener]" in process.words

    def _all(self) -> list[Process]:
        if self.mode == "pidns":
            # Not by descent: what the test itself started there has a parent outside.
            space = space_of(self.first())
            return everyone(lambda pid: space_of(pid) == space)
        found = {p.pid: p for p in everyone()}
        ours = {self.first()}
        grown = True
        while grown:
            more = {pid for pid, p in found.items() if p.parent in ours} - ours
            grown = bool(more)
            ours |= more
        # What was re-parented left the tree.
        ours |= {pid for pid, p in found.items() if p.carries(f"={self.home}\0")}
        return [found[pid] for pid in ours if pid in found and pid != os.getpid()]

    def log(self) -> str:
        """Give what sshd wrote."""
        return (self.folder / "sshd.log").read_text(errors="replace")

    # -- accidents -----------------------------------------------------------------------------

    def kill_sessions(self) -> None:
        """End every connection on the host's side, without a word of SSH."""
        self.signal_sessions(signal.SIGKILL)

    def signal_sessions(self, number: int) -> None:
        """Send a signal to the sshd processes of all connections."""
        for process in self.sessions():
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)

    @contextmanager
    def frozen(self):
        """Stop the sessions: TCP goes on to acknowledge, and nobody reads."""
        self.signal_sessions(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal_sessions(signal.SIGCONT)

    # -- life ----------------------------------------------------------------------------------

    def reset(self) -> None:
        """Between tests: end what was started there and its connections, and empty its home."""
        for process in [*self.processes(), *self.sessions()]:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        until(lambda: not self.processes(), what=f"end of all on {self.name}")
        _empty(self.home)

    def close(self) -> None:
        """End the host and all that runs there."""
        if self.process is None:
            return
        for process in self.processes() if self.mode == "shared" else []:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        if self.mode == "shared":
            self.kill_sessions()
        self.process.kill()  # unshare's --kill-child takes PID 1 along, and that all the others
        self.process.wait()
        self.process = None


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            for below, _, _ in os.walk(path):  # folders of a release are read-only
                Path(below).chmod(0o700)
            shutil.rmtree(path)
        else:
            path.unlink()
