"""Who may change this root: a lease for the time of a plan, a lock for the moment of a verb."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
from typing import Any, Dict, Iterator, Optional

from . import history
from .desk import Desk, Refused, want
from .machine import boot_id, boottime, utc
from .root import TEMPORARY, Root, read_json, remove, replace, root_of, write

TOKEN = re.compile(r"\A[0-9a-f]{32}\Z")


def present(root: Root) -> Optional[Dict[str, Any]]:
    """The lease that is held now, or None when there is none or it has run out.

    One from before a reboot has run out: whoever held it lost the connection with the host.
    """
    lease = read_json(os.path.join(root.lease, "lease.json"))
    if not isinstance(lease, dict):
        return None
    until = lease.get("until_boottime")
    if lease.get("boot_id") != boot_id() or not isinstance(until, (int, float)):
        return None
    if not isinstance(lease.get("token"), str):
        return None
    left = until - boottime()
    return {**lease, "left_s": round(left, 1)} if left > 0 else None


def public(lease: Dict[str, Any]) -> Dict[str, Any]:
    """What others may know of a lease: all but its token."""
    return {name: value for name, value in lease.items() if name != "token"}


WAIT = "--wait-lease waits for your turn"


def _held(lease: Dict[str, Any], hint: str = WAIT) -> Refused:
    return Refused(
        "lease-held",
        f"by {lease.get('who')} on {lease.get('host')} ({lease.get('why')}) since"
        f" {lease.get('since')}, for {lease['left_s']:.0f} s more; {hint}",
        **public(lease),
    )


def _lost() -> Refused:
    return Refused(
        "lease-held",
        "ours is gone: it ran out, or somebody freed it; nothing was changed since; begin again",
    )


def _text(who: Dict[str, str], why: str, seconds: float, token: str) -> bytes:
    lease = {
        "who": str(who.get("who", "unknown"))[:200],
        "host": str(who.get("host", "unknown"))[:200],
        "why": why[:500],
        "since": utc(),
        "seconds": seconds,
        "boot_id": boot_id(),
        "until_boottime": boottime() + seconds,
        "token": token,
    }
    return json.dumps(lease).encode()


@contextlib.contextmanager
def locked(desk: Desk, root: Root) -> Iterator[None]:
    """Hold the root's lock: one verb changes at a time. The kernel frees it when we die.

    Raises:
        Refused: deadline.
        DeskGone: while waiting.
    """
    descriptor = os.open(root.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                desk.pause(0.05)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def changing(desk: Desk, arguments: Dict[str, Any]) -> Iterator[Root]:
    """The root, locked, by the holder of its lease; renewed while the verb runs.

    A dry run takes neither lock nor lease.

    Raises:
        Refused: lease-held when the request's token is not the present one; not-ours; deadline.
    """
    root = root_of(arguments)
    if want(arguments, "dry", bool, default=False):
        yield root
        return
    _check_token(desk, root)
    with locked(desk, root):
        lease = _check_token(desk, root)
        root.sweep()
        with tended(desk, root, float(lease["seconds"])):
            yield root


def _check_token(desk: Desk, root: Root) -> Dict[str, Any]:
    lease = present(root)
    if lease is None:
        raise _lost()
    if not secrets.compare_digest(str(lease.get("token")), desk.lease or ""):
        raise _held(lease)
    return lease


@contextlib.contextmanager
def tended(desk: Desk, root: Root, seconds: float) -> Iterator[None]:
    """Renew the lease while a long verb runs; does nothing for requests without a token."""
    due = boottime() + seconds / 4

    def renew() -> None:
        nonlocal due
        if boottime() < due:
            return
        due = boottime() + seconds / 4
        lease = present(root)
        if lease is not None and lease.get("token") == desk.lease:
            _renew(root, lease, seconds)

    before, desk.tend = desk.tend, renew
    try:
        yield
    finally:
        desk.tend = before


def _renew(root: Root, lease: Dict[str, Any], seconds: float) -> bool:
    """Let it run for `seconds` from now; False when it was given back meanwhile.

    Without the lock: a verb of the same holder may keep that for a whole grace period.
    """
    lease = {**lease, "seconds": seconds, "until_boottime": boottime() + seconds}
    del lease["left_s"]
    try:
        path = os.path.join(root.lease, "lease.json")
        replace(path, json.dumps(lease).encode(), durable=False)
    except FileNotFoundError:
        return False
    return True


@contextlib.contextmanager
def watching(desk: Desk, root: Root) -> Iterator[None]:
    """For verbs that look for long: keeps the desk's own lease alive, if it holds one."""
    lease = present(root)
    if lease is None or lease.get("token") != desk.lease:
        yield
        return
    with tended(desk, root, float(lease["seconds"])):
        yield


