"""How `ssh` would go to a host: asked of `ssh -G`, so that its configuration means what it says."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.errors import ConfigError, Unreachable, visible

if TYPE_CHECKING:
    from tasks.inventory import Host

ASK_SECONDS = 10
"""`Match exec` lines may run programs."""
MOST_JUMPS = 8

_UNSUPPORTED = {
    "knownhostscommand": ("none",),
    "pkcs11provider": ("none",),
    "proxyusefdpass": ("no",),
    "bindaddress": ("none",),
    "bindinterface": ("none",),
}
"""Options that would change where we connect or whom we trust, with the value that means off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hop:
    """One SSH server on the way, the host itself being the last."""

    name: str
    hostname: str
    port: int
    user: str
    identities: tuple[str, ...]
    """Private key files that exist."""
    only_identities: bool
    """Offer no other key that an agent holds."""
    agent: bool
    known_hosts: tuple[str, ...]
    alias: str | None
    """The name to look the host key up under, instead of hostname and port."""
    pin: str | None
    """The only key that is right, as `type base64`; known_hosts is not asked then."""
    family: int
    proxy: str | None
    """Command whose standard streams reach the server."""
    certificates: tuple[str, ...] = ()
    """Files of CertificateFile; one beside its key (KEY-cert.pub) is found without it."""
    accept_new: bool = False
    """Write the key of a server that nothing is known of into the first of `known_hosts`."""
    hashed: bool = False
    """Write its name as a hash (HashKnownHosts)."""

    @property
    def looked_up(self) -> str:
        """The name that known_hosts has for this server."""
        if self.alias:
            return self.alias
        return self.hostname if self.port == 22 else f"[{self.hostname}]:{self.port}"

    @property
    def certified(self) -> str:
        """The name that a certificate of this server must have."""
        return self.alias or self.hostname

    @property
    def at(self) -> str:
        """Address for a person."""
        return f"{self.user}@{self.hostname} port {self.port}"


def route(host: Host) -> tuple[Hop, ...]:
    """Find the way to `host`: its jump hosts in order, then itself.

    Raises:
        Unreachable: its ssh_config file is not there (the message says what starts the host).
        ConfigError: ssh refuses the configuration, or it wants what we do not support.
    """
    if host.ssh_config and not Path(host.ssh_config).is_file():
        raise Unreachable(
            host.name, f"there is no {host.ssh_config} (its ssh_config)", host.if_down
        )
    options = {"-p": str(host.port) if host.port else None, "-l": host.user}
    facts = _resolve(host, host.address, options)
    hops = _jumps(host, facts, seen=())
    return (*hops, _hop(host, host.name, facts, last=True))


def _jumps(host: Host, facts: dict[str, list[str]], seen: tuple[str, ...]) -> tuple[Hop, ...]:
    listed = _one(facts, "proxyjump")
    if not listed or listed == "none":
        return ()
    hops: list[Hop] = []
    for number, word in enumerate(listed.split(",")):
        if len(seen) + number > MOST_JUMPS or word in seen:
            raise ConfigError(host.name, f"ProxyJump goes in a circle at {visible(word)}")
        user, name, port = _parts(host, word)
        hop_facts = _resolve(host, name, {"-p": port, "-l": user})
        # As in ssh: only the first jump host may bring jump hosts of its own.
        if number == 0:
            hops += _jumps(host, hop_facts, (*seen, word))
        hops.append(_hop(host, name, hop_facts, last=False))
    return tuple(hops)


def _parts(host: Host, word: str) -> tuple[str | None, str, str | None]:
    bare = word.removeprefix("ssh://")
    found = re.fullmatch(r"(?:([^@]+)@)?(\[[^\]]+\]|[^:@\[\]]+)(?::(\d+))?", bare)
    if not found or found[2].startswith("-"):
        raise ConfigError(
            host.name, f"ProxyJump {visible(word)} is not understood", "user@host:port"
        )
    return found[1], found[2].strip("[]"), found[3]


