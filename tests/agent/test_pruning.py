from __future__ import annotations

import json
import os

import pytest

from tasks.agent.pruning import KEPT
from tests.agent.machine import canonical

LONG_AGO = "20200101-0000{:02}-0000"


def earlier(machine, number, *, stepped=True, release=None, flags=()):
    """A run that ended long ago, as its records tell it; its id."""
    run_id = LONG_AGO.format(number)
    folder = machine.root / "runs" / run_id
    folder.mkdir(parents=True, mode=0o700)
    spec = machine.spec(*flags)
    record = {"run_id": run_id, "release": release or f"{number:064x}", "spec": spec}
    record["spec_digest"] = canonical(spec)
    (folder / "spec.json").write_text(json.dumps(record))
    (folder / "exit.json").write_text(json.dumps({"code": 0}))
    status = {"loss": 1.0, "step_boottime": 1.0, "phase": "stopped"} if stepped else {}
    (folder / "status.json").write_text(json.dumps(status))
    return run_id


def old_release(machine, number, age_s):
    """A release assembled long ago with one content of its own; its digest and that content's."""
    digest, blob = f"{number:064x}", f"{number + 4096:064x}"
    folder = machine.root / "releases" / digest
    folder.mkdir()
    file = {"path": "x.py", "mode": "0444", "sha256": blob, "size": 1}
    (folder / "MANIFEST.json").write_text(json.dumps({"digest": digest, "files": [file]}))
    (machine.root / "blobs" / blob).write_text("x")
    then = folder.stat().st_mtime - age_s
    os.utime(folder, (then, then))
    return digest, blob


@pytest.fixture
def runs_there(machine):
    return lambda: {path.name for path in (machine.root / "runs").glob("2*")}


def test_the_newest_runs_and_what_is_needed_stay(machine, runs_there):
    current = machine.deploy()
    pinned = earlier(machine, 0, flags=["--pinned"])
    checkpoint = machine.output / "step-00000007"
    checkpoint.mkdir(parents=True)
    (checkpoint / "checkpoint.json").write_text("{}")
    (checkpoint / "PINNED").write_text(f"{pinned}\n")
    old = {earlier(machine, number, flags=["--other"]) for number in range(1, 10)}
    fallback = earlier(machine, 10, flags=["--good"])
    failed = [earlier(machine, 11 + number, stepped=False) for number in range(KEPT)]
    old_release(machine, 0, 9_000)  # of the pinned run
    unused, _ = old_release(machine, 99, 9_000)
    launched = machine.launch()
    assert launched["warnings"] == []
    # The new run is one of the newest.
    assert runs_there() == {pinned, max(old), fallback, launched["run_id"], *failed[1:]}
    assert (machine.root / "releases" / unused).is_dir()
    assert (machine.root / "current").readlink().name == current
    assert machine.temporary() == []


def test_old_releases_go_with_the_contents_that_only_they_had(machine):
    current = machine.deploy()
    kept = earlier(machine, 1)
    of_a_run = old_release(machine, 1, 90_000)
    old = [old_release(machine, 100 + number, 80_000 + number) for number in range(3)]
    new = [old_release(machine, 200 + number, 100 + number) for number in range(KEPT - 1)]
    machine.launch()
    releases = {path.name for path in (machine.root / "releases").iterdir()}
    assert releases == {current, of_a_run[0], *(digest for digest, _ in new)}
    blobs = {path.name for path in (machine.root / "blobs").iterdir()}
    assert not blobs & {blob for _, blob in old}
    assert blobs >= {of_a_run[1], *(blob for _, blob in new)}
    assert kept in {path.name for path in (machine.root / "runs").iterdir()}
    machine.sync()
    assert machine.ask("verify", digest=current)["state"] == "running this"
    *_, last = [json.loads(x) for x in (machine.root / "history.jsonl").read_text().splitlines()]
    assert (last["verb"], last["blobs"]) == ("prune", 3)


def test_what_cannot_be_removed_is_a_warning_and_the_run_is_there(machine, runs_there):
    machine.deploy()
    for number in range(KEPT + 3):
        earlier(machine, number, stepped=False)
    held = machine.root / "runs" / LONG_AGO.format(0)
    (held / "status.json").unlink()
    machine.ask("health")
    beside = machine.root / "runs" / f".tmp-old-{held.name}"
    (beside / "in the way").mkdir(parents=True)
    launched = machine.launch()
    # What an interrupted removal left is swept before, so that it never is in the way.
    assert (launched["warnings"], machine.temporary()) == ([], [])
    assert held.name not in runs_there()
    assert launched["run_id"] in runs_there()
