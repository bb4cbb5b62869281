"""One line for each change of a root, so that people can see who did what."""

from __future__ import annotations

import json
import os
from typing import Any

from .desk import Desk
from .machine import utc
from .root import Root, replace

KEPT = 10_000
SLACK = 1_000
"""Cut only when so many lines are too many: rewriting a megabyte at each change would be waste."""


def record(desk: Desk, root: Root, verb: str, **facts: Any) -> None:
    """Append one change. Only under the lock."""
    line = {"when": utc(), "verb": verb, **desk.by, **facts}
    text = json.dumps(line).encode() + b"\n"
    descriptor = os.open(root.history, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, text)
        size = os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
    if size > (KEPT + SLACK) * 60:  # no line is shorter: smaller files need no counting
        with open(root.history, "rb") as file:
            lines = file.readlines()
        if len(lines) > KEPT + SLACK:
            replace(root.history, b"".join(lines[-KEPT:]))
