"""Where a task's words go."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from typing import TYPE_CHECKING, TextIO

from tasks import report
from tasks.errors import visible

if TYPE_CHECKING:
    from collections.abc import Mapping


class Face:
    """Where a task's words go. Written to from several threads, so each write is one whole."""

    def __init__(
        self, out: TextIO, err: TextIO, environment: Mapping[str, str], *, as_json: bool
    ) -> None:
        self._out, self._err, self.as_json = out, err, as_json
        plain = bool(environment.get("CI")) or environment.get("TERM") == "dumb"
        self.terminal = out.isatty() and not plain
        self.listening = True
        """False once whoever read stdout has gone: followers end, work under way goes on."""
        self.paper = report.Paper(
            width=shutil.get_terminal_size().columns if self.terminal else 80,
            fold=self.terminal,
            colour=self.terminal and not environment.get("NO_COLOR"),
        )
        self._in_place = err.isatty() and not plain

    def say(self, text: str) -> None:
        """Write a result for people."""
        if not self.as_json:
            self._write(text)

    def tell(self, kind: str, facts: Mapping[str, object]) -> None:
        """Write a result for programs."""
        if self.as_json:
            self._write(json.dumps({"kind": kind, **facts}, default=str))

    def note(self, text: str) -> None:
        """Write to stderr what stays: a retry, a warning, the last word of a failure."""
        put(self._err, f"{self._wipe()}{visible(text, lines=True)}\n")

    def progress(self, text: str) -> None:
        """Write to stderr what is under way; on a terminal the next word takes its place."""
        if self._in_place:
            put(self._err, f"{self._wipe()}{visible(text)[: self.paper.width - 1]}")
        else:
            self.note(text)

    def close(self) -> None:
        """Take the last word of progress away."""
        put(self._err, self._wipe())

    def _wipe(self) -> str:
        return "\r\x1b[K" if self._in_place else ""

    def _write(self, text: str) -> None:
        if self._in_place:
            self.close()
        if self.listening and not put(self._out, f"{text}\n"):
            self.listening = False


def put(stream: TextIO, text: str) -> bool:
    """Write at once; False when nobody reads any more."""
    try:
        stream.write(text)
        stream.flush()
    except BrokenPipeError:
        # Python flushes once more when it exits, and would complain.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return False
    return True
