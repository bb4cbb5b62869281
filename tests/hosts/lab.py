"""Real OpenSSH servers on this machine, as throw-away hosts for tests.

Two modes. In `shared` a host is an sshd on a port of its own; it needs no root, and its processes
are ordinary neighbours. In `pidns` it has its own PID and mount namespaces as well: what runs there
sees no process of ours, may not write outside of its folder, and dies with its PID 1. That needs
root. `~` on a host is a folder of its own in both (sshd sets HOME).

Nothing outlives the tests: what is started here gets SIGKILL from the kernel when pytest goes.
"""

from __future__ import annotations

import ctypes
import functools
import getpass
import os
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import pytest

from tasks.inventory import Host, RunSettings

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
PR_SET_PDEATHSIG = 1

# PID 1 of a pidns host: $1 its folder, $2 reap or noreap, $3 sshd. bash, because it reaps what is
# re-parented to it. A container whose PID 1 is `sleep infinity` reaps nothing; so does `noreap`.
INIT = """
set -e
mount --bind "$1" "$1"
[ ! -e "$1/passwd" ] || mount --bind "$1/passwd" /etc/passwd
mount -t tmpfs tmpfs /run -o mode=755
mount -t tmpfs tmpfs /var/tmp -o mode=1777
mkdir /run/sshd
mount -o remount,bind,ro /
"$3" -E "$1/sshd.log" -f "$1/sshd_config"
[ "$2" = reap ] || exec sleep infinity
while :; do sleep 3600 & wait $!; done
"""


def needs(ability: str) -> None:
    """Skip the test, counted, when this machine lacks `ability`; in CI that is a failure."""
    why = _lacking(ability)
    if not why:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI must be able to run this: {why}")
    pytest.skip(f"not run: {why}")


def able(ability: str) -> bool:
    """Say whether this machine has `ability`: sshd or pidns."""
    return not _lacking(ability)


@functools.cache
def _lacking(ability: str) -> str:
    if SSHD is None:
        return "no sshd here (openssh-server)"
    if ability == "sshd":
        return ""
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


def until(truth, seconds: float = 10.0, what: str = "it") -> object:
    """Poll `truth` until it is true, and give it; a test never sleeps for a guessed time."""
    end = time.monotonic() + seconds
    while not (value := truth()):
        if time.monotonic() > end:
            raise AssertionError(f"{what} did not come true in {seconds:g} s")
        time.sleep(0.01)
    return value


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Process:
    """A process as /proc shows it, from outside of every host."""

    def __init__(self, pid: int) -> None:
        # The name stands in parentheses and may hold some: count from behind the last one.
        name, _, rest = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
        fields = rest.split()
        self.pid, self.name = pid, name.partition("(")[2]
        self.state, self.parent, self.started = fields[0], int(fields[1]), int(fields[19])
        self.words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()

    def __repr__(self) -> str:
        return f"{self.pid} {self.state} {self.words or self.name}"

    def carries(self, text: str) -> bool:
        """Say whether its environment holds `text`."""
        with suppress(OSError):
            return os.fsencode(text) in Path(f"/proc/{self.pid}/environ").read_bytes()
        return False


