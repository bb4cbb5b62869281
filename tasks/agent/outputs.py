"""The output folder of a trainer: whose it is, which checkpoints are complete, which is pinned."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any, List, Optional

from .desk import Refused
from .machine import host_name, machine_id
from .root import TEMPORARY, Root, read_json, replace, write

OWNER = "OWNER.json"
"""Two roots or hosts that write one folder would delete each other's checkpoints."""
PINNED = "PINNED"
"""The trainer never deletes a checkpoint that holds a file of this name."""


def complete(folder: str) -> List[str]:
    """Checkpoints in an output folder, oldest first; each was renamed into place whole."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.startswith("step-"))
    except OSError:
        return []
    paths = [os.path.join(folder, name) for name in names]
    return [path for path in paths if os.path.isfile(os.path.join(path, "checkpoint.json"))]


def newest(folder: str) -> Optional[str]:
    """The newest complete checkpoint, or None."""
    found = complete(folder)
    return found[-1] if found else None


def size(path: str) -> int:
    """Bytes of a checkpoint's files."""
    files = [os.path.join(inside, name) for inside, _, names in os.walk(path) for name in names]
    return sum(os.lstat(file).st_size for file in files)


def pin(folder: str, path: str, run_id: str) -> None:
    """Keep this checkpoint from being deleted, instead of the one that was kept before."""
    replace(os.path.join(path, PINNED), f"{run_id}\n".encode())
    for other in complete(folder):
        if other != path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(other, PINNED))


def pinned(path: str) -> bool:
    """Whether a checkpoint is pinned."""
    return os.path.exists(os.path.join(path, PINNED))


def pinned_by(folder: str) -> List[str]:
    """Ids of the runs whose checkpoints are pinned in an output folder."""
    found = []
    for path in complete(folder):
        with contextlib.suppress(OSError), open(os.path.join(path, PINNED), "rb") as file:
            found.append(file.read(64).decode("ascii", "replace").strip())
    return found


def after_pin(folder: str) -> List[str]:
    """Complete checkpoints newer than the pinned one, oldest first; none where none is pinned."""
    found = complete(folder)
    kept = [number for number, path in enumerate(found) if pinned(path)]
    return found[kept[-1] + 1 :] if kept else []


def set_aside(folder: str, run_id: str) -> List[str]:
    """Move what is newer than the pinned checkpoint to a folder named for `run_id`; new paths."""
    moved = []
    for path in after_pin(folder):
        aside = os.path.join(folder, f"aside-{run_id}")
        os.makedirs(aside, exist_ok=True)
        target = os.path.join(aside, os.path.basename(path))
        os.rename(path, target)
        moved.append(target)
    return moved


def check_owner(root: Root, folder: str) -> bool:
    """Whether `folder` is marked as this root's; False when nobody's.

    Raises:
        Refused: refused, when it is another root's or another host's.
    """
    path = os.path.join(folder, OWNER)
    if not os.path.lexists(path):
        return False
    owner: Optional[Any] = read_json(path)
    if not isinstance(owner, dict):
        raise Refused("refused", f"{path}: is not readable; look at it, then remove it")
    if (owner.get("machine_id"), owner.get("root")) != (machine_id(), root.path):
        raise Refused(
            "refused",
            f"{folder}: is written by {owner.get('root')} of {owner.get('host')}; give another"
            f" output-dir, or remove {path} if that one is no more",
            root=owner.get("root"),
            host=owner.get("host"),
        )
    return True


def claim(root: Root, folder: str) -> None:
    """Make the output folder and mark it as this root's. Raises Refused, refused."""
    os.makedirs(folder, exist_ok=True)
    if check_owner(root, folder):
        return
    beside = os.path.join(folder, f"{TEMPORARY}owner-{os.getpid()}")
    owner = {"machine_id": machine_id(), "host": host_name(), "root": root.path}
    write(beside, json.dumps(owner).encode())
    try:
        # A link, not a rename: of two hosts that claim a shared folder at once one must lose.
        os.link(beside, os.path.join(folder, OWNER))
    except FileExistsError:
        check_owner(root, folder)
    finally:
        os.unlink(beside)
