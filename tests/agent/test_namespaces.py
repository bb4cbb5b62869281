"""Hosts whose PID 1 reaps nothing, and numbers that are given out again: in namespaces of ours."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tasks.link.program import AGENT
from tests.agent.call import RefusalError, wait_for
from tests.agent.machine import Machine, lives, read_file, read_stat

pytestmark = pytest.mark.needs_namespaces


@pytest.fixture
def container(tmp_path, not_run):
    """A host with a PID namespace whose PID 1 is `sleep`: it reaps nothing."""
    if os.getuid() != 0:
        not_run("needs root for a PID namespace")
    enter = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sleep", "120"]
    with subprocess.Popen(enter) as unshare:
        first = wait_for(lambda: child_of(unshare))
        wait_for(lambda: read_file(f"/proc/{first}/comm") == b"sleep\n")
        one = Machine(tmp_path, prefix=["nsenter", "-t", str(first), "-p", "-m"])
        one.first = first
        one.deploy()
        yield one
        one.close()
        unshare.kill()


def child_of(process):
    if process.poll() is not None:
        pytest.skip("not run: unshare cannot make a PID namespace here")
    text = read_file(f"/proc/{process.pid}/task/{process.pid}/children").split()
    return int(text[0]) if text else 0


def inside(machine, *words):
    done = subprocess.run([*machine.prefix, *words], capture_output=True, text=True, check=True)
    return done.stdout


def test_a_zombie_leader_that_nobody_reaps_is_gone(container):
    run_id = container.launch("--children", 1)["run_id"]
    container.ask("await_progress", run_id=run_id)
    record = container.record(run_id)
    keeper, trainer = record["keeper"]["pid"], record["trainer"]["pid"]
    inside(container, "kill", "-9", str(keeper), str(trainer))
    wait_for(lambda: inside(container, "ps", "-o", "stat=", "-p", str(trainer)).startswith("Z"))
    assert inside(container, "kill", "-0", str(trainer)) == ""  # as a naive check would see it
    health = container.health()
    assert health["state"] == "lost"
    assert len(health["left_over"]) == 1
    ended = container.kill(grace_s=1)
    assert {each["signal"] for each in ended["signals"]} >= {"SIGTERM"}
    assert trainer not in {each["pid"] for each in ended["signals"]}
    assert ended["seconds"] < 10
    assert container.ask("probe")["pid1_reaps"] is False
    assert container.launch()["changed"]


def test_orphans_stay_under_the_keeper_where_nobody_else_reaps(container):
    run_id = container.launch("--orphan-child", "--bare-child", "--steps", 3)["run_id"]
    health = wait_for(lambda: (h := container.health(run_id))["exit"] and h)
    assert (health["state"], len(health["left_over"])) == ("finished", 2)
    assert container.kill(grace_s=1)["changed"]
    states = inside(container, "ps", "-e", "-o", "pid=,stat=").split("\n")
    alive = [line for line in states if line.strip() and "Z" not in line]
    assert len(alive) == 2  # PID 1 and ps


def test_a_pid_that_was_given_out_again_is_left_alone(container):
    run_id = container.launch("--steps", 3)["run_id"]
    wait_for(lambda: container.health(run_id)["exit"])
    pid = container.record(run_id)["trainer"]["pid"]
    (container.run_folder(run_id) / "exit.json").unlink()
    wait_for(lambda: inside(container, "ps", "-e", "-o", "pid=").split().count(str(pid)) == 0)
    again = f"echo {pid - 1} > /proc/sys/kernel/ns_last_pid; exec sleep 60 & echo $!"
    with subprocess.Popen(
        [*container.prefix, "sh", "-c", again], stdout=subprocess.PIPE, text=True
    ) as stranger:
        assert int(stranger.stdout.readline()) == pid
        assert container.health(run_id)["state"] == "finished"
        assert container.kill()["changed"] is False
        assert inside(container, "ps", "-o", "comm=", "-p", str(pid)).strip() == "sleep"
        inside(container, "kill", "-9", str(pid))


def test_a_restarted_container_is_told_apart_by_start_times(container, tmp_path):
    run_id = container.launch()["run_id"]
    container.ask("await_progress", run_id=run_id)
    os.kill(container.first, signal.SIGKILL)
    wait_for(lambda: not lives(container.first))
    outside = Machine(tmp_path)
    outside.token = container.token
    try:
        health = outside.health()
        assert health["state"] == "lost"
        assert outside.launch()["changed"]
    finally:
        outside.close()
    assert read_stat(container.first) is None or not lives(container.first)


@pytest.fixture
def freezer(not_run):
    """A control group whose processes no signal reaches while it is frozen."""
    top = Path("/sys/fs/cgroup/freezer")
    if os.getuid() != 0 or not (top / "cgroup.procs").exists():
        not_run("needs root and a freezer of cgroup v1")
    group = top / f"agent-test-{os.getpid()}"
    group.mkdir()
    yield group
    (group / "freezer.state").write_text("THAWED")
    wait_for(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


def test_a_process_that_cannot_be_ended_is_named_with_its_state(machine, freezer, tmp_path):
    agent = shutil.copytree(AGENT, tmp_path / "agent")
    text = (agent / "stop.py").read_text()
    assert "KILL_S = 15.0" in text
    (agent / "stop.py").write_text(text.replace("KILL_S = 15.0", "KILL_S = 0.5"))
    machine.agent = agent
    launched = machine.train()
    (freezer / "cgroup.procs").write_text(str(launched["pid"]))
    (freezer / "freezer.state").write_text("FROZEN")
    wait_for(lambda: (freezer / "freezer.state").read_text() == "FROZEN\n")
    words = rf"cannot be ended: pid {launched['pid']}, uid 0, state D, wchan \S+; what hangs"
    with pytest.raises(RefusalError, match=words) as caught:
        machine.kill(grace_s=0.1)
    assert caught.value.code == "failed"
    with pytest.raises(RefusalError, match="in this root"):
        machine.launch()
    (freezer / "freezer.state").write_text("THAWED")
    wait_for(lambda: not machine.members())
    assert machine.kill()["changed"] is False


def test_a_full_disk_does_not_hide_how_a_run_ended(small_disk):
    run_id = small_disk.launch("--load-seconds", 1.5, "--crash-at", 3)["run_id"]
    folder = small_disk.run_folder(run_id)
    small_disk.fill()
    pid = json.loads(small_disk.inside(f"cat {folder}/process.json"))["trainer"]["pid"]
    wait_for(lambda: not lives(pid))
    assert small_disk.health(run_id)["exit"] is None
    small_disk.empty()
    health = wait_for(lambda: (h := small_disk.health(run_id))["exit"] and h)
    assert (health["state"], health["exit"]["code"]) == ("crashed", 1)


DEVICES = """
set -e
mkdir "$1" && mount -t tmpfs tmpfs "$1" && cd "$1"
for name in null zero full random urandom; do touch $name; mount --bind /dev/$name $name; done
mkdir shm && touch nvidiactl nvidia0 && cd /
mount --move "$1" /dev
"""


def test_who_else_holds_a_gpu_of_the_run_is_named_when_it_was_ended(container, tmp_path):
    inside(container, "sh", "-c", DEVICES, "devices", str(tmp_path / "devices"))
    container.change("HELD = open('/dev/nvidia0')\n")
    container.sync()
    container.ask("await_progress", run_id=container.launch()["run_id"])
    assert not [line for line in container.kill()["warnings"] if "nvidia" in line]
    container.ask("await_progress", run_id=container.launch()["run_id"])
    hold = "exec sleep 60 < /dev/nvidia0"
    with subprocess.Popen([*container.prefix, "sh", "-c", hold]) as stranger:
        pid = wait_for(lambda: inside(container, "sh", "-c", "pgrep -x sleep || true").split()[1:])
        told = [line for line in container.kill()["warnings"] if "/dev/nvidia0" in line]
        assert len(told) == 1
        assert pid[0] in told[0]
        stranger.kill()