def everyone() -> list[Process]:
    """Give all processes of this machine."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            if entry.name.isdigit():
                found.append(Process(int(entry.name)))
    return found


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
        return [p for p in self._all() if p.pid not in self._house() and p.state != "Z"]

    def zombies(self) -> list[Process]:
        """Give what ended there and was not reaped."""
        return [p for p in self._all() if p.state == "Z"]

    def sessions(self) -> list[Process]:
        """Give the sshd processes of open connections."""
        listener = self._listener()
        return [p for p in self._all() if p.name.startswith("sshd") and p.pid != listener]

    def _all(self) -> list[Process]:
        if self.mode == "pidns":
            # Not by descent: what the test itself started there has a parent outside.
            space = _space(self.first())
            return [p for p in everyone() if _space(p.pid) == space]
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

    def _house(self) -> set[int]:
        sleeper = {p.pid for p in self._all() if p.words == "sleep 3600"}
        return {self.first(), self._listener(), *sleeper, *(p.pid for p in self.sessions())}

    def _listener(self) -> int:
        if self.mode == "shared":
            return self.first()
        parents = {self.first()}
        return next(
            (p.pid for p in self._all() if p.parent in parents and "[listener]" in p.words), 0
        )

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


def _space(pid: int) -> str:
    """Name the PID namespace of a process, "" when it is gone."""
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return ""


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            for below, _, _ in os.walk(path):  # folders of a release are read-only
                Path(below).chmod(0o700)
            shutil.rmtree(path)
        else:
            path.unlink()


def settings(**trainer) -> RunSettings:
    """Give what the stub trainer is started with: short steps, output under the host's home."""
    flags = {"output-dir": "~/out", "steps": 100_000, "step-seconds": 0.02, **trainer}
    return RunSettings(
        trainer={name.replace("_", "-"): value for name, value in flags.items()},
        grace_seconds=10,
        first_step_seconds=20,
    )


