"""Which positions begin a drafted block, and what each block sees and must predict.

Shapes: T flat context tokens of a micro-batch, N anchors, B slots of a block, Q = N x B block
tokens. The key axis of attention is [T context tokens | Q block tokens]. An anchor is a flat
position in T; -1 marks a slot that found no eligible position, and is left out everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray
    from torch import Tensor

FULL = "full_attention"
SLIDING = "sliding_attention"

# Keeps these draws apart from any other that is keyed by the same seed and epoch.
_STREAM = 0xA2C4

ANCHOR_SEED_LIMIT = 2**63


def eligible(trainable_T: NDArray[np.bool_], document_T: NDArray[np.integer]) -> NDArray[np.intp]:
    """Flat positions that may begin a block: it and the next token carry loss, in one document."""
    kept = np.asarray(trainable_T, dtype=bool) & (document_T >= 0)
    follows = kept[:-1] & kept[1:] & (document_T[:-1] == document_T[1:])
    return np.flatnonzero(follows)


def draw(
    trainable_T: NDArray[np.bool_],
    document_T: NDArray[np.integer],
    *,
    count: int,
    seed: int,
    epoch: int,
    number: int,
) -> NDArray[np.int64]:
    """Draw `count` anchors, uniformly and without replacement.

    Args:
        trainable_T: whether a token carries loss.
        document_T: id of the token's document; -1 for padding.
        count: N; what cannot be filled is -1.
        seed: of the run.
        epoch: from 0.
        number: the batch's number among all ranks and steps; with `seed` and `epoch` it is the
            whole state, so that any rank count and any resume draws the same.

    Returns:
        anchors_N, ascending, the unused ones behind.
    """
    positions = eligible(trainable_T, document_T)
    key = np.array([seed, epoch], dtype=np.uint64)
    counter = np.array([0, 0, _STREAM, number], dtype=np.uint64)
    # Raw words, not Generator.choice: NumPy may change what a Generator's methods return.
    words = np.random.Philox(key=key, counter=counter).random_raw(len(positions))
    chosen = np.sort(positions[np.argsort(words, kind="stable")[:count]])
    anchors_N = np.full(count, -1, dtype=np.int64)
    anchors_N[: len(chosen)] = chosen
    return anchors_N


@dataclass(frozen=True)
class Blocks:
    """The drafted blocks of a micro-batch, all on one device."""

    anchors_N: Tensor
    """int64, flat; -1 is unused."""
    ids_NB: Tensor
    """int64: the anchor's token, then masks."""
    positions_NB: Tensor
    """int64: place in the document, for the rotary embedding."""
    labels_NB: Tensor
    """int64: what the target said there; 0 where nothing is supervised."""
    supervised_NB: Tensor
    """bool: carries loss. Never slot 0, never another document's token."""

    @property
    def ids_Q(self) -> Tensor:
        """Block tokens in the order of the query axis."""
        return self.ids_NB.flatten()

    @property
    def positions_Q(self) -> Tensor:
        """Positions in the order of the query axis."""
        return self.positions_NB.flatten()


def blocks(
    anchors_N: Tensor,
    ids_T: Tensor,
    trainable_T: Tensor,
    document_T: Tensor,
    position_T: Tensor,
    *,
    block_size: int,
    mask_token_id: int,
) -> Blocks:
    """Lay out one block an anchor; a block at its document's end is partly supervised."""
    used_N1 = (anchors_N >= 0)[:, None]
    anchors_N1 = anchors_N.clamp(min=0)[:, None]
    slot_B = torch.arange(block_size, device=anchors_N.device)
    flat_NB = anchors_N1 + slot_B
    inside_NB = flat_NB < ids_T.shape[0]
    flat_NB = flat_NB.clamp(max=ids_T.shape[0] - 1)
    supervised_NB = (
        used_N1
        & inside_NB
        & (slot_B > 0)
        & (document_T[flat_NB] == document_T[anchors_N1])
        & trainable_T[flat_NB]
    )
    ids_NB = torch.where(used_N1 & (slot_B == 0), ids_T[flat_NB], mask_token_id)
    return Blocks(
        anchors_N=anchors_N,
        ids_NB=ids_NB,
        # Beyond the document's end too: a partial block is drafted whole when decoding.
        positions_NB=position_T[anchors_N1] + slot_B,
        labels_NB=torch.where(supervised_NB, ids_T[flat_NB], 0),
        supervised_NB=supervised_NB,
    )


def visible(
    anchors_N: Tensor,
    document_T: Tensor,
    *,
    block_size: int,
    kinds: Iterable[str] = (FULL,),
    window: int | None = None,
) -> dict[str, Tensor]:
    """Who sees whom, for each kind of layer.

    A block sees its own document's context strictly before its anchor (the anchor's own
    feature does not exist yet when decoding), and itself: whole in full layers, causally in
    sliding ones, whose slot k also sees only the `window` nearest positions, itself counted.
    Every row sees at least one key, so that softmax is always defined.

    Returns:
        For each kind a bool mask [Q, T + Q]; True is visible.
    """
    tokens = document_T.shape[0]
    device = anchors_N.device
    count = anchors_N.shape[0]
    context_T = torch.arange(tokens, device=device)
    document_N1 = document_T[anchors_N.clamp(min=0)][:, None]
    context_NT = (
        (anchors_N >= 0)[:, None] & (context_T < anchors_N[:, None]) & (document_T == document_N1)
    )
    own_NN = torch.eye(count, dtype=torch.bool, device=device)
    slot_B = torch.arange(block_size, device=device)
    masks: dict[str, Tensor] = {}
    for kind in set(kinds):
        context_NBT = context_NT[:, None].expand(count, block_size, tokens)
        if kind == FULL:
            inside_BB = torch.ones(block_size, block_size, dtype=torch.bool, device=device)
        elif kind == SLIDING and window is not None:
            oldest_NB = anchors_N[:, None] + slot_B - (window - 1)
            context_NBT = context_NBT & (context_T >= oldest_NB[..., None])
            inside_BB = (slot_B[None] <= slot_B[:, None]) & (
                slot_B[None] > slot_B[:, None] - window
            )
        else:
            raise ValueError(f"kinds: is {kind} with window {window}; give {FULL} or {SLIDING}")
        block_QQ = (own_NN[:, None, :, None] & inside_BB[None, :, None, :]).reshape(
            count * block_size, count * block_size
        )
        masks[kind] = torch.cat([context_NBT.reshape(-1, tokens), block_QQ], dim=1)
    return masks
