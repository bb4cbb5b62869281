"""One plan, many hosts: an operation on all of them, then the next."""

from __future__ import annotations

import dataclasses
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from tasks import operations
from tasks.errors import DeployError, Interrupted, LeaseHeld, RemoteRefusal, ResultLost
from tasks.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from tasks.inventory import Host
    from tasks.link import Link
    from tasks.operations import Operation, Run
    from tasks.outcome import Effect, State

AT_ONCE = 32
"""Hosts that are worked on at the same time."""


def carry_out(
    plan: Sequence[Operation],
    hosts: Sequence[Host],
    run: Run,
    *,
    links: Callable[[Host], Link],
    on_outcome: Callable[[Outcome], None],
    at_once: int = AT_ONCE,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Outcome, ...]:
    """Do each operation on every host before the next begins.

    A host whose operation failed does no later one; the others go on. The host's lease is taken
    before the first changing operation and given back in every ending. After a result that was
    lost, the state of the host is read again and told in the error.

    Args:
        plan: operations, in order.
        hosts: where.
        run: what; each host gets its own copy with its lease.
        links: makes the door to a host; nothing is connected before it is used.
        on_outcome: told each outcome when it is there, from this thread alone.
        at_once: most hosts that are worked on at the same time.
        clock: seconds, never going back.

    Returns:
        The outcomes in the order of plan and hosts.

    Raises:
        Interrupted: Ctrl-C; leases were given back, and the message tells what was under way.
    """
    hands = [_Hand(host, run, links(host), clock) for host in hosts]
    outcomes: dict[tuple[int, str], Outcome] = {}
    untold: set[Future[Outcome]] = set()
    with ThreadPoolExecutor(max(1, min(at_once, len(hands))), "host") as pool:
        try:
            for number, operation in enumerate(plan):
                for hand in hands:
                    untold.add(pool.submit(hand.do, operation))
                for outcome in _as_they_end(untold):
                    outcomes[number, outcome.host] = outcome
                    on_outcome(outcome)
        except KeyboardInterrupt:
            under_way = _stop(hands) or f"before {operation.__name__}"
            for outcome in _as_they_end(untold):
                on_outcome(outcome)
            raise Interrupted("fab", under_way, "see `fab status`") from None
        except BaseException:
            _stop(hands)
            raise
        finally:
            # A link is for one thread at a time: whatever still uses one ends first.
            wait(untold)
            wait([pool.submit(hand.end) for hand in hands])
    return tuple(outcomes[number, host.name] for number in range(len(plan)) for host in hosts)


def _as_they_end(untold: set[Future[Outcome]]) -> Iterator[Outcome]:
    """Give outcomes as they come; a bug in an operation is raised when all others are told."""
    bugs = []
    while untold:
        done, _ = wait(untold, return_when=FIRST_COMPLETED)
        for future in done:
            untold.discard(future)
            if (bug := future.exception()) is not None:
                bugs.append(bug)
            else:
                yield future.result()
    if bugs:
        raise bugs[0]


def _stop(hands: list[_Hand]) -> str:
    """Let every host end at its next safe point, and say what was under way, "" for nothing."""
    under_way = [f"{hand.doing} on {hand.host.name}" for hand in hands if hand.doing]
    for hand in hands:
        hand.link.stop()
    return f"{', '.join(under_way)} under way" if under_way else ""


class _Hand:
    """One host's part of a plan. Used by one thread at a time, but for `doing`."""

    def __init__(self, host: Host, run: Run, link: Link, clock: Callable[[], float]) -> None:
        self.host, self.link = host, link
        self.doing = ""
        self._run, self._clock = run, clock
        self._failed = ""
        self._would_change = False
        self._leased_at: float | None = None

    def do(self, operation: Operation) -> Outcome:
        name = operation.__name__
        if self._failed:
            return self._outcome(name, "skipped", f"{self._failed} failed")
        self.doing, began = name, self._clock()
        try:
            if operations.changing(operation) and not self._run.dry:
                self._take_lease()
            effect = operation(self.host, self._run, self.link)
        except DeployError as error:
            if isinstance(error, RemoteRefusal) and self._would_change:
                # Refused as the host is now, before what a dry run only told of.
                detail = f"once the above is done; as it is now: {error.what}"
                return self._outcome(name, "would change", detail, facts=error.facts)
            self._failed = name
            if isinstance(error, ResultLost | Interrupted):
                error.after = self._read_again()
            self.end()
            took = self._clock() - began
            return self._outcome(
                name, "FAILED", str(error), error=error, seconds=took, facts=error.facts
            )
        finally:
            self.doing = ""
        state = self._state(operation, effect)
        return self._outcome(
            name, state, effect.detail, seconds=self._clock() - began, facts=effect.facts
        )

    def end(self) -> None:
        """Give the lease back and hang up. Does nothing the second time."""
        try:
            if self._run.lease is not None:
                # A person's Ctrl-C ends what is under way; the lease is given back all the same.
                self.link.resume()
                operations.give_back_lease(self.host, self._run, self.link)
        except DeployError as error:
            self.link.notify(f"{error}; the lease ends by itself in {operations.LEASE_SECONDS} s")
        finally:
            self._run = dataclasses.replace(self._run, lease=None)
            self.link.close()

    def _take_lease(self) -> None:
        now = self._clock()
        if self._leased_at is not None and now - self._leased_at < operations.LEASE_SECONDS / 3:
            return  # long verbs renew it on the host
        if self._run.lease is None:
            # Before it is asked for: if the answer is lost, what may be ours is given back.
            self._run = dataclasses.replace(self._run, lease=operations.new_lease())
        try:
            operations.take_lease(self.host, self._run, self.link)
        except LeaseHeld:
            self._run = dataclasses.replace(self._run, lease=None)
            raise
        self._leased_at = now

    def _read_again(self) -> str:
        self.link.resume()
        try:
            return f"read again: {operations.describe(self.host, self._run, self.link)}"
        except DeployError as error:
            return f"it could not be read again: {error.kind or error.what}"

    def _state(self, operation: Operation, effect: Effect) -> State:
        if effect.changed:
            self._would_change = self._run.dry
            return "would change" if self._run.dry else "changed"
        return "unchanged" if operations.changing(operation) else "ok"

    def _outcome(
        self,
        operation: str,
        state: State,
        detail: str,
        *,
        error: DeployError | None = None,
        seconds: float = 0.0,
        facts: Mapping[str, object] | None = None,
    ) -> Outcome:
        return Outcome(
            host=self.host.name,
            operation=operation,
            state=state,
            detail=detail,
            error=error,
            seconds=seconds,
            facts=facts or {},
        )