def lease_acquire(desk: Desk, arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Take the lease; the same token again renews it, so a retry after a lost answer is safe."""
    root = root_of(arguments)
    seconds = want(arguments, "seconds", float)
    why = want(arguments, "why", str, default="")
    token = want(arguments, "token", str, default=desk.lease or secrets.token_hex(16))
    if not TOKEN.match(token):
        raise Refused("bad-request", "token: give 32 hex digits")
    if not 1 <= seconds <= 86_400:
        raise Refused("bad-request", f"seconds: is {seconds:g}; give 1 to 86,400")
    if want(arguments, "renew", bool, default=False) and _own(desk, root, token) is None:
        raise _lost()
    # Without the lock: another's verb may keep that for a whole grace period.
    lease = _own(desk, root, token)
    if want(arguments, "dry", bool, default=False):
        return {"changed": lease is None, "token": token}
    if lease is not None and _renew(root, lease, seconds):
        return {"changed": False, **lease, "seconds": seconds, "left_s": seconds}
    os.makedirs(root.path, exist_ok=True)
    with locked(desk, root):
        desk.check()  # who died while this waited would keep others out for the whole time
        root.claim()
        _own(desk, root, token)
        root.sweep()
        _put(root, _text(desk.by, why, seconds, token))
        lease = _own(desk, root, token)
        assert lease is not None
        return {"changed": True, **lease}


def _own(desk: Desk, root: Root, token: str) -> Optional[Dict[str, Any]]:
    """The present lease, if any; it is that of `token`. Raises Refused, lease-held."""
    lease = present(root)
    if lease is not None and lease["token"] != token:
        # Most often a desk of the same person that was killed, and then they need not wait.
        own = f"{WAIT}; it is your own: if that desk is gone, `fab lease --release` ends it"
        raise _held(lease, own if _same_person(desk, lease) else WAIT)
    return lease


def _same_person(desk: Desk, lease: Dict[str, Any]) -> bool:
    return (lease.get("who"), lease.get("host")) == (desk.by.get("who"), desk.by.get("host"))


def _put(root: Root, text: bytes) -> None:
    # A whole folder, built beside: a crash leaves the old lease, none, or the new one. The one
    # that ran out is renamed away first, because rename refuses a folder that is not empty.
    mine = os.path.join(root.path, f"{TEMPORARY}lease-{secrets.token_hex(4)}")
    old = os.path.join(root.path, f"{TEMPORARY}lease-{secrets.token_hex(4)}")
    os.mkdir(mine)
    # Not flushed: after a power cut the boot id has changed, and no lease holds any more.
    write(os.path.join(mine, "lease.json"), text, durable=False)
    if os.path.isdir(root.lease):
        os.rename(root.lease, old)
    os.rename(mine, root.lease)
    remove(old)


def lease_release(desk: Desk, arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Give the lease back; none held, or ran out: unchanged. Raises Refused, lease-held."""
    root = root_of(arguments)
    token = want(arguments, "token", str)
    lease = _own(desk, root, token)
    if not os.path.isdir(root.lease) or want(arguments, "dry", bool, default=False):
        return {"changed": lease is not None}
    with locked(desk, root):
        _own(desk, root, token)
        remove(root.lease)
    return {"changed": lease is not None}


def lease_free(desk: Desk, arguments: Dict[str, Any]) -> Dict[str, Any]:
    """End a lease that its holder did not give back: of the person named, else the asker's own.

    Raises:
        Refused: lease-held, when it is somebody else's.
    """
    root = root_of(arguments)
    of = want(arguments, "of", str, default=None)
    if present(root) is None:
        return {"changed": False, "lease": None}
    with locked(desk, root):
        lease = present(root)
        if lease is None:
            return {"changed": False, "lease": None}
        ours = of is None and _same_person(desk, lease)
        if of != lease.get("who") and not ours:
            raise _held(
                lease, f"`fab lease --release --of {lease.get('who')}` ends it all the same"
            )
        remove(root.lease)
        history.record(desk, root, "lease_free", of=public(lease))
    return {"changed": True, "lease": public(lease)}


def lease_show(desk: Desk, arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Who holds the lease: {"lease": {...} or None}."""
    del desk
    lease = present(root_of(arguments))
    return {"lease": None if lease is None else public(lease)}
