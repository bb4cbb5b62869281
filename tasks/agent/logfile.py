"""A log that one process appends to, another caps, and many read by byte offset.

The trainer writes straight to the file: were there a pipe to the keeper, a dead keeper would
block or kill it. The keeper caps by punching a hole: the first 64 KiB stay (how it started), then
comes a marker line, then nothing up to the newest text. What is left keeps its offset, so a
follower neither loses its place nor reads a line twice, and no line is lost between copying and
truncating. `ls -l` shows the size with the hole; `du` what it really takes. On file systems
without holes the file is emptied instead, and followers go on from its new start.
"""

from __future__ import annotations

import errno
import os
from typing import List, NamedTuple

HEAD_BYTES = 64 * 1024
HOLE = b"\0" * 512
"""So many zero bytes are a hole; fewer are something a program printed."""
TAIL_BYTES = 256 * 1024


class Cap:
    """Keeps one file below `limit` bytes of disk. For the one process that caps it."""

    def __init__(self, descriptor: int, limit: int) -> None:
        self._descriptor, self._limit, self._hole_end = descriptor, limit, HEAD_BYTES

    def apply(self) -> bool:
        """Drop old text if there is too much; whether it did."""
        size = os.fstat(self._descriptor).st_size
        if size - (self._hole_end - HEAD_BYTES) <= self._limit:
            return False
        end = size - self._limit // 2
        line_end = os.pread(self._descriptor, HEAD_BYTES, end).find(b"\n")
        end += line_end + 1
        marker = f"[log capped at {self._limit >> 20} MiB: older text was dropped here]\n".encode()
        if _punch(self._descriptor, HEAD_BYTES, end - HEAD_BYTES):
            os.pwrite(self._descriptor, b"\n" + marker, HEAD_BYTES)
            self._hole_end = end
        else:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, marker, 0)
            self._hole_end = HEAD_BYTES
        return True


def _punch(descriptor: int, start: int, length: int) -> bool:
    try:
        import ctypes  # noqa: PLC0415  # only when a log is full
    except ImportError:
        return False
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if fallocate(descriptor, 0x01 | 0x02, start, length) == 0:  # KEEP_SIZE | PUNCH_HOLE
        return True
    if ctypes.get_errno() in (errno.EOPNOTSUPP, errno.ENOSYS):
        return False
    raise OSError(ctypes.get_errno(), "cannot punch a hole into the log")


class Part(NamedTuple):
    """Text of a log, and where the next part begins."""

    text: bytes
    offset: int
    dropped: int
    more: bool


NOTHING = Part(b"", 0, 0, more=False)


def read_from(path: str, offset: int, most: int, *, last: bool) -> Part:
    """Whole lines from `offset` on, at most about `most` bytes.

    Args:
        path: the file; a missing one is an empty one.
        offset: where a line begins.
        most: bytes; a longer line comes in pieces.
        last: nobody writes any more, so a line without an end is one too.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return NOTHING
    try:
        size = os.fstat(descriptor).st_size
        began = offset if offset <= size else 0  # it was emptied: see the marker there
        start = _skip_hole(descriptor, began, size)
        data = os.pread(descriptor, most, start)
    finally:
        os.close(descriptor)
    hole = data.find(HOLE)
    if hole >= 0:
        data = data[:hole]
    at_end = start + len(data) >= size
    too_long = b"\n" not in data and (len(data) == most or hole >= 0)
    if not (last and at_end) and not too_long:
        data = data[: data.rfind(b"\n") + 1]
    after = start + len(data)
    return Part(data, after, start - began, more=bool(data) and after < size)


def _skip_hole(descriptor: int, offset: int, size: int) -> int:
    while offset < size:
        data = os.pread(descriptor, 65536, offset)
        text = data.lstrip(b"\0")
        if text:
            return offset + len(data) - len(text)
        try:
            offset = max(offset + len(data), os.lseek(descriptor, offset, os.SEEK_DATA))
        except OSError as error:
            if error.errno != errno.ENXIO:  # ENXIO: no data up to the end
                raise
            return size
    return offset


def tail_offset(path: str, lines: int) -> int:
    """Where the last `lines` lines begin (of the last 256 KiB)."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = max(0, size - TAIL_BYTES)
            file.seek(start)
            data = file.read(TAIL_BYTES)
    except FileNotFoundError:
        return 0
    hole = data.rfind(HOLE)
    if hole >= 0:
        start, data = start + hole + len(HOLE), data[hole + len(HOLE) :]
    elif start:
        cut = data.find(b"\n") + 1
        start, data = start + cut, data[cut:]
    position = len(data) - 1 if data.endswith(b"\n") else len(data)
    for _ in range(lines):
        position = data.rfind(b"\n", 0, position)
        if position < 0:
            return start
    return start + position + 1


def last_lines(path: str, lines: int) -> List[str]:
    """The last lines, for people; long ones are cut."""
    part = read_from(path, tail_offset(path, lines), TAIL_BYTES, last=True)
    found = part.text.decode("utf-8", "replace").splitlines()
    return [line[:500] for line in found[-lines:]]
