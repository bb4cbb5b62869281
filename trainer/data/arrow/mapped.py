"""A file as memory: mapped, not read; what is not touched costs nothing."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trainer.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path


class Mapped:
    """One file, mapped read-only for as long as a view of it lives.

    Pages are read one by one until `read_ahead`: with the kernel's usual read-ahead an index over
    scattered offsets would pull in the whole file.

    Attributes:
        memory: the whole file.
        path: where it was found.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self._facts = _facts(os.fstat(file.fileno()))
            self.memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.address = int(np.frombuffer(self.memory, np.uint8).__array_interface__["data"][0])
        self.read_scattered()

    def __len__(self) -> int:
        return len(self.memory)

    def holds(self, address: int) -> bool:
        """Whether memory at this address is the file's."""
        return self.address <= address < self.address + len(self.memory)

    def read_scattered(self) -> None:
        """From now on only pages that are touched are read."""
        self._advise("MADV_RANDOM")

    def read_ahead(self) -> None:
        """From now on the kernel reads ahead: everything is wanted, in order."""
        self._advise("MADV_NORMAL")

    def prefetch(self, view: npt.NDArray[Any]) -> None:
        """Start to read the pages under a view of this file."""
        if not len(view) or not hasattr(mmap, "MADV_WILLNEED"):
            return
        first = view.__array_interface__["data"][0] - self.address
        page = first - first % mmap.PAGESIZE
        self.memory.madvise(mmap.MADV_WILLNEED, page, first + view.nbytes - page)

    def unchanged(self) -> None:
        """See that the file is still the one that was mapped.

        Raises:
            InputError: it is not, or it is gone.
        """
        try:
            now = _facts(self.path.stat())
        except OSError as error:
            raise InputError(
                f"{self.path}: cannot be looked at any more: {error.strerror}; put it back, and"
                " start again"
            ) from error
        if now != self._facts:
            raise InputError(
                f"{self.path}: was changed while it was in use ({self._facts[1]:,} bytes then,"
                f" {now[1]:,} now); start again, and write new data to a new folder"
            )

    def _advise(self, name: str) -> None:
        # Advice only; other systems than Linux know less of it.
        if hasattr(mmap, name):
            self.memory.madvise(getattr(mmap, name))


def _facts(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns
