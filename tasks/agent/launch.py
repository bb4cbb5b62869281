"""Start a run under a keeper, once."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from typing import Any, Dict, List

from . import history, keeper, outputs, processes, runs
from .current import deployed
from .desk import Desk, Refused, want
from .lease import changing
from .machine import boottime, utc
from .root import TEMPORARY, Root, flush_folder, point, remove
from .spec import Spec, texts


def launch(desk: Desk, arguments: Dict[str, Any]) -> Dict[str, Any]:
    """Start a run, unless this run id, or with `accept_pair` this pair, is there already."""
    plain = want(arguments, "spec", dict)
    canonical = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    spec_digest = want(arguments, "spec_digest", str)
    if hashlib.sha256(canonical.encode()).hexdigest() != spec_digest:
        raise Refused("bad-request", "spec_digest: is not that of spec")
    spec = Spec(plain)
    hidden = want(arguments, "secrets", dict, default={})
    texts(list(hidden.values()), "secrets")
    if sorted(hidden) != sorted(spec.secret_names):
        raise Refused("bad-request", "secrets: are not those that spec.secret_names names")
    with changing(desk, arguments) as root:
        run = runs.Run(root, want(arguments, "run_id", str))
        digest = deployed(root, want(arguments, "digest", str, default=None))
        release = root.release(digest)
        if os.path.isdir(run.path) and not run.never_started:
            return _unchanged(run)
        if not os.path.isfile(os.path.join(release, "MANIFEST.json")):
            raise Refused("refused", f"{digest[:12]}: is not on this host; run `fab sync`")
        for other in runs.living(root):
            pair = (other.spec.get("release"), other.spec.get("spec_digest"))
            known = runs.describe(other)
            accepted = want(arguments, "accept_pair", bool, default=False)
            healthy = known["state"] in ("starting", "training")
            if accepted and healthy and pair == (digest, spec_digest):
                return _unchanged(other)
            raise Refused(
                "refused",
                f"run {other.run_id} is {known['state']} in this root (pid {known['pid']});"
                " run `fab kill` first",
                run_id=other.run_id,
                state=known["state"],
            )
        _check_devices(root, spec.devices)
        if want(arguments, "dry", bool, default=False):
            outputs.check_owner(root, spec.output_dir)
            return {"changed": True, "run_id": run.run_id, "pid": None, "state": "absent"}
        outputs.claim(root, spec.output_dir)
        record = {
            "run_id": run.run_id,
            "release": digest,
            "spec_digest": spec_digest,
            "spec": plain,
            "secrets": {name: _salted(value) for name, value in hidden.items()},
            "by": desk.by,
            "when": utc(),
            "boottime": boottime(),
        }
        added = {
            **hidden,
            "TRAINER_RUN_ID": run.run_id,
            "TRAINER_RUN_DIR": run.path,
            "TRAINER_ROOT": root.path,
            "TRAINER_GRACE_SECONDS": f"{spec.grace_s:g}",
        }
        desk.check()
        building = os.path.join(root.runs, f"{TEMPORARY}{run.run_id}")
        os.makedirs(root.runs, exist_ok=True)
        keeper.prepare(building, record)
        environment = spec.environment(added)
        log_bytes = spec.max_log_mb * 1024 * 1024
        order = keeper.Order(building, run.path, spec.argv, environment, release, log_bytes)
        return _start(desk, root, run, order, record)


def _start(
    desk: Desk, root: Root, run: runs.Run, order: keeper.Order, record: Dict[str, Any]
) -> Dict[str, Any]:
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
    point(root.current, os.path.join("releases", record["release"]))
    point(root.latest, run.run_id)
    outcome = started.go()
    history.record(
        desk,
        root,
        "launch",
        run_id=run.run_id,
        release=record["release"],
        spec_digest=record["spec_digest"],
        pid=started.trainer_pid,
        result=outcome.get("problem", "started"),
    )
    if outcome:
        raise Refused("failed", f"launch: {outcome['problem']}", errno=outcome.get("errno"))
    return {
        "changed": True,
        "run_id": run.run_id,
        "pid": started.trainer_pid,
        "started": record["when"],
        "state": "starting",
    }


def _read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def _unchanged(run: runs.Run) -> Dict[str, Any]:
    known = runs.describe(run)
    return {
        "changed": False,
        "run_id": run.run_id,
        "pid": known["pid"],
        "started": known["started"],
        "state": known["state"],
    }


def _salted(value: str) -> Dict[str, str]:
    salt = secrets.token_hex(16)
    return {"salt": salt, "sha256": hashlib.sha256((salt + value).encode()).hexdigest()}


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
