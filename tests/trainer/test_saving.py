"""Checkpoints are written beside the training: it hardly waits, and their errors end it by name."""

import threading

import pytest

from tests.trainer import made
from tests.trainer.runs import measures, same, state, status
from trainer import config as configs
from trainer import train
from trainer.errors import TrainerError
from trainer.pipeline import Beside, StageError
from trainer.record import checkpoint
from trainer.record.status import Status
from trainer.stop import Stop


@pytest.fixture
def go(tiny_target_dir, tmp_path):
    data = made.save_to_disk(tmp_path / "data", [made.table(made.rows(14))])

    def train_now(out="out", *, stop=None, **more):
        (tmp_path / out).mkdir()
        said = []
        words = made.flags(tiny_target_dir, data, tmp_path / out, epochs=3, **more)
        train.run(configs.read(words), stop or Stop(), Status(tmp_path / out), said.append)
        return said, tmp_path / out

    return train_now


def test_training_goes_on_while_a_checkpoint_is_written(go, tmp_path, monkeypatch):
    save, seen = checkpoint.save, []

    def slow(*words, **more):
        # Two steps more must be done before the disk is: only a writer beside allows that.
        made.until(lambda: len(measures(tmp_path / "out")) >= 6, what="step 6", within=20)
        seen.append(threading.current_thread().name)
        return save(*words, **more)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save", slow)
        said, out = go(save_interval=4, steps=7, keep=0)
    assert seen == ["checkpoint"] * 2
    assert [line[-8:] for line in said if line.startswith("saved")] == ["00000004", "00000007"]
    assert status(out)["checkpoint"].endswith("step-00000007")
    # What was written is what the run was at step 4, not what it became meanwhile.
    _, undisturbed = go("undisturbed", save_interval=4, steps=7, keep=0)
    for name in ("drafter", "optimizer"):
        wanted, got = (
            checkpoint.read(folder / "step-00000004").tensors(name) for folder in (undisturbed, out)
        )
        assert same(wanted, got)


def test_what_is_written_is_the_state_at_its_own_step(go):
    _, often = go("often", save_interval=1, keep=0)
    _, once = go("once")
    assert same(state(often), state(once))
    for path in checkpoint.checkpoints(often):
        assert checkpoint.damage(path) is None
        held = checkpoint.read(path).tensors("optimizer")
        assert int(held["steps"]) == checkpoint.read(path).step


def test_a_stop_while_a_checkpoint_is_written_waits_for_it_and_writes_its_own(
    go, tmp_path, monkeypatch
):
    begin, save, stop = train._save, checkpoint.save, Stop()

    def begin_and_stop(*words):
        begin(*words)
        stop.asked = True

    def slow(out, step, *words, **more):
        if step == 2:
            made.until(lambda: status(tmp_path / "out")["phase"] == "saving", what="the stop")
        return save(out, step, *words, **more)

    monkeypatch.setattr(train, "_save", begin_and_stop)
    monkeypatch.setattr(checkpoint, "save", slow)
    said, out = go(save_interval=2, stop=stop)
    assert said[-1] == "stopped  at step 3"
    assert [checkpoint.read(path).step for path in checkpoint.checkpoints(out)] == [2, 3]
    assert all(checkpoint.damage(path) is None for path in checkpoint.checkpoints(out))
    assert status(out)["checkpoint"].endswith("step-00000003")


def test_a_checkpoint_that_cannot_be_written_ends_the_run_and_is_named(go, monkeypatch):
    def full(*_, **__):
        raise TrainerError("step-00000002: cannot be written: No space left on device")

    monkeypatch.setattr(checkpoint, "save", full)
    with pytest.raises(StageError, match=r"^checkpoint: step-00000002: cannot be written"):
        go(save_interval=2)


def test_a_job_beside_is_handed_over_once():
    beside = Beside("work")
    assert (beside.finished(), beside.wait()) == (None, None)
    go_on = threading.Event()
    beside.start(lambda: go_on.wait(20) and 7)
    assert beside.finished() is None
    with pytest.raises(AssertionError, match="two jobs at once"):
        beside.start(lambda: 1)
    go_on.set()
    assert beside.wait() == 7
    assert beside.finished() is None


def test_an_error_beside_is_told_once_and_named():
    beside = Beside("work")
    beside.start(lambda: 1 // 0)
    with pytest.raises(StageError, match=r"^work: integer division") as caught:
        beside.wait()
    assert caught.value.bug
    assert beside.wait() is None
