"""The operation `doctor`: what an engineer would ask of a host that misbehaves, one by one."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.errors import (
    Ailing,
    ConfigError,
    DeployError,
    HostKeyWrong,
    Interrupted,
    LoginRefused,
    visible,
)
from tasks.outcome import Effect

if TYPE_CHECKING:
    from collections.abc import Callable

    from tasks.inventory import Host
    from tasks.link import Link
    from tasks.operations.words import Run

Row = dict[str, str]
"""{"check", "state": ok, warn or broken, "detail", "mend": what to do, "" when ok}."""

LAYERS = ("name", "route", "port", "banner", "host key", "login", "exec", "python")
"""What must work before a host can be asked anything, in order."""
SKEW_S = 5.0

_MENDS = {
    "name": "see `address` in hosts.yaml and HostName in your ssh configuration; `getent hosts`",
    "route": "is the machine on, and the VPN? a firewall drops silently: `nc -vz ADDRESS PORT`",
    "port": "is sshd running there? a rented machine may have another port since its restart",
    "banner": "what listens there is no sshd, or one with no room: see MaxStartups",
}


@dataclass(kw_only=True)
class Doctor:
    """The operation `doctor`. It only looks, and goes as far as the host lets it."""

    now: Callable[[], float] = time.time
    """Seconds since 1970, to compare the host's clock with."""

    def __post_init__(self) -> None:
        # As a field with a default it would be the name of the class.
        self.__name__ = "doctor"

    def __call__(self, host: Host, run: Run, link: Link) -> Effect:
        """Ask all questions; facts have the rows under "checks", in errors too.

        Raises:
            Ailing: something is broken.
            Unreachable, HostKeyWrong, LoginRefused, RemoteFailure: it could not get that far; the
                rows say which layer failed.
        """
        flags, env = host.run.trainer, host.run.env
        port = env.get("MASTER_PORT", "")
        began = self.now()
        try:
            reply = link.ask(
                "doctor",
                {
                    "root": host.root,
                    "python": host.python,
                    "target": flags.get("target-model"),
                    "data": flags.get("data-dir"),
                    "output": flags.get("output-dir"),
                    "port": int(port) if port.isdigit() else None,
                    "devices": list(host.devices),
                },
                deadline=120,
                by=run.by.words(),
            )
        except (ConfigError, Interrupted):
            raise
        except DeployError as error:
            error.facts = {**error.facts, "checks": _refused(error)}
            raise
        ended = self.now()
        rows: list[Row] = [_row(layer, "ok") for layer in LAYERS[:-1]]
        rows.append(_noise(link.noise))
        rows += [row for row in map(_from_host, reply.get("checks") or []) if row]
        rows.append(_clock(reply, began, ended))
        facts = {**reply, "checks": rows}
        broken = [row["check"] for row in rows if row["state"] == "broken"]
        if broken:
            raise Ailing(host.name, ", ".join(broken), facts=facts)
        warned = sum(row["state"] == "warn" for row in rows)
        detail = f"{len(rows)} questions, nothing broken" + (
            f", {warned} to look at" if warned else ""
        )
        return Effect(changed=False, detail=detail, facts=facts)


def _row(check: str, state: str, detail: str = "", mend: str = "") -> Row:
    return {"check": check, "state": state, "detail": detail, "mend": mend}


def _refused(error: DeployError) -> list[Row]:
    """Say which layer failed, and that those before it did not."""
    layer = str(error.facts.get("layer") or "")
    if isinstance(error, HostKeyWrong):
        layer = "host key"
    elif isinstance(error, LoginRefused):
        layer = "login"
    elif layer not in LAYERS:
        layer = "exec"
    passed = LAYERS[: LAYERS.index(layer)]
    mend = "; ".join(part for part in (error.hint, _MENDS.get(layer, "")) if part)
    return [*(_row(each, "ok") for each in passed), _row(layer, "broken", error.what, mend)]


def _noise(noise: str) -> Row:
    if not noise:
        return _row("shell", "ok", "says nothing of its own")
    lines = noise.splitlines()
    first = visible(lines[0])[:100]
    return _row(
        "shell",
        "warn",
        f"it says {len(lines)} line{'s' if len(lines) > 1 else ''} around our answer: {first}",
        "we bear it, rsync and scp may not: print only where `[ -t 1 ]` in its rc files",
    )


def _from_host(said: object) -> Row | None:
    """Take a row as the host sent it: it may be any host."""
    if not isinstance(said, dict) or said.get("state") not in {"ok", "warn", "broken"}:
        return None
    return {name: visible(str(said.get(name, ""))) for name in ("check", "state", "detail", "mend")}


def _clock(reply: dict[str, object], began: float, ended: float) -> Row:
    clock = reply.get("clock")
    utc = clock.get("utc") if isinstance(clock, dict) else None
    if not isinstance(utc, int | float):
        return _row("clock", "warn", "the host did not tell its time", "")
    # The answer was made somewhere between question and reply.
    off = max(began - utc, utc - ended, 0.0)
    if off > SKEW_S:
        return _row(
            "clock",
            "warn",
            f"is {off:,.0f} s {'behind' if utc < began else 'ahead of'} this desk's",
            "`timedatectl set-ntp true` on whichever is wrong; ours measures ages without it, but"
            " logs and certificates go by it",
        )
    return _row("clock", "ok", "agrees with this desk's")
