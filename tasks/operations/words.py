"""What every operation is given, and how one is marked as changing a host."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from tasks.errors import ConfigError, visible
from tasks.inventory import Secrets

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime

    from tasks.inventory import Host
    from tasks.link import Link
    from tasks.outcome import Effect
    from tasks.release import Release


@dataclass(frozen=True, kw_only=True, slots=True)
class By:
    """Who changes a host, for its history and its lease."""

    who: str = ""
    host: str = ""
    """The desk's name."""
    why: str = ""
    """The command, as a person would repeat it."""

    def words(self) -> dict[str, str]:
        """Give what travels in a request."""
        return {"who": self.who, "host": self.host, "why": self.why}


@dataclass(frozen=True, kw_only=True, slots=True)
class Back:
    """Which earlier run's release and settings are meant; without both, the one before the newest.

    The host knows its runs, so it is the host that chooses.
    """

    to: str | None = None
    """A release's digest, or how it begins."""
    instead_of: str | None = None
    """Id of the run that made no step."""

    def words(self) -> dict[str, str | None]:
        """Give what travels in a request."""
        return {"to": self.to, "instead_of": self.instead_of}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One invocation of a task: the same for all its hosts, but for the lease."""

    id: str
    """Name of the run that a launch makes; repeated, it makes none."""
    release: Release | None = None
    """What should run; None for what the host deployed last, and for what needs no release."""
    back: Back | None = None
    """What ran before should run again; `release` is None then."""
    by: By = field(default_factory=By)
    secrets: Secrets = field(default_factory=Secrets)
    """What the trainers of the hosts need to be told; read before any host was touched."""
    falls_back: bool = False
    """What trained before is put back where the new run makes no step."""
    fresh: bool = False
    """A new run, even where a healthy one already is this release with these settings."""
    dry: bool = False
    """Ask what would change, and change nothing."""
    wait_lease: float = 0.0
    """Seconds to wait for a lease that somebody else holds."""
    lease: str | None = None
    """Token of this host's lease, once it was taken."""

    @property
    def digest(self) -> str | None:
        """What travels in a request: the release's digest, None for the host's `current`."""
        return None if self.release is None else self.release.digest

    def shipped(self) -> Release:
        """Give the release, which this operation cannot do without."""
        assert self.release is not None, "a plan with this operation needs Run(release=...)"
        return self.release


def check_secrets(host: Host, run: Run, reply: Mapping[str, object], whose: str) -> None:
    """Refuse, before anything changes, what would lack a secret once it is put back.

    Args:
        host: where.
        run: what is done.
        reply: names the secrets that the old run was launched with.
        whose: how a person calls that run.

    Raises:
        ConfigError: hosts.yaml does not say where this desk has one of them.
    """
    names = reply.get("secret_names")
    known = run.secrets.of(host.name)
    for name in names if isinstance(names, list) else ():
        if name not in known:
            raise ConfigError(
                host.name,
                f"{whose} needs the secret {visible(str(name))}, which hosts.yaml does not name",
                "name it under `secrets` of the run"
                + (", or give --no-rollback" if run.falls_back else ""),
            )


F = TypeVar("F", bound="Callable[..., Effect]")


class Operation(Protocol):
    """What is done to one host."""

    __name__: str

    def __call__(self, host: Host, run: Run, link: Link) -> Effect:
        """Do it, or find that it is already so."""


def changing(operation: Operation) -> bool:
    """Say whether `operation` changes a host, and so needs its lease."""
    return getattr(operation, "changes", False)


def changes(operation: F) -> F:
    """Mark an operation that changes a host."""
    vars(operation)["changes"] = True
    return operation


def new_run_id(now: datetime) -> str:
    """Name a run: `YYYYMMDD-HHMMSS-xxxx`, in UTC, so that names sort by age."""
    return f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def listed(reply: Mapping[str, object]) -> str:
    """Give the reply's warnings as the end of a line, or ""."""
    warnings = reply.get("warnings")
    if not isinstance(warnings, list) or not warnings:
        return ""
    return "; warning: " + "; ".join(map(str, warnings))
