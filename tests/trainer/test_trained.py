"""A trained drafter is measured and exported from its checkpoint."""

import json

import pytest

from tests.trainer import made
from trainer import config as configs
from trainer import train
from trainer.__main__ import main
from trainer.record.status import Status
from trainer.stop import Stop


@pytest.fixture(scope="module")
def trained(tiny_target_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    data = made.save_to_disk(folder / "set", [made.table(made.rows(14))])
    (folder / "out").mkdir()
    words = made.flags(tiny_target_dir, data, folder / "out", steps=4)
    train.run(configs.read(words), Stop(), Status(folder / "out"), lambda _: None)
    return folder


def test_evaluate_prints_a_table_and_a_last_line_of_json(trained, tiny_target_dir, capsys):
    words = ["--target-model", tiny_target_dir, "--data-dir", trained / "set", "--device", "cpu"]
    words += ["--checkpoint", trained / "out", "--prompts", "3", "--max-new-tokens", "12"]
    assert main(["evaluate", *map(str, words)]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    assert len(table) == 4
    told = json.loads(last)
    assert (told["prompts"], told["same_as_plain"], told["block_size"]) == (3, 3, 4)
    assert told["checkpoint"].endswith("step-00000004")
    assert 1 <= told["accepted"] <= 4


def test_export_writes_a_served_folder_once(trained, tmp_path, capsys):
    words = ["export", "--checkpoint", str(trained / "out"), "--out", str(tmp_path / "served")]
    assert main(words) == 0
    assert {path.name for path in (tmp_path / "served").iterdir()} == {
        "config.json", "model.safetensors",
    }  # fmt: skip
    assert main(words) == 2
    assert "served: exists already" in capsys.readouterr().err


def test_what_is_no_checkpoint_is_told(tmp_path, capsys):
    assert main(["export", "--checkpoint", str(tmp_path), "--out", "x"]) == 2
    assert capsys.readouterr().err == f"--checkpoint: {tmp_path} holds no checkpoint\n"
