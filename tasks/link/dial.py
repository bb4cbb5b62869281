"""A route -> an open SSH conversation, or the error that says which part of it failed."""

from __future__ import annotations

import contextlib
import logging
import socket
import subprocess
import tempfile
from typing import IO, TYPE_CHECKING, Any

import fabric
import paramiko

from tasks.errors import DeployError, HostKeyWrong, Unreachable, visible
from tasks.link.login import Login
from tasks.link.trust import Trust

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tasks.link.route import Hop

CONNECT_SECONDS = 10.0
"""For TCP, and again for each of banner, key exchange, login and an opened channel."""
LEAST_SECONDS = 2.0
"""What an attempt gets even when its deadline is nearer."""

# paramiko's own thread writes tracebacks to logging's last resort, standard error, otherwise.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


class Transport(paramiko.Transport):
    """paramiko's, but it remembers the signal that ended a remote program.

    Without that, a killed program and one whose exit status got lost look the same (-1).
    """

    def _ended(channel: Any, message: paramiko.Message) -> None:  # noqa: N805 - called with a channel
        peek = paramiko.Message(message.get_remainder())
        if peek.get_text() == "exit-signal":
            peek.get_boolean()
            channel.exit_signal = visible(peek.get_text())
        paramiko.Channel._handle_request(channel, message)  # type: ignore[attr-defined]  # noqa: SLF001

    _channel_handler_table = {  # noqa: RUF012 - as in paramiko
        **paramiko.Transport._channel_handler_table,  # type: ignore[attr-defined]  # noqa: SLF001
        paramiko.common.MSG_CHANNEL_REQUEST: _ended,
    }


class Call:
    """The open conversation with a host, through its jump hosts."""

    def __init__(self, trust: Callable[[str, Hop], Trust]) -> None:
        self._trust = trust
        self._connections: list[fabric.Connection] = []
        self._proxies: list[subprocess.Popen[bytes]] = []
        self._sockets: list[socket.socket] = []
        self._proxy_words: IO[bytes] | None = None

    @property
    def transport(self) -> paramiko.Transport:
        """Where channels are opened."""
        transport: paramiko.Transport = self._connections[-1].transport
        return transport

    @property
    def alive(self) -> bool:
        """Whether nothing is known to be broken."""
        return bool(self._connections) and bool(self._connections[-1].is_connected)

    def close(self) -> None:
        """End it, the last hop first. May be called twice."""
        while self._connections:
            # Fabric's close does nothing for a connection that failed half-way; paramiko's does.
            self._connections.pop().client.close()
        while self._sockets:
            self._sockets.pop().close()
        while self._proxies:
            proxy = self._proxies.pop()
            proxy.terminate()
            try:
                proxy.wait(2)
            except subprocess.TimeoutExpired:
                proxy.kill()
                proxy.wait()
        if self._proxy_words is not None:
            self._proxy_words.close()
            self._proxy_words = None

    def extend(self, host: str, hop: Hop, if_down: str, left: Callable[[], float]) -> None:
        """Go one hop further.

        Args:
            host: for the errors.
            hop: where to.
            if_down: what to tell a person when it does not answer.
            left: seconds until the deadline.
        """
        seconds = max(LEAST_SECONDS, min(CONNECT_SECONDS, left()))
        try:
            trust = self._trust(host, hop)
            self._open(host, hop, trust, seconds)
        except DeployError:
            raise
        except paramiko.BadHostKeyException as wrong:
            raise trust.changed(wrong.key, wrong.expected_key) from None
        except paramiko.ssh_exception.IncompatiblePeer as wrong:
            raise HostKeyWrong(
                host, f"{hop.at}: no common algorithm: {visible(str(wrong))}", "update its sshd"
            ) from None
        except (OSError, EOFError, paramiko.SSHException) as wrong:
            layer, why = _why(hop, wrong, seconds)
            why += self._said_by_proxy()
            raise Unreachable(host, why, if_down, facts={"layer": layer}) from wrong

    def _said_by_proxy(self) -> str:
        if self._proxy_words is None:
            return ""
        self._proxy_words.seek(0)
        words = self._proxy_words.read(4096).decode(errors="replace").strip()
        return f"; its proxy says: {visible(words.splitlines()[-1])}" if words else ""

    def _open(self, host: str, hop: Hop, trust: Trust, seconds: float) -> None:
        kwargs: dict[str, Any] = {
            "transport_factory": _transport_factory(trust),
            "auth_strategy": Login(host, hop, trust),
            "banner_timeout": seconds,
            "auth_timeout": seconds,
            "channel_timeout": seconds,
            "look_for_keys": False,
            "allow_agent": False,
        }
        gateway = self._connections[-1] if self._connections else None
        if gateway is None:
            kwargs["sock"] = self._socket(hop, seconds)
        connection = fabric.Connection(
            host=hop.hostname,
            user=hop.user,
            port=hop.port,
            gateway=gateway,
            connect_timeout=seconds,
            connect_kwargs=kwargs,
            # Nothing ambient: neither ~/.fabric.yaml nor ~/.ssh/config as Fabric reads it.
            config=fabric.Config(lazy=True, ssh_config=paramiko.SSHConfig()),
        )
        self._connections.append(connection)
        trust.load_into(connection.client)
        connection.open()

    def _socket(self, hop: Hop, seconds: float) -> socket.socket:
        if hop.proxy:
            # Not paramiko.ProxyCommand: it turns in circles at the end of file of a dead proxy.
            self._proxy_words = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
            ours, theirs = socket.socketpair()
            self._sockets.append(ours)
            with theirs:
                self._proxies.append(
                    subprocess.Popen(
                        ["/bin/sh", "-c", f"exec {hop.proxy}"],
                        stdin=theirs.fileno(),
                        stdout=theirs.fileno(),
                        stderr=self._proxy_words.fileno(),
                    )
                )
            return ours
        # Not paramiko's own connect: it tries no second address after ENETUNREACH or a timeout.
        wrong: OSError = OSError("the name has no address")
        for family, kind, _, _, address in socket.getaddrinfo(
            hop.hostname, hop.port, hop.family, socket.SOCK_STREAM
        ):
            sock = socket.socket(family, kind)
            try:
                sock.settimeout(seconds)
                sock.connect(address)
            except OSError as refused:
                sock.close()
                wrong = refused
                continue
            self._sockets.append(sock)
            return sock
        raise wrong


