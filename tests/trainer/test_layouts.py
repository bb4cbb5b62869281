"""Folders that servers load: read by an implementation of its own, and read back by ours.

Shapes: S context tokens, B slots of a block, H hidden size, F feature width, A heads, E head size.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainer import tiny
from trainer.errors import InputError
from trainer.export import export, export_speculators, read

SLIDING = {"sliding_layers": 1, "sliding_window": 5}


def reference(folder, embedded_BH, features_SF):
    """One block behind S context tokens, from config.json and the tensors alone, key by key."""
    told = json.loads((folder / "config.json").read_text())
    told = told.get("transformer_layer_config", told)
    held = {n: t.double() for n, t in load_file(folder / "model.safetensors").items()}
    heads, groups = told["num_attention_heads"], told["num_key_value_heads"]
    size, eps = told["head_dim"], told["rms_norm_eps"]
    count, block = len(features_SF), len(embedded_BH)

    def normed(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * held[name]

    def turned(x, position):
        half = size // 2
        angle = position * told["rope_theta"] ** (-torch.arange(half).double() / half)
        low, high = x[:half], x[half:]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([low * cos - high * sin, high * cos + low * sin])

    context_SH = normed(features_SF @ held["fc.weight"].T, "hidden_norm.weight")
    hidden_BH = embedded_BH
    for layer in range(told["num_hidden_layers"]):
        at = f"layers.{layer}."
        slides = told["layer_types"][layer] == "sliding_attention"
        inner_BH = normed(hidden_BH, at + "input_layernorm.weight")
        source = torch.cat([context_SH, inner_BH])
        wide = {n: held[f"{at}self_attn.{n}_proj.weight"] for n in "qkv"}
        out = []
        for slot in range(block):
            here, mixed = count + slot, []
            for head in range(heads):
                group = head // (heads // groups)
                rows = slice(group * size, (group + 1) * size)
                query = inner_BH[slot] @ wide["q"][head * size : (head + 1) * size].T
                query = turned(normed(query, at + "self_attn.q_norm.weight"), here)
                seen = [
                    u for u in range(len(source))
                    if not slides or here - told["sliding_window"] < u <= here
                ]  # fmt: skip
                scores, values = [], []
                for u in seen:
                    key = normed(source[u] @ wide["k"][rows].T, at + "self_attn.k_norm.weight")
                    scores.append(query @ turned(key, u) / size**0.5)
                    values.append(source[u] @ wide["v"][rows].T)
                mixed.append(torch.stack(scores).softmax(0) @ torch.stack(values))
            out.append(torch.cat(mixed) @ held[at + "self_attn.o_proj.weight"].T)
        hidden_BH = hidden_BH + torch.stack(out)
        inner_BH = normed(hidden_BH, at + "post_attention_layernorm.weight")
        gate, up, down = (held[f"{at}mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        gated = torch.nn.functional.silu(inner_BH @ gate.T) * (inner_BH @ up.T)
        hidden_BH = hidden_BH + gated @ down.T
    return normed(hidden_BH, "norm.weight")


def written(drafter, out, layout):
    tensors = {name: tensor.float() for name, tensor in drafter.named_parameters()}
    if layout == "z-lab":
        return export(tensors, drafter.config, out, dtype=torch.float32)
    held = tiny.vectors()
    return export_speculators(
        tensors, drafter.config, out, dtype=torch.float32, embedding_VH=held["embed"],
        head_VH=held["lm_head"], verifier="org/Target", verifier_architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
@pytest.mark.parametrize("changes", [{}, SLIDING])
def test_another_implementation_drafts_the_same_from_the_folder(tmp_path, layout, changes):
    # float64 of float32 numbers, so that the file loses nothing.
    drafter = tiny.vector_drafter(torch.float32, **changes).double()
    folder = written(drafter, tmp_path / "out", layout)
    generator = torch.Generator().manual_seed(1)
    features_SF = torch.randn(9, drafter.config.feature_size, generator=generator).double()
    embedded_BH = torch.randn(4, drafter.config.hidden_size, generator=generator).double()
    wanted = reference(folder, embedded_BH, features_SF)
    with torch.no_grad():
        context = drafter.new_context()
        drafter.extend(context, features_SF)
        # The angles of the rotation are float32, as in every implementation.
        torch.testing.assert_close(drafter.draft(embedded_BH, context), wanted, rtol=0, atol=1e-7)


@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
@pytest.mark.parametrize("changes", [{}, SLIDING])
def test_what_was_written_is_read_back(tmp_path, layout, changes):
    drafter = tiny.vector_drafter(torch.float32, **changes)
    found = read(written(drafter, tmp_path / "out", layout))
    # Speculators' layout does not say how many layers the target has.
    layers = drafter.config.target_layers if layout == "z-lab" else 6
    assert found.config == replace(drafter.config, target_layers=layers)
    assert set(found.tensors) == set(dict(drafter.named_parameters()))
    for name, tensor in drafter.named_parameters():
        assert torch.equal(found.tensors[name], tensor)


def test_speculators_layout_has_its_keys_and_the_targets_ends(tmp_path):
    drafter = tiny.vector_drafter(torch.float32)
    folder = written(drafter, tmp_path / "out", "speculators")
    told = json.loads((folder / "config.json").read_text())
    assert told["architectures"] == ["DFlashSpeculator"]
    assert told["speculators_model_type"] == "dflash"
    assert told["aux_hidden_state_layer_ids"] == [2, 6]
    assert told["speculators_config"] == {
        "algorithm": "dflash",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": "org/Target", "architectures": ["Qwen3ForCausalLM"]},
    }
    assert (told["block_size"], told["mask_token_id"], told["draft_vocab_size"]) == (4, 60, 61)
    assert told["transformer_layer_config"]["model_type"] == "qwen3"
    assert "dflash_config" not in told["transformer_layer_config"]
    held = load_file(folder / "model.safetensors")
    assert len(held) == 11 * 2 + 3 + 2
    assert torch.equal(held["lm_head.weight"], tiny.vectors()["lm_head"].float())


def change(folder, **changes):
    told = json.loads((folder / "config.json").read_text())
    for name, value in changes.items():
        if value is None:
            told.pop(name)
        else:
            told[name] = value
    (folder / "config.json").write_text(json.dumps(told))


def test_older_and_newer_spellings_are_read(tmp_path):
    drafter = tiny.vector_drafter(torch.float32)
    folder = written(drafter, tmp_path / "out", "z-lab")
    # Newer ones hold the block size inside alone; transformers 5 has no rope_theta at the top.
    change(folder, block_size=None, rope_theta=None)
    held = load_file(folder / "model.safetensors")
    renamed = {f"model.{name}": tensor for name, tensor in held.items()}
    save_file(renamed | {"embed_tokens.weight": torch.zeros(2)}, folder / "model.safetensors")
    found = read(folder)
    assert found.config == drafter.config
    assert set(found.tensors) == set(held)


def test_taps_that_are_not_told_are_those_of_the_rule(tmp_path):
    drafter = tiny.vector_drafter(torch.float32)
    folder = written(drafter, tmp_path / "out", "z-lab")
    change(folder, dflash_config={"mask_token_id": 60})
    assert read(folder).config.tap_ids == (1, 5)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"head_dim": None}, "its config.json lacks 'head_dim'; give a DFlash drafter"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "ours are sliding first"),
        ({"num_hidden_layers": 3, "layer_types": None}, "11 tensors are missing or unknown"),
    ],
)
def test_a_folder_that_holds_another_drafter_is_refused(tmp_path, changes, line):
    folder = written(tiny.vector_drafter(torch.float32), tmp_path / "out", "z-lab")
    change(folder, **changes)
    with pytest.raises(InputError, match=line):
        read(folder)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"draft_vocab_size": 32}, "has a vocabulary of its own, of 32 tokens"),
        ({"sample_from_anchor": True}, "says sample_from_anchor, which is another way"),
    ],
)
def test_a_speculators_drafter_of_another_kind_is_refused(tmp_path, changes, line):
    folder = written(tiny.vector_drafter(torch.float32), tmp_path / "out", "speculators")
    change(folder, **changes)
    with pytest.raises(InputError, match=line):
        read(folder)


def test_a_folder_that_is_none_is_told(tmp_path):
    with pytest.raises(InputError, match=r"--init-drafter: .*cannot be read"):
        read(tmp_path)
