"""Cross-entropy of drafted blocks, without ever holding the scores of all of them.

Shapes: N blocks, B slots, K = B - 1 drafted slots, H hidden size, V vocabulary; C blocks of one
chunk, R = C x K their rows.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    Weigh = Callable[[Tensor, Tensor], Tensor]

GAMMA_BY_BLOCK = {16: 7.0, 10: 5.0, 8: 4.0}

ROWS_OF_A_CHUNK = 2048
"""Scores of about this many slots exist at a time: 1.2 GB in float32 at 151,936 tokens."""


class BlockLoss(NamedTuple):
    """Sums, so that micro-batches and ranks can be added before anything is divided."""

    numerator: Tensor
    """Sum of weight x cross-entropy, 0-D, in nats; carries the gradient."""
    denominator: Tensor
    """Sum of weights, 0-D."""
    accepted: Tensor
    """Mean accepted length of the used blocks as in decoding: right tokens in a row + 1; 0-D."""
    blocks: Tensor
    """How many blocks were used, 0-D; weighs `accepted` when means are joined."""


def default_gamma(block_size: int) -> float:
    """The paper's decay for its block sizes, in slots; in proportion for others."""
    return GAMMA_BY_BLOCK.get(block_size, 7.0 * block_size / 16)


def decay_weights(block_size: int, gamma: float) -> Tensor:
    """weights_B, float64: 0 for the anchor, then exp(-(k - 1) / gamma) for slot k.

    Early slots earn more: a token counts only if all before it were right.
    """
    return torch.tensor([0.0] + [math.exp(-(k - 1) / gamma) for k in range(1, block_size)]).double()


def weigh_by_decay(
    block_size: int, gamma: float, device: torch.device | str | None = None
) -> Weigh:
    """Weights that depend on the slot alone.

    Args:
        block_size: B.
        gamma: in slots, above 0.
        device: where they are needed; a copy at each use would wait for the device.
    """
    weights_K = decay_weights(block_size, gamma)[1:].to(device)

    def weigh(ce_CK: Tensor, supervised_CK: Tensor) -> Tensor:
        return weights_K.to(ce_CK) * supervised_CK

    return weigh


def weigh_by_pace(alpha: float = 0.5) -> Weigh:
    """D-PACE: a slot weighs what reaching it and all behind it is expected to be worth now.

    Args:
        alpha: 0 to 1; how much of a slot's confidence is given for free.
    """

    def weigh(ce_CK: Tensor, supervised_CK: Tensor) -> Tensor:
        reached_CK = torch.where(supervised_CK, (1 - alpha) * torch.exp(-ce_CK) + alpha, 1.0)
        reached_CK = reached_CK.cumprod(dim=1) * supervised_CK
        return reached_CK.flip(1).cumsum(dim=1).flip(1) * supervised_CK

    return weigh


