"""The lease: who may change a root now. Taken and given back around a plan, by the fleet."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasks.outcome import Effect

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tasks.inventory import Host
    from tasks.link import Link
    from tasks.operations.words import Run

LEASE_SECONDS = 900
"""How long a lease lasts when its desk dies; long verbs renew it on the host."""


def new_lease() -> str:
    """Make a token. The desk makes it, so that a retry after a lost answer finds it to be ours."""
    return secrets.token_hex(16)


def take_lease(host: Host, run: Run, link: Link) -> None:
    """Take the host's lease with the token `run.lease`.

    Idempotent: one that this token holds already is renewed.

    Raises:
        LeaseHeld: somebody else has it; the message says who, why and for how long.
    """
    _acquire(host, run, link, renew=False)


def renew_lease(host: Host, run: Run, link: Link) -> None:
    """Let the lease that we hold run on.

    Raises:
        LeaseHeld: it ran out or was freed meanwhile, so others may have changed the host.
    """
    _acquire(host, run, link, renew=True)


def _acquire(host: Host, run: Run, link: Link, *, renew: bool) -> None:
    link.ask(
        "lease_acquire",
        {
            "root": host.root,
            "seconds": LEASE_SECONDS,
            "why": run.by.why,
            "token": run.lease,
            "renew": renew,
        },
        deadline=20,
        lease=run.lease,
        by=run.by.words(),
    )


def give_back_lease(host: Host, run: Run, link: Link) -> None:
    """Give the host's lease back. Idempotent: one that is gone, or another's, is left alone."""
    link.ask(
        "lease_release",
        {"root": host.root, "token": run.lease},
        deadline=20,
        lease=run.lease,
        by=run.by.words(),
    )


def lease(host: Host, run: Run, link: Link) -> Effect:
    """Ask who may change the host now. Idempotent: it only looks."""
    reply = link.ask("lease_show", {"root": host.root}, deadline=20, by=run.by.words())
    held = reply.get("lease")
    return Effect(changed=False, detail=_said(held) if held else "nobody holds it", facts=reply)


def _said(held: Mapping[str, Any]) -> str:
    return (
        f"{held['who']} on {held.get('host')}: `{held['why']}`, since {held.get('since')}, for"
        f" {held['left_s']:.0f} s more"
    )


@dataclass(frozen=True, kw_only=True)
class FreeLease:
    """The operation that ends a lease which its holder did not give back."""

    of: str | None = None
    """Whose; None: our own, which is one that this person took on this desk."""

    __name__ = "lease"

    def __call__(self, host: Host, run: Run, link: Link) -> Effect:
        """Free the lease, and write that into the host's history.

        Idempotent: where nobody holds it, this changes nothing.

        Raises:
            LeaseHeld: it is somebody else's than was said.
        """
        reply = link.ask(
            "lease_free", {"root": host.root, "of": self.of}, deadline=20, by=run.by.words()
        )
        held = reply.get("lease")
        detail = f"freed: {_said(held)}" if held else "nobody holds it"
        return Effect(changed=bool(reply.get("changed")), detail=detail, facts=reply)
