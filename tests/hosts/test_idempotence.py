"""Everything twice: the second time says so and changes nothing."""

from __future__ import annotations

import hashlib
import os

import pytest

from tasks import operations, plans
from tasks.fleet import carry_out
from tasks.link import Link
from tests.hosts.ground import until

WATCHED = ("releases", "blobs", "runs", "current", "machine.json", "history.jsonl")


def picture(machine):
    """Everything under the root that a second time must not change: names, modes, times, contents.

    Records that a living run writes itself are left out: status, metrics, log, checkpoints.
    """
    moving = {"status.json", "metrics.jsonl", "train.log"}
    root, seen = machine.home / "fab", {}
    for top in WATCHED:
        for path in [root / top, *sorted((root / top).rglob("*"))]:
            if not os.path.lexists(path) or path.name in moving or ".tmp" in path.name:
                continue
            about = path.lstat()
            # A living run renames its records into its folder, whose own times then move.
            moment = 0 if path.is_dir() and path.parent.name == "runs" else about.st_mtime_ns
            content = (
                str(path.readlink())
                if path.is_symlink()
                else hashlib.sha256(path.read_bytes()).hexdigest()
                if path.is_file()
                else ""
            )
            seen[str(path.relative_to(root))] = (about.st_mode, about.st_ino, moment, content)
    return seen


def lasting(machine):
    until(lambda: not machine.sessions(), what="end of all connections")
    return sorted((p.pid, p.started) for p in machine.processes())


@pytest.fixture
def go(notes):
    """`go(plan, host, run)`: outcomes by operation; none may fail."""

    def run_plan(plan, host, run):
        done = carry_out(
            plan,
            [host],
            run,
            links=lambda host: Link(host, notify=notes.append),
            on_outcome=lambda _: None,
        )
        assert not [outcome for outcome in done if outcome.error], done
        return {outcome.operation: outcome for outcome in done}

    return run_plan


OPERATIONS = (
    operations.probe,
    operations.sync,
    operations.verify,
    operations.verify_features,
    operations.launch,
    operations.await_progress,
    operations.health,
    operations.kill,
)


def test_every_operation_twice(machine, go, new_run):
    host, run = machine.host(), new_run()
    for operation in OPERATIONS:
        # A kill without a release ends whatever runs, as `fab kill` does.
        now = run if operation is not operations.kill else new_run(release=None)
        go((operation,), host, now)
        before, alive = picture(machine), lasting(machine)
        again = go((operation,), host, now)[operation.__name__]
        assert again.state in {"unchanged", "ok"}, operation.__name__
        assert (again.state == "unchanged") == operations.changing(operation)
        assert picture(machine) == before, operation.__name__
        assert lasting(machine) == alive, operation.__name__
    assert not lasting(machine)


TASKS = {
    "deploy": plans.DEPLOY,
    "sync": plans.SYNC,
    "launch": plans.LAUNCH,
    "verify": plans.VERIFY,
    "verify-features": plans.VERIFY_FEATURES,
    "health": plans.HEALTH,
    "status": plans.STATUS,
}


@pytest.mark.parametrize("task", TASKS)
def test_every_task_but_restart_twice(machine, go, new_run, task):
    host = machine.host()
    go(plans.DEPLOY, host, new_run())
    before, alive = picture(machine), lasting(machine)
    outcomes = go(TASKS[task], host, new_run())
    assert {outcome.state for outcome in outcomes.values()} <= {"unchanged", "ok"}
    assert picture(machine) == before
    assert lasting(machine) == alive


def test_a_deploy_that_changes_nothing_costs_one_connection_and_nine_channels(machine, go, new_run):
    host = machine.host()
    go(plans.DEPLOY, host, new_run())

    def counted():
        log = machine.log()
        return log.count("Accepted publickey"), log.count("Starting session: command")

    connections, channels = counted()
    go(plans.DEPLOY, host, new_run())
    # Seven operations, and the lease taken and given back.
    assert counted() == (connections + 1, channels + 9)


def test_a_kill_twice(machine, go, new_run):
    host = machine.host()
    go(plans.DEPLOY, host, new_run())
    assert go(plans.KILL, host, new_run(release=None))["kill"].state == "changed"
    before = picture(machine)
    assert go(plans.KILL, host, new_run(release=None))["kill"].state == "unchanged"
    assert picture(machine) == before
    assert not lasting(machine)


@pytest.mark.parametrize("plan", ["DEPLOY", "RESTART"])
def test_the_same_invocation_again_makes_no_second_run(machine, go, new_run, plan):
    host, first = machine.host(), new_run()
    go(plans.DEPLOY, host, first)
    run = new_run(fresh=True)
    assert go(getattr(plans, plan), host, run)["launch"].state == "changed"
    before, alive = picture(machine), lasting(machine)
    again = go(getattr(plans, plan), host, run)
    assert again["kill"].state == again["launch"].state == "unchanged"
    assert picture(machine) == before
    assert lasting(machine) == alive
    assert len([path for path in (machine.home / "fab/runs").iterdir() if path.name[0] == "2"]) == 2


def test_looking_takes_no_lease_and_makes_no_root(machine, new_run, door):
    host, run = machine.host(), new_run()
    link = door(host)
    operations.probe(host, run, link)
    operations.describe(host, run, link)
    assert not (machine.home / "fab").exists()
