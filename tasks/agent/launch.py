"""Start a run under a keeper, once."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any, Dict, List, NamedTuple, Optional

from . import hidden as secrets
from . import history, keeper, outputs, previous, processes, pruning, runs
from .current import deployed
from .desk import Desk, Refused, want
from .lease import changing
from .machine import boottime, utc
from .root import TEMPORARY, Root, flush_folder, point, remove
from .spec import Spec


class What(NamedTuple):
    """What is to run: a release, the settings that were sent or kept, and their secret values."""

    digest: str
    plain: Dict[str, Any]
    spec_digest: str
    hidden: Dict[str, str]

    @property
    def spec(self) -> Spec:
        """The settings, checked. Raises Refused, bad-request."""
        spec = Spec(self.plain)
        secrets.check(self.hidden, spec.secret_names)
        return spec


def launch(desk: Desk, arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Start a run, unless this run id is there.

    With `accept_pair` not where this pair trains, or has trained to its end, either.
    """
    plain = want(arguments, "spec", dict)
    canonical = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    spec_digest = want(arguments, "spec_digest", str)
    if hashlib.sha256(canonical.encode()).hexdigest() != spec_digest:
        raise Refused("bad-request", "spec_digest: is not that of spec")
    hidden = want(arguments, "secrets", dict, default={})
    accepted = want(arguments, "accept_pair", bool, default=False)
    with changing(desk, arguments) as root:
        run = runs.Run(root, want(arguments, "run_id", str))
        digest = deployed(root, want(arguments, "digest", str, default=None))
        what = What(digest, plain, spec_digest, hidden)
        spec = what.spec
        if os.path.isdir(run.path) and not run.never_started:
            return unchanged(run)
        if not os.path.isfile(os.path.join(root.release(digest), "MANIFEST.json")):
            raise Refused("refused", f"{digest[:12]}: is not on this host; run `fab sync`")
        for other in runs.living(root):
            alike = previous.pair(other) == (digest, spec_digest)
            if accepted and alike and secrets.same(other.spec, hidden) and healthy(other):
                return unchanged(other)
            raise in_the_way(other)
        over = _over(root, what) if accepted else None
        if over is not None:
            return unchanged(over)
        if want(arguments, "dry", bool, default=False):
            return dry_answer(root, run, spec)
        previous.keep_newest(root, spec.output_dir)
        return begin(desk, root, run, what)


def _over(root: Root, what: What) -> Optional[runs.Run]:
    """The newest run, if it is of `what` and trained to its end."""
    last = runs.latest(root)
    if last is None or previous.pair(last) != (what.digest, what.spec_digest):
        return None
    return last if previous.completed(last) and secrets.same(last.spec, what.hidden) else None


def healthy(run: runs.Run) -> bool:
    """Whether a run is on its way to its first step, or past it and well."""
    return runs.describe(run)["state"] in ("starting", "training")


def in_the_way(other: runs.Run) -> Refused:
    """What to answer while another run of this root is alive."""
    known = runs.describe(other)
    return Refused(
        "refused",
        f"run {other.run_id} is {known['state']} in this root (pid {known['pid']});"
        " run `fab kill` first",
        run_id=other.run_id,
        state=known["state"],
    )


def dry_answer(root: Root, run: runs.Run, spec: Spec) -> Dict[str, Any]:
    """What a launch would answer. Raises Refused where it would be refused."""
    _check_devices(root, spec.devices)
    outputs.check_owner(root, spec.output_dir)
    return {"changed": True, "run_id": run.run_id, "pid": None, "state": "absent"}


def begin(desk: Desk, root: Root, run: runs.Run, what: What, **added: Any) -> Dict[str, Any]:
    """Start `run` under a keeper; what is `added` goes into its record and the history.

    Raises:
        Refused: devices or the output folder are others'; the interpreter cannot be started.
    """
    spec, release = what.spec, root.release(what.digest)
    _check_devices(root, spec.devices)
    outputs.claim(root, spec.output_dir)
    record = {
        "run_id": run.run_id,
        "release": what.digest,
        "spec_digest": what.spec_digest,
        "spec": what.plain,
        "secrets": {name: secrets.salted(value) for name, value in what.hidden.items()},
        "by": desk.by,
        "when": utc(),
        "boottime": boottime(),
        **added,
    }
    variables = {
        **what.hidden,
        "TRAINER_RUN_ID": run.run_id,
        "TRAINER_RUN_DIR": run.path,
        "TRAINER_ROOT": root.path,
        "TRAINER_GRACE_SECONDS": f"{spec.grace_s:g}",
    }
    desk.check()
    building = os.path.join(root.runs, f"{TEMPORARY}{run.run_id}")
    os.makedirs(root.runs, exist_ok=True)
    keeper.prepare(building, record)
    environment = spec.environment(variables)
    log_bytes = spec.max_log_mb * 1024 * 1024
    order = keeper.Order(building, run.path, spec.argv, environment, release, log_bytes)
    facts = {name: record[name] for name in ("run_id", "release", "spec_digest", *added)}
    outcome = _start(root, run, order, what.digest)
    history.record(
        desk,
        root,
        "put_back" if "like" in added else "launch",
        **facts,
        pid=outcome["pid"],
        result=outcome.get("problem", "started"),
    )
    if "problem" in outcome:
        raise Refused("failed", f"launch: {outcome['problem']}", errno=outcome.get("errno"))
    return {
        "changed": True,
        "run_id": run.run_id,
        "pid": outcome["pid"],
        "started": record["when"],
        "state": "starting",
        "warnings": pruning.prune(desk, root),
    }


def _start(root: Root, run: runs.Run, order: keeper.Order, digest: str) -> Dict[str, Any]:
    """The pid, and "problem" when it could not be started."""
    started = keeper.start(order)
    if started.problem is not None:
        started.cancel()
        words = _read_text(os.path.join(order.building, "keeper.log"))
        raise Refused("failed", f"keeper: {started.problem}: {words.strip()[-500:]}")
    # From here to `go` the order counts: the run is a run before it can do anything, so a retry
    # finds it; a crash before `go` ends the waiting child, and that is written down too.
    if os.path.isdir(run.path):  # of an earlier try of the same launch
        remove(run.path)
    os.rename(order.building, run.path)
    flush_folder(root.runs)
    point(root.current, os.path.join("releases", digest))
    point(root.latest, run.run_id)
    return {"pid": started.trainer_pid, **started.go()}


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def unchanged(run: runs.Run) -> Dict[str, Any]:
    """What to answer about a run that is there already."""
    known = runs.describe(run)
    return {
        "changed": False,
        "run_id": run.run_id,
        "pid": known["pid"],
        "started": known["started"],
        "state": known["state"],
    }


def _check_devices(root: Root, devices: List[int]) -> None:
    """Raises Refused when a run of another root holds one of `devices`."""
    if not devices:
        return
    for pid, variables in processes.tagged(processes.everything(), b"TRAINER_ROOT").items():
        other = variables[b"TRAINER_ROOT"].decode("utf-8", "replace")
        theirs = variables.get(b"CUDA_VISIBLE_DEVICES", b"").decode("ascii", "replace").split(",")
        shared = [device for device in devices if str(device) in theirs]
        if other != root.path and shared:
            run_id = variables.get(b"TRAINER_RUN_ID", b"").decode("ascii", "replace")
            raise Refused(
                "refused",
                f"devices {shared}: held by run {run_id} of {other} (pid {pid}); give other"
                " devices in hosts.yaml, or kill that run",
                pid=pid,
                root=other,
                devices=shared,
            )
