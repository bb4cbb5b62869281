"""What a drafter is made of.

Shapes: S tokens, Q block tokens, H hidden size, A heads, G key/value heads, E head size,
X any width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask

from trainer.model.tiles import attend

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer.model.drafter import DrafterConfig


class Layer(nn.Module):
    """Attention over [context | block], then a gated MLP, each behind a norm and a residual."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.eps)

    def forward(
        self,
        hidden_QH: Tensor,
        turn_Q: tuple[Tensor, Tensor],
        context: tuple[Tensor, Tensor] | None,
        visible_QS: Tensor | BlockMask | None,
    ) -> Tensor:
        """One layer; `visible_QS` of None means that all is visible."""
        hidden_QH = hidden_QH + self.self_attn(
            self.input_layernorm(hidden_QH), turn_Q, context, visible_QS
        )
        out_QH: Tensor = hidden_QH + self.mlp(self.post_attention_layernorm(hidden_QH))
        return out_QH


class Attention(nn.Module):
    """Queries from the block; keys and values from context and block by the same weights."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.repeats = config.heads // config.kv_heads
        wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, wide, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, narrow, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, narrow, bias=False)
        self.o_proj = nn.Linear(wide, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.eps)
        self.k_norm = RMSNorm(config.head_dim, config.eps)

    def keys_values(self, x_SH: Tensor, turn_S: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """keys_GSE, normed and turned, and values_GSE."""
        keys_GSE = turned(self.k_norm(self._split(self.k_proj(x_SH))), turn_S)
        return keys_GSE, self._split(self.v_proj(x_SH))

    def forward(
        self,
        x_QH: Tensor,
        turn_Q: tuple[Tensor, Tensor],
        context: tuple[Tensor, Tensor] | None,
        visible_QS: Tensor | BlockMask | None,
    ) -> Tensor:
        """Attend; the context's keys come first."""
        queries_AQE = turned(self.q_norm(self._split(self.q_proj(x_QH))), turn_Q)
        keys_GSE, values_GSE = self.keys_values(x_QH, turn_Q)
        if context is not None:
            keys_GSE = torch.cat([context[0], keys_GSE], dim=1)
            values_GSE = torch.cat([context[1], values_GSE], dim=1)
        if isinstance(visible_QS, BlockMask):
            out_AQE = attend(queries_AQE, keys_GSE, values_GSE, visible_QS)
        else:
            # Repeated by hand: SDPA's own grouping falls back to the slow kernel under a mask.
            out_AQE = functional.scaled_dot_product_attention(
                queries_AQE[None],
                keys_GSE.repeat_interleave(self.repeats, dim=0)[None],
                values_GSE.repeat_interleave(self.repeats, dim=0)[None],
                attn_mask=visible_QS,
            )[0]
        out_QH: Tensor = self.o_proj(out_AQE.transpose(0, 1).flatten(1))
        return out_QH

    def _split(self, x_SX: Tensor) -> Tensor:
        return x_SX.view(x_SX.shape[0], -1, self.head_dim).transpose(0, 1)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_QH: Tensor) -> Tensor:
        """Gate, multiply, project back."""
        out_QH: Tensor = self.down_proj(functional.silu(self.gate_proj(x_QH)) * self.up_proj(x_QH))
        return out_QH


class RMSNorm(nn.Module):
    """Root mean square norm; the statistic is taken in at least float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Scale the last axis to unit root mean square, then by the weight."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Rotary(nn.Module):
    """Rotary position embedding over the whole head, angles in float32."""

    inv_freq: Tensor

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        self.head_dim, self.theta = head_dim, theta
        # Made at once, not at first use: ranks must agree on their buffers from the start.
        self.register_buffer("inv_freq", self._exact("cpu"), persistent=False)

    def forward(self, position_S: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each position's angles, [S, head_dim]."""
        angle_SE = (position_S.float()[:, None] * self.inv_freq).repeat(1, 2)
        return angle_SE.cos().to(dtype), angle_SE.sin().to(dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call] # torch leaves it untyped
        # A cast to bfloat16 would round the frequencies; far positions would turn wrongly.
        self.inv_freq = self._exact(self.inv_freq.device)
        return self

    def _exact(self, device: Any) -> Tensor:
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        return (1.0 / self.theta**exponent).to(device)


def turned(x_ASE: Tensor, turn_S: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each half-pair of the head by its position's angle."""
    cos_SE, sin_SE = turn_S
    first, second = x_ASE.chunk(2, dim=-1)
    return x_ASE * cos_SE + torch.cat([-second, first], dim=-1) * sin_SE
