"""Short-lived child processes of a verb: bounded, and gone with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from typing import BinaryIO, Dict, Iterator, List, NamedTuple, Optional

from .desk import Desk, Refused
from .root import TEMPORARY, remove

PR_SET_PDEATHSIG = 1
NICE = 19
"""Whatever a verb starts for a moment, a run may be training beside it."""
SESSION_NICE = 10
"""A tenth of the CPUs beside a session that wants them all. At 19 it is a seventieth, and checks
of 5 s took minutes on a host that trains on its CPUs."""
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
    desk: Desk,
    argv: List[str],
    *,
    directory: str,
    environment: Dict[str, str],
    scratch: Optional[str] = None,
) -> Said:
    """Run a program to its end, at a safe point all the while.

    Its whole process group ends with it, at the deadline, and when the desk goes. Output goes to
    unnamed files: a pipe would need a reader, and would stay open in what the program leaves.
    What it writes for a while goes into a folder of its own under `scratch`, which goes with it,
    and not to /tmp, which on many a host is full or of little memory.

    Raises:
        Refused: failed, when it cannot be started; deadline.
        DeskGone: nobody waits any more.
    """

    def prepare() -> None:
        os.setsid()
        os.nice(NICE)
        # Where the kernel groups by session, a nice value counts inside of one alone: the session
        # as a whole must be niced too, or it takes as much of the CPUs as the run's does.
        with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as group:
            group.write(str(SESSION_NICE))
        with contextlib.suppress(ImportError, AttributeError):  # a Python without libffi
            import ctypes  # noqa: PLC0415  # in the child alone

            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)

    with _folder(scratch) as place, tempfile.TemporaryFile(
        dir=place
    ) as out, tempfile.TemporaryFile(dir=place) as err:
        if place is not None:
            environment = {"TMPDIR": place, **environment}
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


@contextlib.contextmanager
def _folder(scratch: Optional[str]) -> Iterator[Optional[str]]:
    if scratch is None:
        yield None
        return
    # Named for this process: while it lives, others that sweep leave the folder alone.
    place = os.path.join(scratch, f"{TEMPORARY}children-{os.getpid()}")
    os.makedirs(place, mode=0o700, exist_ok=True)
    try:
        yield place
    finally:
        remove(place)


def _end_of(file: BinaryIO) -> str:
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), LARGEST, max(0, size - LARGEST)).decode("utf-8", "replace")
