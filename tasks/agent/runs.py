"""A run as its records and /proc tell it, and in one word how it is."""

from __future__ import annotations

import calendar
import os
import signal
import time
from typing import Any, Dict, List, NamedTuple, Optional

from . import logfile, processes
from .desk import Desk, want
from .machine import boot_id, boottime
from .processes import Identity, Stat
from .root import RUN_ID, Root, read_json, root_of

LIVING = ("starting", "training", "training, unsupervised", "stalled")
OVER = ("finished", "crashed", "killed", "lost", "absent")
STEP_STALL_S = 60.0
STEP_STALL_MEDIANS = 10
PHASE_STALL_S = {"starting": 900.0, "loading": 1800.0, "saving": 600.0}
"""How long a phase without steps may last: a model of 60 GB loads for minutes from a slow disk."""
LAST_LINES = 20


class Run:
    """The folder of one run. Records are read when asked for: others write them meanwhile."""

    def __init__(self, root: Root, run_id: str) -> None:
        self.run_id, self.path = run_id, root.run(run_id)

    def file(self, name: str) -> str:
        """Path of a file in the run's folder."""
        return os.path.join(self.path, name)

    def _record(self, name: str) -> Dict[str, Any]:
        value = read_json(self.file(name))
        return value if isinstance(value, dict) else {}

    @property
    def spec(self) -> Dict[str, Any]:
        """What was launched; empty when unreadable."""
        return self._record("spec.json")

    @property
    def status(self) -> Dict[str, Any]:
        """What the trainer says; empty until it says something."""
        return self._record("status.json")

    @property
    def exit(self) -> Dict[str, Any]:
        """How it ended; empty until the keeper wrote that down."""
        return self._record("exit.json")

    @property
    def never_started(self) -> bool:
        """Whether its launch was cut before the trainer's program ran: nothing came of it."""
        return bool(self.exit.get("error"))

    def identities(self) -> Processes:
        """Who was recorded as keeper and trainer; None for each that junk stands for."""
        record = self._record("process.json")
        session = record.get("session")
        return Processes(
            processes.identity(record.get("keeper")),
            processes.identity(record.get("trainer")),
            session if type(session) is int and session > 1 else None,
        )

    def tagged(self, stats: Dict[int, Stat]) -> List[int]:
        """Living processes that carry this run's folder in their environment."""
        found = processes.tagged(stats, b"TRAINER_RUN_DIR").items()
        return [pid for pid, names in found if names[b"TRAINER_RUN_DIR"] == self.path.encode()]

    def left_over(self) -> List[int]:
        """What lives of a run whose trainer is gone: tagged ones, and the keeper's descendants."""
        stats = processes.everything()
        keeper = self.identities().keeper
        found = set(self.tagged(stats))
        if keeper is not None and keeper.alive():
            found.update(processes.descendants(stats, [keeper.pid]))
        return sorted(pid for pid in found if not stats[pid].gone)


class Processes(NamedTuple):
    """The recorded processes of a run."""

    keeper: Optional[Identity]
    trainer: Optional[Identity]
    session: Optional[int]


def names(root: Root) -> List[str]:
    """Ids of all runs, oldest first."""
    try:
        return sorted(name for name in os.listdir(root.runs) if RUN_ID.match(name))
    except FileNotFoundError:
        return []


def latest(root: Root) -> Optional[Run]:
    """The run that `runs/latest` points to, else the newest by name, else None."""
    try:
        name = os.readlink(root.latest)
    except OSError:
        name = ""
    if RUN_ID.match(name) and os.path.isdir(root.run(name)):
        return Run(root, name)
    found = names(root)
    return Run(root, found[-1]) if found else None


def living(root: Root) -> List[Run]:
    """Runs of which a process lives, by record or by tag, oldest first."""
    runs = {run_id: Run(root, run_id) for run_id in names(root)}
    found = set()
    for run_id, run in runs.items():
        keeper, trainer, _session = run.identities()
        kept = keeper is not None and keeper.alive()
        # A keeper outlives its trainer while children are left, which may have lost the tag.
        if (trainer is not None and trainer.alive()) or (kept and run.left_over()):
            found.add(run_id)
    prefix = root.runs.encode() + b"/"
    for variables in processes.tagged(processes.everything(), b"TRAINER_RUN_DIR").values():
        folder = variables[b"TRAINER_RUN_DIR"]
        if folder.startswith(prefix):
            found.add(folder[len(prefix) :].decode("ascii", "replace"))
    return [runs[run_id] for run_id in sorted(found & set(runs))]


def number(value: object) -> Optional[float]:
    """A finite or infinite number from JSON, or None."""
    return float(value) if type(value) in (int, float) else None  # type: ignore[arg-type]


def describe(run: Optional[Run]) -> Dict[str, Any]:
    """How a run is: the answer of `health`."""
    if run is None or not os.path.isdir(run.path):
        detail = "no run was launched here" if run is None else "no such run on this host"
        return {
            "state": "absent",
            "run_id": run.run_id if run else None,
            "detail": detail,
            "last_lines": [],
            "left_over": [],
        }
    state, detail, left_over = _state(run)
    status, launched, ended = run.status, run.spec, run.exit
    stepped = number(status.get("step_boottime"))
    trainer = run.identities().trainer
    if state in OVER and left_over:
        detail += f"; {len(left_over)} of its processes are left, `fab kill` ends them"
    return {
        "state": state,
        "run_id": run.run_id,
        "pid": trainer.pid if trainer else None,
        "phase": status.get("phase"),
        "step": status.get("step"),
        "steps": status.get("steps"),
        "loss": status.get("loss"),
        "detail": detail,
        "exit": ended or None,
        "last_lines": logfile.last_lines(run.file("train.log"), LAST_LINES)
        if state in ("crashed", "killed", "lost")
        else [],
        "age_s": _age(stepped) if state in LIVING else _since_end(ended),
        "release": launched.get("release"),
        "running_release": status.get("release"),
        "spec_digest": launched.get("spec_digest"),
        "checkpoint": status.get("checkpoint"),
        "started": launched.get("when"),
        "left_over": left_over,
    }


