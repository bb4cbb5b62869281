"""A checkpoint is whole or not there; a damaged one is noticed; a pinned one stays."""

import json

import pytest
import torch

from trainer.errors import InputError, TrainerError
from trainer.record import checkpoint


def save(out, step, *, keep=0):
    flat = torch.arange(12.0) + step
    files = {
        # Views into one buffer, as the drafter's parameters are.
        "drafter": {"a": flat[:4].view(2, 2), "b": flat[4:]},
        "optimizer": {"masters": flat, "steps": torch.tensor(float(step))},
    }
    return checkpoint.save(out, step, files, {"position": {"step": step}}, keep=keep)


def steps(out):
    return [int(path.name[5:]) for path in checkpoint.checkpoints(out)]


def newest(out):
    said = []
    return checkpoint.newest(out, say=said.append), said


def flip(file):
    held = bytearray(file.read_bytes())
    held[-1] ^= 1
    file.write_bytes(held)


def test_what_was_saved_comes_back(tmp_path):
    path = save(tmp_path, 12)
    assert path == tmp_path / "step-00000012"
    found, said = newest(tmp_path)
    assert (found.path, found.step, said) == (path, 12, [])
    assert found.facts["position"] == {"step": 12}
    assert found.tensors("drafter")["a"].tolist() == [[12.0, 13.0], [14.0, 15.0]]
    assert found.tensors("optimizer")["masters"].tolist() == [12.0 + i for i in range(12)]
    assert sorted(found.facts["files"]) == ["drafter.safetensors", "optimizer.safetensors"]


def test_there_may_be_none(tmp_path):
    assert newest(tmp_path / "missing") == (None, [])


def test_only_the_newest_stay_and_pinned_ones_do(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "step-00000001" / checkpoint.PINNED).touch()
    for step in range(2, 6):
        save(tmp_path, step, keep=2)
    assert steps(tmp_path) == [1, 4, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000001", "step-00000004", "step-00000005",
    ]  # fmt: skip


def test_keep_0_keeps_all(tmp_path):
    for step in range(5):
        save(tmp_path, step)
    assert steps(tmp_path) == [0, 1, 2, 3, 4]


def damage_file(path):
    flip(path / "optimizer.safetensors")
    return "optimizer.safetensors is damaged"


def remove_file(path):
    (path / "drafter.safetensors").unlink()
    return "drafter.safetensors is missing"


def cut_facts(path):
    (path / "checkpoint.json").write_text('{"step": 3')
    return "its checkpoint.json is damaged"


def remove_facts(path):
    (path / "checkpoint.json").unlink()
    return "its checkpoint.json is damaged"


@pytest.mark.parametrize("harm", [damage_file, remove_file, cut_facts, remove_facts])
def test_a_damaged_one_is_passed_over_and_told(tmp_path, harm):
    save(tmp_path, 2)
    why = harm(save(tmp_path, 3))
    found, said = newest(tmp_path)
    assert found.step == 2
    assert len(said) == 1
    assert why in said[0]
    assert "trying the checkpoint before it" in said[0]


def test_nothing_is_started_anew_over_damaged_ones(tmp_path):
    damage_file(save(tmp_path, 3))
    with pytest.raises(InputError, match="every checkpoint is damaged"):
        newest(tmp_path)


def test_a_damaged_one_is_replaced_when_its_step_comes_again(tmp_path):
    damage_file(save(tmp_path, 3))
    save(tmp_path, 3)
    assert checkpoint.damage(tmp_path / "step-00000003") is None
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_a_whole_one_of_the_same_step_stays(tmp_path):
    path = save(tmp_path, 3)
    before = (path / "checkpoint.json").stat().st_mtime_ns
    assert save(tmp_path, 3) == path
    assert (path / "checkpoint.json").stat().st_mtime_ns == before


def test_what_an_ended_process_left_half_written_is_no_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_flush", full)
    with pytest.raises(TrainerError, match=r"step-00000002: cannot be written: .*No space left"):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert newest(tmp_path)[0].step == 1
    save(tmp_path, 2)
    assert newest(tmp_path)[0].step == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_it_holds_no_pickle(tmp_path):
    path = save(tmp_path, 3)
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}
    json.loads((path / "checkpoint.json").read_text())
