"""metrics.jsonl and the log: one line a step, the same names in both. Standard library only."""

from __future__ import annotations

import json
import time
from collections import deque
from typing import TYPE_CHECKING

from trainer.record.status import despite_disk

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trainer.record.events import Events
    from trainer.record.status import Step, Trialled

_RECENT = 100  # steps that the pace is taken over


class Metrics:
    """Appends one object a step to metrics.jsonl, and a point to each curve of `events`.

    With no folder, and no events, it keeps nothing.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        events: Events | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._events = events
        # Line-buffered: a step that is in status.json is in here too, whatever ends the process.
        self._file = (folder / "metrics.jsonl").open("a", buffering=1) if folder else None

    def step(self, done: Step, tried: Trialled | None = None) -> None:
        """One step more is done; after some of them the drafter was tried out."""
        if self._events is not None:
            self._events.step(done, tried)
        if self._file is None:
            return
        line: dict[str, object] = {
            "step": done.step,
            "loss": done.loss,
            "accepted": done.accepted,
            "norm": done.norm,
            "rate": done.rate,
            "tokens_per_s": round(done.tokens_per_s, 1),
            "wait": round(done.wait, 4),
            **{name: round(share, 4) for name, share in done.stages.items()},
            "memory_gb": round(done.memory_gb, 3),
            "epoch": done.epoch,
            "time": self._clock(),
        }
        if tried is not None:
            line |= {
                "eval_accepted": tried.accepted,
                "eval_first": tried.first,
                "eval_lengths": tried.lengths,
                "eval_samples": tried.samples,
                "eval_seconds": round(tried.seconds, 3),
            }
        with despite_disk():  # what did not fit is in the buffer, and goes with a later line
            self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Let the files go."""
        if self._events is not None:
            self._events.close()
        if self._file is not None:
            with despite_disk():
                self._file.close()


class Pace:
    """How long a run will still take, by how fast it was lately: saves and trials included."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended: deque[float] = deque(maxlen=_RECENT)

    def left_s(self, done: Step) -> float:
        """Seconds that are left after this step; call it once a step."""
        self._ended.append(self._clock())
        steps = len(self._ended) - 1
        each = (self._ended[-1] - self._ended[0]) / steps if steps else done.seconds
        return (done.steps - done.step) * each


def line(done: Step, block_size: int, left_s: float) -> str:
    """The log line of a step: fixed columns, units."""
    width = len(f"{done.steps:,}")
    return (
        f"step {done.step:>{width},}/{done.steps:,}  loss {done.loss:.3f}"
        f"  accept {done.accepted:.2f}/{block_size}  norm {done.norm:.2f}  rate {done.rate:.1e}"
        f"  {_short(done.tokens_per_s)} tok/s/gpu  wait {done.wait:.1%}"
        f"  eta {_span(left_s)}"
    )


def trial_line(tried: Trialled, done: Step, block_size: int) -> str:
    """The log line of a trial; beside it what training saw, as the two may part."""
    return (
        f"eval  step {done.step:,}/{done.steps:,}  accepted {tried.accepted:.2f}/{block_size}"
        f" ({done.accepted:.2f} in training)  first token right {tried.first:.1%}"
        f"  {tried.samples} samples  {tried.seconds:.1f} s"
    )


def _short(number: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}"


def _span(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d{hours % 24:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"
