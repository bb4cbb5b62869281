"""A drafter as a folder that z-lab's code, SGLang and vLLM load.

config.json and model.safetensors, with the tensor names of the published drafters: eleven a
layer and three more; embedding and head stay with the target.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from trainer.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from trainer.model.drafter import DrafterConfig


def export(
    tensors: Mapping[str, Tensor],
    config: DrafterConfig,
    out: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    eos_token_id: int | None = None,
) -> Path:
    """Write a drafter for serving. The folder is complete when it exists.

    Args:
        tensors: the drafter's parameters by name.
        config: what it is.
        out: the folder to make.
        dtype: of the tensors in the file.
        eos_token_id: the target's end token, which some loaders ask for.

    Returns:
        The folder.

    Raises:
        InputError: `out` exists already, or the tensors are not those of the config.
    """
    return write(
        tensors, config, Path(out), served_config(config, dtype, eos_token_id), dtype=dtype
    )


def write(
    tensors: Mapping[str, Tensor],
    config: DrafterConfig,
    out: Path,
    told: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    more: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write the folder of any layout.

    Args:
        tensors: the drafter's parameters by name.
        config: what it is.
        out: the folder to make.
        told: config.json.
        dtype: of the tensors in the file.
        more: tensors that stand in the file besides the drafter's.

    Raises:
        InputError: `out` exists already, or the tensors are not those of the config.
    """
    if out.exists():
        raise InputError(f"{out}: exists already; remove it or give another --out")
    wanted = tensor_names(config)
    if set(tensors) != wanted:
        odd = sorted(set(tensors) ^ wanted)
        raise InputError(f"{out}: {len(odd)} tensors are missing or unknown, first {odd[0]}")
    out.parent.mkdir(parents=True, exist_ok=True)
    beside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    # Copies: training keeps all parameters in one buffer, which safetensors refuses to write.
    all_tensors = {**tensors, **(more or {})}
    copies = {
        name: tensor.detach().to("cpu", dtype, copy=True) for name, tensor in all_tensors.items()
    }
    save_file(copies, beside / "model.safetensors", metadata={"format": "pt"})
    (beside / "config.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    beside.rename(out)
    return out


def tensor_names(config: DrafterConfig) -> set[str]:
    """The names of all tensors in the file."""
    attention = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    mlp = ("gate_proj", "up_proj", "down_proj")
    a_layer = [
        "input_layernorm",
        "post_attention_layernorm",
        *(f"self_attn.{name}" for name in attention),
        *(f"mlp.{name}" for name in mlp),
    ]
    layers = {f"layers.{i}.{name}.weight" for i in range(config.layers) for name in a_layer}
    return layers | {"fc.weight", "hidden_norm.weight", "norm.weight"}


def served_config(
    config: DrafterConfig, dtype: torch.dtype, eos_token_id: int | None
) -> dict[str, Any]:
    """config.json, with what each known loader reads.

    No auto_map: SGLang would then look for a modelling file.
    """
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        # At both places: z-lab's code reads the first alone, newer files have the second.
        "block_size": config.block_size,
        "dflash_config": {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.tap_ids),
        },
        # Read even where target_layer_ids are given.
        "num_target_layers": config.target_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "layer_types": list(config.layer_types),
        # Without use_sliding_window, transformers forgets the window.
        "use_sliding_window": config.sliding_layers > 0,
        "sliding_window": config.sliding_window if config.sliding_layers else None,
        "max_window_layers": config.layers,
        "rms_norm_eps": config.eps,
        # Both spellings: transformers 5 writes the second, the serving engines read the first.
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "vocab_size": config.vocabulary,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "pad_token_id": eos_token_id,
        "dtype": str(dtype).removeprefix("torch."),
        "use_cache": True,
    }
