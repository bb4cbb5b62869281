"""status.json and metrics.jsonl say where a run is, and which release it is."""

import dataclasses
import errno
import hashlib
import json
import os
import subprocess
import sys
import threading

import pytest

from tests.trainer import made
from trainer.record import metrics
from trainer.record import status as record
from trainer.record.status import Status, Step, Trialled, folder_of, release_digest

DONE = Step(
    step=1240, steps=20000, epoch=0, loss=2.7134, accepted=3.4211, norm=0.812, rate=5.9e-4,
    tokens_per_s=12_390.0, wait=0.0034, seconds=0.61, stages={"wait_target": 0.25}, memory_gb=1.5,
)  # fmt: skip


def read(folder):
    return json.loads((folder / "status.json").read_text())


def test_the_log_line_has_fixed_columns_and_units():
    assert metrics.line(DONE, 16, 11_444) == (
        "step  1,240/20,000  loss 2.713  accept 3.42/16  norm 0.81  rate 5.9e-04"
        "  12.4k tok/s/gpu  wait 0.3%  eta 3h10m"
    )


def test_what_is_left_follows_the_pace_of_late_whatever_took_the_time():
    now = iter([0.0, 2.0, 4.0, 9.0])  # the last step was followed by a save
    pace = metrics.Pace(lambda: next(now))
    left = [pace.left_s(dataclasses.replace(DONE, step=step, steps=10)) for step in (1, 2, 3, 4)]
    assert left == pytest.approx([9 * DONE.seconds, 8 * 2.0, 7 * 2.0, 6 * 3.0])


def test_metrics_that_did_not_fit_on_a_full_disk_come_later(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    never, later = metrics.Metrics(tmp_path), metrics.Metrics(tmp_path)
    for number in range(3):
        for each in (never, later):
            each.step(dataclasses.replace(DONE, step=number))
    never.close()
    with (tmp_path / "room").open("w") as room:
        os.dup2(room.fileno(), later._file.fileno())
    later.step(dataclasses.replace(DONE, step=3))
    later.close()
    lines = (tmp_path / "room").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3]


def test_a_status_that_does_not_fit_on_a_full_disk_stays_as_it_was(tmp_path, monkeypatch):
    status = Status(tmp_path)
    status.phase("training")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(record, "write_whole", full)
        status.step(DONE)
        assert read(tmp_path)["step"] == 0
    status.note()
    assert read(tmp_path)["step"] == 1240


def test_status_follows_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINER_RUN_ID", "20261130-101500-abcd")
    now = iter(range(100, 200))
    status = Status(tmp_path, clock=lambda: float(next(now)))
    status.phase("starting")
    assert read(tmp_path) == {
        "run_id": "20261130-101500-abcd", "release": None, "pid": os.getpid(), "phase": "starting",
        "step": 0, "steps": None, "loss": None, "accepted": None, "tokens_per_s": None,
        "step_boottime": None, "median_step_s": None, "boottime": 100.0, "checkpoint": None,
    }  # fmt: skip
    for seconds in (5.0, 1.0, 2.0):
        status.step(dataclasses.replace(DONE, seconds=seconds))
    status.phase("saving")
    held = read(tmp_path)
    assert (held["phase"], held["step"], held["steps"]) == ("saving", 1240, 20000)
    assert (held["loss"], held["accepted"], held["median_step_s"]) == (2.7134, 3.4211, 2.0)
    assert (held["step_boottime"], held["boottime"]) == (105.0, 107.0)
    status.phase("stopped", checkpoint="/out/step-00001240")
    assert read(tmp_path)["checkpoint"] == "/out/step-00001240"


def test_a_reader_never_sees_half_a_status(tmp_path):
    status = Status(tmp_path)
    status.phase("starting")
    ended = threading.Event()

    def write():
        for step in range(500):
            status.step(dataclasses.replace(DONE, step=step, loss=float("1" * (step % 15 + 1))))
        ended.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not ended.is_set():
        read(tmp_path)
    writer.join()
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_only_the_first_rank_writes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Status(None).phase("loading")
    metrics.Metrics(None).step(DONE)
    assert not list(tmp_path.iterdir())


def test_metrics_are_one_object_a_step_appended(tmp_path):
    for step in (1, 2):
        kept = metrics.Metrics(tmp_path, clock=lambda: 7.0)
        kept.step(dataclasses.replace(DONE, step=step))
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == step
        kept.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1]) == {
        "step": 2, "loss": 2.7134, "accepted": 3.4211, "norm": 0.812, "rate": 5.9e-4,
        "tokens_per_s": 12_390.0, "wait": 0.0034, "wait_target": 0.25, "memory_gb": 1.5,
        "epoch": 0, "time": 7.0,
    }  # fmt: skip


def test_a_trial_stands_in_the_line_of_its_step_and_has_one_of_its_own(tmp_path):
    tried = Trialled(samples=32, accepted=2.444, lengths=(30, 50, 20), seconds=1.26)
    kept = metrics.Metrics(tmp_path)
    kept.step(DONE, tried)
    kept.close()
    held = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (held["step"], held["eval_accepted"], held["eval_samples"]) == (1240, 2.444, 32)
    assert held["eval_first"] == pytest.approx(0.7)
    assert held["eval_lengths"] == [30, 50, 20]
    assert metrics.trial_line(tried, DONE, 16) == (
        "eval  step 1,240/20,000  accepted 2.44/16 (3.42 in training)  first token right 70.0%"
        "  32 samples  1.3 s"
    )


def test_they_go_to_the_runs_own_folder():
    assert str(folder_of("/out", {})) == "/out"
    assert str(folder_of("/out", {"TRAINER_RUN_DIR": "/root/runs/r"})) == "/root/runs/r"


@pytest.fixture
def release(tmp_path):
    """A release: a few of the trainer's files and their manifest."""
    package = tmp_path / "trainer"
    files = []
    for name in ("__init__.py", "errors.py", "record/__init__.py", "record/status.py"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        held = (made.ROOT / "trainer" / name).read_bytes()
        (package / name).write_bytes(held)
        sha256 = hashlib.sha256(held).hexdigest()
        files.append(
            {"path": f"trainer/{name}", "mode": "0444", "sha256": sha256, "size": len(held)}
        )
    files.sort(key=lambda entry: entry["path"])
    text = "".join(f"{each['mode']} {each['sha256']} {each['path']}\n" for each in files)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (tmp_path / "MANIFEST.json").write_text(json.dumps({"digest": "believed", "files": files}))
    return tmp_path, digest


def digest_of(folder):
    script = (
        "import trainer.errors; from trainer.record.status import release_digest as d; print(d())"
    )
    done = subprocess.run(
        [sys.executable, "-B", "-c", script], cwd=folder, env=made.environment(PYTHONPATH=""),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip()


def test_the_release_is_computed_from_what_was_imported(release):
    folder, digest = release
    assert digest_of(folder) == digest
    (folder / "trainer/errors.py").write_text("# edited on the host\n")
    assert digest_of(folder) == "None"


def test_a_file_beside_the_release_is_no_part_of_it(release):
    folder, digest = release
    (folder / "trainer/never_imported.py").write_text("")
    assert digest_of(folder) == digest


def test_a_checkout_is_no_release():
    assert release_digest() is None
