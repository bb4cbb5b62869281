"""Real OpenSSH servers on this machine, as throw-away hosts for tests.

Two modes. In `shared` a host is an sshd on a port of its own; it needs no root, and its processes
are ordinary neighbours. In `pidns` it has its own PID and mount namespaces as well: what runs there
sees no process of ours, may not write outside of its folder, and dies with its PID 1. That needs
root. `~` on a host is a folder of its own in both (sshd sets HOME).

Nothing outlives the tests: what is started here gets SIGKILL from the kernel when pytest goes.
"""

from __future__ import annotations

import ctypes
import getpass
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

from tests.hosts.ground import SSHD, needs, until
from tests.hosts.machine import Machine

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


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


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
        network: bool = False,
    ) -> Machine:
        """Start a host.

        Args:
            name: its name, new in this lab.
            mode: shared or pidns.
            init: pidns only: `noreap` has a PID 1 that leaves zombies.
            shell: pidns only: the login shell.
            sshd: lines for its sshd_config; they win over those that are here.
            known: whether known_hosts has its key.
            network: pidns only: it has a network of its own too, without any interface yet, and
                its sshd listens to whatever comes.
        """
        needs("pidns" if mode == "pidns" else "sshd")
        machine = Machine(self, name, mode, init)
        machine.home.mkdir(parents=True)
        self._keygen(machine.folder / "host_key")
        shutil.copy(f"{self.key}.pub", machine.folder / "authorized_keys")
        if shell is not None:
            self._passwd(machine.folder / "passwd", shell)
        self._configure(machine, (*sshd, f"ListenAddress {'0.0.0.0' if network else '127.0.0.1'}"))
        if known:
            with self.known_hosts.open("a") as file:
                file.write(f"[127.0.0.1]:{machine.port} {machine.host_key}\n")
        self._run(machine, init, ["--net"] if network else [])
        self.machines.append(machine)
        answers = (
            (lambda: "listening" in machine.log()) if network else lambda: _banner(machine.port)
        )
        until(answers, what=f"sshd of {name}, see {machine.folder},")
        return machine

    @staticmethod
    def _configure(machine: Machine, lines: tuple[str, ...]) -> None:
        at = machine.folder
        (at / "sshd.log").touch()
        (at / "sshd_config").write_text(
            "\n".join(
                (
                    *lines,
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
    def _run(machine: Machine, init: str, more: list[str]) -> None:
        assert SSHD is not None
        at = machine.folder
        if machine.mode == "shared":
            if os.geteuid() == 0:
                Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
            words = [SSHD, "-D", "-E", f"{at}/sshd.log", "-f", f"{at}/sshd_config"]
        else:
            spaces = ["--pid", "--mount", "--fork", "--mount-proc", "--kill-child", *more]
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
