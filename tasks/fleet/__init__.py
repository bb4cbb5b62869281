"""One plan, many hosts: an operation on all of them, then the next."""

from __future__ import annotations

import time
from collections import defaultdict
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from tasks import operations
from tasks.errors import Interrupted
from tasks.fleet.hand import Hand

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future

    from tasks.inventory import Host
    from tasks.link import Link
    from tasks.operations import Operation, Run
    from tasks.outcome import Outcome

AT_ONCE = 32
"""Hosts that are worked on at the same time."""


def carry_out(
    plan: Sequence[Operation],
    hosts: Sequence[Host],
    run: Run,
    *,
    links: Callable[[Host], Link],
    on_outcome: Callable[[Outcome], None],
    fallback: Sequence[Operation] = (),
    at_once: int = AT_ONCE,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[Outcome, ...]:
    """Do each operation on every host before the next begins.

    A host whose operation failed does no later one; the others go on. Where the plan changes
    anything, a host's lease is taken after the probe, so that what was verified is what is
    launched, and given back in every ending. After a result that was lost, the state of the host
    is read again and told in the error.

    A host whose new run makes no step does the fallback at once, under the same lease; so does one
    where the old run was stopped and no new one could be launched.

    Args:
        plan: operations, in order.
        hosts: where.
        run: what; each host gets its own copy with its lease.
        links: makes the door to a host; nothing is connected before it is used.
        on_outcome: told each outcome when it is there, from this thread alone.
        fallback: operations that put the old run back; their outcomes are marked `back`.
        at_once: most hosts that are worked on at the same time.
        clock: seconds, never going back.
        sleep: waits for so many seconds.

    Returns:
        The outcomes in the order of plan and hosts; those of a fallback follow what failed.

    Raises:
        Interrupted: Ctrl-C; leases were given back, and the message tells what was under way.
    """
    changes = any(map(operations.changing, plan))
    hands = [
        Hand(host, run, links(host), clock, sleep, changes=changes, fallback=fallback)
        for host in hosts
    ]
    named = {hand.host.name: hand for hand in hands}
    outcomes: dict[tuple[int, str], list[Outcome]] = defaultdict(list)
    untold: set[Future[Outcome]] = set()
    with ThreadPoolExecutor(max(1, min(at_once, len(hands))), "host") as pool:
        try:
            for number, operation in enumerate(plan):
                for hand in hands:
                    untold.add(pool.submit(hand.do, operation))
                for outcome in _as_they_end(untold):
                    outcomes[number, outcome.host].append(outcome)
                    on_outcome(outcome)
                    if step := named[outcome.host].next_back():
                        untold.add(pool.submit(named[outcome.host].do, step))
        except KeyboardInterrupt:
            under_way = _stop(hands) or f"before {operation.__name__.replace('_', '-')}"
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
    cells = [outcomes[number, host.name] for number in range(len(plan)) for host in hosts]
    return tuple(outcome for cell in cells for outcome in cell)


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


def _stop(hands: list[Hand]) -> str:
    """Let every host end at its next safe point, and say what was under way, "" for nothing."""
    under_way = [
        f"{hand.doing.replace('_', '-')} on {hand.host.name}" for hand in hands if hand.doing
    ]
    for hand in hands:
        hand.link.stop()
    return f"{', '.join(under_way)} under way" if under_way else ""
