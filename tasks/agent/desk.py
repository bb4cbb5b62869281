"""The desk, as a verb sees it: frames out, bytes in, its patience, and whether it is there."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # as in the bootstrap
import json
import os
import threading
import time
from typing import Any, BinaryIO, Callable, Dict, List, Optional

TICK_S = 2.0
"""A frame goes out at least this often, so that 15 s of silence mean a lost path."""
OVERDUE_S = 5.0
"""A verb that is stuck this long after its deadline (dead NFS, a driver) is ended from outside."""
STALLED_S = 20.0
"""A desk from which nothing of an upload came for so long is gone, though nobody said so: longer
than it is patient with us, and the lock that is held meanwhile is in the way of its next try."""
AHEAD_BYTES = 4 * 1024 * 1024
"""So much of stdin is read before a verb asks for it; more would only fill memory."""


class Refused(Exception):
    """An expected failure, told to the desk as an E frame.

    Args:
        code: not-ours, lease-held, verify, no-first-step, refused, failed, deadline or bad-request.
        text: `where: what is, with the value; what to do next`.
        data: plain values for the desk.
    """

    def __init__(self, code: str, text: str, **data: Any) -> None:
        self.code, self.text, self.data = code, text, data
        super().__init__(text)


class DeskGone(Exception):
    """Standard input ended or standard output broke: nobody waits for the answer any more."""


class Frames:
    """Writes frames that carry the request's nonce, each in one piece."""

    def __init__(self, out: BinaryIO, nonce: str) -> None:
        self._out, self._nonce, self._lock = out, nonce.encode(), threading.Lock()
        self.last = time.monotonic()
        self.broken = False

    def write(self, kind: bytes, payload: Dict[str, Any]) -> None:
        """Send one frame; a reader that is gone is remembered in `broken`, never raised.

        Raising would let a lost reader abort a change half-way: verbs look at their safe points.
        """
        text = json.dumps(payload).encode()
        frame = b"\x02%s %s %d\n%s\x03\n" % (self._nonce, kind, len(text), text)
        with self._lock:
            self.last = time.monotonic()
            try:
                self._out.write(frame)
                self._out.flush()
            except OSError:
                self.broken = True


class Desk:
    """The other end of one request.

    Attributes:
        lease: the token that came with the request, or None.
        by: {"who", "host", "why"} of the person or job that asked.
        tend: called about once a second at safe points; long verbs renew their lease by it.
        on_exit: called before the process is ended from outside (kills child processes).
    """

    def __init__(self, stdin: BinaryIO, stdout: BinaryIO, request: Dict[str, Any]) -> None:
        self._began = time.monotonic()
        _signal.alarm(0)  # the bootstrap's: from here on the request's deadline counts
        deadline = request["deadline"]  # looked at after this, so that the refusal has a desk
        self._deadline = float(deadline) if isinstance(deadline, (int, float)) else 60.0
        self.lease: Optional[str] = request["lease"]
        self.by: Dict[str, str] = request["by"]
        self.tend: Optional[Callable[[], None]] = None
        self.on_exit: List[Callable[[], None]] = []
        self._tended = self._began
        self._frames = Frames(stdout, request["nonce"])
        self._stdin, self._ahead = stdin, bytearray()
        self._ended = False
        self._news = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._tick, daemon=True).start()

    @property
    def gone(self) -> bool:
        """Whether the desk closed its side."""
        return self._frames.broken or (self._ended and not self._ahead)

    def left(self) -> float:
        """Seconds until the request's deadline; negative when past."""
        return self._began + self._deadline - time.monotonic()

    def progress(self, **values: Any) -> None:
        """Tell how far the verb is."""
        self._frames.write(b"P", values)

    def need(self, blobs: List[str]) -> None:
        """Ask for the raw bytes of these sha256, in this order."""
        self._frames.write(b"N", {"blobs": blobs})

    def end(self, kind: bytes, payload: Dict[str, Any]) -> None:
        """Send the last frame: R, E or T."""
        self._frames.write(kind, payload)

    def check(self) -> None:
        """A safe point: between two changes, where stopping leaves nothing half done.

        Raises:
            DeskGone: nobody waits any more.
            Refused: deadline.
        """
        if self.gone:
            raise DeskGone
        if self.left() <= 0:
            raise Refused("deadline", f"not done after {self._deadline:g} s, and stopped")
        if self.tend is not None and time.monotonic() - self._tended > 1.0:
            self._tended = time.monotonic()
            self.tend()

    def pause(self, seconds: float) -> None:
        """Wait, at a safe point; returns early, by raising, when the desk goes or time is up."""
        end = time.monotonic() + seconds
        while True:
            self.check()
            left = min(end - time.monotonic(), max(self.left(), 0.001), 0.5)
            if left <= 0:
                return
            with self._news:
                if not self._ended:
                    self._news.wait(left)

    def read(self, most: int) -> bytes:
        """Between 1 and `most` bytes from the desk. A safe point."""
        end = time.monotonic() + STALLED_S
        while time.monotonic() < end:
            with self._news:
                if self._ahead:
                    part = bytes(self._ahead[:most])
                    del self._ahead[:most]
                    self._news.notify_all()
                    return part
                if not self._ended:
                    self._news.wait(0.2)
            self.check()
        raise Refused("deadline", f"nothing came from the desk for {STALLED_S:g} s; repeat")

    def _listen(self) -> None:
        # The only reader of stdin from here on: end of file is then seen at once, in every verb.
        while True:
            part = self._stdin.read1(65536)  # type: ignore[attr-defined]
            with self._news:
                self._ahead += part
                self._ended = not part
                self._news.notify_all()
                while len(self._ahead) > AHEAD_BYTES:
                    self._news.wait()
            if not part:
                return

    def _tick(self) -> None:
        while True:
            time.sleep(0.25)
            if time.monotonic() - self._frames.last >= TICK_S:
                self._frames.write(b"P", {"alive": True})
            if self.left() < -OVERDUE_S:
                for act in self.on_exit:
                    act()
                text = f"stuck {OVERDUE_S:g} s after its deadline of {self._deadline:g} s; ended"
                self._frames.write(b"E", {"code": "deadline", "text": text, "data": {}})
                os._exit(1)


def want(arguments: Dict[str, Any], name: str, kind: type, default: Any = ...) -> Any:
    """The argument `name`, which must be of `kind` exactly (an int will do for a float).

    None stands for the default, where there is one.

    Raises:
        Refused: bad-request.
    """
    value = arguments.get(name)
    if value is None and default is not ...:
        return default
    if kind is float and type(value) is int:
        return float(value)
    # `type(...) is`, not isinstance: True is an int, and would pass for a number of seconds.
    if type(value) is not kind:
        raise Refused("bad-request", f"{name}: is {value!r}; give {kind.__name__}")
    return value
