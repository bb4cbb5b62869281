"""A drafter in the layout of the speculators library, which `vllm serve DIR` takes as it is.

The same tensors as z-lab's, and copies of the target's embedding and head besides; the target is
named in the config.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer.export.zlab import served_config, write

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from trainer.model.drafter import DrafterConfig

VERSION = "0.9.0"
"""The release of speculators whose configuration class these keys were compared with."""

# What z-lab's config says of more than the layers.
_NOT_OF_THE_LAYERS = {"architectures", "block_size", "dflash_config", "num_target_layers"}


def export_speculators(
    tensors: Mapping[str, Tensor],
    config: DrafterConfig,
    out: str | Path,
    *,
    embedding_VH: Tensor,
    head_VH: Tensor,
    verifier: str,
    verifier_architectures: Sequence[str],
    dtype: torch.dtype = torch.bfloat16,
    eos_token_id: int | None = None,
) -> Path:
    """Write a drafter for vLLM. The folder is complete when it exists.

    Args:
        tensors: the drafter's parameters by name.
        config: what it is.
        out: the folder to make.
        embedding_VH: the target's.
        head_VH: the target's; the embedding again where they are tied.
        verifier: name or path of the target, as the server is to load it.
        verifier_architectures: from the target's config.json.
        dtype: of the tensors in the file.
        eos_token_id: the target's end token.

    Returns:
        The folder.

    Raises:
        InputError: `out` exists already, or the tensors are not those of the config.
    """
    ends = {"embed_tokens.weight": embedding_VH, "lm_head.weight": head_VH}
    served = served_config(config, dtype, eos_token_id)
    told = speculators_config(config, served, verifier, verifier_architectures)
    return write(tensors, config, Path(out), told, dtype=dtype, more=ends)


def speculators_config(
    config: DrafterConfig,
    served: Mapping[str, Any],
    verifier: str,
    verifier_architectures: Sequence[str],
) -> dict[str, Any]:
    """config.json in that layout."""
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": list(verifier_architectures)},
        },
        "transformer_layer_config": {
            name: value for name, value in served.items() if name not in _NOT_OF_THE_LAYERS
        },
        "draft_vocab_size": config.vocabulary,
        "target_hidden_size": config.hidden_size,
        "block_size": config.block_size,
        # Counted from the embedding's output, not from the first layer's.
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.tap_ids],
        "mask_token_id": config.mask_token_id,
        # Sliding layers are causal inside a block; slot k drafts the token at the anchor + k.
        "sliding_window_non_causal": False,
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        "dtype": served["dtype"],
    }