def call(
    host: str,
    hops: Sequence[Hop],
    if_down: str,
    *,
    left: Callable[[], float],
    trust: Callable[[str, Hop], Trust] = Trust,
) -> Call:
    """Open the conversation.

    Args:
        host: for the errors.
        hops: the way.
        if_down: what to tell a person when it does not answer.
        left: seconds until the deadline.
        trust: gives what is known of each server on the way.

    Raises:
        Unreachable, LoginRefused, HostKeyWrong: it did not come about, and nothing is left open.
    """
    made = Call(trust)
    with contextlib.ExitStack() as undo:
        undo.callback(made.close)
        for hop in hops:
            made.extend(host, hop, if_down, left)
        undo.pop_all()
    return made


def _transport_factory(trust: Trust) -> Callable[..., Transport]:
    def make(sock: Any, **kwargs: Any) -> Transport:
        if isinstance(sock, socket.socket) and sock.family != socket.AF_UNIX:
            # Without TCP_NODELAY each call costs one more round trip; without the others a path
            # that dies silently is never noticed: paramiko counts no answers to its keepalives.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _PATIENCE.items():
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        transport = Transport(sock, **kwargs)
        options = transport.get_security_options()
        options.key_types = trust.preferred(options.key_types)
        return transport

    return make


_PATIENCE = {
    "TCP_KEEPIDLE": 5,  # s
    "TCP_KEEPINTVL": 3,  # s
    "TCP_KEEPCNT": 3,
    "TCP_USER_TIMEOUT": 10_000,  # ms
}


# What paramiko says of a server that says nothing depends on which of its threads notices first.
_MUTE = {"", "No existing session", "Error reading SSH protocol banner"}


def _why(hop: Hop, wrong: Exception, seconds: float) -> tuple[str, str]:
    """Give the layer that failed (name, route, port, banner) and the words for it."""
    if isinstance(wrong, socket.gaierror):
        return "name", f"the name {hop.hostname} has no address ({wrong.strerror})"
    if isinstance(wrong, TimeoutError):
        return "route", f"{hop.at} does not answer in {seconds:.0f} s"
    if isinstance(wrong, ConnectionRefusedError):
        return "port", f"nothing listens at {hop.at}"
    if isinstance(wrong, paramiko.ChannelException):
        return "route", f"the jump host cannot reach {hop.at} ({visible(wrong.text)})"
    if isinstance(wrong, EOFError) or str(wrong) in _MUTE:
        return "banner", f"{hop.at} took the connection and did not speak SSH in {seconds:.0f} s"
    layer = "banner" if isinstance(wrong, paramiko.SSHException) else "route"
    return layer, f"{hop.at}: {visible(getattr(wrong, 'strerror', None) or str(wrong))}"
