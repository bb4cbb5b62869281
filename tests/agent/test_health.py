from __future__ import annotations

import fcntl
import json
import os
import signal
import time

import pytest

from tasks.agent import processes
from tests.agent.call import RefusalError, wait_for
from tests.agent.machine import lives, read_stat


def ended(machine):
    return wait_for(lambda: (h := machine.health())["exit"] and h)


def test_absent(machine):
    assert machine.health()["state"] == "absent"
    machine.deploy()
    found = machine.health("20260101-000000-abcd")
    assert (found["state"], found["detail"]) == ("absent", "no such run on this host")


def test_starting_training_and_finished_after_a_stop(machine):
    digest = machine.deploy()
    run_id = machine.launch("--load-seconds", 0.5)["run_id"]
    assert machine.health()["state"] == "starting"
    machine.ask("await_progress", run_id=run_id)
    health = machine.health()
    assert health["state"] == "training"
    assert health["release"] == health["running_release"] == digest
    assert health["age_s"] < 5
    assert health["step"] >= 1
    machine.kill()
    health = machine.health()
    assert health["state"] == "finished"
    assert health["detail"].startswith("stopped at step")
    assert (health["exit"]["code"], health["exit"]["signal"]) == (0, None)
    assert health["exit"]["peak_bytes"] > 1_000_000


def test_finished_by_itself(machine):
    machine.deploy()
    machine.launch("--steps", 3)
    health = ended(machine)
    assert (health["state"], health["detail"]) == ("finished", "finished at step 3")


def test_crashed_tells_code_and_last_lines(machine):
    machine.deploy()
    machine.launch("--crash-at", 4)
    health = ended(machine)
    assert (health["state"], health["exit"]["code"]) == ("crashed", 1)
    assert health["detail"] == "exit 1 at step 3"
    assert health["last_lines"][-1] == "RuntimeError: planted at step 4"


def test_the_age_of_a_run_that_ended_is_the_time_since_its_end(machine):
    machine.deploy()
    run_id = machine.launch("--steps", 1)["run_id"]
    record = ended(machine)["exit"]
    assert 0 <= machine.health()["age_s"] < 10
    path = machine.run_folder(run_id) / "exit.json"
    path.write_text(json.dumps({**record, "boottime": record["boottime"] - 100}))
    assert 100 <= machine.health()["age_s"] < 110
    before = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 7200))
    path.write_text(json.dumps({**record, "boot_id": "an earlier one", "when": before}))
    assert 7200 <= machine.health()["age_s"] < 7300
    path.write_text(json.dumps({**record, "boot_id": "an earlier one", "when": "junk"}))
    assert machine.health()["age_s"] is None


def test_killed_tells_the_signal(machine):
    machine.deploy()
    machine.launch("--die-at", 3)
    health = ended(machine)
    assert (health["state"], health["exit"]["signal"]) == ("killed", 9)
    assert health["detail"] == "killed by SIGKILL at step 2"
    assert health["last_lines"][-1].startswith("step      2/")


def test_killed_with_a_risen_counter_hints_at_memory(machine):
    machine.deploy()
    run_id = machine.launch("--die-at", 1)["run_id"]
    record = ended(machine)["exit"]
    record["oom_kills"] = 1
    (machine.run_folder(run_id) / "exit.json").write_text(json.dumps(record))
    assert "consistent with the kernel's out-of-memory killer" in machine.health()["detail"]


def test_stalled_by_phase(machine):
    run_id = machine.train("--hang-at", 3)["run_id"]
    path = machine.run_folder(run_id) / "status.json"
    wait_for(lambda: json.loads(path.read_text())["step"] == 2)
    status = json.loads(path.read_text())
    now = time.clock_gettime(time.CLOCK_BOOTTIME)

    def with_status(**changes):
        path.write_text(json.dumps({**status, **changes}))
        return machine.health()["state"]

    assert with_status(step_boottime=now - 55) == "training"
    assert with_status(step_boottime=now - 70) == "stalled"
    assert with_status(step_boottime=now - 70, median_step_s=20.0) == "training"
    assert with_status(step_boottime=now - 300, phase="saving", boottime=now - 50) == "training"
    assert with_status(phase="saving", boottime=now - 601) == "stalled"
    loading = {"phase": "loading", "step_boottime": None}
    assert with_status(**loading, boottime=now - 1700) == "starting"
    assert with_status(**loading, boottime=now - 1900) == "stalled"
    assert with_status(phase="starting", step_boottime=None, boottime=now - 901) == "stalled"


def test_lost_when_nobody_wrote_how_it_ended(machine):
    run_id = machine.train()["run_id"]
    record = machine.record(run_id)
    for who in ("keeper", "trainer"):
        os.kill(record[who]["pid"], signal.SIGKILL)
    wait_for(lambda: not lives(record["trainer"]["pid"]))
    health = machine.health()
    assert health["state"] == "lost"
    assert "no process and no record of its end at step" in health["detail"]
    assert health["last_lines"]
    assert machine.launch()["changed"]


