"""Operations that read what runs leave behind: their state for a table, and their logs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasks.errors import ConnectionLost, Unreachable
from tasks.outcome import Effect

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tasks.inventory import Host
    from tasks.link import Link
    from tasks.operations.words import Run

SLICE_S = 20
"""How long the host waits for new lines in one call."""
CHUNK_BYTES = 1 << 20
PATIENCE_S = 900
"""How long a follower looks for a host that is gone; a reboot or a night train fits in."""


def status(host: Host, run: Run, link: Link) -> Effect:
    """Ask for all that is known of the newest run, of its release and of the machine.

    Idempotent: it only looks. A run that died is an answer here, not an error.
    """
    reply = link.ask("status", {"root": host.root}, deadline=30, by=run.by.words())
    # What the trainer wrote itself stands below; what was checked against its processes wins.
    facts = {**(reply.get("status") or {}), **reply}
    return Effect(changed=False, detail=str(reply.get("state")), facts=facts)


@dataclass(kw_only=True)
class ReadLogs:
    """The operation `logs`: the end of a run's log, and with `follow` all that comes after.

    A place in a log is (run, file, byte). It moves on when lines were handed out, so a connection
    that is lost and found again neither repeats a line nor loses one.
    """

    emit: Callable[[str, str, Sequence[str]], bool]
    """Takes host, run id and whole lines, from the host's own thread; False ends the reading."""
    run_id: str | None = None
    """None: the newest run."""
    lines: int = 20
    """How many of the last lines to begin with."""
    follow: bool = False
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        # As a field with a default it would be the name of the class.
        self.__name__ = "logs"

    def __call__(self, host: Host, run: Run, link: Link) -> Effect:
        """Hand out lines until the log ends, or, following, until the run does.

        Raises:
            ConnectionLost, Unreachable: at once when not following; else after `PATIENCE_S`.
        """
        place: dict[str, Any] = {"run_id": self.run_id, "file": None, "offset": None}
        given, lost_at = 0, None
        while True:
            try:
                reply = self._ask(host, run, link, place)
            except (ConnectionLost, Unreachable) as lost:
                now = self.clock()
                first = lost_at is None
                lost_at = now if lost_at is None else lost_at
                if not self.follow or place["offset"] is None or now - lost_at > PATIENCE_S:
                    raise
                if first:
                    link.notify(f"{host.name}: {lost.kind}; looking for it again")
                self.sleep(1)
                continue
            lost_at = None
            # From now on a host that goes is told once, below, and not at each attempt.
            link.quiet = self.follow
            place = {name: reply[name] for name in place}
            lines = _lines(reply)
            given += len(lines)
            read_on = not lines or self.emit(host.name, place["run_id"], lines)
            # Not following, it ends after the lines that were asked for, however fast more come.
            more = not reply["ended"] if self.follow else reply["more"] and given < self.lines
            if not (read_on and more):
                facts = {**place, "lines": given, "ended": reply["ended"]}
                return Effect(changed=False, detail=f"{given:,} lines", facts=facts)

    def _ask(self, host: Host, run: Run, link: Link, place: dict[str, Any]) -> Mapping[str, Any]:
        arguments = {
            "root": host.root,
            **place,
            "lines": self.lines,
            "follow_s": SLICE_S if self.follow else 0,
            "max_bytes": CHUNK_BYTES,
        }
        return link.ask("logs", arguments, deadline=SLICE_S + 20, by=run.by.words())


def _lines(reply: Mapping[str, Any]) -> list[str]:
    lines: list[str] = reply["text"].split("\n")
    if not lines[-1]:
        lines.pop()
    if reply.get("dropped"):
        lines.insert(0, f"({reply['dropped']:,} bytes here were taken by the log's cap)")
    return lines
