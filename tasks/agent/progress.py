"""The first step of a run, or why it does not come."""

from __future__ import annotations

import math
import time
from typing import Any, Dict, List, Optional

from . import logfile, previous, runs
from .current import on_host
from .desk import Desk, Refused, want
from .lease import watching
from .root import Root, root_of

LAST_LINES = 3
TOLD = {
    "crashed": "died",
    "exited": "ended",
    "stalled": "stalled",
    "deadline": "made none in its time",
}
LOOK_S = 0.05
"""An early death is told within so much of it, and so many seconds cost next to nothing."""


def await_progress(desk: Desk, arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Wait until a run has made a step with a finite loss, or finds that none is left to make.

    Raises:
        Refused: no-first-step.
    """
    root = root_of(arguments)
    run = _run(root, arguments)
    began = time.monotonic()
    limit = want(arguments, "seconds", float, default=math.inf)
    told: Optional[Any] = None
    with watching(desk, root):
        while True:
            known = runs.describe(run)
            loss = runs.number(known.get("loss"))
            stepped = loss is not None and runs.number(run.status.get("step_boottime")) is not None
            waited = time.monotonic() - began
            if known["state"] in ("crashed", "killed", "lost", "absent"):
                raise _no_step(desk, "crashed", run, known)
            # One that resumed behind the last step has no loss of its own, and nothing to do.
            over = known.get("loss") is None and previous.completed(run)
            if over or (stepped and loss is not None and math.isfinite(loss)):
                return {
                    "run_id": run.run_id,
                    "state": known["state"],
                    "step": known["step"],
                    "loss": loss,
                    "seconds": round(waited, 2),
                    "phase": known["phase"],
                    "last_lines": logfile.last_lines(run.file("train.log"), LAST_LINES),
                }
            if known["state"] == "finished":
                raise _no_step(desk, "exited", run, known)
            if known["state"] == "stalled":
                raise _no_step(desk, "stalled", run, known)
            if waited >= limit or desk.left() < 1:
                raise _no_step(desk, "deadline", run, known)
            if (known["phase"], known["step"]) != told:
                told = (known["phase"], known["step"])
                desk.progress(phase=known["phase"], step=known["step"])
            desk.pause(LOOK_S)


def _run(root: Root, arguments: Dict[str, Any]) -> runs.Run:
    run = runs.Run(root, want(arguments, "run_id", str))
    pair: Optional[List[Any]] = want(arguments, "pair", list, default=None)
    if pair is not None and len(pair) == 2 and not run.spec:
        wanted = [pair[0] or on_host(root)[0], pair[1]]
        last = runs.latest(root)
        for other in [*runs.living(root), *([last] if last else [])]:
            if list(previous.pair(other)) == wanted:
                return other
    back = want(arguments, "back", dict, default=None)
    if back is not None and not run.spec:
        return previous.choose(root, back)
    return run


def _no_step(desk: Desk, why: str, run: runs.Run, known: Dict[str, Any]) -> Refused:
    if desk.lease is not None:  # who only looks gives up, and marks nothing
        previous.mark_failed(run, why, known["detail"])
    lines = known["last_lines"] or logfile.last_lines(run.file("train.log"), runs.LAST_LINES)
    words = f": {lines[-1]}" if lines else ""
    return Refused(
        "no-first-step",
        f"run {run.run_id} {TOLD[why]}: {known['detail']}{words};"
        f" see `fab logs --run {run.run_id}`",
        why=why,
        state=known["state"],
        run_id=run.run_id,
        exit=known.get("exit"),
        last_lines=lines,
    )
