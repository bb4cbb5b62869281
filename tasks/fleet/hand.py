"""One host's part of a plan: its lease, what it does, and the way back when a new run fails."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from tasks import operations
from tasks.errors import (
    DeployError,
    Interrupted,
    LeaseHeld,
    NoFirstStep,
    RemoteRefusal,
    ResultLost,
)
from tasks.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tasks.inventory import Host
    from tasks.link import Link
    from tasks.operations import Operation, Run
    from tasks.outcome import Effect, State

LOOK_S = 2.0
"""How often somebody else's lease is looked at while waiting for it."""


class Hand:
    """One host's part of a plan. Used by one thread at a time, but for `doing`."""

    def __init__(
        self,
        host: Host,
        run: Run,
        link: Link,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        *,
        changes: bool,
        fallback: Sequence[Operation],
    ) -> None:
        self.host, self.link = host, link
        self.doing = ""
        self._run, self._clock, self._sleep = run, clock, sleep
        self._needs_lease = changes and not run.dry
        self._fallback = fallback
        self._steps_back: list[Operation] = []
        self._stopped = self._going_back = self._would_change = False
        self._failed = ""
        self._leased_at: float | None = None

    def do(self, operation: Operation) -> Outcome:
        """Do one operation, and say how it ended; one that failed is never raised."""
        name = operation.__name__
        if self._failed and not self._going_back:
            return self._outcome(name, "skipped", f"{self._failed} failed")
        self.doing, began = name, self._clock()
        try:
            if self._needs_lease and operation is not operations.probe:
                self._hold_lease()
            effect = operation(self.host, self._run, self.link)
        except DeployError as error:
            if isinstance(error, RemoteRefusal) and self._would_change:
                # Refused as the host is now, before what a dry run only told of.
                detail = f"once the above is done; as it is now: {error.what}"
                return self._outcome(name, "would change", detail, facts=error.facts)
            return self._fail(operation, error, self._clock() - began)
        finally:
            self.doing = ""
        self._stopped |= effect.changed and operation in self._fallback
        outcome = self._outcome(
            name,
            self._state(operation, effect),
            effect.detail,
            seconds=self._clock() - began,
            facts=effect.facts,
        )
        if self._going_back and not self._steps_back:
            self._going_back = False
            self.end()
        return outcome

    def next_back(self) -> Operation | None:
        """Give what this host does next to put the old run back, None when there is nothing."""
        return self._steps_back.pop(0) if self._steps_back else None

    def _fail(self, operation: Operation, error: DeployError, seconds: float) -> Outcome:
        name = operation.__name__
        lost = isinstance(error, ResultLost | Interrupted | LeaseHeld)
        if self._going_back and not lost and not isinstance(error, NoFirstStep):
            # What counts now is that nothing trains there, whatever kept the old run away.
            what = f"{error.kind}: {error.what}"
            error = NoFirstStep(self.host.name, what, error.hint, facts=error.facts)
        if isinstance(error, ResultLost | Interrupted) or (lost and self._leased_at is not None):
            error.after = self._read_again()
        if isinstance(error, LeaseHeld):
            self._run = dataclasses.replace(self._run, lease=None)  # nothing of ours to give back
        owed = not lost and (self._stopped or isinstance(error, NoFirstStep))
        outcome = self._outcome(
            name, "FAILED", str(error), error=error, seconds=seconds, facts=error.facts
        )
        first = not self._failed
        self._failed, self._going_back = name, False
        if first and owed and self._fallback and not self._run.dry:
            self._go_back(error)
        else:
            self._steps_back.clear()
            self.end()
        return outcome

    def _go_back(self, error: DeployError) -> None:
        # It may be an earlier invocation's run that was kept, and then died before its first step.
        its_run = error.facts.get("run_id") if isinstance(error, NoFirstStep) else None
        failed = str(its_run or self._run.id)
        self._steps_back, self._going_back = list(self._fallback), True
        self._run = dataclasses.replace(
            self._run,
            id=operations.new_run_id(datetime.now(UTC)),
            release=None,
            back=operations.Back(instead_of=failed),
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

    def _hold_lease(self) -> None:
        """Take the lease the first time; later see that it is still ours, and renew it.

        Long verbs renew it on the host, and every change there looks for it again.
        """
        now = self._clock()
        if self._leased_at is None:
            self._take_lease(now + self._run.wait_lease)
        elif now - self._leased_at < operations.LEASE_SECONDS / 3:
            return
        else:
            operations.renew_lease(self.host, self._run, self.link)
        self._leased_at = self._clock()

    def _take_lease(self, until: float) -> None:
        told = ""
        # Before it is asked for: if the answer is lost, what may be ours is given back.
        self._run = dataclasses.replace(self._run, lease=operations.new_lease())
        while True:
            try:
                operations.take_lease(self.host, self._run, self.link)
            except LeaseHeld as held:
                if self._clock() >= until:
                    raise
                holder = f"{held.facts.get('who')}, since {held.facts.get('since')}"
                if holder != told:
                    told = holder
                    self.link.notify(f"{held.where}: waiting for the lease: held {held.what}")
                self._sleep(LOOK_S)
            else:
                return

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
            back=self._going_back,
        )
