"""A disk that takes no more, told as what it is: no room, no inodes, or a quota."""

from __future__ import annotations

import errno
import os

from .desk import Refused

FULL = (errno.ENOSPC, errno.EDQUOT)


def full(path: str, code: int = errno.ENOSPC, *, needed: int = 0) -> Refused:
    """What to answer when nothing more fits where `path` is or would be.

    Args:
        path: absolute, or from "~/".
        code: one of FULL: what the system said.
        needed: bytes, where it is known how many.
    """
    there = os.path.expanduser(path)
    while not os.path.isdir(there) and there not in ("/", ""):
        there = os.path.dirname(there)
    disk = os.statvfs(there or "/")
    free = disk.f_bavail * disk.f_frsize
    if code == errno.EDQUOT:
        what = f"the quota of uid {os.getuid()} is used up"
    elif disk.f_files and not disk.f_favail:
        what = f"no inodes left, {free >> 20:,} MiB free; remove files"
    else:
        what = f"disk full, {free >> 20:,} MiB free"
        what += f" and {needed >> 20:,} MiB needed" if needed else ""
    return Refused("failed", f"{there}: {what}; free some, then repeat", errno=code, free=free)
