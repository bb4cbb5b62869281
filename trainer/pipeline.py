"""Stages that run at once, joined by bounded channels; and work that is done beside them.

Each stage is a function in a thread of its own. It takes from the channel before it, and waits
when the channel after it is full; the last channel is read by whoever iterates. Torch is not known
here: what a stage sets for its own thread (gradients off) its function sets itself.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from trainer.errors import TrainerError

if TYPE_CHECKING:
    from typing_extensions import Self

Item = TypeVar("Item")
Stage = tuple[str, Callable[[Any], Any]]

# How long the end of a run waits for a stage that is inside its function. Threads are daemons:
# one that never comes back does not hold the process.
_LAST_WAIT_S = 2.0
# How much longer the process waits for it, before Python ends: a thread that comes back from torch
# while Python ends is torn down inside C++, which aborts the process (SIGABRT).
_AT_EXIT_S = 60.0


class StageError(TrainerError):
    """A stage failed; `__cause__` is what it raised."""

    def __init__(self, stage: str, error: BaseException) -> None:
        self.stage = stage
        self.bug = not isinstance(error, TrainerError)
        self.exit_code = getattr(error, "exit_code", 1)
        super().__init__(f"{stage}: {error}" if str(error) else f"{stage}: {type(error).__name__}")


class Closed(Exception):  # noqa: N818 - an ending, not an error
    """The other side of a channel is gone."""


class Channel(Generic[Item]):
    """A queue of at most `depth` items with an end, an error and a way to give up."""

    def __init__(self, depth: int) -> None:
        self._items: deque[Item] = deque()
        self._depth = depth
        self._moved = threading.Condition()
        self._ended = self._closed = False
        self._error: BaseException | None = None

    def put(self, item: Item) -> None:
        """Hand on one item; waits while the channel is full.

        Raises:
            Closed: nobody will read it.
        """
        with self._moved:
            self._moved.wait_for(lambda: len(self._items) < self._depth or self._closed)
            if self._closed:
                raise Closed
            self._items.append(item)
            self._moved.notify_all()

    def get(self) -> Item:
        """Take one item; waits while there is none.

        An error overtakes the items before it: a run that must end ends now.

        Raises:
            Closed: the end, after the last item; or the reader gave up.
            BaseException: what `fail` was given.
        """
        with self._moved:
            self._moved.wait_for(
                lambda: self._items or self._ended or self._closed or self._error is not None
            )
            if self._error is not None:
                raise self._error
            if self._closed or not self._items:
                raise Closed
            item = self._items.popleft()
            self._moved.notify_all()
            return item

    def end(self) -> None:
        """No more items come."""
        with self._moved:
            self._ended = True
            self._moved.notify_all()

    def fail(self, error: BaseException) -> None:
        """No more items come, because of `error`."""
        with self._moved:
            self._error = error
            self._moved.notify_all()

    def close(self) -> None:
        """Nobody reads on: wakes and refuses whoever waits."""
        with self._moved:
            self._closed = True
            self._items.clear()
            self._moved.notify_all()


class Pipeline:
    """`source` through `stages`, in order, as an iterator.

    Args:
        source: its items enter the first stage; iterated in the first stage's thread.
        stages: name and function of each.
        depth: items that may wait in each channel; 0: no threads, each item is made when asked for.

    Use as a context manager: leaving it, for whatever reason, ends every thread.
    """

    def __init__(self, source: Iterable[Any], stages: Sequence[Stage], *, depth: int) -> None:
        self._source, self._stages, self._depth = source, stages, depth
        self._channels: list[Channel[Any]] = [Channel(depth) for _ in stages] if depth else []
        self._threads: list[threading.Thread] = []
        self.busy_s = dict.fromkeys((name for name, _ in stages), 0.0)
        """Seconds inside each stage's function."""
        self.wait_s = dict.fromkeys(self.busy_s, 0.0)
        """Seconds each stage waited, for input or for room."""
        self.reader_wait_s = 0.0
        """Seconds the reader waited for an item."""

    def __enter__(self) -> Self:
        """Start the threads."""
        if self._depth:
            # One channel more than there are stages to feed: the last feeds the reader.
            sources = [iter(self._source), *map(_drain, self._channels)]
            for (name, work), source, sink in zip(
                self._stages, sources, self._channels, strict=False
            ):
                thread = threading.Thread(
                    target=self._run, args=(name, work, source, sink), name=name, daemon=True
                )
                self._threads.append(thread)
                thread.start()
        return self

    def stages_s(self) -> dict[str, float]:
        """Seconds of each stage so far, as `busy_NAME` and `wait_NAME`."""
        return {
            f"{what}_{name}": seconds
            for what, held in (("busy", self.busy_s), ("wait", self.wait_s))
            for name, seconds in held.items()
        }

    def __exit__(self, *exception: object) -> None:
        """End the threads: those that wait at once, others after the item they work on."""
        for channel in self._channels:
            channel.close()
        deadline = time.monotonic() + _LAST_WAIT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                atexit.register(thread.join, _AT_EXIT_S)

    def __iter__(self) -> Iterator[Any]:
        """What comes out of the last stage.

        Raises:
            StageError: a stage failed; it is named.
        """
        items = _drain(self._channels[-1]) if self._depth else self._serial()
        while True:
            began = time.perf_counter()
            try:
                item = next(items)
            except StopIteration:
                return
            finally:
                self.reader_wait_s += time.perf_counter() - began
            yield item

    def _serial(self) -> Iterator[Any]:
        name = self._stages[0][0]
        try:
            for item in self._source:
                for name, work in self._stages:
                    began = time.perf_counter()
                    item = work(item)  # noqa: PLW2901 - it goes through the stages
                    self.busy_s[name] += time.perf_counter() - began
                yield item
                name = self._stages[0][0]
        except Exception as error:
            raise StageError(name, error) from error

    def _run(
        self, name: str, work: Callable[[Any], Any], source: Iterator[Any], sink: Channel[Any]
    ) -> None:
        try:
            while True:
                waited = time.perf_counter()
                try:
                    item = next(source)
                except StopIteration:
                    break
                began = time.perf_counter()
                made = work(item)
                done = time.perf_counter()
                sink.put(made)
                self.busy_s[name] += done - began
                self.wait_s[name] += began - waited + time.perf_counter() - done
            sink.end()
        except Closed:
            pass  # the reader is gone, and so is the reason to go on
        except StageError as error:
            sink.fail(error)  # from a stage before this one, which it names
        except BaseException as error:  # noqa: BLE001 - whatever it is, the reader must get it
            failure = StageError(name, error)
            failure.__cause__ = error
            sink.fail(failure)


