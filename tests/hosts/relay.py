"""A TCP path that a test can spoil."""

from __future__ import annotations

import selectors
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from tests.hosts.ground import until

if TYPE_CHECKING:
    from collections.abc import Callable


class Relay:
    """A port that passes TCP on to another one, until told to stall, cut or refuse it."""

    def __init__(self, port: int, at: int = 0) -> None:
        self._target, self._pairs = port, {}
        self._server = socket.create_server(("127.0.0.1", at))
        self.port = self._server.getsockname()[1]
        self.stalled = False
        """Nothing passes, in neither direction."""
        self.mute = False
        """Nothing passes from the server to the client."""
        self.sent = 0
        """Bytes from the client to the server."""
        self.accepted = 0
        self._open = True
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open = False
        self._thread.join()
        self._hang_up()
        self._server.close()
        self._selector.close()

    def cut(self) -> None:
        """Reset every connection; new ones are taken."""
        self.do(self._hang_up)

    def refuse(self) -> None:
        """Take no new connection."""
        self.do(self._close_door)

    def do(self, act: Callable[[], None]) -> None:
        """Let the relay's own thread do `act`, between two pieces of data; returns afterwards."""
        self._todo = act
        until(lambda: self._todo is None, what="the relay's turn")

    _todo: Callable[[], None] | None = None

    def _close_door(self) -> None:
        self._selector.unregister(self._server)
        self._server.close()

    def _serve(self) -> None:
        while self._open:
            if self._todo is not None:
                self._todo()
                self._todo = None
            for key, _ in self._selector.select(0.01):
                if key.fileobj is self._server:
                    self._accept()
                elif not self.stalled:
                    self._pass(key.fileobj)
            if self.stalled or self.mute:
                time.sleep(0.01)  # what waits here stays readable: no busy loop

    def _accept(self) -> None:
        client, _ = self._server.accept()
        try:
            server = socket.create_connection(("127.0.0.1", self._target), timeout=5)
        except OSError:
            client.close()
            return
        self.accepted += 1
        for one, other in ((client, server), (server, client)):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._pairs[one] = (other, one is server)
            self._selector.register(one, selectors.EVENT_READ)

    def _pass(self, sock: socket.socket) -> None:
        if sock not in self._pairs:
            return
        other, from_server = self._pairs[sock]
        if from_server and self.mute:
            return
        try:
            data = sock.recv(1 << 16)
            other.sendall(data)
        except OSError:
            data = b""
        if not data:
            self._forget(sock)
            self._forget(other)
        elif not from_server:
            self.sent += len(data)

    def _hang_up(self) -> None:
        for sock in list(self._pairs):
            # A zero linger makes close() send RST instead of FIN.
            with suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._forget(sock)

    def _forget(self, sock: socket.socket) -> None:
        if self._pairs.pop(sock, None) is not None:
            self._selector.unregister(sock)
            sock.close()
