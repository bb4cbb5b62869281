"""Whose a root is: shared, another user's, copied, beside another, or of before a restart."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal

import pytest

from tasks import errors, plans
from tasks.fleet import carry_out
from tasks.link import Link
from tests.hosts.desk import Desk
from tests.hosts.ground import needs, until
from tests.hosts.machine import settings


@pytest.fixture
def deploy(new_run, notes):
    """`deploy(host)`: the outcome of the plan's last operation that was done."""

    def make(host, plan=plans.DEPLOY, **changes):
        outcomes = carry_out(
            plan,
            [host],
            new_run(**changes),
            links=lambda host: Link(host, notify=notes.append),
            on_outcome=lambda _: None,
        )
        return [each for each in outcomes if each.state != "skipped"][-1]

    return make


@pytest.fixture
def pair(lab, tmp_path):
    """Two hosts with PID spaces and machine ids of their own, that see one disk."""
    needs("pidns")
    made = []
    for name in ("first", "second"):
        machine = lab.start(f"{name}-{tmp_path.name[-12:]}", mode="pidns")
        (machine.folder / "id").write_text(f"{name:0>32}\n")
        mount = ["mount", "--bind", str(machine.folder / "id"), "/etc/machine-id"]
        assert machine.inside(mount).returncode == 0
        made.append(machine)
    yield made
    for machine in made:
        machine.close()


def trainers(machine):
    return [each.pid for each in machine.processes() if "trainer train" in each.words]


def test_a_root_on_a_shared_disk_is_refused_and_the_other_run_goes_on(pair, deploy):
    first, second = pair
    host = first.host()
    assert deploy(host).state == "ok"
    (pid,) = trainers(first)
    shared = second.host(root=f"{first.home}/fab")
    for plan in (plans.DEPLOY, plans.KILL, plans.RESTART, plans.STATUS, plans.VERIFY):
        error = deploy(shared, plan).error
        assert type(error) is errors.NotOurRoot, plan
        assert "root is shared with" in str(error)
        assert error.exit_code == 2
        assert error.facts["machine_id"] == f"{'first':0>32}"
    assert trainers(first) == [pid]
    assert trainers(second) == []


def test_a_copied_root_is_refused_until_it_is_said_to_be_a_copy(pair, deploy):
    first, second = pair
    assert deploy(first.host()).state == "ok"
    shutil.copytree(first.home / "fab", second.home / "fab", symlinks=True)
    error = deploy(second.host()).error
    assert type(error) is errors.NotOurRoot
    machine_json = second.home / "fab/machine.json"
    assert f"remove {machine_json}" in str(error)
    machine_json.unlink()
    # The run in the copy is none of this machine's, whatever its record says of pids.
    assert deploy(second.host()).state == "ok"
    assert len(trainers(first)) == len(trainers(second)) == 1


def test_a_copied_machine_with_the_same_id_is_told_by_its_name(machine, deploy):
    assert deploy(machine.host()).state == "ok"
    path = machine.home / "fab/machine.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "host": "the-original"}))
    outcome = deploy(machine.host(), plans.DEPLOY[:1])
    assert outcome.state == "ok"
    assert "was made by the-original" in outcome.detail
    assert "machine-id-setup" in outcome.detail


def test_the_root_of_another_user_is_refused(machine, deploy):
    assert deploy(machine.host()).state == "ok"
    path = machine.home / "fab/machine.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "uid": 4321}))
    error = deploy(machine.host(), plans.KILL, fresh=True).error
    assert type(error) is errors.NotOurRoot
    assert f"root belongs to uid 4321, and this is uid {os.getuid()}" in str(error)
    assert len(trainers(machine)) == 1


def test_two_projects_on_one_host_do_not_touch_each_other(machine, deploy):
    one = machine.host(root="~/one", run=settings(output_dir="~/out-one"))
    two = machine.host(root="~/two", run=settings(output_dir="~/out-two"))
    assert deploy(one).state == "ok"
    (first,) = trainers(machine)
    assert deploy(two).state == "ok"
    both = set(trainers(machine))
    assert len(both) == 2
    assert first in both
    assert deploy(two, plans.KILL, fresh=True).state == "changed"
    assert trainers(machine) == [first]
    clash = dataclasses.replace(two, run=settings(output_dir="~/out-one"))
    error = deploy(clash).error
    assert type(error) is errors.VerificationFailed
    assert "/one of" in str(error)
    assert trainers(machine) == [first]


def test_devices_that_another_project_holds_are_refused_by_name(machine, deploy):
    one = machine.host(root="~/one", run=settings(output_dir="~/out-one"))
    two = machine.host(root="~/two", run=settings(output_dir="~/out-two"))
    assert deploy(one).state == "ok"
    assert deploy(two, plans.SYNC).state == "changed"
    # Verify asks nvidia-smi, which this machine does not have; the launch asks who holds them.
    held = dataclasses.replace(one, devices=(0, 1))
    assert deploy(held, plans.KILL).state == "changed"
    assert deploy(held, plans.RUN[1:2]).state == "changed"
    error = deploy(dataclasses.replace(two, devices=(1, 2)), plans.RUN[1:2]).error
    assert type(error) is errors.RemoteRefusal
    assert "devices [1]: held by run" in str(error)
    assert "/one (pid" in str(error)


def test_a_host_whose_container_was_restarted_says_so_and_trains_on(tmp_path, stub, lab):
    needs("pidns")
    machine = lab.start("restarted", mode="pidns")
    desk = Desk(tmp_path, stub, machine)
    name = machine.name
    desk.fab("deploy")
    os.kill(machine.first(), signal.SIGKILL)
    machine.process.wait(10)
    until(lambda: not trainers(machine) if machine.process.poll() is None else True)
    lab._run(machine, "reap", [])
    until(lambda: machine.inside(["true"]).returncode == 0)
    until(lambda: _answers(machine), what="sshd after the restart")
    (row,) = [each for each in desk.objects("status") if each["kind"] == "status"]
    assert row["state"] == "lost"
    assert "its keeper or container was killed" in row["detail"]
    lines = desk.fab("doctor", exits=7)
    assert [line for line in lines if line.split()[:2] == ["run", "broken"]]
    lines = desk.fab("deploy")
    told = {line.split()[1]: line for line in lines if line.startswith(f"{name}  ")}
    assert "changed" in told["launch"]
    assert len(trainers(machine)) == 1


def _answers(machine):
    import socket

    try:
        with socket.create_connection(("127.0.0.1", machine.port), timeout=1) as sock:
            return sock.recv(4) == b"SSH-"
    except OSError:
        return False
