"""Proving who we are to one server: the keys that ssh would offer, in its order; no password."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm

from tasks.errors import LoginRefused, visible
from tasks.link.authority import certified

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tasks.link.route import Hop
    from tasks.link.trust import Trust

# What paramiko and cryptography raise for a key file that is locked, damaged or of an unknown kind.
_LOCKED = (paramiko.PasswordRequiredException, TypeError)
_UNUSABLE = (
    *(paramiko.SSHException, ValueError, OSError, paramiko.pkey.UnknownKeyType),
    UnsupportedAlgorithm,
)


class Login:
    """An authentication strategy of paramiko: it calls `authenticate` once the server is known."""

    def __init__(self, host: str, hop: Hop, trust: Trust) -> None:
        self._host, self._hop, self._trust = host, hop, trust
        self._notes: list[str] = []
        self._offered: list[str] = []

    def authenticate(self, transport: paramiko.Transport) -> list[str]:
        """Offer key after key until the server takes one.

        Raises:
            LoginRefused: it took none, or wants more than a key.
            paramiko.SSHException: the conversation ended in the middle.
        """
        self._trust.refuse_revoked(transport.get_remote_server_key())
        agent = paramiko.Agent() if self._hop.agent else None
        try:
            for label, key in self._keys(agent):
                self._offered.append(label)
                try:
                    more = transport.auth_publickey(self._hop.user, key)
                except paramiko.BadAuthenticationType as wrong:
                    raise self._refused(
                        f"the server only allows {', '.join(wrong.allowed_types)}"
                    ) from None
                except paramiko.AuthenticationException as wrong:
                    if not transport.is_active():
                        if len(self._offered) > 1:
                            raise self._refused(_TOO_MANY) from None
                        raise paramiko.SSHException("connection ended during login") from wrong
                    if "timeout" in str(wrong).lower():
                        raise paramiko.SSHException("no answer to the login") from wrong
                    continue
                if more:
                    raise self._refused(f"the key was right, and the server also wants {more}")
                return []
        finally:
            if agent is not None:
                agent.close()
        raise self._refused("")

    def _refused(self, why: str) -> LoginRefused:
        offered = ", ".join(self._offered) or "no key: none was found"
        parts = [f"{self._hop.at}", why, f"offered {offered}", *self._notes]
        hint = "see the host's authorized_keys"
        if any("passphrase" in note for note in self._notes):
            hint = "unlock the key with `ssh-add`"
        elif "allows password" in why or "allows keyboard-interactive" in why:
            hint = "passwords are not typed here; put a key there by `ssh-copy-id`"
        elif why is _TOO_MANY:
            hint = "name the right one: `identity_file` in hosts.yaml, or IdentitiesOnly in ssh's"
        return LoginRefused(self._host, visible("; ".join(part for part in parts if part)), hint)

    def _keys(self, agent: paramiko.Agent | None) -> Iterator[tuple[str, paramiko.PKey]]:
        """Give what to offer: the agent's keys (ours first), then files without a passphrase."""
        held = []
        for key in agent.get_keys() if agent else ():
            if key.get_name().startswith("sk-"):
                self._notes.append(f"{_HARDWARE.format('the agent')} ({key.get_name()})")
            else:
                held.append(key)
        public = {file: blob for file in self._hop.identities if (blob := _public(file))}
        ours = [key for key in held if key.asbytes() in public.values()]
        others = [] if self._hop.only_identities else [key for key in held if key not in ours]
        for key in [*ours, *others]:
            yield from self._forms(f"agent key {key.comment or key.get_name()}", key)
        for file in self._hop.identities:
            blob = public.get(file, b"")
            if blob in [key.asbytes() for key in held]:
                continue
            try:
                if _kind(blob).startswith("sk-") or _is_hardware(file):
                    self._notes.append(_HARDWARE.format(file))
                    continue
                found = paramiko.PKey.from_path(file)
            except _LOCKED:
                self._notes.append(f"{file} has a passphrase, and no agent holds it")
            except _UNUSABLE as wrong:
                self._notes.append(f"{file} cannot be used: {wrong}")
            else:
                yield from self._forms(file, found)

    def _forms(self, label: str, key: Any) -> Iterator[tuple[str, paramiko.PKey]]:
        """Give a key with each certificate that there is for it, and then bare, as ssh does."""
        if key.public_blob is not None:  # paramiko found KEY-cert.pub by itself
            yield f"{label} with its certificate", key
        for file in self._hop.certificates:
            try:
                key.public_blob = None
                blob = paramiko.pkey.PublicBlob.from_file(file)
                if certified(blob) != f"{key.get_name()} {key.get_base64()}":
                    continue
                key.load_certificate(file)
            except _UNUSABLE as wrong:
                self._notes.append(f"certificate {file} cannot be used: {wrong}")
                continue
            yield f"{label} with certificate {file}", key
        key.public_blob = None
        yield label, key


_TOO_MANY = "the server hung up after these keys"
_HARDWARE = "{} holds a hardware key, and those are not supported here"


def _kind(blob: bytes) -> str:
    size = int.from_bytes(blob[:4], "big")
    return blob[4 : 4 + size].decode("ascii", "replace") if size < 100 else ""


def _is_hardware(file: str) -> bool:
    """Tell from a private key file alone: the format names its kind in the part that is open."""
    lines = Path(file).read_text(encoding="utf-8", errors="replace").split("-----")
    try:
        body = base64.b64decode("".join(lines[2].split()), validate=True) if len(lines) > 2 else b""
    except ValueError:
        return False
    return body.startswith(b"openssh-key-v1\0") and b"sk-" in body[:200]


def _public(file: str) -> bytes | None:
    """Read the public half of a key file, or None when it does not lie beside it."""
    path = Path(f"{file}.pub")
    try:
        return base64.b64decode(path.read_text(encoding="utf-8").split()[1], validate=True)
    except (OSError, ValueError, IndexError):
        return None
