from __future__ import annotations

import json
import os
import re
import socket
import sys
from pathlib import Path

import pytest

from tests.agent.call import RefusalError, wait_for
from tests.agent.machine import canonical, lives

REQUIRED = ["flat-gradients", "exact-resume"]


def verify(machine, digest=None, spec=None):
    digest = digest or machine.manifest()[0]
    return machine.ask("verify", digest=digest, python=sys.executable, spec=spec)


def differences(machine, **more):
    with pytest.raises(RefusalError) as caught:
        verify(machine, **more)
    assert caught.value.code == "verify"
    return caught.value.data["differences"]


def test_the_four_states(machine):
    digest = machine.deploy()
    machine.change("# changed\n")
    assert verify(machine)["state"] == "not deployed"
    found = verify(machine, digest)
    assert found["state"] == "deployed, not running"
    assert Path(found["imported_from"]).parent == machine.root / "releases" / digest / "trainer"
    changed = machine.sync()["digest"]
    run_id = machine.launch(digest=digest)["run_id"]
    machine.ask("await_progress", run_id=run_id)
    assert verify(machine, digest)["state"] == "running this"
    assert verify(machine, changed)["state"] == "running other code"
    assert not list((machine.root / "releases").rglob("__pycache__"))


def test_before_anything_travels_paths_and_interpreter_are_looked_at(machine):
    machine.manifest()
    plain = machine.spec("--target-model", "/nowhere/model")
    plain["argv"][0] = "/nowhere/python"
    assert differences(machine, spec=plain) == [
        "python /nowhere/python: is not there, or may not be started",
        "target-model /nowhere/model: is not there",
    ]


def test_without_a_digest_what_is_deployed_is_meant(machine):
    digest = machine.deploy()
    asks = [
        lambda: machine.ask("verify", python=sys.executable),
        lambda: machine.ask("features", python=sys.executable),
        lambda: machine.launch(digest=None, current=True),
    ]
    for ask in asks:
        with pytest.raises(RefusalError, match=r"^verify: nothing is deployed; run `fab deploy`"):
            ask()
    machine.ask("await_progress", run_id=machine.launch()["run_id"])
    machine.change("# synced, and never launched\n")
    machine.sync()
    found = machine.ask("verify", python=sys.executable)
    assert (found["state"], found["digest"]) == ("running this", digest)
    assert machine.ask("features", python=sys.executable)["features"]
    again = machine.launch(current=True, accept_pair=True)
    assert again["changed"] is False
    pair = [None, canonical(machine.spec())]
    assert machine.ask("await_progress", run_id=machine.run_id(), pair=pair)["step"] >= 1
    machine.kill()
    run_id = machine.launch(current=True)["run_id"]
    assert machine.record(run_id, "spec.json")["release"] == digest


def test_an_import_that_fails_is_told_with_its_last_words(machine):
    machine.deploy()
    (machine.source / "trainer" / "__init__.py").write_text("import no_such_module\n")
    machine.sync()
    [difference] = differences(machine)
    assert difference.endswith("ModuleNotFoundError: No module named 'no_such_module'")


def test_a_trainer_that_is_imported_from_elsewhere_is_refused(machine, tmp_path):
    machine.deploy()
    (tmp_path / "other/trainer").mkdir(parents=True)
    (tmp_path / "other/trainer/__init__.py").write_text("")
    odd = {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(tmp_path / "other")}
    [difference] = differences(machine, spec=machine.spec(env=odd))
    assert "imports the trainer from" in difference
    assert f"{tmp_path}/other/trainer/__init__.py, not from the release" in difference


def test_a_python_that_is_none_is_told(machine):
    digest = machine.deploy()
    with pytest.raises(RefusalError, match="/no/python: cannot be started: No such file"):
        machine.ask("verify", digest=digest, python="/no/python")


def test_a_bare_name_of_a_python_is_looked_up_on_path(machine, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python-of-mine").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    digest = machine.deploy()
    for verb in ("probe", "verify", "features"):
        found = machine.ask(verb, digest=digest, python="python-of-mine", required=[])
        assert found["warnings"] == []
    spec = machine.spec()
    spec["argv"][0] = "python-of-mine"
    run_id = machine.launch(spec=spec)["run_id"]
    assert machine.ask("await_progress", run_id=run_id)["step"] >= 1


def test_paths_of_the_spec_are_tried(machine):
    machine.deploy()
    spec = machine.spec("--target-model", "~/model", f"--data-dir={machine.home}")
    assert differences(machine, spec=spec) == [
        f"target-model {machine.home}/model: is not there",
    ]
    (machine.home / "model").mkdir()
    assert verify(machine, spec=spec)["warnings"] == []
    assert not machine.output.exists()
    spec["output_dir"] = "/proc/x"
    [difference] = differences(machine, spec=spec)
    assert difference.startswith("output-dir /proc/x: cannot be written")


def test_little_space_is_told_before_anything_shows_what_a_checkpoint_takes(small_disk):
    digest, spec = small_disk.manifest()[0], small_disk.spec()
    found = verify(small_disk, digest, spec)
    assert re.search(r"output-dir .*: only \d+ MiB free", found["warnings"][0])


def test_two_checkpoints_must_fit(machine):
    machine.deploy()
    checkpoint = machine.output / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "checkpoint.json").write_text("{}")
    with (checkpoint / "state.bin").open("wb") as file:
        file.truncate(1 << 42)
    [difference] = differences(machine, spec=machine.spec())
    assert "two checkpoints of 4,194,304 MiB must fit" in difference


