"""A host, asked: connects when needed, repeats what may be repeated, and says so."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any, Self

import tenacity

from tasks.errors import ConnectionLost, DeployError, Interrupted, Unreachable
from tasks.link.dial import CONNECT_SECONDS, Call, call
from tasks.link.exchange import Exchange, Question
from tasks.link.program import BOOT, program
from tasks.link.replies import checked
from tasks.link.route import route
from tasks.link.trust import Trust

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import TracebackType

    from tasks.inventory import Host
    from tasks.link.route import Hop

Reply = dict[str, Any]
"""What a verb answered: plain values, control characters escaped."""

CONNECT_ATTEMPTS = 4
ASK_ATTEMPTS = 3
LONG_SECONDS = 30.0
"""A conversation that lasted longer does not count as an attempt: a wait may be cut many times."""
AHEAD_SECONDS = 2.0
"""The host's own deadline is this much nearer than the desk's, so that its word comes first."""


class Link:
    """The door to one host. One connection, opened by the first question, for all of them.

    Not for several threads at once, but for `stop`.
    """

    def __init__(
        self,
        host: Host,
        *,
        notify: Callable[[str], None],
        progress: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.host, self.notify = host, notify
        self.progress = progress or notify
        """Told what is under way, where the next word takes the place of the last."""
        self.noise = ""
        """What the host's shells said around the last answer: it is not part of it."""
        self._clock, self._sleep = clock, sleep
        self._hops: tuple[Hop, ...] | None = None
        self._call: Call | None = None
        self._stopped = False
        self.quiet = False
        """Set by who tells in words of their own that the host is gone: no attempt is told."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection; the next question opens a new one."""
        if self._call is not None:
            self._call.close()
            self._call = None

    def stop(self) -> None:
        """Let the question under way, and every later one, end as Interrupted. From any thread."""
        self._stopped = True

    def resume(self) -> None:
        """Allow questions again after `stop`."""
        self._stopped = False

    def ask(
        self,
        verb: str,
        arguments: Mapping[str, Any],
        *,
        deadline: float,
        lease: str | None = None,
        by: Mapping[str, str] | None = None,
        blobs: Callable[[list[str]], Iterable[bytes]] | None = None,
        on_progress: Callable[[Reply], None] | None = None,
    ) -> Reply:
        """Put one question to the host's agent, and give its result.

        A question whose connection was lost is put again within the deadline: every verb looks
        first and acts only where something is to be done.

        Args:
            verb: as in the agent's verbs.py.
            arguments: its arguments, JSON values.
            deadline: seconds for everything: connecting, repeating, and the host's work.
            lease: token of the root's lease, for a verb that changes it.
            by: who asks: {"who", "host", "why"}.
            blobs: gives the contents of the sha256s that the host lacks, in their order.
            on_progress: told each progress frame that says something.

        Raises:
            DeployError: whatever did not end in a result, each in its class.
        """
        until = self._clock() + deadline
        lost: list[ConnectionLost] = []
        short: list[DeployError] = []  # attempts in a row that count against ASK_ATTEMPTS

        def once() -> Reply:
            began = self._clock()
            question = self._question(verb, arguments, lease, by)
            try:
                return self._exchanged(question, until, blobs, on_progress)
            except (ConnectionLost, Unreachable) as wrong:
                if self._clock() - began > LONG_SECONDS:
                    short.clear()
                short.append(wrong)
                if isinstance(wrong, ConnectionLost):
                    lost.append(wrong)
                    self.close()
                raise

        def may(wrong: BaseException) -> bool:
            # A host that was never reached was tried often enough when connecting.
            return bool(lost) and isinstance(wrong, ConnectionLost | Unreachable)

        try:
            return self._retrying(
                may,
                lambda: len(short) >= ASK_ATTEMPTS,
                until,
                f"{verb.replace('_', '-')} asked again",
            )(once)
        except Unreachable as gone:
            if not lost:
                raise
            # The host may have acted: that it cannot be reached now must not hide that.
            what = f"{lost[0].what}; since then not reachable: {gone.what}"
            raise ConnectionLost(self.host.name, what, gone.hint) from gone

    def _question(
        self,
        verb: str,
        arguments: Mapping[str, Any],
        lease: str | None,
        by: Mapping[str, str] | None,
    ) -> Question:
        return Question(
            host=self.host.name,
            verb=verb,
            command=BOOT.format(python=self.host.agent_python),
            program=program(verb),
            request={
                "verb": verb,
                "arguments": dict(arguments),
                "nonce": secrets.token_hex(16),
                "lease": lease,
                "by": dict(by or {}),
            },
            python=self.host.agent_python,
        )

    def _exchanged(
        self,
        question: Question,
        until: float,
        blobs: Callable[[list[str]], Iterable[bytes]] | None,
        on_progress: Callable[[Reply], None] | None,
    ) -> Reply:
        transport = self._opened(until).transport
        left = until - self._clock() - AHEAD_SECONDS
        exchange = Exchange(
            question.within(max(1.0, left)),
            transport,
            until=until,
            clock=self._clock,
            sleep=self._sleep,
            stopped=lambda: self._stopped,
        )
        try:
            said = exchange.run(blobs, on_progress)
            return checked(self.host.name, question.verb, said)
        finally:
            self.noise = exchange.noise

    def _opened(self, until: float) -> Call:
        """Give the open connection, or make one."""
        if self._stopped:
            raise Interrupted(self.host.name, "nothing was under way")
        if self._call is not None and not self._call.alive:
            self.close()
        if self._call is None:
            if self._hops is None:
                self._hops = route(self.host)
            hops = self._hops
            tried: list[str] = []
            end = min(until, self._clock() + CONNECT_SECONDS)

            def once() -> Call:
                tried.append(self.host.name)
                return call(
                    self.host.name,
                    hops,
                    self.host.if_down,
                    left=lambda: end - self._clock(),
                    trust=lambda host, hop: Trust(host, hop, self.notify),
                )

            def may(wrong: BaseException) -> bool:
                return isinstance(wrong, Unreachable) and not self._stopped

            self._call = self._retrying(
                may, lambda: len(tried) >= CONNECT_ATTEMPTS, end, "connect"
            )(once)
        return self._call

    def _retrying(
        self,
        may: Callable[[BaseException], bool],
        enough: Callable[[], bool],
        until: float,
        what: str,
    ) -> tenacity.Retrying:
        return tenacity.Retrying(
            retry=tenacity.retry_if_exception(may),
            stop=lambda _: enough() or self._clock() >= until,
            wait=tenacity.wait_random_exponential(multiplier=0.5, max=4),
            before_sleep=lambda state: self._tell(what, state),
            sleep=self._sleep,
            reraise=True,
        )

    def _tell(self, what: str, state: tenacity.RetryCallState) -> None:
        assert state.outcome is not None
        assert state.next_action is not None
        if self.quiet:
            return
        wrong = state.outcome.exception()
        why = f"{wrong.kind}: {wrong.what}" if isinstance(wrong, DeployError) else str(wrong)
        self.notify(
            f"{self.host.name}: {what} attempt {state.attempt_number + 1}"
            f" in {state.next_action.sleep:.1f} s: {why}"
        )
