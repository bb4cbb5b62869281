"""A run's log, by run, file and byte offset: a follower can go on after any interruption."""

from __future__ import annotations

import os
import time
from typing import Any, Dict

from . import logfile, runs
from .desk import Desk, Refused, want
from .root import root_of

FILES = ("train.log", "metrics.jsonl")
LOOK_S = 0.1
LARGEST = 8 * 1024 * 1024


def logs(desk: Desk, arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Whole lines from an offset on; waits up to `follow_s` for some."""
    root = root_of(arguments)
    run = runs.chosen(root, arguments)
    if run is None or not os.path.isdir(run.path):
        raise Refused("refused", f"logs: no run {run.run_id if run else ''} on this host")
    name = want(arguments, "file", str, default="train.log")
    if name not in FILES:
        raise Refused("bad-request", f"file: is {name!r}; give one of {', '.join(FILES)}")
    path = run.file(name)
    offset = want(arguments, "offset", int, default=None)
    if offset is None:
        offset = logfile.tail_offset(path, max(0, want(arguments, "lines", int, default=20)))
    most = min(max(want(arguments, "max_bytes", int, default=1024 * 1024), 4096), LARGEST)
    end = time.monotonic() + want(arguments, "follow_s", float, default=0.0)
    while True:
        # Whether it is over is asked first: what is read after that is all there will be.
        over = _over(run)
        part = logfile.read_from(path, max(0, offset), most, last=over)
        if part.text or over or time.monotonic() >= end or desk.left() < 1:
            break
        offset = part.offset
        desk.pause(min(LOOK_S, max(0.0, end - time.monotonic())))
    return {
        "run_id": run.run_id,
        "file": name,
        "offset": part.offset,
        "text": part.text.decode("utf-8", "replace"),
        "more": part.more,
        "dropped": part.dropped,
        "ended": over and not part.more,
    }


def _over(run: runs.Run) -> bool:
    known = runs.describe(run)
    return known["state"] in runs.OVER and not known["left_over"]
