"""One question on one channel: what is said, how long silence is borne, what no answer means."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import paramiko

from tasks import errors
from tasks.errors import (
    ConnectionLost,
    DeployError,
    Interrupted,
    LoginRefused,
    RemoteFailure,
    RemoteTimeout,
    UnreadableReply,
    visible,
)
from tasks.link.ending import Ending
from tasks.link.frames import FINAL, NOISE_KEPT, Frame, Frames, Unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

SILENCE_SECONDS = 15.0
"""A host sends a frame at least each 3 s; after this long without one, the path is lost."""
CHANNEL_SECONDS = 10.0
BUSY_SECONDS = 5.0
"""How long a host that allows one session may take to end the last one."""
ENDING_SECONDS = 3.0
GLANCE_SECONDS = 0.2
"""How often deadlines are looked at while nothing comes."""
PIECE = 32768
BROKEN = (paramiko.SSHException, EOFError, OSError)
"""What paramiko raises when one writes to a path that has just died."""

CLASSES: dict[str, type[DeployError]] = {
    "not-ours": errors.NotOurRoot,
    "lease-held": errors.LeaseHeld,
    "verify": errors.VerificationFailed,
    "no-first-step": errors.NoFirstStep,
    "refused": errors.RemoteRefusal,
    "failed": errors.RemoteFailure,
    "bad-request": errors.RemoteFailure,
    "deadline": errors.RemoteTimeout,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """All that is said to a host for one verb."""

    host: str
    verb: str
    command: str
    """The exec string."""
    program: bytes
    request: dict[str, Any]
    python: str
    """Named in the error when the host cannot start it."""

    @property
    def name(self) -> str:
        """Write the verb as people type tasks and operations."""
        return self.verb.replace("_", "-")

    @property
    def nonce(self) -> str:
        """What marks the frames of the answer."""
        return str(self.request["nonce"])

    def within(self, seconds: float) -> Question:
        """Give the same question with the host's own deadline."""
        return replace(self, request={**self.request, "deadline": seconds})

    def opening(self) -> bytes:
        """Give the first bytes of standard input: program, then request."""
        said = json.dumps(self.request).encode()
        return b"%d\n%s%d\n%s" % (len(self.program), self.program, len(said), said)


