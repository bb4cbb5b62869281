from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.agent.call import RefusalError, wait_for
from tests.agent.machine import lives, read_stat

CHILDREN = ("--children", 2, "--new-session-child", "--orphan-child", "--bare-child")


SOON = 1.5
"""Seconds of grace where children ignore SIGTERM: a share of it is spent on them."""


def signals(ended):
    return [(each["pid"], each["signal"]) for each in ended["signals"]]


def test_a_run_that_obeys_gets_one_signal_and_saves(machine, bystander):
    launched = machine.train("--save-seconds", 0.5)
    ended = machine.kill()
    assert ended["changed"]
    assert signals(ended) == [(launched["pid"], "SIGTERM")]
    assert ended["state"] == "finished"
    checkpoint = machine.output / f"step-{ended['step']:08d}"
    assert ended["checkpoint"] == str(checkpoint)
    assert json.loads((checkpoint / "checkpoint.json").read_text())["step"] == ended["step"]
    assert (checkpoint / "PINNED").read_text() == launched["run_id"] + "\n"
    assert not machine.members()
    before = machine.snapshot()
    second = machine.kill()
    assert (second["changed"], second["signals"]) == (False, [])
    assert machine.snapshot() == before
    assert lives(bystander.pid)


def test_where_nothing_ever_ran_nothing_is_stopped(machine):
    machine.deploy()
    assert machine.kill()["changed"] is False


def test_children_of_every_kind_go_and_a_bystander_stays(machine, bystander):
    launched = machine.train(*CHILDREN)
    keeper = machine.record(launched["run_id"])["keeper"]["pid"]
    members = machine.members() | descendants(keeper)
    assert len(members) == 7  # keeper, trainer, 2 + 1 + 1 + 1 children
    ended = machine.kill(grace_s=SOON)
    assert ended["state"] == "finished"
    assert not any(lives(pid) for pid in members)
    hit = {pid for pid, _ in signals(ended)}
    assert hit == members - {keeper}
    first = [name for pid, name in signals(ended) if pid == launched["pid"]]
    assert first == ["SIGTERM"]
    assert lives(bystander.pid)
    assert machine.health()["left_over"] == []


def descendants(pid):
    found = set()
    for path in Path("/proc").iterdir():
        stat = read_stat(int(path.name)) if path.name.isdigit() else None
        if stat is not None and stat["state"] != "Z" and stat["parent"] == pid:
            found |= {int(path.name)} | descendants(int(path.name))
    return found


def test_children_that_outlive_their_trainer_are_seen_and_ended(machine):
    machine.train(*CHILDREN, "--steps", 5)
    health = wait_for(lambda: (h := machine.health())["exit"] and h)
    assert health["state"] == "finished"
    assert len(health["left_over"]) == 5
    assert "5 of its processes are left" in health["detail"]
    with pytest.raises(RefusalError, match="is finished in this root"):
        machine.launch()
    assert machine.kill(grace_s=SOON)["changed"]
    assert not any(lives(pid) for pid in health["left_over"])
    assert machine.launch()["changed"]


def test_a_leader_that_ignores_term_is_killed_after_its_grace(machine):
    launched = machine.train("--ignore-term")
    ended = machine.kill(grace_s=0.3)
    assert signals(ended) == [
        (launched["pid"], name) for name in ("SIGTERM", "SIGCONT", "SIGTERM", "SIGKILL")
    ]
    assert ended["state"] == "killed"
    assert machine.health()["exit"]["signal"] == signal.SIGKILL


def test_a_stopped_leader_is_woken_to_save(machine):
    launched = machine.train()
    os.kill(launched["pid"], signal.SIGSTOP)
    wait_for(lambda: read_stat(launched["pid"])["state"] == "T")
    ended = machine.kill()
    assert signals(ended) == [(launched["pid"], "SIGTERM"), (launched["pid"], "SIGCONT")]
    assert ended["state"] == "finished"