def test_a_taken_port_is_named_with_its_holder(machine):
    machine.deploy()
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        number = holder.getsockname()[1]
        spec = machine.spec(env={"MASTER_PORT": str(number)})
        assert differences(machine, spec=spec) == [f"port {number}: is taken by pid {os.getpid()}"]
    assert verify(machine, spec=spec)["state"] == "deployed, not running"


def test_an_output_folder_of_others_is_a_difference(machine):
    machine.deploy()
    machine.output.mkdir()
    owner = {"machine_id": "x", "host": "gpu7", "root": "/r"}
    (machine.output / "OWNER.json").write_text(json.dumps(owner))
    [difference] = differences(machine, spec=machine.spec())
    assert "is written by /r of gpu7" in difference


def features(machine, **more):
    digest = machine.manifest()[0]
    arguments = {"digest": digest, "python": sys.executable, "required": REQUIRED, **more}
    return machine.ask("features", **arguments)


def test_features_are_tried_and_named(machine):
    machine.train()
    found = features(machine)
    assert {each["name"] for each in found["features"]} > set(REQUIRED)
    assert (found["missing"], found["warnings"]) == ([], [])
    assert machine.health()["state"] == "training"
    assert not list((machine.root / "releases").rglob("__pycache__"))


def test_missing_and_failing_features_are_refused_by_name(machine):
    machine.deploy()
    env = {"STUB_MISSING": "flat-gradients", "STUB_FAILING": "exact-resume"}
    words = "flat-gradients: missing; exact-resume: fails: a planted fault"
    with pytest.raises(RefusalError, match=words) as caught:
        features(machine, env=env)
    assert caught.value.code == "verify"
    assert caught.value.data["missing"] == ["flat-gradients"]
    assert caught.value.data["failing"] == ["exact-resume"]
    found = features(machine, env=env, required=["tensor-batches"])
    assert found["warnings"] == ["feature exact-resume: fails, and is not required"]


def test_features_of_a_trainer_without_answer_or_of_other_code_are_refused(machine):
    digest = machine.deploy()
    (machine.source / "trainer" / "faults.py").write_text("raise ImportError('planted')\n")
    machine.sync()
    with pytest.raises(RefusalError, match="exit 1 without an answer: ImportError: planted"):
        features(machine)
    file = machine.root / "releases" / digest / "trainer" / "loop.py"
    file.chmod(0o644)
    file.write_text(file.read_text() + "\n")
    with pytest.raises(RefusalError, match="the trainer says it is None, not"):
        features(machine, digest=digest)
    with pytest.raises(RefusalError, match="not deployed; run `fab sync`"):
        features(machine, digest="0" * 64)


def test_checks_run_niced_and_limited_and_go_with_the_desk(machine):
    machine.deploy()
    call = machine.start(
        "features",
        digest=machine.manifest()[0],
        python=sys.executable,
        env={"STUB_HANG": "1"},
        deadline=60,
    )
    pid = wait_for(lambda: checker(call.process.pid))
    assert os.getpriority(os.PRIO_PROCESS, pid) == 19
    group = Path(f"/proc/{pid}/autogroup")  # not every kernel groups by session
    assert not group.exists() or group.read_text().endswith(" nice 10\n")
    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert {b"OMP_NUM_THREADS=2", b"CUDA_VISIBLE_DEVICES="} <= set(environ)
    call.hang_up()
    assert call.process.wait(5) == 3
    assert not lives(pid)


def test_checks_write_under_the_root_and_nothing_of_it_stays(machine):
    machine.change(
        "\nimport pathlib, tempfile\n"
        "pathlib.Path(tempfile.mkdtemp(), 'big').write_text('x')\n"
        f"pathlib.Path({str(machine.home / 'told')!r}).write_text(tempfile.gettempdir())\n"
    )
    machine.lease()
    machine.sync()
    assert features(machine)["missing"] == []
    told = Path((machine.home / "told").read_text())
    assert told.parent == machine.root
    assert machine.temporary() == []


@pytest.mark.parametrize("end", ["deadline", "SIGKILL"])
def test_checks_go_with_their_verb(machine, end):
    machine.deploy()
    call = machine.start(
        "features",
        digest=machine.manifest()[0],
        python=sys.executable,
        env={"STUB_HANG": "1"},
        deadline=2 if end == "deadline" else 60,
    )
    pid = wait_for(lambda: checker(call.process.pid))
    if end == "SIGKILL":
        call.process.kill()
    else:
        with pytest.raises(RefusalError, match="not done after 2 s"):
            call.result()
    wait_for(lambda: not lives(pid))


def checker(agent):
    """Pid of the trainer's checks under an agent, once they run in the trainer's Python."""
    for child in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
        if b"features" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
            return int(child)
    return None


def test_flags_that_the_release_does_not_know_are_found_before_anything_stops(machine):
    machine.deploy()
    plain = machine.spec()
    assert verify(machine, spec=plain)["state"] == "deployed, not running"
    plain["argv"] = [*plain["argv"], "--wrong-flag", "1"]
    assert differences(machine, spec=plain) == ["run.trainer: --wrong-flag: unknown flag"]


@pytest.mark.parametrize("place", [".", "runs/out", ".."])
def test_an_output_folder_and_the_root_do_not_lie_in_each_other(machine, place):
    machine.deploy()
    plain = machine.spec()
    plain["output_dir"] = os.path.normpath(machine.root / place)
    assert "lie in each other" in differences(machine, spec=plain)[0]
