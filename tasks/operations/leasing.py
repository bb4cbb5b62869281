"""The lease: who may change a root now. Taken and given back around a plan, by the fleet."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tasks.inventory import Host
    from tasks.link import Link
    from tasks.operations.words import Run

LEASE_SECONDS = 900
"""How long a lease lasts when its desk dies; long verbs renew it on the host."""


def new_lease() -> str:
    """Make a token. The desk makes it, so that a retry after a lost answer finds it to be ours."""
    return secrets.token_hex(16)


def take_lease(host: Host, run: Run, link: Link) -> None:
    """Take the host's lease with the token `run.lease`, or renew it when that is ours already.

    Raises:
        LeaseHeld: somebody else has it; the message says who, why and for how long.
    """
    link.ask(
        "lease_acquire",
        {"root": host.root, "seconds": LEASE_SECONDS, "why": run.by.why, "token": run.lease},
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
