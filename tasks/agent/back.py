"""Put back what trained before, on the checkpoint that was pinned for it."""

from __future__ import annotations

import os
from typing import Any, Dict, List, Optional

from . import hidden as secrets
from . import history, launch, outputs, previous, runs
from .desk import Desk, Refused, want
from .lease import changing
from .root import Root


def put_back(desk: Desk, arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Start a run like an earlier one; what a failed run wrote is moved aside and named.

    Raises:
        Refused: refused, when there is nothing to go back to, or a run is alive.
    """
    back = want(arguments, "back", dict)
    hidden = want(arguments, "secrets", dict, default={})
    with changing(desk, arguments) as root:
        run = runs.Run(root, want(arguments, "run_id", str))
        if os.path.isdir(run.path) and not run.never_started:
            return _answer(launch.unchanged(run), run)
        like = previous.choose(root, back)
        for other in runs.living(root):
            if other.run_id == like.run_id and launch.healthy(other):
                return _answer(launch.unchanged(other), other)
            if not want(arguments, "dry", bool, default=False):
                raise launch.in_the_way(other)
        record = like.spec
        mine = secrets.chosen(hidden, record)
        what = launch.What(record["release"], record["spec"], record["spec_digest"], mine)
        folder = what.spec.output_dir
        left = _left(root, back)
        added = {"instead_of": left, "like": like.run_id}
        if want(arguments, "dry", bool, default=False):
            answer = launch.dry_answer(root, run, what.spec)
            return {**_answer(answer, like), **added, "aside": _would_move(root, folder)}
        previous.keep_newest(root, folder)
        aside = outputs.set_aside(folder, left or "unknown")
        if aside:
            history.record(desk, root, "set_aside", run_id=left, paths=aside)
        try:
            answer = launch.begin(desk, root, run, what, **added, aside=aside)
        except Refused as refused:
            raise _telling(refused, aside) from None
        return _answer(answer, run)


def _left(root: Root, back: Dict[str, Any]) -> Optional[str]:
    """The run that another one takes the place of."""
    failed: Optional[str] = want(back, "instead_of", str, default=None)
    last = runs.latest(root)
    return failed or (last.run_id if last is not None else None)


def _would_move(root: Root, folder: str) -> List[str]:
    last = runs.latest(root)
    return [] if last is None or previous.stepped(last) else outputs.after_pin(folder)


def _telling(refused: Refused, aside: List[str]) -> Refused:
    moved = f"; set aside before: {', '.join(aside)}" if aside else ""
    return Refused(refused.code, refused.text + moved, **refused.data)


def _answer(answer: Dict[str, Any], of: runs.Run) -> Dict[str, Any]:
    record, folder = of.spec, previous.output_of(of)
    return {
        **answer,
        "release": record.get("release"),
        "spec_digest": record.get("spec_digest"),
        "instead_of": record.get("instead_of"),
        "like": record.get("like"),
        "aside": record.get("aside") or [],
        "checkpoint": outputs.newest(folder) if folder is not None else None,
    }
