"""The drafter: a few decoder layers that fill a block of masks at once.

Shapes: T context tokens, Q block tokens, H hidden size, F = taps x H, A heads, G key/value
heads, E head size. No batch axis: documents and blocks lie flat and the mask separates them.

The names of its tensors are those of z-lab's checkpoints. Embedding and head belong to the
target: callers embed block tokens and apply the head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainer.model.anchors import FULL, SLIDING
from trainer.model.layers import Layer, RMSNorm, Rotary

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Everything that a served drafter must say of itself."""

    hidden_size: int
    """The target's: embedding and head are shared."""
    intermediate_size: int
    layers: int = 5
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tap_ids: tuple[int, ...]
    """Target layers whose outputs are the context features; id i is layer i's output."""
    target_layers: int
    mask_token_id: int
    block_size: int = 16
    """Slots of a block: the anchor and block_size - 1 drafted tokens."""
    rope_theta: float
    eps: float = 1e-6
    max_positions: int = 32_768
    sliding_layers: int = 0
    """How many of the first layers see only a window."""
    sliding_window: int | None = None
    """Positions that a sliding layer's slot sees, itself counted."""

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: is {self.kv_heads}; give a divisor of {self.heads}")
        if self.block_size < 2:
            raise ValueError(f"block_size: is {self.block_size}; give at least 2")
        if not 0 <= self.sliding_layers <= self.layers:
            raise ValueError(f"sliding_layers: is {self.sliding_layers}; give 0 to {self.layers}")
        if self.sliding_layers and not (self.sliding_window and self.sliding_window > 0):
            raise ValueError("sliding_window: is missing; give the positions a slot sees")

    @property
    def layer_types(self) -> tuple[str, ...]:
        """The kind of each layer, as z-lab's config names them."""
        return (SLIDING,) * self.sliding_layers + (FULL,) * (self.layers - self.sliding_layers)

    @property
    def feature_size(self) -> int:
        """F: width of one token's context features."""
        return len(self.tap_ids) * self.hidden_size


class Context:
    """Keys and values of the context, a layer at a time; they grow as tokens are accepted."""

    def __init__(self, layers: int) -> None:
        self.layers: list[tuple[Tensor, Tensor] | None] = [None] * layers
        self.length = 0

    def append(self, layer: int, keys_GTE: Tensor, values_GTE: Tensor) -> None:
        """Add the newest tokens of one layer."""
        held = self.layers[layer]
        if held is not None:
            keys_GTE = torch.cat([held[0], keys_GTE], dim=1)
            values_GTE = torch.cat([held[1], values_GTE], dim=1)
        self.layers[layer] = (keys_GTE, values_GTE)


class Drafter(nn.Module):
    """Drafts blocks from the target's context features."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.eps)
        self.rotary = Rotary(config.head_dim, config.rope_theta)

    def forward(
        self,
        embedded_QH: Tensor,
        features_TF: Tensor,
        position_T: Tensor,
        position_Q: Tensor,
        visible: Mapping[str, Tensor | BlockMask],
    ) -> Tensor:
        """Draft all blocks of a micro-batch at once.

        Args:
            embedded_QH: block tokens through the target's embedding.
            features_TF: the target's context features, cast to the drafter's dtype.
            position_T: int64, place of a context token in its document.
            position_Q: int64, place of a block token in its document.
            visible: for each kind of layer a mask [Q, T + Q], as `anchors.visible` makes it, or
                `tiles.tiles` for a drafter that is compiled.

        Returns:
            hidden_QH, normed: the target's head turns it into scores.
        """
        context_TH = self._fuse(features_TF)
        turn_T = self.rotary(position_T, context_TH.dtype)
        turn_Q = self.rotary(position_Q, context_TH.dtype)
        hidden_QH = embedded_QH.to(context_TH.dtype)
        for layer, kind in zip(self._layers(), self.config.layer_types, strict=True):
            context = layer.self_attn.keys_values(context_TH, turn_T)
            hidden_QH = layer(hidden_QH, turn_Q, context, visible[kind])
        out_QH: Tensor = self.norm(hidden_QH)
        return out_QH

    def new_context(self) -> Context:
        """An empty context, for decoding."""
        return Context(self.config.layers)

    def extend(self, context: Context, features_TF: Tensor) -> None:
        """Add the features of the next T accepted tokens to the context of one sequence."""
        context_TH = self._fuse(features_TF)
        count = context_TH.shape[0]
        position_T = torch.arange(count, device=context_TH.device) + context.length
        turn_T = self.rotary(position_T, context_TH.dtype)
        for i, layer in enumerate(self._layers()):
            context.append(i, *layer.self_attn.keys_values(context_TH, turn_T))
        context.length += count

    def draft(self, embedded_BH: Tensor, context: Context) -> Tensor:
        """Draft one block behind the context: [anchor, mask, ...] -> hidden_BH.

        The anchor stands at position `context.length`.
        """
        hidden_BH = embedded_BH.to(self.fc.weight.dtype)
        slot_B = torch.arange(hidden_BH.shape[0], device=hidden_BH.device)
        position_B = slot_B + context.length
        turn_B = self.rotary(position_B, hidden_BH.dtype)
        key_S = torch.arange(context.length + len(slot_B), device=hidden_BH.device)
        window = self.config.sliding_window or 0
        sliding_BS = (key_S <= position_B[:, None]) & (key_S > position_B[:, None] - window)
        for layer, kind, held in zip(
            self._layers(), self.config.layer_types, context.layers, strict=True
        ):
            hidden_BH = layer(hidden_BH, turn_B, held, sliding_BS if kind == SLIDING else None)
        out_BH: Tensor = self.norm(hidden_BH)
        return out_BH

    def _fuse(self, features_TF: Tensor) -> Tensor:
        # Once a forward, for all layers.
        fused_TH: Tensor = self.hidden_norm(self.fc(features_TF.to(self.fc.weight.dtype)))
        return fused_TH

    def _layers(self) -> list[Layer]:
        # Named for the type checker: a ModuleList forgets what it holds.
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def initialise_(self, seed: int, deviation: float = 0.02) -> None:
        """Draw all matrices anew from a normal distribution; norms become 1.

        Drawn on the CPU, so that every device and rank starts from the same numbers.
        """
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim == 1:
                    parameter.fill_(1.0)
                else:
                    drawn = torch.empty(parameter.shape, dtype=torch.float32)
                    parameter.copy_(drawn.normal_(0.0, deviation, generator=generator))
