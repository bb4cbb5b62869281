r"""Bytes from a host -> frames. Pure: no clock, no socket.

A frame is b"\x02" + nonce + b" " + kind + b" " + decimal length + b"\n" + payload + b"\x03\n";
the payload is a JSON object in UTF-8. What stands outside of frames (a motd, a noisy .bashrc, a
library's warning) is noise: its end is kept for error texts, and it never counts as an answer.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from tasks.errors import visible

MOST_BYTES = 64 << 20
"""A payload above this is refused before it is read."""
NOISE_KEPT = 4096
FINAL = frozenset("RET")
"""Kinds that end a conversation: result, expected failure, traceback of a bug."""
KINDS = frozenset("PN") | FINAL

_HEADER = re.compile(rb"([A-Z]) ([0-9]{1,9})\n")
_HEADER_MOST = 12


class Unreadable(ValueError):  # noqa: N818 - never leaves this package
    """A frame with our nonce that is not a frame: the program there is not ours, or was cut."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message of a verb."""

    kind: str
    payload: dict[str, Any]


class Frames:
    """Takes bytes as they come, and gives the frames in them."""

    def __init__(self, nonce: str) -> None:
        self._mark = b"\x02" + nonce.encode() + b" "
        self._buffer = bytearray()
        self._noise = bytearray()

    @property
    def noise(self) -> str:
        """The last words outside of frames, over several lines, harmless to a terminal."""
        text = bytes(self._noise + self._buffer)[-NOISE_KEPT:].decode(errors="replace")
        return visible(text, lines=True).strip()

    def feed(self, data: bytes) -> list[Frame]:
        """Take the next bytes, and give the frames that they complete.

        Raises:
            Unreadable: a frame is too large, has no end, or holds no JSON object.
        """
        self._buffer += data
        frames = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        return frames

    def _next(self) -> Frame | None:
        at = self._buffer.find(self._mark)
        if at < 0:
            # The mark may be cut by the end of what came so far.
            self._drop(max(0, len(self._buffer) - len(self._mark) + 1))
            return None
        self._drop(at)
        start = len(self._mark)
        header = _HEADER.match(self._buffer, start)
        if header is None:
            if len(self._buffer) >= start + _HEADER_MOST or b"\n" in self._buffer[start:]:
                raise Unreadable("a frame whose head is no head")
            return None
        kind, length = header[1].decode(), int(header[2])
        if kind not in KINDS:
            raise Unreadable(f"a frame of unknown kind {kind}")
        if length > MOST_BYTES:
            raise Unreadable(f"a frame of {length:,} bytes; {MOST_BYTES:,} are allowed")
        begin, end = header.end(), header.end() + length
        if len(self._buffer) < end + 2:
            return None
        if self._buffer[end : end + 2] != b"\x03\n":
            raise Unreadable("a frame without its end")
        payload = _object(bytes(self._buffer[begin:end]))
        del self._buffer[: end + 2]
        return Frame(kind, payload)

    def _drop(self, count: int) -> None:
        self._noise += self._buffer[:count]
        del self._buffer[:count]
        del self._noise[:-NOISE_KEPT]


def _object(payload: bytes) -> dict[str, Any]:
    try:
        value = json.loads(payload)
    except (ValueError, RecursionError) as wrong:
        raise Unreadable(f"a frame that is not JSON: {visible(str(wrong))}") from None
    if type(value) is not dict:
        raise Unreadable("a frame that is no JSON object")
    return {visible(key): harmless(item) for key, item in value.items()}


def harmless(value: Any) -> Any:
    """Escape control characters in every string of a JSON value, but for line feeds and tabs."""
    if isinstance(value, str):
        return visible(value, lines=True)
    if isinstance(value, list):
        return [harmless(item) for item in value]
    if isinstance(value, dict):
        return {visible(key): harmless(item) for key, item in value.items()}
    return value
