"""Small parts that tests build on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import transformers

from trainer.model.anchors import Blocks, blocks, visible
from trainer.model.drafter import Drafter, DrafterConfig

VECTORS = Path(__file__).parent / "data/zlab_vectors.npz"
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    # Wide, so that a random model does not repeat one token for ever.
    "initializer_range": 0.4,
}
CONFIG = DrafterConfig(
    hidden_size=32,
    intermediate_size=48,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocabulary=61,
    tap_ids=(1, 5),
    target_layers=8,
    mask_token_id=60,
    block_size=4,
    rope_theta=1e6,
)


class Alone:
    """A world of one rank."""

    def sum_(self, tensor):
        """The sum over one is the one."""


def save_llama(out, **changes):
    config = transformers.LlamaConfig(
        **SIZES | {"num_hidden_layers": 6, "tie_word_embeddings": True} | changes
    )
    return _save(transformers.LlamaForCausalLM, config, out)


def save_qwen(out, **changes):
    config = transformers.Qwen3Config(
        **SIZES | {"num_hidden_layers": 8, "tie_word_embeddings": False} | changes
    )
    return _save(transformers.Qwen3ForCausalLM, config, out)


def save_qwen35(out):
    """A vision-language model with a hybrid language model; the model itself comes along."""
    linear = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    config = transformers.Qwen3_5Config(
        text_config=SIZES | {"num_hidden_layers": 8, "head_dim": 16} | linear | heads,
        vision_config=vision | {"out_hidden_size": 32, "num_position_embeddings": 16},
    )
    return out, _made(transformers.Qwen3_5ForConditionalGeneration, config, out)


def _save(kind, config, out):
    _made(kind, config, out)
    return out


def _made(kind, config, out):
    transformers.utils.logging.disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = kind(config).float().eval()
    model.save_pretrained(out)
    return model


def vectors():
    with np.load(VECTORS) as held:
        return {name: torch.from_numpy(held[name]) for name in held.files}


def vector_drafter(dtype, **changes):
    """The drafter of the published vectors."""
    drafter = Drafter(replace(CONFIG, **changes)).to(dtype)
    held = vectors()
    drafter.load_state_dict(
        {n.removeprefix("draft."): t for n, t in held.items() if n.startswith("draft.")}
    )
    return drafter


def flat(*lengths, padding=0):
    """document_T and position_T of documents one after the other."""
    document = [d for d, length in enumerate(lengths) for _ in range(length)] + [-1] * padding
    position = [p for length in lengths for p in range(length)] + [0] * padding
    return torch.tensor(document, dtype=torch.int32), torch.tensor(position)


class Case:
    """A micro-batch with random contents, and a drafter run over it in float64."""

    def __init__(self, *lengths, anchors, padding=0, **changes):
        self.drafter = vector_drafter(torch.float64, **changes)
        self.config = self.drafter.config
        self.document_T, self.position_T = flat(*lengths, padding=padding)
        generator = torch.Generator().manual_seed(3)
        count = len(self.document_T)
        self.ids_T = torch.randint(0, 60, (count,), generator=generator)
        self.features_TF = torch.randn(
            count, self.config.feature_size, generator=generator, dtype=torch.float64
        )
        self.embedding_VH = vectors()["embed"]
        self.head_VH = vectors()["lm_head"]
        self.trainable_T = self.document_T >= 0
        self.anchors_N = torch.tensor(anchors)

    def lay_out(self) -> Blocks:
        return blocks(
            self.anchors_N,
            self.ids_T,
            self.trainable_T,
            self.document_T,
            self.position_T,
            block_size=self.config.block_size,
            mask_token_id=self.config.mask_token_id,
        )

    def embedded(self):
        return self.embedding_VH[self.lay_out().ids_Q]

    def run(self, *, embedded_QH=None, features_TF=None):
        laid = self.lay_out()
        masks = visible(
            self.anchors_N,
            self.document_T,
            block_size=self.config.block_size,
            kinds=self.config.layer_types,
            window=self.config.sliding_window,
        )
        hidden_QH = self.drafter(
            self.embedding_VH[laid.ids_Q] if embedded_QH is None else embedded_QH,
            self.features_TF if features_TF is None else features_TF,
            self.position_T,
            laid.positions_Q,
            masks,
        )
        return hidden_QH.view(len(self.anchors_N), self.config.block_size, -1)