def block_loss(
    hidden_QH: Tensor,
    head_VH: Tensor,
    labels_NB: Tensor,
    supervised_NB: Tensor,
    weigh: Weigh,
    *,
    rows: int = ROWS_OF_A_CHUNK,
) -> BlockLoss:
    """Weighted cross-entropy of all blocks, and how far each would have been accepted.

    Slot 0 is the anchor: it is never predicted, so it never meets the head. Backward goes
    through the numerator; the step divides by the denominator of all ranks.

    Args:
        hidden_QH: the drafter's output, block after block.
        head_VH: the target's frozen head.
        labels_NB: int64; what the target said.
        supervised_NB: bool; False carries no loss, and its label does not matter.
        weigh: (cross-entropy, supervised) of whole blocks -> weights; without gradient.
        rows: slots whose scores may exist at once.

    Returns:
        The sums; cross-entropy is taken in at least float32.
    """
    count, block_size = labels_NB.shape
    hidden_NKH = hidden_QH.view(count, block_size, -1)[:, 1:]
    numerator, denominator, accepted, used = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call] # torch leaves it untyped
        hidden_NKH,
        head_VH,
        labels_NB[:, 1:],
        supervised_NB[:, 1:],
        weigh,
        _even(count, max(1, rows // (block_size - 1))),
    )
    return BlockLoss(numerator, denominator, accepted, used)


def _even(count: int, most: int) -> int:
    """Blocks of a chunk, at most `most`: chunks of one size are compiled once."""
    return -(-count // -(-count // most))


class _ChunkedCrossEntropy(torch.autograd.Function):
    # The gradient is made in the forward, while a chunk's scores are at hand: backward then
    # only scales it, and the head is multiplied three times instead of four.
    @staticmethod
    def forward(  # noqa: PLR0917 - apply() passes by position
        ctx: Any,
        hidden_NKH: Tensor,
        head_VH: Tensor,
        labels_NK: Tensor,
        supervised_NK: Tensor,
        weigh: Weigh,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = torch.promote_types(hidden_NKH.dtype, torch.float32)
        numerator = hidden_NKH.new_zeros((), dtype=wide)
        denominator, accepted = torch.zeros_like(numerator), torch.zeros_like(numerator)
        head_VH = head_VH.to(hidden_NKH.dtype)
        wanted = ctx.needs_input_grad[0]
        gradient_NKH = torch.empty_like(hidden_NKH) if wanted else None
        scored = _compiled() if hidden_NKH.is_cuda else _scored
        for start in range(0, len(hidden_NKH), chunk):
            part = slice(start, start + chunk)
            sums, gradient_CKH = scored(
                hidden_NKH[part],
                head_VH,
                labels_NK[part],
                supervised_NK[part],
                weigh,
                wanted=wanted,
            )
            numerator += sums[0]
            denominator += sums[1]
            accepted += sums[2]
            if gradient_NKH is not None and gradient_CKH is not None:
                gradient_NKH[part] = gradient_CKH
        used = supervised_NK.any(dim=1).sum().to(wide)
        ctx.save_for_backward(gradient_NKH)
        accepted = torch.where(used > 0, (accepted + used) / used.clamp(min=1), 0.0)
        ctx.mark_non_differentiable(denominator, accepted, used)
        return numerator, denominator, accepted, used

    @staticmethod
    def backward(ctx: Any, slope: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        (gradient_NKH,) = ctx.saved_tensors
        return gradient_NKH * slope.to(gradient_NKH.dtype), None, None, None, None, None


def _scored(
    hidden_CKH: Tensor,
    head_VH: Tensor,
    labels_CK: Tensor,
    supervised_CK: Tensor,
    weigh: Weigh,
    *,
    wanted: bool,
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
    """Numerator, denominator and right drafts in a row of one chunk; and the gradient."""
    wide = torch.promote_types(hidden_CKH.dtype, torch.float32)
    label_R1 = labels_CK.reshape(-1, 1)
    # Flat rows: three axes would be multiplied as a batch, four times slower on a CPU.
    scores_RV = (hidden_CKH.reshape(len(label_R1), -1) @ head_VH.T).to(wide)
    top_R1, best_R1 = scores_RV.max(-1, keepdim=True)
    right_CK = (best_R1 == label_R1).view_as(supervised_CK) & supervised_CK
    accepted = right_CK.to(wide).cumprod(dim=1).sum()
    # One pass of exp serves both the loss and its slope.
    shifted_R1 = scores_RV.sub_(top_R1).gather(-1, label_R1)
    total_R1 = scores_RV.exp_().sum(-1, keepdim=True)
    ce_CK = (total_R1.log() - shifted_R1).view(supervised_CK.shape)
    weights_CK = weigh(ce_CK, supervised_CK)
    # where, not a product alone: an unsupervised slot may hold anything, also inf.
    numerator = torch.where(supervised_CK, weights_CK * ce_CK, 0.0).sum()
    sums = numerator, weights_CK.sum(), accepted
    if not wanted:
        return sums, None
    weights_R1 = weights_CK.view(-1, 1)
    slope_RV = scores_RV.mul_(weights_R1 / total_R1)
    slope_RV.scatter_add_(-1, label_R1, -weights_R1)
    return sums, (slope_RV.to(head_VH.dtype) @ head_VH).view_as(hidden_CKH)


@functools.cache
def _compiled() -> Callable[..., tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]]:
    # It reads and writes the scores four times instead of eleven. Not at import: that brings in
    # the compiler.
    return torch.compile(_scored, dynamic=False)
