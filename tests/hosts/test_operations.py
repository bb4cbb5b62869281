"""Each operation against a real host with the stub trainer, and what the errors say."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading

import pytest

from tasks import errors, operations
from tasks import release as releases
from tasks.fleet import carry_out
from tasks.inventory import launch_spec, spec_digest
from tasks.link import Link
from tasks.operations import (
    await_progress,
    describe,
    health,
    kill,
    launch,
    probe,
    sync,
    verify,
    verify_features,
)
from tests.hosts.ground import until
from tests.hosts.machine import settings
from tests.hosts.relay import Relay

DEPLOY = (probe, sync, verify, verify_features, kill, launch, await_progress)


@pytest.fixture
def deploy(notes):
    """`deploy(host, run)`: the whole plan; gives the outcomes by operation."""

    def go(host, run, plan=DEPLOY):
        done = carry_out(
            plan,
            [host],
            run,
            links=lambda host: Link(host, notify=notes.append),
            on_outcome=lambda _: None,
        )
        return {outcome.operation: outcome for outcome in done}

    return go


def states(outcomes):
    return {name: outcome.state for name, outcome in outcomes.items()}


def trainer_of(machine, run_id):
    return [p for p in machine.processes() if p.carries(f"TRAINER_RUN_ID={run_id}")]


def lasting(machine):
    """What runs there once no connection is open any more."""
    until(lambda: not machine.sessions(), what="end of all connections")
    return sorted((p.pid, p.started) for p in machine.processes())


def test_a_first_deploy_brings_the_run_to_its_first_step(machine, deploy, new_run):
    run, host = new_run(), machine.host()
    outcomes = deploy(host, run)
    assert states(outcomes) == {
        "probe": "ok",
        "sync": "changed",
        "verify": "ok",
        "verify_features": "ok",
        "kill": "unchanged",
        "launch": "changed",
        "await_progress": "ok",
    }
    root = machine.home / "fab"
    assert (root / "current").resolve().name == run.release.digest
    assert trainer_of(machine, run.id)
    spec = json.loads((root / "runs" / run.id / "spec.json").read_text())
    assert spec_digest(launch_spec(host)) in json.dumps(spec)
    assert not (root / "lease").exists()
    for outcome in outcomes.values():
        assert outcome.detail


def test_a_deploy_of_what_already_runs_leaves_it_alone(machine, deploy, new_run):
    run, host = new_run(), machine.host()
    deploy(host, run)
    before = lasting(machine)
    again = new_run()
    outcomes = deploy(host, again)
    assert outcomes["kill"].state == "unchanged"
    assert outcomes["launch"].state == "unchanged"
    assert run.id in outcomes["launch"].detail
    assert lasting(machine) == before


def test_a_changed_file_alone_travels_and_its_run_replaces_the_old_one(
    machine, deploy, new_run, stub
):
    first, host = new_run(), machine.host()
    deploy(host, first)
    (stub / "loop.py").write_text((stub / "loop.py").read_text() + "\n# changed\n")
    second = new_run(release=releases.read_tree(stub))
    outcomes = deploy(host, second)
    assert outcomes["sync"].facts["sent_files"] == 1
    assert outcomes["kill"].state == "changed"
    assert not trainer_of(machine, first.id)
    assert trainer_of(machine, second.id)


def test_a_fresh_run_is_made_even_of_the_same_release(machine, deploy, new_run):
    first, host = new_run(), machine.host()
    deploy(host, first)
    second = new_run(fresh=True)
    outcomes = deploy(host, second)
    assert outcomes["kill"].state == "changed"
    assert trainer_of(machine, second.id)
    assert not trainer_of(machine, first.id)
    # The same invocation once more: its run is there.
    before = lasting(machine)
    assert states(deploy(host, second))["launch"] == "unchanged"
    assert lasting(machine) == before


def test_a_dry_run_says_what_would_change_and_changes_nothing(machine, deploy, new_run):
    outcomes = deploy(machine.host(), new_run(dry=True))
    assert outcomes["sync"].state == "would change"
    assert outcomes["launch"].state == "would change"
    assert not [o for o in outcomes.values() if o.state == "FAILED"]
    assert not (machine.home / "fab").exists()
    first = new_run()
    deploy(machine.host(), first)
    before = lasting(machine)
    outcomes = deploy(machine.host(), new_run(dry=True, fresh=True))
    assert states(outcomes)["kill"] == "would change"
    assert states(outcomes)["launch"] == "would change"
    assert lasting(machine) == before


def test_verification_stops_a_deploy_before_the_old_run_is_stopped(machine, deploy, new_run):
    first, host = new_run(), machine.host()
    deploy(host, first)
    wanted = dataclasses.replace(host.run, features=("teleportation",))
    outcomes = deploy(dataclasses.replace(host, run=wanted), new_run(fresh=True))
    failed = outcomes["verify_features"].error
    assert isinstance(failed, errors.VerificationFailed)
    assert "teleportation" in str(failed)
    assert outcomes["kill"].state == "skipped"
    assert trainer_of(machine, first.id)


def test_a_damaged_release_is_named_file_by_file(machine, deploy, new_run, door):
    run, host = new_run(), machine.host()
    deploy(host, run, (sync,))
    victim = machine.home / "fab/releases" / run.release.digest / "trainer/loop.py"
    victim.chmod(0o644)
    victim.write_text("changed = True\n")
    with pytest.raises(errors.VerificationFailed, match=r"loop\.py"):
        verify(host, run, door(host))


def test_a_release_that_is_not_there_says_fab_sync(machine, new_run, door):
    with pytest.raises(errors.VerificationFailed, match="fab sync --host gpu1"):
        verify(machine.host(), new_run(), door(machine.host()))


def test_a_run_that_crashes_before_its_first_step_is_told_with_its_last_words(
    machine, deploy, new_run
):
    host = machine.host(run=settings(exit_before_first_step=True))
    outcome = deploy(host, new_run())["await_progress"]
    assert isinstance(outcome.error, errors.NoFirstStep)
    assert outcome.error.exit_code == 10


def test_a_run_that_hangs_before_its_first_step_is_given_up_at_the_deadline(
    machine, deploy, new_run
):
    hang = dataclasses.replace(settings(hang_before_first_step=True), first_step_seconds=2)
    outcome = deploy(machine.host(run=hang), new_run())["await_progress"]
    assert isinstance(outcome.error, errors.NoFirstStep)
    assert outcome.seconds < 8


def test_health_is_an_error_when_nothing_was_ever_started(machine, new_run, door):
    with pytest.raises(errors.Unhealthy, match="no run was ever started"):
        health(machine.host(), new_run(), door(machine.host()))


def test_health_of_a_crash_is_an_error_and_describe_only_says_it(machine, deploy, new_run, door):
    host = machine.host(run=settings(crash_at=3))
    run = new_run()
    deploy(host, run)
    link = door(host)
    until(lambda: "crashed" in describe(host, run, link))
    with pytest.raises(errors.Unhealthy, match="crashed"):
        health(host, run, link)


def test_a_root_of_another_machine_is_refused(machine, deploy, new_run):
    deploy(machine.host(), new_run(), (sync,))
    about = machine.home / "fab/machine.json"
    facts = json.loads(about.read_text())
    facts["machine_id"] = "f" * 32
    about.chmod(0o600)
    about.write_text(json.dumps(facts))
    outcome = deploy(machine.host(), new_run(), (sync,))["sync"]
    assert isinstance(outcome.error, errors.NotOurRoot)


def test_somebody_elses_lease_is_respected(machine, deploy, new_run, door):
    host = machine.host()
    anna = new_run(by=operations.By(who="anna", host="her-desk", why="fab deploy"))
    anna = dataclasses.replace(anna, lease=operations.new_lease())
    operations.take_lease(host, anna, door(host))
    outcome = deploy(host, new_run(), (sync,))["sync"]
    assert isinstance(outcome.error, errors.LeaseHeld)
    assert "anna" in str(outcome.error)
    assert outcome.error.exit_code == 5
    operations.give_back_lease(host, anna, door(host))
    assert deploy(host, new_run(), (sync,))["sync"].state == "changed"


def test_kill_ends_the_run_and_only_the_run(machine, deploy, new_run):
    run, host = new_run(), machine.host()
    deploy(host, run)
    words = trainer_of(machine, run.id)[0].words
    bystander = machine.start(["sleep", "60"], executable=None)
    try:
        outcome = deploy(host, new_run(release=None), (kill,))["kill"]
        assert outcome.state == "changed"
        assert not trainer_of(machine, run.id)
        assert bystander.poll() is None
        assert words
    finally:
        bystander.kill()
        bystander.wait()


def test_a_launch_whose_verb_is_killed_is_told_and_a_retry_finds_its_run(
    machine, deploy, new_run, monkeypatch
):
    run, host = new_run(), machine.host()
    deploy(host, run, (sync,))
    link_ask = Link.ask

    def killed_after_acting(self, verb, arguments, **options):
        reply = link_ask(self, verb, arguments, **options)
        if verb == "launch":
            raise errors.RemoteKilled(self.host.name, "launch: by SIGKILL on the host")
        return reply

    with monkeypatch.context() as patched:
        patched.setattr(Link, "ask", killed_after_acting)
        outcome = deploy(host, run, (launch,))["launch"]
    assert isinstance(outcome.error, errors.RemoteKilled)
    assert f"read again: run {run.id} is" in str(outcome.error)
    again = deploy(host, run, (launch, await_progress))
    assert states(again) == {"launch": "unchanged", "await_progress": "ok"}
    assert len([p for p in machine.processes() if "trainer train" in p.words]) == 1


def test_a_wait_whose_path_is_cut_goes_on_over_a_new_one(machine, deploy, new_run, notes):
    run, host = new_run(), machine.host(run=settings(load_seconds=2))
    deploy(host, run, (sync, launch))
    with Relay(machine.port) as relay:
        through = dataclasses.replace(host, port=relay.port, host_key=machine.host_key)

        def cut():
            until(machine.verbs)
            relay.cut()

        cutter = threading.Thread(target=cut)
        cutter.start()
        outcome = deploy(through, run, (await_progress,))["await_progress"]
        cutter.join()
    assert outcome.state == "ok"
    assert [note for note in notes if "await-progress asked again" in note]


def test_ctrl_c_ends_the_waiting_gives_the_lease_back_and_tells_what_was_under_way(
    machine, deploy, new_run
):
    run, host = new_run(), machine.host(run=settings(hang_before_first_step=True))

    def press():
        trainer = until(lambda: trainer_of(machine, run.id), 20)[0]
        # The verb that launched it began before it; the one that waits for its step, after.
        until(lambda: [verb for verb in machine.verbs() if verb.started > trainer.started], 20)
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(errors.Interrupted, match="await-progress on gpu1 under way"):
        deploy(host, run)
    presser.join()
    assert not (machine.home / "fab/lease").exists()
    assert trainer_of(machine, run.id)
    until(lambda: not machine.sessions(), what="end of all connections")


def test_a_killed_keeper_is_seen_from_the_desk(machine, deploy, new_run, door):
    run, host = new_run(), machine.host()
    deploy(host, run)
    record = json.loads((machine.home / "fab/runs" / run.id / "process.json").read_text())
    keeper = next(
        p
        for p in machine.processes()
        if p.words and "zlib.decompress" in p.words and not p.carries("TRAINER_RUN_ID=")
    )
    os.kill(keeper.pid, signal.SIGKILL)
    link = door(host)
    until(lambda: "unsupervised" in describe(host, run, link))
    assert record
