"""Operations that read what runs leave behind: their state for a table, and their logs."""

from __future__ import annotations

import base64
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasks.errors import ConnectionLost, Unreachable
from tasks.outcome import Effect

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tasks.inventory import Host
    from tasks.link import Link
    from tasks.operations.words import Run

SLICE_S = 20
"""How long the host waits for new lines in one call; short, so that a lost desk is noticed there."""
CHUNK_BYTES = 1 << 20
PATIENCE_S = 900
"""How long a follower looks for a host that is gone; a reboot or a night train fits in."""


def status(host: Host, run: Run, link: Link) -> Effect:
    """Ask for all that is known of the newest run, of its release and of the machine.

    Idempotent: it only looks. A run that died is an answer here, not an error.
    """
    reply = link.ask("status", {"root": host.root}, deadline=30, by=run.by.words())
    return Effect(changed=False, detail=str(reply.get("state")), facts=reply)


@dataclass(frozen=True, kw_only=True)
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
    __name__: str = "logs"

    def __call__(self, host: Host, run: Run, link: Link) -> Effect:
        """Hand out lines until the log ends, or, following, until the run does.

        Raises:
            ConnectionLost, Unreachable: at once when not following; else after `PATIENCE_S`.
        """
        place: dict[str, Any] = {"run_id": self.run_id, "file": None, "offset": None}
        rest, given, lost_at = b"", 0, None
        while True:
            try:
                reply = link.ask("logs", self._request(host, place), deadline=SLICE_S + 20)
            except (ConnectionLost, Unreachable) as lost:
                lost_at = self.clock() if lost_at is None else lost_at
                if not self.follow or place["offset"] is None:
                    raise
                if self.clock() - lost_at > PATIENCE_S:
                    raise
                link.notify(f"{host.name}: {lost.kind}; looking for it again")
                self.sleep(1)
                continue
            lost_at = None
            place = {name: reply[name] for name in ("run_id", "file", "offset")}
            *whole, rest = (rest + base64.b64decode(reply["data_b64"])).split(b"\n")
            ended = bool(reply.get("ended")) and not reply.get("more")
            if rest and (ended or not (self.follow or reply.get("more"))):
                whole, rest = [*whole, rest], b""
            given += len(whole)
            texts = [line.decode(errors="replace") for line in whole]
            if texts and not self.emit(host.name, place["run_id"], texts):
                return Effect(changed=False, detail="nobody reads on", facts=place)
            if ended or not (self.follow or reply.get("more")):
                facts = {**place, "lines": given, "ended": ended}
                return Effect(changed=False, detail=f"{given:,} lines", facts=facts)

    def _request(self, host: Host, place: dict[str, Any]) -> dict[str, Any]:
        return {
            "root": host.root,
            **place,
            "lines": self.lines,
            "follow_s": SLICE_S if self.follow else 0,
            "max_bytes": CHUNK_BYTES,
        }