def _age(moment: Optional[float]) -> Optional[float]:
    return None if moment is None else round(boottime() - moment, 1)


def _since_end(ended: Dict[str, Any]) -> Optional[float]:
    """Seconds since a run ended; over a reboot as good as the clock was set."""
    if ended.get("boot_id") == boot_id():
        return _age(number(ended.get("boottime")))
    try:
        end = time.strptime(str(ended.get("when")), "%Y-%m-%dT%H:%M:%SZ")
    except ValueError:
        return None
    return round(max(0.0, time.time() - calendar.timegm(end)), 1)


def _state(run: Run) -> Any:
    """(state, detail, pids left over)."""
    for _ in range(50):
        keeper, trainer, _session = run.identities()
        if run.exit:
            return (*_ended(run), run.left_over())
        if trainer is not None and trainer.alive():
            return (*_alive(run, supervised=keeper is not None and keeper.alive()), [])
        if keeper is None or not keeper.alive():
            break
        time.sleep(0.02)  # the keeper is about to write down how it ended
    if run.exit:  # written between the two looks
        return (*_ended(run), run.left_over())
    strays = run.left_over()
    if trainer is None and strays:
        state, detail = _alive(run, supervised=False)
        return (
            state,
            f"process.json names nobody; pid {strays[0]} carries this run id; {detail}",
            [],
        )
    return (*_gone(run, trainer), strays)


def _ended(run: Run) -> Any:
    ended, step = run.exit, run.status.get("step")
    at = f" at step {step:,}" if type(step) is int else " before its first status"
    if ended.get("error"):
        return "crashed", str(ended["error"])
    number_of_signal = ended.get("signal")
    if type(number_of_signal) is int:
        try:
            name = signal.Signals(number_of_signal).name
        except ValueError:
            name = f"signal {number_of_signal}"
        kills = ended.get("oom_kills")
        hint = ""
        if number_of_signal == signal.SIGKILL and type(kills) is int and kills > 0:
            hint = "; consistent with the kernel's out-of-memory killer, which struck meanwhile"
        return "killed", f"killed by {name}{at}{hint}"
    code = ended.get("code")
    if code == 0:
        stopped = run.status.get("phase") == "stopped"
        return "finished", f"{'stopped' if stopped else 'finished'}{at}"
    return "crashed", f"exit {code}{at}"


def _alive(run: Run, *, supervised: bool) -> Any:
    status = run.status
    phase = status.get("phase") or "starting"
    step, stepped = status.get("step"), number(status.get("step_boottime"))
    wrote = number(status.get("boottime"))
    at = f"step {step:,}" if type(step) is int else "no step yet"
    quiet, limit = 0.0, STEP_STALL_S
    if stepped is not None and phase not in PHASE_STALL_S:
        median = number(status.get("median_step_s")) or 0.0
        quiet, limit = boottime() - stepped, max(STEP_STALL_S, STEP_STALL_MEDIANS * median)
    else:
        limit = PHASE_STALL_S.get(str(phase), PHASE_STALL_S["starting"])
        quiet = boottime() - wrote if wrote is not None else _seconds_since_launch(run)
    keeperless = "" if supervised else "; its keeper is gone, so how it ends will not be known"
    if quiet > limit:
        return "stalled", f"{phase}, {at}, and nothing for {quiet:.0f} s{keeperless}"
    if not supervised:
        return "training, unsupervised", f"{phase}, {at}{keeperless}"
    if stepped is None:
        return "starting", str(phase)
    return "training", f"{at}" if phase == "training" else f"{at}, {phase}"


def _seconds_since_launch(run: Run) -> float:
    launched = number(run.spec.get("boottime"))
    return boottime() - launched if launched is not None else 0.0


def _gone(run: Run, trainer: Optional[Identity]) -> Any:
    status = run.status
    phase, step = status.get("phase"), status.get("step")
    at = f" at step {step:,}" if type(step) is int else ""
    if phase in ("finished", "stopped"):
        return "finished", f"{phase}{at}, as its last status says; its keeper was gone by then"
    if trainer is not None and trainer.boot != boot_id():
        return "lost", f"the host was rebooted{at}; `fab restart` goes on from the last checkpoint"
    if trainer is None:
        return "lost", "process.json names nobody, and no process carries this run id"
    return "lost", f"no process and no record of its end{at}: its keeper or container was killed"


def chosen(root: Root, arguments: Dict[str, Any]) -> Optional[Run]:
    """The run that a request names, or the latest."""
    run_id = want(arguments, "run_id", str, default=None)
    return latest(root) if run_id is None else Run(root, run_id)


def health(desk: Desk, arguments: Dict[str, Any]) -> Dict[str, Any]:
    """In one word how the run is, and what shows it."""
    del desk
    root = root_of(arguments)
    return describe(chosen(root, arguments))
