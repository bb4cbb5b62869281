"""Whatever ends the processes, started again they come to the same bits: one pair and two."""

import signal

import pytest

from tests.trainer import made
from tests.trainer.runs import same, state, status, steps_seen

FAULTS = f"{made.ROOT}/tests/trainer/faults:{made.ROOT}"
KILLED = {1: -signal.SIGKILL, 2: 128 + signal.SIGKILL}


@pytest.mark.parametrize("pairs", [1, 2])
def test_kills_and_damage_resume_to_the_same_bits(tiny_target_dir, tmp_path, pairs):
    rows = [made.table(made.rows(14))]
    data = made.save_to_disk(tmp_path / "set", rows)
    out = tmp_path / "often"

    def start(folder, fault="none", **more):
        words = made.flags(
            tiny_target_dir, data, folder, epochs=9, dp_pairs=pairs, save_interval=4, **more
        )
        return made.run(["train", *words], PYTHONPATH=FAULTS, FAULT=fault)

    def checkpoints():
        return [int(path.name[5:]) for path in sorted(out.glob("step-*"))]

    code, _, err = start(tmp_path / "whole")
    assert code == 0, err

    # SIGKILL between two steps, at the start of the 7th, when step 4 is on the disk.
    code, _, _ = start(out, f"kill-settled:{0 if pairs == 2 else -1}:7")
    assert code == KILLED[pairs]
    assert (checkpoints(), steps_seen(out)) == ([4], [1, 2, 3, 4, 5, 6])

    # SIGKILL while a checkpoint is written.
    code, said, _ = start(out, "kill-in-save:12")
    assert code == KILLED[pairs]
    assert f"resumed   from {out}/step-00000004" in said
    assert checkpoints() == [4, 8]
    assert [path.name for path in out.glob(".step-*")] == [".step-00000012.partial"]

    # A newest checkpoint that a disk cut short: the one before it is taken.
    with (out / "step-00000008/optimizer.safetensors").open("r+b") as file:
        file.truncate(100)
    code, said, err = start(out)
    assert code == 0, err
    assert "step-00000008: optimizer.safetensors is damaged" in said
    assert f"resumed   from {out}/step-00000004" in said
    assert same(state(tmp_path / "whole"), state(out))
    assert status(out)["phase"] == "finished"
    # Three are kept, each of them whole, and nothing half written is left.
    assert len(checkpoints()) == 3
    assert not list(out.glob(".step-*"))