def test_lost_after_a_reboot_although_the_pid_lives(machine):
    run_id = machine.train()["run_id"]
    path = machine.run_folder(run_id) / "process.json"
    record = json.loads(path.read_text())
    machine.kill()
    (machine.run_folder(run_id) / "exit.json").unlink()
    status = machine.run_folder(run_id) / "status.json"
    status.write_text(json.dumps({**json.loads(status.read_text()), "phase": "training"}))
    mine = {"pid": os.getpid(), "start": read_stat(os.getpid())["start"]}
    for who in ("keeper", "trainer"):
        record[who] = {**mine, "boot_id": "an-earlier-boot"}
    path.write_text(json.dumps(record))
    health = machine.health()
    assert health["state"] == "lost"
    assert "the host was rebooted" in health["detail"]
    assert machine.kill()["changed"] is False


@pytest.mark.parametrize(
    "value",
    [
        None,
        5,
        [],
        {},
        {"pid": 0, "start": 1, "boot_id": "b"},
        {"pid": -1, "start": 1, "boot_id": "b"},
        {"pid": 1, "start": 0, "boot_id": "b"},
        {"pid": True, "start": 1, "boot_id": "b"},
        {"pid": "7", "start": 1, "boot_id": "b"},
        {"pid": 7, "start": -1, "boot_id": "b"},
        {"pid": 7, "start": 1, "boot_id": ""},
        {"pid": 7, "start": 1},
    ],
)
def test_what_names_no_process_for_certain_names_none(value):
    assert processes.identity(value) is None


@pytest.mark.parametrize("text", ["", '{"trainer": {"pid": -1, "start": 1}}', "[" * 100_000])
def test_a_junk_record_names_nobody_and_the_tag_finds_the_run(machine, text, bystander):
    run_id = machine.train()["run_id"]
    record = machine.record(run_id)
    (machine.run_folder(run_id) / "process.json").write_text(text)
    health = machine.health()
    assert health["state"] == "training, unsupervised"
    assert f"pid {record['trainer']['pid']} carries this run id" in health["detail"]
    with pytest.raises(RefusalError, match="in this root"):
        machine.launch()
    ended = machine.kill()
    assert [each["signal"] for each in ended["signals"]] == ["SIGTERM"]
    assert ended["state"] == "finished"
    assert lives(bystander.pid)


def test_a_reused_pid_is_not_our_trainer(machine, bystander):
    run_id = machine.train()["run_id"]
    machine.kill()
    path = machine.run_folder(run_id) / "process.json"
    record = json.loads(path.read_text())
    for who in ("keeper", "trainer"):
        record[who]["pid"] = bystander.pid
    path.write_text(json.dumps(record))
    (machine.run_folder(run_id) / "exit.json").unlink()
    assert machine.health()["state"] == "finished"
    assert machine.kill()["changed"] is False
    assert lives(bystander.pid)


def test_looking_takes_no_lock_and_no_lease(machine):
    machine.train()
    machine.token = None
    with (machine.root / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert machine.health()["state"] == "training"
        assert machine.ask("status")["status"]["phase"] == "training"
        assert machine.ask("logs")["text"]
        assert machine.ask("probe")["run"]["state"] == "training"
        assert machine.ask("lease_show")["lease"]["who"] == "tester"


def test_await_progress_tells_a_crash_at_once(machine):
    machine.deploy()
    run_id = machine.launch("--exit-before-first-step")["run_id"]
    with pytest.raises(RefusalError, match=r" died: exit 2") as caught:
        machine.ask("await_progress", run_id=run_id)
    assert caught.value.code == "no-first-step"
    assert caught.value.data["why"] == "crashed"
    assert caught.value.data["exit"]["code"] == 2
    assert caught.value.data["last_lines"] == ["trainer: --data-dir is missing; give a folder"]


def test_await_progress_gives_up_at_its_limit_and_takes_no_nan(machine):
    machine.deploy()
    run_id = machine.launch("--hang-before-first-step")["run_id"]
    with pytest.raises(RefusalError) as caught:
        machine.ask("await_progress", run_id=run_id, seconds=0.5)
    assert caught.value.data["why"] == "deadline"
    with pytest.raises(RefusalError) as caught:
        machine.ask("await_progress", run_id=run_id, deadline=1.5)
    assert caught.value.data["why"] == "deadline"
    machine.kill(grace_s=0.1)
    run_id = machine.launch("--nan-at", 1)["run_id"]
    with pytest.raises(RefusalError) as caught:
        machine.ask("await_progress", run_id=run_id)
    assert caught.value.data["exit"]["code"] == 3


def test_await_progress_takes_the_live_run_of_the_pair(machine):
    launched = machine.train()
    record = machine.record(launched["run_id"], "spec.json")
    pair = [record["release"], record["spec_digest"]]
    found = machine.ask("await_progress", run_id=machine.run_id(), pair=pair)
    assert found["run_id"] == launched["run_id"]
    with pytest.raises(RefusalError):
        machine.ask("await_progress", run_id=machine.run_id(), pair=["0" * 64, pair[1]])
