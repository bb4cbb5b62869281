from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from pathlib import Path

import pytest

from tasks.agent.desk import Refused
from tasks.agent.spec import Spec
from tests.agent.call import RefusalError, wait_for
from tests.agent.machine import Machine, lives, read_file, read_stat


def test_a_run_is_launched_once(machine):
    digest = machine.deploy()
    spec = machine.spec("--steps", 1000)
    run_id = machine.run_id()
    first = machine.launch(run_id=run_id, spec=spec)
    assert first["changed"]
    machine.ask("await_progress", run_id=run_id)
    before = machine.snapshot()
    second = machine.launch(run_id=run_id, spec=spec)
    assert (second["changed"], second["pid"]) == (False, first["pid"])
    assert machine.snapshot() == before
    assert str((machine.root / "current").readlink()) == f"releases/{digest}"
    assert str((machine.root / "runs" / "latest").readlink()) == run_id
    assert machine.temporary() == []


def test_the_same_pair_is_accepted_and_another_run_refused(machine):
    first = machine.train()
    again = machine.launch(accept_pair=True)
    assert (again["changed"], again["run_id"]) == (False, first["run_id"])
    with pytest.raises(RefusalError, match=r"is training in this root \(pid \d+\); run `fab kill`"):
        machine.launch()
    with pytest.raises(RefusalError, match="is training in this root"):
        machine.launch("--steps", 7, accept_pair=True)


def test_a_pair_that_trained_to_its_end_is_not_launched_again(machine):
    machine.deploy()
    run_id = machine.launch("--steps", 3)["run_id"]
    wait_for(lambda: machine.health()["state"] == "finished")
    before = machine.snapshot()
    again = machine.launch("--steps", 3, accept_pair=True)
    assert (again["changed"], again["run_id"], again["state"]) == (False, run_id, "finished")
    record = machine.record(run_id, "spec.json")
    pair = [record["release"], record["spec_digest"]]
    found = machine.ask("await_progress", run_id=machine.run_id(), pair=pair)
    assert (found["run_id"], found["state"], found["step"]) == (run_id, "finished", 3)
    assert machine.snapshot() == before


def test_a_run_that_finds_nothing_left_to_train_has_not_failed(machine):
    machine.deploy()
    for _ in range(2):
        run_id = machine.launch("--steps", 3)["run_id"]
        wait_for(lambda: machine.health()["state"] == "finished")
    found = machine.ask("await_progress", run_id=run_id)
    assert (found["run_id"], found["state"], found["step"]) == (run_id, "finished", 3)
    assert not (machine.run_folder(run_id) / "failed.json").exists()


def test_a_pair_whose_last_checkpoint_is_gone_is_launched_again(machine):
    machine.deploy()
    machine.launch("--steps", 3)
    wait_for(lambda: machine.health()["state"] == "finished")
    shutil.rmtree(machine.output / "step-00000003")
    assert machine.launch("--steps", 3, accept_pair=True)["changed"]


def test_keeper_and_trainer_stand_alone(machine):
    run_id = machine.train()["run_id"]
    record = machine.record(run_id)
    keeper, trainer = record["keeper"]["pid"], record["trainer"]["pid"]
    assert read_stat(keeper)["session"] == record["session"] != os.getsid(0)
    assert read_stat(trainer)["parent"] == keeper
    assert read_stat(trainer)["start"] == record["trainer"]["start"]
    assert read_file(f"/proc/{keeper}/comm") == b"fab-keeper\n"
    files = {int(p.name): str(p.readlink()) for p in Path(f"/proc/{trainer}/fd").iterdir()}
    log = str(machine.run_folder(run_id) / "train.log")
    assert files[0] == os.devnull
    assert files[1] == files[2] == log
    # The stub itself holds a lock, to find out whether two of it ever live at once.
    assert {n for n, path in files.items() if not path.endswith("/.alone")} == {0, 1, 2}
    kept = [str(p.readlink()) for p in Path(f"/proc/{keeper}/fd").iterdir()]
    assert {os.devnull, log, str(machine.run_folder(run_id) / "keeper.log")} == set(kept)
    assert str(Path(f"/proc/{trainer}/cwd").readlink()) == os.path.realpath(
        machine.root / "current"
    )