class Lab:
    """All hosts of a test session: one client key, one known_hosts file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key = self._keygen(folder / "id")
        self.known_hosts = folder / "known_hosts"
        self.known_hosts.write_text("")
        # An empty configuration: whatever the person at this desk has in ~/.ssh does not matter.
        self.config = folder / "ssh_config"
        self.config.write_text("IdentityAgent none\nGlobalKnownHostsFile /dev/null\n")
        self.machines: list[Machine] = []

    def start(
        self,
        name: str,
        *,
        mode: str = "shared",
        init: str = "reap",
        shell: str | None = None,
        sshd: tuple[str, ...] = (),
        known: bool = True,
    ) -> Machine:
        """Start a host.

        Args:
            name: its name, new in this lab.
            mode: shared or pidns.
            init: pidns only: `noreap` has a PID 1 that leaves zombies.
            shell: pidns only: the login shell.
            sshd: lines for its sshd_config; they win over those that are here.
            known: whether known_hosts has its key.
        """
        needs("pidns" if mode == "pidns" else "sshd")
        machine = Machine(self, name, mode, init)
        machine.home.mkdir(parents=True)
        self._keygen(machine.folder / "host_key")
        shutil.copy(f"{self.key}.pub", machine.folder / "authorized_keys")
        if shell is not None:
            self._passwd(machine.folder / "passwd", shell)
        self._configure(machine, sshd)
        if known:
            with self.known_hosts.open("a") as file:
                file.write(f"[127.0.0.1]:{machine.port} {machine.host_key}\n")
        self._run(machine, init)
        self.machines.append(machine)
        until(lambda: _banner(machine.port), what=f"sshd of {name}, see {machine.folder},")
        return machine

    @staticmethod
    def _configure(machine: Machine, lines: tuple[str, ...]) -> None:
        at = machine.folder
        (at / "sshd.log").touch()
        (at / "sshd_config").write_text(
            "\n".join(
                (
                    *lines,
                    "ListenAddress 127.0.0.1",
                    f"Port {machine.port}",
                    f"HostKey {at}/host_key",
                    f"AuthorizedKeysFile {at}/authorized_keys",
                    f"PidFile {at}/sshd.pid",
                    f"SetEnv HOME={machine.home}",
                    "UsePAM no",
                    "StrictModes no",
                    "PasswordAuthentication no",
                    "KbdInteractiveAuthentication no",
                    "PrintMotd no",
                    "PrintLastLog no",
                    "LogLevel VERBOSE",
                )
            )
            + "\n"
        )

    @staticmethod
    def _run(machine: Machine, init: str) -> None:
        assert SSHD is not None
        at = machine.folder
        if machine.mode == "shared":
            if os.geteuid() == 0:
                Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
            words = [SSHD, "-D", "-E", f"{at}/sshd.log", "-f", f"{at}/sshd_config"]
        else:
            spaces = ["--pid", "--mount", "--fork", "--mount-proc", "--kill-child"]
            words = ["unshare", *spaces, "bash", "-c", INIT, "init", str(at), init, SSHD]
        with (at / "init.log").open("wb") as log:
            machine.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - async-signal-safe enough: one prctl
                start_new_session=True,
            )

    @staticmethod
    def _passwd(path: Path, shell: str) -> None:
        lines = Path("/etc/passwd").read_text().splitlines()
        mine = f"{getpass.getuser()}:"
        changed = [
            f"{line.rpartition(':')[0]}:{shell}" if line.startswith(mine) else line
            for line in lines
        ]
        path.write_text("\n".join(changed) + "\n")

    @staticmethod
    def _keygen(path: Path) -> Path:
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", str(path)]
        subprocess.run(words, check=True, timeout=20)
        return path

    def new_key(self, name: str) -> Path:
        """Make a key that no host knows."""
        return self._keygen(self.folder / name)

    def close(self) -> None:
        """End every host."""
        for machine in self.machines:
            machine.close()


def _banner(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as sock:
            return sock.recv(4) == b"SSH-"
    except OSError:
        return False


class Relay:
    """A port that passes TCP on to another one, until told to stall, cut or refuse it."""

    def __init__(self, port: int, at: int = 0) -> None:
        self._target, self._pairs = port, {}
        self._server = socket.create_server(("127.0.0.1", at))
        self.port = self._server.getsockname()[1]
        self.stalled = False
        """Nothing passes, in neither direction."""
        self.mute = False
        """Nothing passes from the server to the client."""
        self.sent = 0
        """Bytes from the client to the server."""
        self.accepted = 0
        self._open = True
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open = False
        self._thread.join()
        self._hang_up()
        self._server.close()
        self._selector.close()

    def cut(self) -> None:
        """Reset every connection; new ones are taken."""
        self._cutting = True
        until(lambda: not self._cutting, what="the cut")

    def refuse(self) -> None:
        """Take no new connection."""
        self._refusing = True
        until(lambda: not self._refusing, what="the refusal")

    _cutting = False
    _refusing = False

    def _serve(self) -> None:
        while self._open:
            if self._refusing:
                self._selector.unregister(self._server)
                self._server.close()
                self._refusing = False
            if self._cutting:
                self._hang_up()
                self._cutting = False
            for key, _ in self._selector.select(0.01):
                if key.fileobj is self._server:
                    self._accept()
                elif not self.stalled:
                    self._pass(key.fileobj)
            if self.stalled or self.mute:
                time.sleep(0.01)  # what waits here stays readable: no busy loop

    def _accept(self) -> None:
        client, _ = self._server.accept()
        try:
            server = socket.create_connection(("127.0.0.1", self._target), timeout=5)
        except OSError:
            client.close()
            return
        self.accepted += 1
        for one, other in ((client, server), (server, client)):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._pairs[one] = (other, one is server)
            self._selector.register(one, selectors.EVENT_READ)

    def _pass(self, sock: socket.socket) -> None:
        if sock not in self._pairs:
            return
        other, from_server = self._pairs[sock]
        if from_server and self.mute:
            return
        try:
            data = sock.recv(1 << 16)
            other.sendall(data)
        except OSError:
            data = b""
        if not data:
            self._forget(sock)
            self._forget(other)
        elif not from_server:
            self.sent += len(data)

    def _hang_up(self) -> None:
        for sock in list(self._pairs):
            # A zero linger makes close() send RST instead of FIN.
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._forget(sock)

    def _forget(self, sock: socket.socket) -> None:
        if self._pairs.pop(sock, None) is not None:
            self._selector.unregister(sock)
            sock.close()