def _resolve(host: Host, name: str, options: dict[str, str | None]) -> dict[str, list[str]]:
    """Ask `ssh -G`; without an ssh there is no configuration either, and defaults hold."""
    ssh = shutil.which("ssh")
    if ssh is None:
        if host.ssh_config:
            raise ConfigError(host.name, "has an ssh_config, and no ssh is there to read it")
        return {
            "hostname": [name],
            "port": [options["-p"] or "22"],
            "user": [options["-l"] or getpass.getuser()],
            "identityfile": ["~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa"],
            "userknownhostsfile": ["~/.ssh/known_hosts"],
        }
    words = [ssh, "-G"]
    if host.ssh_config:
        words += ["-F", host.ssh_config]
    for flag, value in options.items():
        words += [flag, value] if value else []
    try:
        asked = subprocess.run(
            [*words, "--", name],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ASK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            host.name, f"`ssh -G` took over {ASK_SECONDS} s", "see `Match exec`"
        ) from None
    if asked.returncode:
        said = visible(asked.stderr.decode(errors="replace").strip().replace("\n", "; "))
        raise ConfigError(host.name, f"`ssh -G` says: {said}", "mend the ssh configuration")
    facts: dict[str, list[str]] = {}
    for line in asked.stdout.decode(errors="replace").splitlines():
        key, _, value = line.partition(" ")
        facts.setdefault(key, []).append(value)
    return facts


def _one(facts: dict[str, list[str]], key: str) -> str:
    return facts.get(key, [""])[0]


def _hop(host: Host, name: str, facts: dict[str, list[str]], *, last: bool) -> Hop:
    for option, off in _UNSUPPORTED.items():
        value = _one(facts, option)
        if value and value not in off:
            raise ConfigError(
                host.name,
                f"the ssh configuration of {name} sets {option} {visible(value)}",
                "that is not supported; leave it out for this host",
            )
    hostname, user = _one(facts, "hostname"), _one(facts, "user")
    port = int(_one(facts, "port") or 22)

    def full(text: str) -> str:
        tokens = {"h": hostname, "n": name, "p": str(port), "r": user, "%": "%"}
        tokens |= {"d": str(Path.home()), "u": getpass.getuser(), "l": socket.gethostname()}
        tokens |= {"L": socket.gethostname().partition(".")[0], "i": str(os.getuid())}
        tokens["k"] = _one(facts, "hostkeyalias") or name
        return re.sub(r"%(.)", lambda m: tokens.get(m[1], m[0]), text)

    files = [full(text) for text in facts.get("identityfile", []) if text != "none"]
    if last and host.identity_file:
        files = [host.identity_file]
        if not Path(host.identity_file).is_file():
            raise ConfigError(host.name, f"there is no key file {host.identity_file}")
    known = [*facts.get("userknownhostsfile", []), *facts.get("globalknownhostsfile", [])]
    known = [full(file) for line in known for file in _files(line)]
    certificates = [full(file) for file in facts.get("certificatefile", []) if file != "none"]
    proxy = _one(facts, "proxycommand")
    has_jump = _one(facts, "proxyjump") not in {"", "none"}
    agent = _one(facts, "identityagent")
    usual = {"", "none", "SSH_AUTH_SOCK", "$SSH_AUTH_SOCK", "${SSH_AUTH_SOCK}"}
    if agent not in {*usual, os.environ.get("SSH_AUTH_SOCK", "")}:
        raise ConfigError(
            host.name, f"sets identityagent {visible(agent)}", "point SSH_AUTH_SOCK there instead"
        )
    families = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}
    return Hop(
        name=name,
        hostname=hostname,
        port=port,
        user=user,
        identities=tuple(f for f in map(os.path.expanduser, files) if Path(f).is_file()),
        only_identities=_one(facts, "identitiesonly") == "yes"
        or (last and bool(host.identity_file)),
        agent=agent != "none",
        known_hosts=(host.known_hosts,) if last and host.known_hosts else tuple(known),
        alias=_one(facts, "hostkeyalias") or None,
        pin=host.host_key if last else None,
        family=families.get(_one(facts, "addressfamily"), socket.AF_UNSPEC),
        proxy=full(proxy) if proxy and proxy != "none" and not has_jump else None,
        certificates=tuple(map(os.path.expanduser, certificates)),
        accept_new=host.accept_new,
        hashed=_one(facts, "hashknownhosts") == "yes",
    )


def _files(line: str) -> list[str]:
    """Split the files of one option: `ssh -G` joins them by spaces, and quotes none that has some.

    A new one begins where a word begins as a path does.
    """
    files: list[str] = []
    for word in line.split(" "):
        if files and not word.startswith(("/", "~", "%")) and word != "none":
            files[-1] += f" {word}"
        else:
            files.append(word)
    return [file for file in files if file not in {"none", ""}]