def test_the_environment_is_what_the_spec_says_and_nothing_of_the_login(machine):
    machine.deploy()
    spec = machine.spec(env={"A": "~/x", "TRAINER_RUN_ID": "mine"}, secret_names=["TOKEN"])
    spec["devices"] = [2, 3]
    launched = machine.launch(spec=spec, secret={"TOKEN": "hush-hush"})
    run_id = launched["run_id"]
    pairs = read_file(f"/proc/{launched['pid']}/environ").decode().strip("\0").split("\0")
    found = dict(pair.split("=", 1) for pair in pairs)
    assert found["A"] == str(machine.home / "x")
    assert found["TOKEN"] == "hush-hush"
    assert found["TRAINER_RUN_ID"] == run_id
    assert found["TRAINER_RUN_DIR"] == str(machine.run_folder(run_id))
    assert found["TRAINER_GRACE_SECONDS"] == "20"
    assert found["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert found["PYTHONUNBUFFERED"] == found["PYTHONDONTWRITEBYTECODE"] == "1"
    assert "FAB_TEST_SESSION" not in found
    everywhere = [p for p in machine.root.rglob("*") if p.is_file() and not p.is_symlink()]
    assert not any(b"hush-hush" in p.read_bytes() for p in everywhere)
    assert set(machine.record(run_id, "spec.json")["secrets"]["TOKEN"]) == {"salt", "sha256"}


def test_nothing_is_readable_for_others(machine):
    run_id = machine.train()["run_id"]
    machine.kill()
    paths = [machine.root, *machine.root.rglob("*")]
    assert machine.run_folder(run_id) / "exit.json" in paths
    for path in paths:
        mode = path.lstat().st_mode
        inside_release = path.is_file() and machine.root / "releases" in path.parents
        if not stat.S_ISLNK(mode) and not inside_release:  # their folder is closed
            assert mode & 0o077 == 0, path


def test_an_interpreter_that_cannot_start_is_named_with_its_errno(machine):
    machine.deploy()
    spec = machine.spec()
    spec["argv"][0] = "/no/python"
    run_id = machine.run_id()
    with pytest.raises(RefusalError, match="/no/python: cannot be started: No such file") as caught:
        machine.launch(run_id=run_id, spec=spec)
    assert (caught.value.code, caught.value.data) == ("failed", {"errno": 2})
    health = wait_for(lambda: (h := machine.health(run_id))["exit"] and h)
    assert (health["state"], health["exit"]["code"]) == ("crashed", 127)
    assert "cannot be started" in health["detail"]


def test_a_launch_without_its_release_is_refused(machine):
    machine.lease()
    with pytest.raises(RefusalError, match="is not on this host; run `fab sync`"):
        machine.launch()
    assert not (machine.root / "runs").exists()


def test_a_dry_launch_changes_nothing_and_needs_no_lease(machine):
    machine.deploy()
    before, machine.token = machine.snapshot(), None
    assert machine.launch(dry=True)["changed"]
    assert machine.snapshot() == before
    assert not machine.output.exists()


def test_an_output_folder_of_another_root_is_refused(machine):
    machine.train()
    machine.kill()
    owner = machine.output / "OWNER.json"
    assert json.loads(owner.read_text())["root"] == str(machine.root)
    owner.write_text(json.dumps({"machine_id": "other", "host": "gpu7", "root": "/r"}))
    for dry in (True, False):
        with pytest.raises(RefusalError, match="is written by /r of gpu7; give another"):
            machine.launch(dry=dry)
    owner.write_text("junk")
    with pytest.raises(RefusalError, match="is not readable; look at it"):
        machine.launch()


def test_devices_of_another_roots_run_are_refused(machine, tmp_path):
    launched = machine.train(spec=machine.spec(devices=[0, 1]))
    (tmp_path / "b").mkdir()
    other = Machine(tmp_path / "b")
    try:
        other.deploy()
        with pytest.raises(RefusalError, match=r"devices \[1\]: held by run .* of ") as caught:
            other.launch(spec=other.spec(devices=[1, 2]))
        assert caught.value.data["pid"] == launched["pid"]
        assert other.launch(spec=other.spec(devices=[2, 3]))["changed"]
    finally:
        other.close()


@pytest.mark.parametrize(
    "change",
    [
        {"argv": []},
        {"argv": "python"},
        {"argv": [1]},
        {"output_dir": "x"},
        {"output_dir": "/a/../b"},
        {"env": {"A=B": "c"}},
        {"env": {"A": 1}},
        {"devices": ["0"]},
        {"devices": [True]},
        {"max_log_mb": 0},
        {"grace_s": -1},
        {"secret_names": ["A=B"]},
    ],
)
def test_odd_specs_are_bad_requests(machine, change):
    with pytest.raises(Refused) as caught:
        Spec({**machine.spec(), **change})
    assert caught.value.code == "bad-request"


def test_secrets_are_those_that_the_spec_names_and_the_digest_is_the_specs(machine):
    machine.deploy()
    for more in ({"spec": machine.spec(secret_names=["S"])}, {"secret": {"S": "x"}}):
        with pytest.raises(RefusalError, match=r"secrets: are not those"):
            machine.launch(**more)
    with pytest.raises(RefusalError, match=r"spec_digest: is not that of spec"):
        machine.ask("launch", spec=machine.spec(), spec_digest="0" * 64)


def test_a_launch_cut_before_the_go_starts_nothing_and_can_be_repeated(machine):
    machine.deploy()
    # The verb dies between making the run and letting it go: by a `current` that cannot be made.
    (machine.root / "current").mkdir()
    run_id = machine.run_id()
    with pytest.raises(RefusalError, match="Is a directory"):
        machine.launch(run_id=run_id)
    health = wait_for(lambda: (h := machine.health(run_id))["exit"] and h)
    assert (health["state"], health["detail"]) == ("crashed", "the launch was interrupted")
    assert wait_for(lambda: not machine.members())
    (machine.root / "current").rmdir()
    assert machine.launch(run_id=run_id)["changed"]
    assert machine.ask("await_progress", run_id=run_id)["step"] >= 1
    assert machine.launch(run_id=run_id)["changed"] is False


def test_the_keeper_dies_and_the_trainer_goes_on(machine):
    run_id = machine.train()["run_id"]
    record = machine.record(run_id)
    os.kill(record["keeper"]["pid"], 9)
    wait_for(lambda: not lives(record["keeper"]["pid"]))
    step = machine.health()["step"]
    health = wait_for(lambda: (h := machine.health())["step"] > step and h)
    assert health["state"] == "training, unsupervised"
    ended = machine.kill()
    assert (ended["changed"], ended["state"]) == (True, "finished")
    assert not lives(record["trainer"]["pid"])
    assert machine.health()["detail"].startswith("stopped at step")


def test_the_log_is_capped_without_losing_a_followers_place(machine):
    machine.deploy()
    spec = machine.spec("--chatter", 4096, "--step-seconds", 0.0005, "--steps", 600)
    run_id = machine.launch(spec=spec)["run_id"]
    log = machine.run_folder(run_id) / "train.log"
    seen, offset = [], 0
    while True:
        part = machine.ask("logs", run_id=run_id, offset=offset, follow_s=5, max_bytes=1 << 20)
        seen += [line for line in part["text"].splitlines() if line.startswith("step")]
        offset = part["offset"]
        if part["ended"]:
            break
    steps = [int(line[5:].split("/")[0].replace(",", "")) for line in seen]
    assert steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (1, 600)
    assert log.stat().st_size > 2_400_000
    assert log.stat().st_blocks * 512 < 2_000_000
    again = machine.ask("logs", run_id=run_id, offset=0, max_bytes=1 << 20)
    assert again["text"].startswith("step      1/")
    assert "[log capped at 1 MiB: older text was dropped here]" in again["text"]
    later = machine.ask("logs", run_id=run_id, offset=again["offset"], max_bytes=4096)
    assert later["dropped"] > 700_000
    assert later["text"].split(" ")[0] in ("step", "x" * 4095 + "\nstep")
    tail = machine.ask("logs", run_id=run_id, lines=2)
    assert tail["text"].startswith("step    600/600")


def test_python_that_runs_the_agent_need_not_be_the_trainers(machine):
    launched = machine.train()
    assert str(Path(f"/proc/{launched['pid']}/exe").readlink()) == os.path.realpath(sys.executable)
