"""What may stand in an answer: a host is not trusted to be ours only because it took our key.

Fields mean the same in the answers of all verbs (tasks/agent/verbs.py says what), so one table
does. What is not in it is shown to nobody but as JSON.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tasks.errors import UnreadableReply, visible

if TYPE_CHECKING:
    from collections.abc import Callable

MOST = 1 << 63


def _whole(value: object) -> bool:
    return type(value) is int and -MOST < value < MOST


def _number(value: object) -> bool:
    return _whole(value) or type(value) is float


def _finite(value: object) -> bool:
    return _number(value) and math.isfinite(value)  # type: ignore[arg-type]  # a number by now


def _list_of(kind: type) -> Callable[[object], bool]:
    return lambda value: type(value) is list and all(type(item) is kind for item in value)


def _is(kind: type) -> Callable[[object], bool]:
    return lambda value: type(value) is kind


KINDS: tuple[tuple[str, Callable[[object], bool], tuple[str, ...]], ...] = (
    ("a whole number", _whole, ("step", "steps", "pid", "dropped", "offset")),
    ("a whole number", _whole, ("sent_files", "sent_bytes")),
    ("a number", _number, ("loss", "accepted", "tokens_per_s")),
    ("a finite number", _finite, ("seconds", "age_s", "left_s", "utc")),
    ("text", _is(str), ("kept", "run_id", "release", "state", "checkpoint", "detail", "digest")),
    ("text", _is(str), ("phase", "file", "text", "current", "who", "why", "version", "id")),
    ("yes or no", _is(bool), ("changed", "more", "ended")),
    ("a list of texts", _list_of(str), ("warnings", "last_lines", "aside", "secret_names")),
    ("a list of objects", _list_of(dict), ("features", "gpus", "checks")),
    ("an object", _is(dict), ("python", "run", "exit", "status", "lease", "clock", "fallback")),
)
_FIELDS = {name: (kind, fits) for kind, fits, names in KINDS for name in names}

ONE_LINE = frozenset(
    name for kind, _, names in KINDS for name in names if kind == "text" and name != "text"
)
NEEDED = {
    "logs": ("run_id", "file", "offset", "text", "more", "ended"),
    "put_back": ("run_id",),
}
"""Fields without which nothing can be said of an answer."""
NEEDED_INSIDE = {"lease": ("who", "why", "left_s")}


def checked(host: str, verb: str, reply: dict[str, Any]) -> dict[str, Any]:
    """Give the answer, if each field that is known has its kind; null is none.

    What the trainer wrote into its status.json is any trainer's: there, odd fields are left out.

    Raises:
        UnreadableReply: a field is something else, or is missing.
    """

    def wrong(name: str, what: str) -> UnreadableReply:
        return UnreadableReply(host, f"{verb}: its answer has {name}, which {what}")

    def check(fields: dict[str, Any], before: str) -> dict[str, Any]:
        for name, value in fields.items():
            kind, _ = _FIELDS.get(name, ("", None))
            if not fits(name, value):
                raise wrong(f"{before}{name}", f"is not {kind}")
        return {name: _one_line(name, value) for name, value in fields.items()}

    reply = check(reply, "")
    for name in ("python", "run", "lease", "fallback"):
        inside = reply.get(name)
        if isinstance(inside, dict):
            reply[name] = check(inside, f"{name}.")
            for each in NEEDED_INSIDE.get(name, ()) if verb == "lease_show" else ():
                if inside.get(each) is None:
                    raise wrong(f"{name}.{each}", "is missing")
    for name in NEEDED.get(verb, ()):
        if reply.get(name) is None:
            raise wrong(name, "is missing")
    said = reply.get("status")
    if isinstance(said, dict):
        reply["status"] = {
            name: _one_line(name, value) for name, value in said.items() if fits(name, value)
        }
    return reply


def _one_line(name: str, value: object) -> object:
    """Escape line feeds where a line goes on behind the value: they would begin one of our own."""
    return visible(value) if name in ONE_LINE and isinstance(value, str) else value


def fits(name: str, value: object) -> bool:
    """Whether a value may stand under a name."""
    _, check = _FIELDS.get(name, ("", None))
    return check is None or value is None or check(value)
