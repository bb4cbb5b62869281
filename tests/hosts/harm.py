"""What can happen to a deploy at one moment of it: drawn from a seed, done by the path itself."""

from __future__ import annotations

import os
import random
import signal
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.hosts.relay import Relay

if TYPE_CHECKING:
    import socket

PATH = ("drop", "stall", "reset")
"""An end of file; silence on that connection for ever; a reset."""
WHERE = ("up", "down", "message")


@dataclass(frozen=True, kw_only=True)
class Harm:
    """One cut: what happens, and when."""

    seed: int
    what: str
    """One of PATH, or `verb` or `desk`: that program gets SIGKILL."""
    where: str
    """After so many bytes to the host (up) or from it (down), or before that message."""
    after: int

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.what} at {self.where} {self.after}"


def draw(seed: int, *, bytes_up: int, bytes_down: int, messages: int, desk: bool) -> Harm:
    """Draw a cut whose moment is spread evenly over a whole deploy.

    Args:
        seed: all that decides.
        bytes_up: of a whole deploy, to the host.
        bytes_down: of a whole deploy, from the host.
        messages: of a whole deploy, in both directions.
        desk: whether the desk is a process of its own, which may be killed; then its messages
            cannot be counted, and the moment is one of bytes.
    """
    chance = random.Random(seed)
    what = "desk" if desk else chance.choice((*PATH, "verb"))
    where = chance.choice(WHERE[:2] if desk else WHERE)
    whole = {"up": bytes_up, "down": bytes_down, "message": messages}[where]
    return Harm(seed=seed, what=what, where=where, after=chance.randrange(whole))


class Path(Relay):
    """A relay that counts what passes, and does one harm when its moment has come."""

    def __init__(self, machine, harm: Harm | None = None) -> None:
        self._machine, self.harm = machine, harm
        self.desk = 0
        """Pid of the desk, where it is a process of its own."""
        self.passed = {"up": 0, "down": 0, "message": 0}
        self.done = False
        self._silent: list[socket.socket] = []
        super().__init__(machine.port)

    def __exit__(self, *why: object) -> None:
        super().__exit__(*why)
        for sock in self._silent:
            sock.close()

    def message(self) -> None:
        """Count a message that goes or has come; the desk's own thread calls this."""
        self.passed["message"] += 1
        if self._due("message"):
            self.do(self._harm)

    def _due(self, where: str) -> bool:
        harm = self.harm
        if self.done or harm is None or harm.where != where:
            return False
        return self.passed[where] >= harm.after

    def _pass(self, sock: socket.socket) -> None:
        if sock not in self._pairs:
            return
        other, from_server = self._pairs[sock]
        where = "down" if from_server else "up"
        most = 1 << 16
        if self.harm is not None and self.harm.where == where and not self.done:
            most = max(1, min(most, self.harm.after - self.passed[where]))
        try:
            data = sock.recv(most)
            other.sendall(data)
        except OSError:
            data = b""
        if not data:
            self._forget(sock)
            self._forget(other)
        self.passed[where] += len(data)
        if self._due(where):
            self._harm()

    def _harm(self) -> None:
        self.done = True
        match self.harm.what:
            case "reset":
                self._hang_up()
            case "drop":
                for sock in list(self._pairs):
                    self._forget(sock)
            case "stall":
                for sock in list(self._pairs):
                    self._selector.unregister(sock)
                    del self._pairs[sock]
                    self._silent.append(sock)
            case "verb":
                for verb in self._machine.verbs():
                    with suppress(ProcessLookupError):
                        os.kill(verb.pid, signal.SIGKILL)
            case "desk":
                with suppress(ProcessLookupError):
                    os.kill(self.desk, signal.SIGKILL)
