"""What trained here before: which runs made a step, which failed to, and which one comes back."""

from __future__ import annotations

import json
import math
import os
import re
from typing import Any, Dict, List, Optional, Tuple

from . import outputs, runs
from .desk import Refused, want
from .machine import utc
from .root import DIGEST, Root, replace

FAILED = "failed.json"
"""In the folder of a run that was given up before its first step."""
HEAD_BYTES = 64 * 1024
BEGINNING = re.compile(r"\A[0-9a-f]{6,64}\Z")


def stepped(run: runs.Run) -> bool:
    """Whether a run made a step with a finite loss; what became of it later does not matter."""
    status = run.status
    if _finite(status.get("loss")) and runs.number(status.get("step_boottime")) is not None:
        return True
    try:
        with open(run.file("metrics.jsonl"), "rb") as file:
            lines = file.read(HEAD_BYTES).split(b"\n")
    except FileNotFoundError:
        return False
    return any(_finite(_loss(line)) for line in lines)


def _loss(line: bytes) -> Any:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value.get("loss") if isinstance(value, dict) else None


def _finite(value: object) -> bool:
    number = runs.number(value)
    return number is not None and math.isfinite(number)


def pair(run: runs.Run) -> Tuple[Any, Any]:
    """What a run is of: its release and the digest of its settings."""
    spec = run.spec
    return spec.get("release"), spec.get("spec_digest")


def completed(run: runs.Run) -> bool:
    """Whether a run made its last step and its last checkpoint is there: nothing is left to do."""
    status, folder = run.status, output_of(run)
    step = status.get("step")
    if status.get("phase") != "finished" or type(step) is not int or step != status.get("steps"):
        return False
    newest = outputs.newest(folder) if folder is not None else None
    name = os.path.basename(newest or "").partition("-")[2]
    return run.exit.get("code") == 0 and name.isdigit() and int(name) == step > 0


def mark_failed(run: runs.Run, why: str, detail: str) -> None:
    """Write down that a run never made a step, so that what it is of is not chosen again."""
    if os.path.isdir(run.path):
        text = json.dumps({"why": why, "detail": detail, "when": utc()})
        replace(run.file(FAILED), text.encode())


def failures(root: Root, digest: str) -> List[runs.Run]:
    """Runs of a release that were given up before their first step, newest first."""
    return [run for run in newest_first(root) if _marked(run) and run.spec.get("release") == digest]


def _marked(run: runs.Run) -> bool:
    return os.path.isfile(run.file(FAILED))


def newest_first(root: Root) -> List[runs.Run]:
    """All runs. Ids tell seconds; within one, the record that was written later is newer."""
    found = [runs.Run(root, name) for name in runs.names(root)]

    def age(run: runs.Run) -> Tuple[str, int]:
        try:
            return run.run_id[:15], os.stat(run.file("spec.json")).st_mtime_ns
        except OSError:
            return run.run_id[:15], 0

    return sorted(found, key=age, reverse=True)


def choose(root: Root, back: Dict[str, Any]) -> runs.Run:
    """The run whose release and settings come back.

    Args:
        root: where.
        back: {"to": a release's digest or how it begins, "instead_of": id of the run that failed};
            without both, what ran before the newest run is meant.

    Raises:
        Refused: refused, when there is none.
    """
    wanted = want(back, "to", str, default=None)
    instead_of = want(back, "instead_of", str, default=None)
    if wanted is not None:
        return _named(root, wanted)
    found = newest_first(root)
    last = runs.latest(root)
    if last is not None and _came_back(last, instead_of):
        return last
    left = instead_of or (last.run_id if last is not None else None)
    left_pair = pair(last) if last is not None and instead_of is None and stepped(last) else None
    given_up = set()
    for run in found:
        here = pair(run)
        wanted_here = run.run_id != instead_of and here not in given_up and here != left_pair
        if wanted_here and stepped(run) and _usable(root, run):
            return run
        if _marked(run) and run.run_id != left:
            given_up.add(here)
    raise Refused(
        "refused",
        "nothing to go back to: no other release made a step here; mend the trainer or its"
        " settings, then run `fab deploy`",
    )


def _came_back(run: runs.Run, instead_of: Optional[str]) -> bool:
    """Whether `run` is what was put back already, and well."""
    left = run.spec.get("instead_of")
    if left is None or instead_of not in (None, left):
        return False
    return runs.describe(run)["state"] in ("starting", "training")


def _usable(root: Root, run: runs.Run) -> bool:
    release, spec = run.spec.get("release"), run.spec.get("spec")
    if not isinstance(release, str) or not DIGEST.match(release) or not isinstance(spec, dict):
        return False
    return os.path.isfile(os.path.join(root.release(release), "MANIFEST.json"))


def _named(root: Root, wanted: str) -> runs.Run:
    if not BEGINNING.match(wanted):
        raise Refused("bad-request", f"--to: is {wanted!r}; give 6 to 64 hex digits of a release")
    names = os.listdir(root.releases) if os.path.isdir(root.releases) else []
    kept = sorted(name for name in names if DIGEST.match(name))
    fitting = [name for name in kept if name.startswith(wanted)]
    if len(fitting) != 1:
        what = "no release here begins so" if not fitting else "several releases begin so"
        there = ", ".join(name[:12] for name in kept) or "none"
        raise Refused("refused", f"--to: is {wanted}, and {what}; there are: {there}")
    of_it = [run for run in newest_first(root) if run.spec.get("release") == fitting[0]]
    usable = [run for run in of_it if _usable(root, run)]
    last = runs.latest(root)
    ranked = [run for run in usable if last is not None and run.run_id == last.run_id]
    ranked += [run for run in usable if stepped(run)] + usable
    if not ranked:
        text = f"release {fitting[0][:12]} never ran here, so its settings are not known"
        raise Refused("refused", f"{text}; `fab deploy` runs what the desk has")
    return ranked[0]


def output_of(run: runs.Run) -> Optional[str]:
    """Where a run writes its checkpoints."""
    spec = run.spec.get("spec")
    folder = spec.get("output_dir") if isinstance(spec, dict) else None
    return os.path.expanduser(folder) if isinstance(folder, str) else None


def keep_newest(root: Root, folder: str) -> None:
    """Pin the checkpoint that the next run begins with; `folder` counts before the first run.

    After a run that made no step the pin stays where it was: whatever such a run wrote is not what
    to go back to. Raises OSError.
    """
    last = runs.latest(root)
    if last is not None and not stepped(last):
        return
    where = output_of(last) if last is not None else folder
    newest = outputs.newest(where) if where is not None else None
    if where is not None and newest is not None and not outputs.pinned(newest):
        outputs.pin(where, newest, last.run_id if last is not None else "found")
