"""A secret, from a variable of the desk to the trainer's environment, and nowhere else."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.hosts.desk import Desk, states
from tests.hosts.ground import until

VALUE = "s3cr3t-Value_of-this-test"
OTHER = "an0ther-Value_of-this-test"


@pytest.fixture
def desk(tmp_path, stub, machine):
    made = Desk(tmp_path, stub, machine)
    name_secrets(made, HF_TOKEN={"env": "MY_TOKEN"})
    return made


def name_secrets(desk, **sources):
    path = desk.folder / "hosts.yaml"
    text = yaml.safe_load(path.read_text())
    text["run"]["secrets"] = sources
    path.write_text(yaml.safe_dump(text, sort_keys=False))


def fab(desk, *words, token=VALUE, **more):
    env = {**desk.command()["env"], "MY_TOKEN": token}
    if token is None:
        del env["MY_TOKEN"]
    return desk.fab(*words, env=env, **more)


def files_with(value, *folders):
    words = ["grep", "-rlaF", "--", value, *map(str, folders)]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.splitlines()


def holders(machine, value, name):
    """Give the processes there whose /proc file holds `value`."""
    return {
        process.pid
        for process in machine.processes()
        if value.encode() in Path(f"/proc/{process.pid}/{name}").read_bytes()
    }


def test_a_secret_is_in_the_trainers_environment_and_nowhere_else(desk):
    machine, said = desk.machine, []
    for words in (
        ("deploy",),
        ("restart", "--json"),
        ("status", "--json"),
        ("logs",),
        ("deploy", "--dry-run", "--json"),
    ):
        said += [*fab(desk, *words), desk.err]
    trainers = set(desk.trainers())
    assert len(trainers) == 1
    assert holders(machine, VALUE, "environ") == trainers
    loop = desk.folder / "trainer/loop.py"
    before = "        wanted, began, number ="
    text = loop.read_text().replace(before, f"        raise RuntimeError('planted')\n{before}", 1)
    loop.write_text(text)
    said += [*fab(desk, "deploy", exits=6), desk.err]
    said += [*fab(desk, "status", "--json"), desk.err]
    trainers = set(desk.trainers())
    assert holders(machine, VALUE, "environ") == trainers
    assert holders(machine, VALUE, "cmdline") == set()
    assert not [line for line in said if VALUE in line]
    assert files_with(VALUE, machine.folder, desk.folder) == []
    # Nor anything that gives it away to whoever reads the root: every record is salted anew.
    salts = [
        json.loads(path.read_text())["secrets"]["HF_TOKEN"]["sha256"]
        for path in machine.home.glob("fab/runs/2*/spec.json")
    ]
    assert len(salts) == len(set(salts)) > 2


def test_a_changed_value_restarts_the_run_and_an_unchanged_one_does_not(desk):
    fab(desk, "deploy")
    before = desk.trainers(), desk.files()
    again = states(fab(desk, "deploy"))
    assert ("kill", "unchanged") in again
    assert ("launch", "unchanged") in again
    assert (desk.trainers(), desk.files()) == before
    would = fab(desk, "deploy", "--dry-run", token=OTHER)
    assert ("kill", "would") in states(would)
    assert (desk.trainers(), desk.files()) == before
    changed = states(fab(desk, "deploy", token=OTHER))
    assert ("sync", "unchanged") in changed
    assert ("kill", "changed") in changed
    (trainer,) = desk.trainers()
    assert [trainer] != before[0]
    assert OTHER.encode() in Path(f"/proc/{trainer}/environ").read_bytes()
    assert VALUE.encode() not in Path(f"/proc/{trainer}/environ").read_bytes()


def test_a_missing_secret_is_told_before_any_host_is_touched(desk):
    before = desk.machine.log().count("Accepted")
    for task in ("deploy", "restart", "launch", "rollback"):
        assert fab(desk, task, token=None, exits=2) == []
        assert desk.err == (
            "gpu1: secret HF_TOKEN: the variable MY_TOKEN is not set at this desk; set it first\n"
        )
    assert desk.machine.log().count("Accepted") == before
    # Who only looks or stops needs none.
    for task, code in (("status", 0), ("verify", 4), ("kill", 0), ("sync", 0)):
        fab(desk, task, token=None, exits=code)


def test_the_secrets_of_what_would_be_put_back_are_asked_for_before_anything_changes(desk):
    fab(desk, "deploy")
    before = desk.trainers(), desk.files()
    name_secrets(desk)
    lines = fab(desk, "deploy", exits=2)
    assert "needs the secret HF_TOKEN, which hosts.yaml does not name" in lines[-1]
    assert "--no-rollback" in lines[-1]
    assert (desk.trainers(), desk.files()) == before
    fab(desk, "deploy", "--no-rollback")
    assert desk.trainers() != before[0]
    lines = fab(desk, "rollback", exits=2)
    assert "HF_TOKEN, which hosts.yaml does not name" in lines[-1]


def test_a_file_of_the_desk_will_do(desk):
    (desk.folder / "token").write_text(f"{OTHER}\n")
    name_secrets(desk, HF_TOKEN={"file": "token"})
    desk.fab("deploy")
    (trainer,) = until(desk.trainers)
    environment = Path(f"/proc/{trainer}/environ").read_bytes().split(b"\0")
    assert f"HF_TOKEN={OTHER}".encode() in environment
