"""The folder that serving engines load."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors import safe_open

from tests.trainer import tiny
from trainer.errors import InputError
from trainer.export import export, served_config
from trainer.update.gradients import FlatGradients
from trainer.update.optimizer import AdamW


def read(folder):
    with safe_open(folder / "model.safetensors", "pt") as held:
        names = held.keys()
        return {name: held.get_tensor(name) for name in names}, held.metadata()


def tensors(drafter):
    return dict(drafter.named_parameters())


def test_names_are_those_of_published_drafters(tmp_path):
    drafter = tiny.vector_drafter(torch.float32)
    held, metadata = read(export(tensors(drafter), drafter.config, tmp_path / "out"))
    published = {name.removeprefix("draft.") for name in tiny.vectors() if "draft." in name}
    assert set(held) == published
    assert len(held) == 11 * 2 + 3
    assert metadata == {"format": "pt"}
    assert {each.dtype for each in held.values()} == {torch.bfloat16}


def test_numbers_survive_also_from_the_flat_buffer_of_training(tmp_path):
    drafter = tiny.vector_drafter(torch.float32)
    AdamW(FlatGradients(drafter.parameters(), tiny.Alone()))
    out = export(tensors(drafter), drafter.config, tmp_path / "out", dtype=torch.float32)
    held, _ = read(out)
    assert all(torch.equal(held[name], each) for name, each in tensors(drafter).items())


def test_config_is_understood_by_transformers(tmp_path):
    config = replace(tiny.CONFIG, sliding_layers=1, sliding_window=2048)
    drafter = tiny.vector_drafter(torch.float32)
    out = export(tensors(drafter), config, tmp_path / "out", eos_token_id=2)
    plain = json.loads((out / "config.json").read_text())
    read_back = transformers.AutoConfig.from_pretrained(out)
    assert type(read_back).__name__ == "Qwen3Config"
    assert read_back.sliding_window == 2048
    assert read_back.layer_types == ["sliding_attention", "full_attention"]
    assert read_back.rope_parameters["rope_theta"] == 1e6
    assert (read_back.block_size, read_back.num_target_layers) == (4, 8)
    assert read_back.dflash_config == {
        "block_size": 4,
        "mask_token_id": 60,
        "target_layer_ids": [1, 5],
    }
    # What transformers 4 and the serving engines read by their own names.
    assert plain["rope_theta"] == plain["rope_parameters"]["rope_theta"] == 1e6
    assert plain["vocab_size"] == 61
    assert "auto_map" not in plain


KEYS = """architectures attention_bias attention_dropout block_size bos_token_id dflash_config dtype
    eos_token_id head_dim hidden_act hidden_size initializer_range intermediate_size layer_types
    max_position_embeddings max_window_layers model_type num_attention_heads num_hidden_layers
    num_key_value_heads num_target_layers pad_token_id rms_norm_eps rope_parameters rope_scaling
    rope_theta sliding_window tie_word_embeddings use_cache use_sliding_window vocab_size"""


def test_config_has_every_key_that_a_loader_reads():
    config = served_config(tiny.CONFIG, torch.bfloat16, None)
    assert sorted(config) == KEYS.split()
    assert config["sliding_window"] is None
    assert config["use_sliding_window"] is False
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dtype"] == "bfloat16"


def test_refuses_wrong_tensors_and_an_existing_folder(tmp_path):
    drafter = tiny.vector_drafter(torch.float32)
    held = tensors(drafter)
    held.pop("fc.weight")
    with pytest.raises(InputError, match=r"missing or unknown, first fc\.weight"):
        export(held, drafter.config, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export(tensors(drafter), drafter.config, tmp_path / "out")
    with pytest.raises(InputError, match="exists already"):
        export(tensors(drafter), drafter.config, tmp_path / "out")
