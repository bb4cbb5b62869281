"""A conversation that ended without an answer -> which of the known situations that is. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.errors import (
    ConnectionLost,
    DeployError,
    RemoteFailure,
    RemoteKilled,
    UnreadableReply,
)

NO_STATUS = -1
"""paramiko's exit status when none came: the program was killed, or the path died."""
NOT_STARTED = frozenset({126, 127})
"""What a shell says of a program that it cannot run."""
OTHER_PROGRAM = (
    "this login runs a program of its own or none; see its shell (nologin), ForceCommand of its"
    " sshd, and command= in its authorized_keys"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """All that is known of a channel that ended."""

    status: int
    signal: str
    """Name without SIG, "" when the server named none."""
    alive: bool
    """Whether the connection lives."""
    output_ended: bool
    """Whether the server said that the program's output ended."""
    closed: bool
    answered: bool
    """Whether any frame of ours came."""
    words: str
    """The program's last line, or ""."""

    def error(self, host: str, verb: str, python: str) -> DeployError:
        """Make the error for it."""
        said = f"; it said: {self.words}" if self.words else ""
        if self.signal:
            return RemoteKilled(host, f"{verb}: by SIG{self.signal} on the host{said}")
        if self.status > 128:
            return RemoteKilled(host, f"{verb}: by signal {self.status - 128} on the host{said}")
        if self.status == NO_STATUS:
            return self._without_status(host, verb, said)
        if self.status in NOT_STARTED or "not found" in self.words.lower():
            return RemoteFailure(
                host,
                f"{verb}: {python} does not start (exit {self.status}){said}",
                "set `agent_python` to a Python >= 3.8 of this host",
                facts={"layer": "python"},
            )
        if self.status and not self.answered:
            what = f"{verb}: exit {self.status} before our program ran{said}"
            return RemoteFailure(host, what, OTHER_PROGRAM, facts={"layer": "exec"})
        what = f"it ended with exit {self.status} and gave no result"
        return UnreadableReply(
            host, f"{verb}: {what}{said}", "" if self.answered else OTHER_PROGRAM
        )

    def _without_status(self, host: str, verb: str, said: str) -> DeployError:
        if not self.alive:
            return ConnectionLost(host, f"{verb}: it ended before the answer")
        if not self.output_ended:
            return RemoteFailure(host, f"{verb}: the server would not run our program{said}")
        if not self.closed:
            return UnreadableReply(host, f"{verb}: it closed its output and went on{said}")
        return RemoteKilled(host, f"{verb}: on the host; it left no exit status{said}")
