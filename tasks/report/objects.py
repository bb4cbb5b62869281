"""Outcomes and errors as JSON objects; the schema stands in tasks/cli."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tasks.errors import DeployError
    from tasks.outcome import Outcome


def error_object(error: DeployError) -> dict[str, object]:
    """Give an error's class, exit code, message and facts."""
    return {
        "class": type(error).__name__,
        "exit_code": error.exit_code,
        "message": str(error),
        "facts": dict(error.facts),
    }


def outcome_object(outcome: Outcome) -> dict[str, object]:
    """Give everything that is known of an outcome."""
    return {
        "host": outcome.host,
        "operation": outcome.operation.replace("_", "-"),
        "state": outcome.state,
        "detail": outcome.detail,
        "seconds": round(outcome.seconds, 3),
        "facts": dict(outcome.facts),
        "back": outcome.back,
        "error": None if outcome.error is None else error_object(outcome.error),
    }
