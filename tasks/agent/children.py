"""Short-lived child processes of a verb: bounded, and gone with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from typing import BinaryIO, Dict, List, NamedTuple

from .desk import Desk, Refused

PR_SET_PDEATHSIG = 1
LARGEST = 4 * 1024 * 1024


class Said(NamedTuple):
    """What a child left: exit status as subprocess gives it, and the ends of its two streams."""

    status: int
    out: str
    err: str

    @property
    def last_words(self) -> str:
        """The last line it wrote, for an error text."""
        lines = self.err.strip().splitlines() or self.out.strip().splitlines()
        return lines[-1][:500] if lines else "(it wrote nothing)"


def run(
    desk: Desk, argv: List[str], *, directory: str, environment: Dict[str, str], nice: int = 0
) -> Said:
    """Run a program to its end, at a safe point all the while.

    Its whole process group ends with it, at the deadline, and when the desk goes. Output goes to
    unnamed files: a pipe would need a reader, and would stay open in what the program leaves.

    Raises:
        Refused: failed, when it cannot be started; deadline.
        DeskGone: nobody waits any more.
    """

    def prepare() -> None:
        os.setsid()
        os.nice(nice)
        with contextlib.suppress(ImportError, AttributeError):  # a Python without libffi
            import ctypes  # noqa: PLC0415  # in the child alone

            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)

    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            child = subprocess.Popen(
                argv,
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                preexec_fn=prepare,  # noqa: PLW1509  # the child calls nothing that takes a lock
            )
        except OSError as error:
            raise Refused(
                "failed", f"{argv[0]}: cannot be started: {error.strerror}", errno=error.errno
            ) from error

        def end() -> None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # all gone already
                os.killpg(child.pid, signal.SIGKILL)

        desk.on_exit.append(end)
        try:
            while child.poll() is None:
                desk.pause(0.02)
        finally:
            desk.on_exit.remove(end)
            end()
            child.wait()
        return Said(child.returncode, _end_of(out), _end_of(err))


def _end_of(file: BinaryIO) -> str:
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), LARGEST, max(0, size - LARGEST)).decode("utf-8", "replace")
