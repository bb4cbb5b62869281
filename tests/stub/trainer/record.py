"""What a run writes down: status, metrics, checkpoints; by rename where it must be whole."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from pathlib import Path

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def boottime() -> float:
    """Seconds since the host booted, time asleep included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def claim(output: Path) -> None:
    """Leave `.two` in the output folder when another trainer, or a child of one, lives there.

    A lock that the kernel frees at death sees every overlap, however short; polling does not.
    """
    alone = os.open(output / ".alone", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        (output / ".two").write_text(os.environ.get("TRAINER_RUN_ID", "unknown"))


@contextlib.contextmanager
def despite_disk():
    """As the real one: a run does not end for want of a line about it."""
    try:
        yield
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise


def write_whole(path: Path, value: object) -> None:
    """Put JSON at `path` so that a reader sees the old or the new text, never a part."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(value))
    beside.replace(path)


def release_of_imported() -> str | None:
    """Digest of the release that the imported files belong to, or None when any differs."""
    home = Path(__file__).resolve().parent.parent
    try:
        entries = json.loads((home / "MANIFEST.json").read_text())["files"]
    except (OSError, ValueError, KeyError):
        return None
    by_path = {entry["path"]: entry["sha256"] for entry in entries}
    for name, module in list(sys.modules.items()):
        if name == "trainer" or name.startswith("trainer."):
            file = Path(str(module.__file__)).resolve()
            found = hashlib.sha256(file.read_bytes()).hexdigest()
            if by_path.get(file.relative_to(home).as_posix()) != found:
                return None
    lines = sorted((e["path"], f"{e['mode']} {e['sha256']} {e['path']}\n") for e in entries)
    return hashlib.sha256("".join(line for _, line in lines).encode()).hexdigest()


def newest(output: Path) -> int:
    """Step of the newest complete checkpoint; 0 when there is none."""
    steps = [
        json.loads((folder / "checkpoint.json").read_text())["step"]
        for folder in output.glob("step-*")
        if (folder / "checkpoint.json").is_file()
    ]
    return max(steps, default=0)


def save(output: Path, step: int, seconds: float) -> Path:
    """Write a checkpoint, taking `seconds` for it, and keep the newest two and the pinned."""
    final = output / f"step-{step:08d}"
    if final.exists():
        return final
    beside = output / f".{final.name}.{os.getpid()}"
    beside.mkdir()
    state = f"state of step {step}\n".encode()
    (beside / "state.bin").write_bytes(state)
    time.sleep(seconds)
    write_whole(
        beside / "checkpoint.json",
        {"step": step, "files": {"state.bin": hashlib.sha256(state).hexdigest()}},
    )
    beside.replace(final)
    for old in sorted(output.glob("step-*"))[:-2]:
        if not (old / "PINNED").exists():
            shutil.rmtree(old)
    return final
