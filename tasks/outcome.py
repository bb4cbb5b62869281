"""What an operation did (effect), and how it ended on a host (outcome)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tasks.errors import DeployError

State = Literal["changed", "unchanged", "ok", "FAILED", "skipped", "would change"]


@dataclass(frozen=True, slots=True)
class Effect:
    """What an operation did to a host, or found there."""

    changed: bool
    detail: str
    """One line for a person."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """The same for a program: plain values, as the host sent them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How one operation ended on one host."""

    host: str
    operation: str
    state: State
    detail: str
    error: DeployError | None = None
    """Set when, and only when, `state` is FAILED."""
    back: bool = False
    """Part of putting the old run back, after the new one failed."""
    seconds: float = 0.0
    facts: Mapping[str, object] = field(default_factory=dict)
