"""Which key a server must show: a pin of hosts.yaml, or known_hosts as ssh would read it.

A server that nothing is known of is refused, unless hosts.yaml says `host_keys: accept-new`.
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import paramiko

from tasks.errors import HostKeyWrong, visible
from tasks.link.authority import unvouched
from tasks.link.remember import remember

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tasks.link.route import Hop

_PREFERRED = ("ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521")


@dataclass(frozen=True, slots=True)
class Known:
    """One line of a known_hosts file that is about the server we look for."""

    marker: str
    """"" or @revoked or @cert-authority."""
    key: paramiko.PKey
    file: str


def known(names: Iterable[str], files: Iterable[str]) -> Iterator[Known]:
    """Give the lines about any of `names`. Files that are missing or unreadable know nobody."""
    wanted = tuple(names)
    for file in files:
        path = Path(file).expanduser()
        if not path.is_file():
            continue
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            words = line.split()
            marker = words.pop(0) if words and words[0].startswith("@") else ""
            if len(words) < 3 or not any(_matches(words[0], name) for name in wanted):
                continue
            if (key := _key(words[1], words[2])) is not None:
                yield Known(marker, key, str(path))


def _key(kind: str, encoded: str) -> paramiko.PKey | None:
    """Decode a public key; None for kinds that paramiko cannot check anyway, and for junk."""
    try:
        return paramiko.PKey.from_type_string(kind, base64.b64decode(encoded, validate=True))
    except (paramiko.SSHException, ValueError, binascii.Error):
        return None
    except paramiko.pkey.UnknownKeyType:
        return None


def _matches(patterns: str, name: str) -> bool:
    """Compare as OpenSSH does: comma list, wildcards, `!` excludes, or a salted hash."""
    if patterns.startswith("|1|"):
        salt, _, digest = patterns[3:].partition("|")
        try:
            made = hmac.new(base64.b64decode(salt), name.lower().encode(), hashlib.sha1).digest()
            return hmac.compare_digest(made, base64.b64decode(digest))
        except (ValueError, binascii.Error):
            return False
    found = False
    for pattern in patterns.lower().split(","):
        # fnmatch gives [ ] a meaning, and `[host]:port` has them literally.
        glob = pattern.removeprefix("!").replace("[", "[[]")
        if fnmatch.fnmatchcase(name.lower(), glob):
            if pattern.startswith("!"):
                return False
            found = True
    return found


def fingerprint(key: paramiko.PKey) -> str:
    """Write a key as `ssh-keygen -l` does."""
    digest = base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")
    return f"{key.get_name()} SHA256:{digest}"


class Trust(paramiko.MissingHostKeyPolicy):
    """What is known of one server, and the refusal of every other key.

    A key is added in one case: nothing is known of the server, and hosts.yaml wants it so.
    """

    def __init__(self, host: str, hop: Hop, notify: Callable[[str], None] = lambda _: None) -> None:
        self._host, self._hop, self._notify = host, hop, notify
        self.authorities: list[paramiko.PKey] = []
        self._elsewhere: list[paramiko.PKey] = []
        self._revoked: list[paramiko.PKey] = []
        self._files: dict[bytes, str] = {}
        self.keys: list[paramiko.PKey] = []
        if hop.pin:
            kind, encoded = hop.pin.split()
            key = _key(kind, encoded)
            if key is None:
                raise HostKeyWrong(
                    host, f"host_key of hosts.yaml is no {kind} key", "copy it again"
                )
            self.keys = [key]
            return
        found = list(known([hop.looked_up], hop.known_hosts))
        self._revoked = [line.key for line in found if line.marker == "@revoked"]
        self.keys = [line.key for line in found if not line.marker]
        self._files = {line.key.asbytes(): line.file for line in found}
        self.authorities = [
            line.key
            for line in known({hop.looked_up, hop.certified}, hop.known_hosts)
            if line.marker == "@cert-authority"
        ]
        if not self.keys and not hop.alias:
            # As ssh does: a key known for the host's own port 22 will do for another port.
            self._elsewhere = [
                line.key for line in known([hop.hostname], hop.known_hosts) if not line.marker
            ]

    def preferred(self, offered: Iterable[str]) -> tuple[str, ...]:
        """Sort the algorithms so that the server shows a key of a kind that we know."""
        kinds = {key.get_name() for key in [*self.keys, *self._elsewhere]}
        if "ssh-rsa" in kinds:
            kinds |= {"rsa-sha2-512", "rsa-sha2-256"}
        ordered = sorted(offered, key=lambda kind: kind not in kinds)
        if self.authorities and not self.keys:
            return (*(f"{kind}-cert-v01@openssh.com" for kind in ordered), *ordered)
        return tuple(ordered)

    def load_into(self, client: paramiko.SSHClient) -> None:
        """Make `client` accept these keys for this server, and nothing else."""
        hop = self._hop
        name = hop.hostname if hop.port == 22 else f"[{hop.hostname}]:{hop.port}"
        for key in sorted(self.keys, key=lambda key: key.get_name() not in _PREFERRED):
            client.get_host_keys().add(name, key.get_name(), key)
        client.set_missing_host_key_policy(self)

    def missing_host_key(
        self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey
    ) -> None:
        """Refuse a server of which no key is known (paramiko calls this)."""
        del client, hostname
        if key in self._elsewhere:
            return
        hop, why = self._hop, ""
        if self.authorities:
            why = unvouched(key, self.authorities, hop.certified, time.time())
            if not why:
                return
            why = f", and known_hosts has an authority for it, but {why}"
        elif hop.accept_new and not self._elsewhere and key not in self._revoked:
            file = remember(self._host, hop, key)
            self._notify(f"{self._host}: {fingerprint(key)} of {hop.looked_up} is now in {file}")
            return
        port = f"-p {hop.port} " if hop.port != 22 else ""
        raise HostKeyWrong(
            self._host,
            f"{hop.looked_up} is unknown and shows {fingerprint(key)}{why}",
            "compare that with `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` there; if it is"
            f" the same, run `fab trust --host {self._host}`, or set"
            f" `host_key: {key.get_name()} {key.get_base64()}` in hosts.yaml, or connect once by"
            f" `ssh {port}{hop.user}@{hop.hostname}`",
            facts={"key": f"{key.get_name()} {key.get_base64()}", "fingerprint": fingerprint(key)},
        )

    def refuse_revoked(self, key: paramiko.PKey) -> None:
        """Refuse a key that known_hosts marks as stolen.

        Raises:
            HostKeyWrong: it does.
        """
        if key in self._revoked:
            raise HostKeyWrong(
                self._host,
                f"{self._hop.looked_up} shows {fingerprint(key)}, which known_hosts marks @revoked",
                "somebody may be in between; the host needs a new key",
            )

    def changed(self, shown: paramiko.PKey, expected: paramiko.PKey) -> HostKeyWrong:
        """Make the error for a server whose key is not the known one."""
        hop = self._hop
        what = f"{hop.looked_up} shows {fingerprint(shown)}"
        facts = {"fingerprint": fingerprint(shown), "expected": fingerprint(expected)}
        if hop.pin:
            return HostKeyWrong(
                self._host,
                f"{what}, and hosts.yaml pins {fingerprint(expected)}",
                "somebody may be in between; if the host was set up anew, change its host_key",
                facts=facts,
            )
        file = self._files.get(expected.asbytes(), "known_hosts")
        return HostKeyWrong(
            self._host,
            f"{what}, and {visible(file)} has {fingerprint(expected)}",
            "somebody may be in between; if the host was set up anew:"
            f" ssh-keygen -R '{hop.looked_up}' -f {visible(file)}",
            facts=facts,
        )
