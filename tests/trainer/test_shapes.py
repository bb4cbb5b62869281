"""Drafters of every shape that is promised go all the way: trained, resumed, measured, exported."""

import json

import pytest

from tests.trainer import made
from tests.trainer.runs import same, state
from trainer.__main__ import main
from trainer.export import read

SHAPES = [
    {"block_size": 8},
    {"block_size": 10, "draft_layers": 3, "tap_count": 3, "loss": "dpace"},
    {"block_size": 16, "draft_layers": 1, "target_layer_ids": "4"},
    {"block_size": 8, "draft_layers": 3, "sliding_layers": 2, "sliding_window": 6},
    {"block_size": 16, "draft_layers": 2, "sliding_layers": 2, "sliding_window": 9},
    {"block_size": 10, "draft_layers": 2, "sliding_layers": 0, "sliding_window": 9},
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape.values())))
def test_a_shape_goes_all_the_way(tiny_target_dir, tmp_path, capsys, shape):
    data = made.save_to_disk(tmp_path / "data", [made.table(made.rows(14))])

    def go(out, **more):
        words = made.flags(tiny_target_dir, data, tmp_path / out, **shape, **more)
        assert main(["train", *map(str, words)]) == 0

    go("whole", steps=5)
    go("parts", steps=5, save_interval=3)
    (tmp_path / "parts/step-00000005").rename(tmp_path / "aside")
    go("parts", steps=5)
    assert same(state(tmp_path / "whole"), state(tmp_path / "parts"))

    words = ["export", "--checkpoint", tmp_path / "whole", "--out", tmp_path / "served"]
    assert main([*map(str, words)]) == 0
    config = read(tmp_path / "served").config
    assert config.block_size == shape["block_size"]
    assert config.layers == shape.get("draft_layers", 2)
    assert config.layer_types.count("sliding_attention") == shape.get("sliding_layers", 0)

    capsys.readouterr()
    words = ["evaluate", "--target-model", tiny_target_dir, "--checkpoint", tmp_path / "served"]
    words += ["--data-dir", data, "--device", "cpu", "--limit", "1", "--max-new-tokens", "20"]
    assert main([*map(str, words)]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["same_as_plain"] == 1
    assert len(told["lengths"]) == shape["block_size"]
