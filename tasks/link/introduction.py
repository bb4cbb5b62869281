"""Meeting a host for the first time: the key that it shows, looked at before anything is sent."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from tasks.link.authority import unvouched
from tasks.link.dial import CONNECT_SECONDS, call
from tasks.link.remember import remember
from tasks.link.route import Hop, route
from tasks.link.trust import Trust, fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import paramiko

    from tasks.inventory import Host


@dataclass(frozen=True, kw_only=True)
class Introduction:
    """What a host shows, and whether that was known."""

    host: str
    last: bool
    """False for a jump host on the way."""
    looked_up: str
    """The name that known_hosts has, or would have, for it."""
    fingerprint: str
    """Kind and SHA256, as `ssh-keygen -l` prints them."""
    known: str
    """What says that it is right: "hosts.yaml", "known_hosts", "an authority", or ""."""
    remember: Callable[[], str]
    """Write the key down, and name the file. Raises HostKeyWrong."""


class _Shown(Exception):  # noqa: N818 - no error: it is how paramiko is left at this point
    def __init__(self, key: paramiko.PKey) -> None:
        super().__init__()
        self.key = key


class _Looking(Trust):
    def load_into(self, client: paramiko.SSHClient) -> None:
        client.set_missing_host_key_policy(self)

    def missing_host_key(
        self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey
    ) -> NoReturn:
        del client, hostname
        raise _Shown(key)


def introduce(host: Host) -> Iterator[Introduction]:
    """Look at the key of each server on the way, the host's own last; it is not logged in to.

    A jump host must be known, or be remembered between two of them, to go on beyond it.

    Raises:
        Unreachable, LoginRefused: as for every question.
        HostKeyWrong: a key is not the known one, is marked as stolen, or of a jump host that was
            not remembered.
    """
    hops = route(host)
    for number in range(len(hops)):
        yield _meet(host, hops[: number + 1], last=number + 1 == len(hops))


def _meet(host: Host, hops: Sequence[Hop], *, last: bool) -> Introduction:
    there = hops[-1]
    until = time.monotonic() + CONNECT_SECONDS

    def trust(name: str, hop: Hop) -> Trust:
        return _Looking(name, hop) if hop is there else Trust(name, hop)

    try:
        call(
            host.name, hops, host.if_down, left=lambda: until - time.monotonic(), trust=trust
        ).close()
    except _Shown as shown:
        key = shown.key
    else:
        raise AssertionError("paramiko asked nobody about the host's key")
    knowing = Trust(host.name, there)
    knowing.refuse_revoked(key)
    return Introduction(
        host=host.name,
        last=last,
        looked_up=there.looked_up,
        fingerprint=fingerprint(key),
        known=_known(knowing, there, key),
        remember=lambda: remember(host.name, there, key),
    )


def _known(knowing: Trust, hop: Hop, key: paramiko.PKey) -> str:
    if key in knowing.keys:
        return "hosts.yaml" if hop.pin else "known_hosts"
    if knowing.keys:
        alike = [each for each in knowing.keys if each.get_name() == key.get_name()]
        raise knowing.changed(key, (alike or knowing.keys)[0])
    if knowing.authorities and not unvouched(key, knowing.authorities, hop.certified, time.time()):
        return "an authority"
    return ""
