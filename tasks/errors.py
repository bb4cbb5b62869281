"""The tree of what can go wrong, each with its exit code. Ground floor: plain values, no imports.

A message has the form `where: what is, with the value; what to do next`.
"""

# ruff: noqa: N818 - the names are the situations, as a person says them
from __future__ import annotations

import re
import unicodedata
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping

MIXED = 9
"""Exit code when hosts failed in different ways."""
ROLLED_BACK = 6
"""Exit code when a new run made no step, and the old one trains again."""


def visible(text: str, *, lines: bool = False) -> str:
    r"""Escape what could steer a terminal or forge a line: text from a host is not trusted.

    Args:
        text: as it came, in any state.
        lines: keep line feeds and tabs, for text that is shown over several lines.
    """
    return (_DOUBTFUL_IN_LINES if lines else _DOUBTFUL).sub(_escaped, text)


# Whole log chunks go through here: only what is not plain ASCII is looked at one by one.
_DOUBTFUL = re.compile(r"[^\x20-\x7e]")
_DOUBTFUL_IN_LINES = re.compile(r"[^\x20-\x7e\n\t]")
# Cf holds the marks that turn the direction of text, Cs lone surrogates, Zl and Zp line breaks.
_HARMFUL = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def _escaped(found: re.Match[str]) -> str:
    character = found[0]
    if unicodedata.category(character) not in _HARMFUL:
        return character
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class DeployError(Exception):
    """What a person can cause, meet and act on. A bug is any other exception.

    Attributes:
        where: host, file or flag that it is about.
        what: what is, with the value.
        hint: what to do next, or "".
        facts: plain values that a program may want (what the host sent along).
        after: what was read from the host afterwards, or "".
    """

    exit_code: ClassVar[int] = 1
    kind: ClassVar[str] = ""
    """A few words that no other class uses, so that two failures never read the same."""

    def __init__(
        self, where: str, what: str, hint: str = "", *, facts: Mapping[str, object] | None = None
    ) -> None:
        self.where, self.what, self.hint = where, what, hint
        self.facts: Mapping[str, object] = facts or {}
        self.after = ""
        super().__init__(where, what, hint)

    def __str__(self) -> str:
        said = [self.where, self.kind, self.what] if self.kind else [self.where, self.what]
        text = ": ".join(part for part in said if part)
        return "; ".join(part for part in (text, self.hint, self.after) if part)


class ConfigError(DeployError):
    """hosts.yaml, the local tree or a value on the command line is not usable."""

    exit_code = 2


class MissingHostError(ConfigError):
    """A name, group or pattern that hosts.yaml does not have."""


class NotOurRoot(DeployError):
    """The root on the host belongs to another machine or another user."""

    exit_code = 2
    kind = "root is not ours"


class Unreachable(DeployError):
    """No SSH conversation came about: name, route, port, or a server that says nothing."""

    exit_code = 3
    kind = "not reachable"


class LoginRefused(DeployError):
    """The server answered and let none of our keys in."""

    exit_code = 3
    kind = "login refused"


class HostKeyWrong(DeployError):
    """The server's key is unknown, changed or revoked; nothing was sent to it."""

    exit_code = 3
    kind = "host key not accepted"


class VerificationFailed(DeployError):
    """The release or the machine is not what was asked for. Nothing was stopped."""

    exit_code = 4
    kind = "verification failed"


class LeaseHeld(DeployError):
    """Somebody else may change this root now."""

    exit_code = 5
    kind = "lease held"


class RemoteFailure(DeployError):
    """The operation ran on the host and failed; the host says why."""

    exit_code = 7
    kind = "failed on the host"


class RemoteRefusal(DeployError):
    """The host understood the operation and would not do it; nothing was changed."""

    exit_code = 7
    kind = "refused by the host"


class ResultLost(DeployError):
    """The operation may have happened or not: its result never came. The state is read again."""

    exit_code = 8


class RemoteKilled(ResultLost):
    """The program on the host was killed before it answered; the connection lives."""

    kind = "killed before it answered"


class ConnectionLost(ResultLost):
    """The connection ended, or fell silent, before the answer."""

    kind = "connection lost"


class RemoteTimeout(ResultLost):
    """The deadline passed before the answer; `what` says whether the host stopped its side."""

    kind = "timed out"


class UnreadableReply(ResultLost):
    """Something answered, and it was not our program's answer."""

    kind = "reply unreadable"


class NoFirstStep(DeployError):
    """The new run did not reach its first step, and no older one was put back."""

    exit_code = 10
    kind = "no first step"


class Unhealthy(DeployError):
    """`health` found a run that is not starting, training or finished."""

    exit_code = 11
    kind = "not healthy"


class Ailing(DeployError):
    """`doctor` found something broken on a host that it could get in to."""

    exit_code = 7
    kind = "broken"


class Interrupted(DeployError):
    """A person or a CI job ended the command; `what` tells what was under way."""

    exit_code = 12
    kind = "interrupted"