def test_a_stopped_keeper_is_woken_to_write_down_the_end(machine):
    keeper = machine.record(machine.train()["run_id"])["keeper"]["pid"]
    os.kill(keeper, signal.SIGSTOP)
    assert machine.kill()["state"] == "finished"
    assert not lives(keeper)


def test_all_go_when_their_keeper_was_killed(machine):
    launched = machine.train("--children", 1, "--new-session-child", "--orphan-child")
    os.kill(machine.record(launched["run_id"])["keeper"]["pid"], signal.SIGKILL)
    assert machine.kill(grace_s=SOON)["changed"]
    assert not machine.members()


def test_keep_leaves_a_healthy_run_of_the_pair_or_id(machine):
    launched = machine.train()
    record = machine.record(launched["run_id"], "spec.json")
    pair = [record["release"], record["spec_digest"]]
    for keep in (
        {"run_id": "20260101-000000-abcd", "pair": pair},
        {"run_id": launched["run_id"], "pair": None},
    ):
        found = machine.kill(keep=keep)
        assert (found["changed"], found["kept"]) == (False, launched["run_id"])
    assert lives(launched["pid"])
    other = {"run_id": "20260101-000000-abcd", "pair": [pair[0], "0" * 64]}
    dry = machine.kill(keep=other, dry=True)
    assert (dry["changed"], dry["kept"], dry["pid"]) == (True, None, launched["pid"])
    assert lives(launched["pid"])
    assert machine.kill(keep=other)["changed"]


def test_a_pin_moves_only_to_a_checkpoint_of_a_run_that_stepped(machine):
    machine.train()
    first = machine.kill()["checkpoint"]
    machine.launch("--hang-before-first-step")
    wait_for(lambda: machine.health()["phase"] == "loading")
    machine.kill(grace_s=0.1)
    assert Path(first, "PINNED").exists()
    run_id = machine.launch()["run_id"]
    machine.ask("await_progress", run_id=run_id)
    second = machine.kill()["checkpoint"]
    assert Path(second, "PINNED").exists()
    assert not Path(first, "PINNED").exists()


def test_a_cut_kill_goes_on_when_it_is_repeated(machine):
    machine.train("--save-seconds", 1.5)
    call = machine.start("kill", grace_s=30, deadline=40)
    wait_for(lambda: machine.health()["phase"] == "saving")
    call.hang_up()
    assert call.process.wait(5) == 3
    ended = machine.kill()
    assert ended["state"] == "finished"
    assert not machine.members()


def test_kill_tells_a_deadline_that_is_shorter_than_the_grace(machine):
    machine.train("--ignore-term")
    with pytest.raises(RefusalError) as caught:
        machine.ask("kill", grace_s=30, deadline=0.7)
    assert caught.value.code == "deadline"
    machine.kill(grace_s=0.1)


@pytest.mark.skipif(os.getuid() != 0, reason="not run: only root can become another user")
def test_a_process_of_another_user_is_refused(machine):
    launched = machine.train()
    path = machine.run_folder(launched["run_id"]) / "process.json"
    genuine = path.read_text()
    program = "import os, time; os.setuid(65534); print(flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", program], stdout=subprocess.PIPE
    ) as stranger:
        stranger.stdout.readline()
        record = json.loads(genuine)
        record["trainer"].update(pid=stranger.pid, start=read_stat(stranger.pid)["start"])
        path.write_text(json.dumps(record))
        with pytest.raises(RefusalError, match=f"pid {stranger.pid} .* belongs to uid 65534"):
            machine.kill()
        assert lives(stranger.pid)
        assert lives(launched["pid"])
        stranger.kill()
    path.write_text(genuine)


def test_looking_goes_on_while_a_kill_waits(machine):
    machine.train("--save-seconds", 1)
    call = machine.start("kill", grace_s=20, deadline=30)
    states = set()
    while call.process.poll() is None:
        states.add(machine.health()["state"])
        time.sleep(0.05)
    assert call.result()["changed"]
    assert "training" in states
