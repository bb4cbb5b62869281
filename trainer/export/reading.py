"""Reads a drafter back from the folders that SGLang, vLLM, z-lab's code and speculators load."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from trainer.errors import InputError
from trainer.export.zlab import tensor_names
from trainer.model.anchors import FULL, SLIDING
from trainer.model.drafter import DrafterConfig
from trainer.model.target_shape import tap_ids_by_formula

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

# The target's own, which its folder has too; `model.` stands before names in some files.
_ENDS = {"embed_tokens.weight", "lm_head.weight"}


@dataclass(frozen=True)
class Served:
    """A drafter out of a folder."""

    config: DrafterConfig
    tensors: dict[str, Tensor]
    """Its parameters by name, on the CPU in float32."""


def read(path: Path, *, flag: str = "--init-drafter") -> Served:
    """Read a drafter in z-lab's or in speculators' layout.

    Args:
        path: the folder.
        flag: what named it, for messages.

    Returns:
        The drafter. Where a layout does not say how many layers the target has, it is one more
        than the last that is tapped.

    Raises:
        InputError: the folder holds no drafter, or one that is made otherwise than ours.
    """
    where = f"{flag}: {path}"
    try:
        told = json.loads((path / "config.json").read_text(encoding="utf-8"))
        files = sorted(path.glob("*.safetensors"))
        held = {name: tensor for file in files for name, tensor in load_file(file).items()}
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"{where}: cannot be read ({error}); give an exported drafter") from error
    try:
        config = _of_speculators(told) if "speculators_model_type" in told else _of_zlab(told)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(f"{where}: its config.json {why}; give a DFlash drafter") from error
    tensors = {
        short: tensor.to(torch.float32)
        for name, tensor in held.items()
        if (short := name.removeprefix("model.")) not in _ENDS
    }
    odd = sorted(tensors.keys() ^ tensor_names(config))
    if odd:
        raise InputError(f"{where}: {len(odd)} tensors are missing or unknown, first {odd[0]}")
    return Served(config, tensors)


def _of_zlab(told: dict[str, Any]) -> DrafterConfig:
    own = told.get("dflash_config") or {}
    layers = told["num_target_layers"]
    taps = own.get("target_layer_ids") or tap_ids_by_formula(layers, told["num_hidden_layers"])
    return _config(
        told,
        block_size=told.get("block_size") or own["block_size"],
        mask_token_id=own["mask_token_id"],
        tap_ids=tuple(taps),
        target_layers=layers,
    )


def _of_speculators(told: dict[str, Any]) -> DrafterConfig:
    inner = told["transformer_layer_config"]
    if told["draft_vocab_size"] != inner["vocab_size"]:
        raise ValueError(
            f"has a vocabulary of its own, of {told['draft_vocab_size']:,} tokens, not the target's"
        )
    for name in ("sliding_window_non_causal", "sample_from_anchor"):
        if told.get(name):
            raise ValueError(f"says {name}, which is another way of drafting")
    taps = tuple(each - 1 for each in told["aux_hidden_state_layer_ids"])
    return _config(
        inner,
        block_size=told["block_size"],
        mask_token_id=told["mask_token_id"],
        tap_ids=taps,
        target_layers=max(taps) + 1,
    )


def _config(told: dict[str, Any], **own: Any) -> DrafterConfig:
    layers = told["num_hidden_layers"]
    kinds = told.get("layer_types") or [FULL] * layers
    sliding = kinds.count(SLIDING)
    if kinds != [SLIDING] * sliding + [FULL] * (layers - sliding):
        raise ValueError(f"has layers of {', '.join(kinds)}; ours are sliding first, then full")
    rope = told.get("rope_parameters") or {}
    theta = told["rope_theta"] if rope.get("rope_theta") is None else rope["rope_theta"]
    return DrafterConfig(
        hidden_size=told["hidden_size"],
        intermediate_size=told["intermediate_size"],
        layers=layers,
        heads=told["num_attention_heads"],
        kv_heads=told["num_key_value_heads"],
        head_dim=told["head_dim"],
        vocabulary=told["vocab_size"],
        rope_theta=float(theta),
        eps=told["rms_norm_eps"],
        max_positions=told["max_position_embeddings"],
        sliding_layers=sliding,
        sliding_window=told.get("sliding_window") if sliding else None,
        **own,
    )
