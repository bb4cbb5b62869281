"""A checkpoint of each format that ever was is read; one of a newer format is refused.

The stored ones are never written again: they are what older trainers wrote.
"""

import json
import shutil

import pytest

from tests.trainer import made
from tests.trainer.runs import steps_seen
from trainer import config as configs
from trainer import train
from trainer.build.trained import load
from trainer.errors import InputError
from trainer.record import checkpoint
from trainer.record.status import Status
from trainer.stop import Stop

STORED = made.ROOT / "tests/trainer/data/checkpoints"
SHAPE = {
    "draft_layers": 1, "draft_heads": 1, "draft_kv_heads": 1, "draft_head_dim": 4,
    "draft_intermediate": 8, "tap_count": 1,
}  # fmt: skip


@pytest.fixture
def go(tiny_target_dir, tmp_path):
    data = made.save_to_disk(tmp_path / "data", [made.table(made.rows(14))])

    def train_now(**more):
        (tmp_path / "out").mkdir(exist_ok=True)
        words = made.flags(tiny_target_dir, data, tmp_path / "out", **SHAPE, **more)
        said = []
        train.run(configs.read(words), Stop(), Status(tmp_path / "out"), said.append)
        return said

    return train_now


def test_there_is_a_stored_one_of_each_format():
    kept = [json.loads((path / "checkpoint.json").read_text()) for path in STORED.glob("*")]
    assert sorted(each["format"] for each in kept) == list(range(1, checkpoint.FORMAT + 1))


@pytest.mark.parametrize("stored", sorted(STORED.glob("*")), ids=lambda path: path.name)
def test_a_stored_checkpoint_is_loaded_and_goes_on(go, tmp_path, stored):
    _, drafter = load(stored, print)
    assert sum(each.numel() for each in drafter.parameters()) == 2440
    (tmp_path / "out").mkdir()
    shutil.copytree(stored, tmp_path / "out/step-00000003")
    said = go(steps=5)
    assert f"resumed   from {tmp_path}/out/step-00000003" in said
    assert said[-1] == "finished  at step 5"
    assert steps_seen(tmp_path / "out") == [4, 5]


def test_one_without_a_number_is_of_the_first_format(go, tmp_path):
    go(steps=3)
    told = tmp_path / "out/step-00000003/checkpoint.json"
    facts = json.loads(told.read_text())
    assert facts.pop("format") == checkpoint.FORMAT == 1
    told.write_text(json.dumps(facts))
    assert go(steps=4)[-1] == "finished  at step 4"


def test_one_of_a_newer_trainer_is_refused_and_not_passed_over(go, tmp_path):
    go(steps=4, save_interval=3)
    told = tmp_path / "out/step-00000004/checkpoint.json"
    newer = {"format": 7, "what": ["nobody", "knows"]}
    told.write_text(json.dumps(newer))
    with pytest.raises(InputError) as caught:
        go(steps=5)
    assert str(caught.value) == (
        f"{tmp_path}/out/step-00000004: is of format 7, and this trainer reads up to 1; use the"
        " trainer that wrote it, or give another --output-dir"
    )