class Exchange:
    """One question and its answer, on a channel of its own."""

    def __init__(
        self,
        question: Question,
        transport: paramiko.Transport,
        *,
        until: float,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        stopped: Callable[[], bool],
    ) -> None:
        self._q, self._transport = question, transport
        self._until, self._clock, self._sleep, self._stopped = until, clock, sleep, stopped
        self._frames = Frames(question.nonce)
        self._arrived: list[Frame] = []
        self._stderr = bytearray()
        self._ended = False
        self._any = False
        self._heard = clock()
        self._channel: Any = None

    @property
    def noise(self) -> str:
        """What stood outside of the frames, on both streams, over several lines."""
        said = visible(bytes(self._stderr).decode(errors="replace"), lines=True).strip()
        return "\n".join(part for part in (self._frames.noise, said) if part)

    def run(
        self,
        blobs: Callable[[list[str]], Iterable[bytes]] | None,
        on_progress: Callable[[dict[str, Any]], None] | None,
    ) -> dict[str, Any]:
        """Ask, and give the result.

        Raises:
            DeployError: every ending but a result, each in its class.
        """
        self._channel = self._open()
        try:
            try:
                self._start()
            except BROKEN:
                raise self._lost("it ended before the question") from None
            self._send(self._q.opening())
            while True:
                frame = self._next()
                if frame.kind == "P" and on_progress and frame.payload.keys() != {"alive"}:
                    on_progress(frame.payload)
                elif frame.kind == "N":
                    self._stream(frame.payload, blobs)
                elif frame.kind in FINAL:
                    return self._result(frame)
        finally:
            with contextlib.suppress(*BROKEN):  # then it is closed already
                self._channel.close()

    def _open(self) -> Any:
        began = self._clock()
        while True:
            try:
                return self._transport.open_session(timeout=CHANNEL_SECONDS)
            except paramiko.ChannelException as refused:
                # One session at a time: the server may not have noticed the end of the last one.
                if self._clock() - began > BUSY_SECONDS or self._stopped():
                    raise LoginRefused(
                        self._q.host,
                        f"the server opens no session: {visible(refused.text)}",
                        "this account or key may not run commands; see MaxSessions of its sshd",
                    ) from None
                self._sleep(0.05)
            except BROKEN as wrong:
                raise self._lost(f"no channel: {visible(str(wrong)) or 'end of file'}") from wrong

    def _start(self) -> None:
        # As Channel.exec_command, without its wait for the server's word: that has no limit in
        # time and costs a round trip. A refusal closes the channel, which _no_result tells.
        message = paramiko.Message()
        message.add_byte(paramiko.common.cMSG_CHANNEL_REQUEST)
        message.add_int(self._channel.remote_chanid)
        message.add_string("exec")
        message.add_boolean(True)
        message.add_string(self._q.command)
        self._transport._send_user_message(message)  # type: ignore[attr-defined]  # noqa: SLF001

    def _send(self, data: bytes) -> None:
        """Send all of `data`, listening meanwhile; what cannot be sent any more, `_next` tells."""
        at = 0
        while at < len(data) and not self._ended:
            self._channel.settimeout(GLANCE_SECONDS)
            try:
                at += self._channel.send(data[at : at + PIECE])
            except TimeoutError:
                pass  # its window is full: listen, look at the clock, try again
            except BROKEN:
                return
            self._listen(0)
            if any(frame.kind in FINAL for frame in self._arrived):
                return
            self._patience()

    def _stream(
        self, wanted: dict[str, Any], blobs: Callable[[list[str]], Iterable[bytes]] | None
    ) -> None:
        names = wanted.get("blobs")
        if blobs is None or not isinstance(names, list):
            raise self._unreadable("it asked for files that were not offered")
        try:
            for blob in blobs(names):
                self._send(blob)
        except (KeyError, TypeError):
            raise self._unreadable("it asked for files that the release does not have") from None

    def _next(self) -> Frame:
        while not self._arrived:
            if self._ended:
                raise self._no_result()
            self._listen(GLANCE_SECONDS)
            if not self._arrived and not self._ended:
                self._patience()
        return self._arrived.pop(0)

    def _listen(self, seconds: float) -> None:
        self._channel.settimeout(seconds)
        try:
            data = self._channel.recv(1 << 16)
        except TimeoutError:
            data = None
        while self._channel.recv_stderr_ready():
            self._stderr += self._channel.recv_stderr(1 << 16)
            del self._stderr[:-NOISE_KEPT]
        if data is None:
            return
        if not data:
            self._ended = True
            return
        try:
            came = self._frames.feed(data)
        except Unreadable as wrong:
            raise self._unreadable(str(wrong)) from None
        if came:
            self._any, self._heard = True, self._clock()
            self._arrived += came

    def _patience(self) -> None:
        now = self._clock()
        if self._stopped():
            raise Interrupted(self._q.host, f"{self._q.name} was under way", "see `fab status`")
        if now >= self._until:
            raise self._overdue()
        if now - self._heard > SILENCE_SECONDS:
            raise self._lost(f"nothing heard for {SILENCE_SECONDS:.0f} s")

    def _result(self, frame: Frame) -> dict[str, Any]:
        host, verb, said = self._q.host, self._q.name, frame.payload
        if frame.kind == "R":
            return said
        if frame.kind == "T":
            text = str(said.get("traceback", "")).strip()
            last = visible(text.splitlines()[-1]) if text else "no traceback"
            raise RemoteFailure(
                host, f"{verb}: a bug in our program there: {last}", facts={"traceback": text}
            )
        data = said.get("data")
        raise CLASSES.get(str(said.get("code")), RemoteFailure)(
            host, visible(str(said.get("text"))), facts=data if isinstance(data, dict) else {}
        )

    def _lost(self, what: str) -> ConnectionLost:
        return ConnectionLost(self._q.host, f"{self._q.name}: {what}")

    def _unreadable(self, what: str) -> UnreadableReply:
        words = self._last_words()
        return UnreadableReply(
            self._q.host, f"{self._q.name}: {what}" + (f"; it said: {words}" if words else "")
        )

    def _last_words(self) -> str:
        said = visible(bytes(self._stderr).decode(errors="replace"), lines=True).strip()
        lines = (said or self._frames.noise).splitlines()
        return visible(lines[-1].strip())[:300] if lines else ""

    def _overdue(self) -> RemoteTimeout:
        """Close the host's input, which ends its side at the next safe point, and say if it did."""
        with contextlib.suppress(*BROKEN):  # then it is closed already
            self._channel.shutdown_write()
        until = self._clock() + ENDING_SECONDS
        while not self._channel.exit_status_ready() and self._clock() < until:
            self._channel.settimeout(GLANCE_SECONDS)
            try:
                self._ended = not self._channel.recv(1 << 16) or self._ended
            except TimeoutError:
                continue
            if self._ended:
                self._sleep(0.05)
        stopped = self._channel.exit_status_ready() and self._transport.is_active()
        side = "the host stopped its side" if stopped else "whether the host stopped is not known"
        return RemoteTimeout(self._q.host, f"{self._q.name}: no result in time; {side}")

    def _no_result(self) -> DeployError:
        """Say why the channel ended without an answer."""
        channel, transport = self._channel, self._transport
        until = self._clock() + ENDING_SECONDS
        while not channel.exit_status_ready() and self._clock() < until:
            self._sleep(0.02)
            self._listen(0)
        if channel.exit_status == -1:
            # A connection that dies closes its channels a moment before it calls itself dead.
            until = self._clock() + 0.5
            while transport.is_active() and self._clock() < until:
                self._sleep(0.02)
        ending = Ending(
            status=channel.exit_status,
            signal=getattr(channel, "exit_signal", ""),
            alive=transport.is_active(),
            output_ended=bool(channel.eof_received),
            closed=channel.closed,
            answered=self._any,
            words=self._last_words(),
        )
        return ending.error(self._q.host, self._q.name, self._q.python)
