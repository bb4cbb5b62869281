"""End a run and everything it started, and nothing else."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, Dict, List, Optional, Sequence, Set

from . import gpus, history, previous, processes, runs
from . import hidden as secrets
from .desk import Desk, Refused, want
from .lease import changing
from .outputs import newest, pin
from .processes import Identity
from .root import Root
from .union import Union

LOOK_S = 0.03
ORPHANS_S = 2.0
"""What the leader leaves may take so long to end by itself."""
TERM_S = 5.0
KILL_S = 15.0
"""SIGKILL takes effect in milliseconds, but a driver may first give back 140 GB."""


def kill(desk: Desk, arguments: Dict[str, Any]) -> Dict[str, Any]:
    """End the run of this root, and wait until nothing of it is left.

    Raises:
        Refused: refused for a process of another user; failed for one that cannot be ended.
    """
    keep = want(arguments, "keep", dict, default={})
    with changing(desk, arguments) as root:
        back = want(keep, "back", dict, default=None)
        like = None if back is None else previous.choose(root, back)
        living = runs.living(root)
        for run in living:
            if _is_kept(run, keep, like):
                return _nothing(run, kept=run.run_id)
        if not living:
            return _nothing(runs.latest(root), kept=None)
        if want(arguments, "dry", bool, default=False):
            known = runs.describe(living[-1])
            return {**_nothing(living[-1], kept=None), "changed": True, "state": known["state"]}
        grace = want(arguments, "grace_s", float, default=None)
        results = [_Stop(desk, root, run, grace).end() for run in living]
        return results[-1]


def _is_kept(run: runs.Run, keep: Dict[str, Any], like: Optional[runs.Run]) -> bool:
    meant = run.run_id == keep.get("run_id") or (like is not None and run.run_id == like.run_id)
    alike = bool(keep.get("pair")) and list(previous.pair(run)) == keep["pair"]
    # With another value of a secret, the same release and settings are another run.
    if not meant and not (
        alike and secrets.same(run.spec, want(keep, "secrets", dict, default={}))
    ):
        return False
    return runs.describe(run)["state"] in ("starting", "training")


def _nothing(run: Optional[runs.Run], *, kept: Optional[str]) -> Dict[str, Any]:
    trainer = run.identities().trainer if run else None
    return {
        "changed": False,
        "kept": kept,
        "run_id": run.run_id if run else None,
        "pid": trainer.pid if trainer and trainer.alive() else None,
        "step": run.status.get("step") if run else None,
        "checkpoint": None,
        "signals": [],
        "seconds": 0.0,
        "state": None,
        "warnings": [],
    }


class _Stop:
    def __init__(self, desk: Desk, root: Root, run: runs.Run, grace: Optional[float]) -> None:
        self._desk, self._root, self._run = desk, root, run
        spec = run.spec.get("spec")
        spec = spec if isinstance(spec, dict) else {}
        if grace is None:
            grace = runs.number(spec.get("grace_s"))
        self._grace = 120.0 if grace is None else grace
        self._output = spec.get("output_dir")
        self._union = Union(run)
        self._signals: List[Dict[str, Any]] = []
        self._warnings: List[str] = []

    def end(self) -> Dict[str, Any]:
        began = time.monotonic()
        self._refuse_strangers()
        devices = self._devices()
        self._ask_leader()
        self._force()
        self._wait_for_keeper()
        self._note_strangers(devices)
        known = runs.describe(self._run)
        checkpoint = self._pin()
        history.record(
            self._desk,
            self._root,
            "kill",
            run_id=self._run.run_id,
            release=known["release"],
            step=known["step"],
            result=known["state"],
        )
        return {
            "changed": True,
            "kept": None,
            "run_id": self._run.run_id,
            "pid": self._union.leader.pid if self._union.leader else None,
            "step": known["step"],
            "checkpoint": checkpoint,
            "signals": self._signals,
            "seconds": round(time.monotonic() - began, 2),
            "state": known["state"],
            "warnings": self._warnings,
        }

    def _refuse_strangers(self) -> None:
        for who in self._union.look():
            user = processes.owner(who.pid)
            if user not in (None, os.getuid()):
                raise Refused(
                    "refused",
                    f"pid {who.pid} of run {self._run.run_id} belongs to uid {user}, and this is"
                    f" uid {os.getuid()}; nothing was signalled",
                    pid=who.pid,
                    uid=user,
                )

    def _ask_leader(self) -> None:
        """TERM to the leader alone, which then saves and ends its own children; its grace."""
        leader = self._union.leader
        if leader is None or not leader.alive():
            return
        stat = leader.stat()
        self._send(leader, signal.SIGTERM, "leader")
        if stat is not None and stat.state in "Tt":
            self._send(leader, signal.SIGCONT, "leader, which was stopped")
        end = time.monotonic() + self._grace
        looked = 0.0
        while leader.alive() and time.monotonic() < end:
            # Its children are learnt while it lives; not at each look, on hosts with thousands.
            if time.monotonic() - looked > 0.5:
                looked = time.monotonic()
                self._union.look()
            self._desk.pause(LOOK_S)
        end = time.monotonic() + min(ORPHANS_S, self._grace)
        while not leader.alive() and self._union.look() and time.monotonic() < end:
            self._desk.pause(LOOK_S)

    def _force(self) -> None:
        rounds = (
            ((signal.SIGCONT, signal.SIGTERM), min(TERM_S, self._grace)),
            ((signal.SIGKILL,), KILL_S),
        )
        for numbers, patience in rounds:
            end = time.monotonic() + patience
            hit: Set[Identity] = set()
            while True:
                left = self._union.look()
                if not left:
                    return
                # Also those that appeared after the others were hit.
                for who in left:
                    if who not in hit:
                        hit.add(who)
                        self._send_all(who, numbers)
                if time.monotonic() >= end:
                    break
                self._desk.pause(LOOK_S)
        self._tell_stuck()

    def _send_all(self, who: Identity, numbers: Sequence[int]) -> None:
        if processes.owner(who.pid) in (None, os.getuid()):  # else it is named when all is done
            for number in numbers:
                self._send(who, number, "left over")

    def _tell_stuck(self) -> None:
        stuck = "; ".join(processes.where_stuck(who) for who in self._union.look())
        if stuck:
            raise Refused(
                "failed",
                f"run {self._run.run_id}: cannot be ended: {stuck}; what hangs in the kernel"
                " goes with a reboot alone",
                signals=self._signals,
            )

    def _send(self, who: Identity, number: int, what: str) -> None:
        if processes.send(who, number):
            name = signal.Signals(number).name
            self._signals.append({"pid": who.pid, "signal": name, "what": what})

    def _wait_for_keeper(self) -> None:
        """It writes how the run ended, and leaves; one that was stopped is woken first."""
        keeper = self._union.keeper
        if keeper is None:
            return
        end = time.monotonic() + TERM_S
        while keeper.alive() and time.monotonic() < end:
            self._send_quietly(keeper)
            self._desk.pause(LOOK_S)
        if keeper.alive():
            self._send(keeper, signal.SIGKILL, "keeper, which did not end")

    @staticmethod
    def _send_quietly(keeper: Identity) -> None:
        stat = keeper.stat()
        if stat is not None and stat.state in "Tt":
            processes.send(keeper, signal.SIGCONT)

    def _devices(self) -> Set[str]:
        if not gpus.present():
            return set()
        return {name for who in self._union.look() for name in gpus.open_devices(who.pid)}

    def _note_strangers(self, devices: Set[str]) -> None:
        """What others hold of the devices that the run held is told, not touched."""
        if not devices:
            return
        for device, found in gpus.holders().items():
            if device in devices and device.rpartition("nvidia")[2].isdigit():
                who = ", ".join(f"pid {one['pid']} (uid {one['uid']})" for one in found)
                self._warnings.append(f"{device}: still held by {who}")

    def _pin(self) -> Optional[str]:
        if not isinstance(self._output, str):
            return None
        folder = os.path.expanduser(self._output)
        found = newest(folder)
        # Only a run that stepped has proven itself; otherwise the pin stays where it was.
        if found is not None and previous.stepped(self._run):
            try:
                pin(folder, found, self._run.run_id)
            except OSError as error:  # the run is stopped, and that must be told
                self._warnings.append(f"{found}: cannot be pinned: {error.strerror}")
        return found
