"""What old runs and releases need not stay: a root must not grow with every change."""

from __future__ import annotations

import os
from typing import Any, Dict, List, Set

from . import history, outputs, previous, releases, runs
from .desk import Desk
from .root import DIGEST, TEMPORARY, Root, read_json, remove

KEPT = 20
"""So many runs and so many releases, the newest ones, stay whatever they are."""


def prune(desk: Desk, root: Root) -> List[str]:
    """Remove old runs, releases and contents that nothing needs; warnings. Only under the lock.

    What lives, `latest`, `current`, the run of a pinned checkpoint, and the last two that
    different releases or settings made a step with, stay however old they are.
    """
    found = runs.names(root)
    there = _releases(root)
    if len(found) <= KEPT and len(there) <= KEPT:
        return []
    ordered = previous.newest_first(root)
    kept = {run.run_id for run in ordered[:KEPT]} | _needed(root, ordered)
    try:
        gone = [name for name in found if name not in kept]
        for name in gone:
            _away(root.runs, name)
        digests = _digests(root, kept) | set(there[:KEPT])
        old = [digest for digest in there if digest not in digests]
        for digest in old:
            _away(root.releases, digest)
        blobs = _drop_blobs(root, digests) if old else 0
    except OSError as error:  # the run has been started, and that must be told
        return [f"{error.filename or root.path}: cannot be removed: {error.strerror}"]
    if gone or old:
        history.record(desk, root, "prune", runs=gone, releases=old, blobs=blobs)
    return []


def _releases(root: Root) -> List[str]:
    """Digests of all releases, the one assembled last first."""
    try:
        names = [name for name in os.listdir(root.releases) if DIGEST.match(name)]
    except FileNotFoundError:
        return []
    made = {name: os.stat(os.path.join(root.releases, name)).st_mtime_ns for name in names}
    return sorted(names, key=made.__getitem__, reverse=True)


def _needed(root: Root, ordered: List[runs.Run]) -> Set[str]:
    needed = {run.run_id for run in runs.living(root)}
    last = runs.latest(root)
    if last is not None:
        needed.add(last.run_id)
    pairs: List[Any] = []
    for run in ordered:
        if len(pairs) == 2:
            break
        if previous.pair(run) not in pairs and previous.stepped(run):
            pairs.append(previous.pair(run))
            needed.add(run.run_id)
    for folder in {previous.output_of(run) for run in ordered}:
        needed.update(outputs.pinned_by(folder) if folder is not None else [])
    return needed


def _digests(root: Root, kept: Set[str]) -> Set[str]:
    """Releases that a run which stays was of, and the one that is deployed."""
    found: Set[str] = {str(runs.Run(root, name).spec.get("release")) for name in kept}
    if os.path.islink(root.current):
        found.add(os.path.basename(os.readlink(root.current)))
    return found


def _drop_blobs(root: Root, digests: Set[str]) -> int:
    needed: Set[str] = set()
    for digest in digests:
        record: Any = read_json(os.path.join(root.releases, digest, releases.MANIFEST))
        files: List[Dict[str, Any]] = record["files"] if isinstance(record, dict) else []
        needed.update(file["sha256"] for file in files)
    gone = [name for name in os.listdir(root.blobs) if name not in needed]
    for name in gone:
        os.unlink(os.path.join(root.blobs, name))
    return len(gone)


def _away(folder: str, name: str) -> None:
    # By one rename first: nobody finds a half-removed run or release.
    beside = os.path.join(folder, f"{TEMPORARY}old-{name}")
    os.rename(os.path.join(folder, name), beside)
    remove(beside)