class Beside(Generic[Item]):
    """Does one job at a time in a thread of its own, while whoever asked for it goes on.

    Args:
        name: of the work, for errors.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._made: list[Item] = []
        self._error: Exception | None = None

    def start(self, job: Callable[[], Item]) -> None:
        """Begin a job; the one before must have ended, so `finished` or `wait` was called."""
        assert self._thread is None, f"{self._name}: two jobs at once"
        # A daemon: a second Ctrl-C, or an error elsewhere, need not wait for a slow disk.
        self._thread = threading.Thread(target=self._run, args=(job,), name=self._name, daemon=True)
        self._thread.start()

    def finished(self) -> Item | None:
        """What the job made, once, if it has ended; None while it runs or where there is none.

        Raises:
            StageError: it failed.
        """
        return self.wait() if self._thread is not None and not self._thread.is_alive() else None

    def wait(self) -> Item | None:
        """What the job made, when it has ended; None where there is none.

        Raises:
            StageError: it failed.
        """
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise StageError(self._name, error) from error
        return self._made.pop()

    def _run(self, job: Callable[[], Item]) -> None:
        try:
            self._made.append(job())
        except Exception as error:  # noqa: BLE001 - whatever it is, whoever waits must get it
            self._error = error


def _drain(channel: Channel[Any]) -> Iterator[Any]:
    while True:
        try:
            item = channel.get()
        except Closed:
            return
        yield item
