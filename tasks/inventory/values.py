"""The values that hosts.yaml becomes, and what is computed from them alone."""

from __future__ import annotations

import fnmatch
import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tasks.errors import ConfigError, MissingHostError, visible
from tasks.inventory.fields import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tasks.inventory.secrets import Source

Scalar = bool | int | float | str
Flag = Scalar | tuple[Scalar, ...]

ALL = "all"
"""Every enabled host; the name of no host and of no group."""
DEFAULT = "default"
"""The group that is meant when no host was named."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """What should run on a host."""

    trainer: Mapping[str, Flag] = field(default_factory=dict)
    """Flags of `python -m trainer train`, in order, without their dashes."""
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, Source] = field(default_factory=dict)
    """Variables of the trainer whose values the desk has, and where it has them."""
    grace_seconds: int = 120
    """From SIGTERM to SIGKILL; a checkpoint must fit in."""
    first_step_seconds: int = 300
    """How long a new run may take to its first step."""
    features: tuple[str, ...] = ()
    """What `verify-features` demands of the trainer."""
    max_log_mb: int = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """A machine, how to reach it, and what should run there."""

    name: str
    address: str
    """What `ssh` would be given: a DNS name, an IP address, or an alias of its configuration."""
    port: int | None = None
    user: str | None = None
    identity_file: str | None = None
    ssh_config: str | None = None
    """The file for `ssh -F`, absolute here; in hosts.yaml it starts from the folder of the file."""
    host_key: str | None = None
    """The only key that is accepted, as `type base64`."""
    known_hosts: str | None = None
    accept_new: bool = False
    """Remember the key of a host that is met for the first time, instead of refusing it."""
    root: str = "~/fab"
    python: str = "python3"
    """The trainer's interpreter, absolute or under the host's `~/`."""
    agent_python: str = "python3"
    """What runs our verbs: Python >= 3.8, a path or a name on the host's PATH."""
    devices: tuple[int, ...] = ()
    if_down: str = ""
    """What to tell a person when this host does not answer."""
    enabled: bool = True
    run: RunSettings = field(default_factory=RunSettings)


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """All of hosts.yaml."""

    source: str
    hosts: tuple[Host, ...]
    groups: Mapping[str, tuple[str, ...]]

    def select(self, words: Iterable[str] = ()) -> tuple[Host, ...]:
        """Find the hosts that `words` name, each once, in the order of the words.

        Args:
            words: names, groups, globs, `all`, or comma lists of these; none means the group
                `default`, or every enabled host where there is no such group.

        Raises:
            MissingHostError: a word names nothing.
            ConfigError: a word names a host that is disabled.
        """
        words = tuple(words)
        asked = [part.strip() for word in words for part in word.split(",") if part.strip()]
        if words and not asked:
            # `--host "$HOST"` with HOST unset must not mean every host of the default group.
            raise MissingHostError(
                "--host", "names no host", "name one, or leave it out for the default group"
            )
        found: dict[str, Host] = {}
        for word in asked or [DEFAULT if DEFAULT in self.groups else ALL]:
            found.update((host.name, host) for host in self._named(word))
        if not found:
            raise MissingHostError(
                self.source, "no host is enabled", "add one under `hosts`, or enable one"
            )
        return tuple(found.values())

    def _named(self, word: str) -> list[Host]:
        usable = [host for host in self.hosts if host.enabled]
        if word == ALL:
            return usable
        if word in self.groups:
            return [host for host in usable if host.name in self.groups[word]]
        if matched := [host for host in usable if fnmatch.fnmatchcase(host.name, word)]:
            return matched
        if any(host.name == word for host in self.hosts):
            raise ConfigError(
                "--host", f"{word} is disabled", f"set hosts.{word}.enabled in {self.source}"
            )
        known = [*(host.name for host in self.hosts), *self.groups]
        guess = did_you_mean(word, known)
        raise MissingHostError(
            "--host",
            f"no host named {visible(word)}",
            "; ".join(part for part in (f"{self.source} has {', '.join(known)}", guess) if part),
        )


def words_of(flags: Mapping[str, Flag]) -> list[str]:
    """Write flags as command-line words, in their order.

    `true` is a bare flag, `false` is nothing, a list is one value joined by commas, text stays
    as it is. A value that starts with a dash is joined by `=`, or it would read as a flag.
    """
    words: list[str] = []
    for name, value in flags.items():
        if value is False:
            continue
        if value is True:
            words.append(f"--{name}")
            continue
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        words += [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]
    return words


def launch_spec(host: Host) -> dict[str, Any]:
    """Say what should run on `host`. Paths under `~/` are left for the host to expand."""
    settings = host.run
    return {
        "argv": [host.python, "-m", "trainer", "train", *words_of(settings.trainer)],
        "env": dict(settings.env),
        "secret_names": sorted(settings.secrets),
        "grace_s": settings.grace_seconds,
        "max_log_mb": settings.max_log_mb,
        "output_dir": settings.trainer.get("output-dir"),
        "devices": list(host.devices),
    }


def spec_digest(spec: Mapping[str, Any]) -> str:
    """Name a spec by its content: sha256 of its canonical JSON, in hex."""
    text = json.dumps(spec, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
