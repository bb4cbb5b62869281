"""The small process that starts a trainer, stays its parent, and writes down how it ended.

It has a session of its own and no open file of the caller's, so no channel waits for it. It is a
subreaper: a descendant whose parent dies becomes its child, also where PID 1 reaps nothing. It
ignores the signals of a shutdown, so that it can still write exit.json. When it is killed, the
trainer goes on: nothing of the trainer's passes through the keeper.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
from typing import Any, Dict, List, NamedTuple, NoReturn, Optional

from .logfile import Cap
from .machine import boot_id, boottime, oom_kills, utc
from .processes import Identity, identify, me
from .root import flush_folder, replace, write

PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36
NAME = b"fab-keeper"
IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE)
LOOK_S = 0.5
"""How often the size of the log is looked at."""
FULL_DISK_S = 600.0


class Order(NamedTuple):
    """What to start.

    Args:
        building: the run's folder while it is built; process.json and train.log go there.
        folder: where `building` is renamed to before the trainer may start.
    """

    building: str
    folder: str
    argv: List[str]
    environment: Dict[str, str]
    directory: str
    log_bytes: int


class Started:
    """A keeper and a trainer that waits for `go`."""

    def __init__(self, reports: int, go: int) -> None:
        self._reports = os.fdopen(reports, "rb")
        self._go = go
        first = self._report()
        self.problem: Optional[str] = first.get("problem")
        self.trainer_pid: Optional[int] = first.get("trainer")

    def _report(self) -> Dict[str, Any]:
        line = self._reports.readline()
        return json.loads(line) if line else {"problem": "the keeper died before it answered"}

    def go(self) -> Dict[str, Any]:
        """Let the trainer exec; {} when it did, else {"errno", "problem"}."""
        os.write(self._go, b"g")
        os.close(self._go)
        with self._reports:
            return self._report()

    def cancel(self) -> None:
        """Let the waiting child end without having been a trainer."""
        os.close(self._go)
        self._reports.close()


def start(order: Order) -> Started:
    """Fork a keeper and, waiting under it, the process that will be the trainer."""
    reports, report = os.pipe()
    go, let_go = os.pipe()
    first = os.fork()
    if first == 0:
        _in_child(lambda: _detach(order, report, go))
    os.close(report)
    os.close(go)
    os.waitpid(first, 0)
    return Started(reports, let_go)


def _in_child(act: Any) -> NoReturn:
    # A forked child must never return into the verb: it would answer the desk a second time.
    status = 1
    try:
        act()
        status = 0
    except BaseException:  # noqa: BLE001  # the process ends here; stderr is keeper.log
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    finally:
        os._exit(status)


def _detach(order: Order, report: int, go: int) -> None:
    os.setsid()
    if os.fork() == 0:
        _in_child(lambda: _Keeper(order, report, go).run())


def _prctl(option: int, value: Any) -> None:
    try:
        import ctypes  # noqa: PLC0415  # the one caller
    except ImportError:  # a Python built without libffi: the keeper then adopts no orphans
        return
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _close_all_but(kept: List[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # the listing's own descriptor is gone already
                os.close(int(name))


class _Keeper:
    def __init__(self, order: Order, report: int, go: int) -> None:
        self._order, self._report, self._go = order, report, go
        self._oom_kills = oom_kills()
        self._trainer = 0
        self._exit: Dict[str, Any] = {}

    def run(self) -> None:
        order = self._order
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        problems = os.open(os.path.join(order.building, "keeper.log"), flags, 0o600)
        log = os.open(os.path.join(order.building, "train.log"), flags, 0o600)
        capped = os.open(os.path.join(order.building, "train.log"), os.O_RDWR)
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        os.dup2(problems, 2)
        _close_all_but([0, 1, 2, self._report, self._go, log, capped])
        os.chdir("/")
        for number in IGNORED:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        _prctl(PR_SET_NAME, NAME)
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        error, error_in = os.pipe()  # close-on-exec, as all that Python opens
        self._trainer = os.fork()
        if self._trainer == 0:
            _in_child(lambda: self._become_trainer(log, error_in))
        os.close(error_in)
        os.close(log)
        os.close(self._go)
        self._write_processes(identify(self._trainer))
        self._say({"trainer": self._trainer})
        with os.fdopen(error, "rb") as outcome:
            problem = outcome.read()
        self._say(json.loads(problem) if problem else {})
        os.close(self._report)
        self._wait(Cap(capped, order.log_bytes), problem)

    def _say(self, report: Dict[str, Any]) -> None:
        # The verb may have died; the child then sees its pipe end, and we write how that ended.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._report, json.dumps(report).encode() + b"\n")

    def _write_processes(self, trainer: Identity) -> None:
        def plain(who: Identity) -> Dict[str, Any]:
            return {"pid": who.pid, "start": who.start, "boot_id": who.boot}

        record = {"keeper": plain(me()), "trainer": plain(trainer), "session": os.getsid(0)}
        replace(os.path.join(self._order.building, "process.json"), json.dumps(record).encode())

    def _become_trainer(self, log: int, error: int) -> None:
        order = self._order
        let_go = os.read(self._go, 1)
        if not let_go:
            os.write(error, json.dumps({"problem": "the launch was interrupted"}).encode())
            os._exit(125)
        # Its own process group: a trainer that signals its group must not hit the keeper.
        os.setpgid(0, 0)
        for number in IGNORED:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            os.chdir(order.directory)
            os.execvpe(order.argv[0], order.argv, order.environment)  # noqa: S606  # no shell
        except OSError as failure:
            text = f"{order.argv[0]}: cannot be started: {failure.strerror}"
            report = {"errno": failure.errno, "problem": text}
            os.write(error, json.dumps(report).encode())
            os._exit(127)

    def _wait(self, cap: Cap, problem: bytes) -> None:
        capping = True
        while self._reap(problem):
            signal.sigtimedwait({signal.SIGCHLD}, LOOK_S)
            try:
                capping = capping and cap.apply() is not None
            except OSError:  # a log that cannot be capped is no reason to lose the exit record
                capping = False
                sys.excepthook(*sys.exc_info())

    def _reap(self, problem: bytes) -> bool:
        """Collect the dead; whether any descendant lives."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._trainer:
                self._note_exit(status, usage.ru_maxrss * 1024, problem)
                self._write_exit()

    def _note_exit(self, status: int, peak_bytes: int, problem: bytes) -> None:
        signalled = os.WIFSIGNALED(status)
        before, after = self._oom_kills, oom_kills()
        self._exit = {
            "code": None if signalled else os.WEXITSTATUS(status),
            "signal": os.WTERMSIG(status) if signalled else None,
            "when": utc(),
            "boottime": boottime(),
            "boot_id": boot_id(),
            "peak_bytes": peak_bytes,
            "oom_kills": after - before if before is not None and after is not None else None,
            "error": json.loads(problem)["problem"] if problem else None,
        }

    def _write_exit(self) -> None:
        """A full disk ends many a trainer, and must not hide how: tried again for a while."""
        end = boottime() + FULL_DISK_S
        # No folder: the launch was interrupted before this was a run.
        while os.path.isdir(self._order.folder) and not self._exit_fits(boottime() > end):
            signal.sigtimedwait({signal.SIGCHLD}, LOOK_S)

    def _exit_fits(self, last_try: bool) -> bool:
        path = os.path.join(self._order.folder, "exit.json")
        try:
            replace(path, json.dumps(self._exit).encode())
        except OSError as error:
            if last_try or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return False
        return True


def prepare(building: str, spec: Dict[str, Any]) -> None:
    """Make the folder of a run that is being built, with what is launched."""
    os.mkdir(building, 0o700)
    write(os.path.join(building, "spec.json"), json.dumps(spec, indent=1).encode())
    flush_folder(building)
