"""Who sees whom as tiles, for attention that skips what nobody sees.

A dense mask costs Q x (T + Q) whatever it says; yet a block sees one document up to its anchor,
and itself. Anchors ascend and documents lie end to end, so that a tile of neighbouring blocks
needs a handful of tiles of keys.

Shapes as in anchors.py; I tiles of queries, J tiles of keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from trainer.model.anchors import FULL, SLIDING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    Sees = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

TILE = 128
"""Queries and keys of a tile: what the kernel is made for."""


def tiles(
    anchors_N: Tensor,
    document_T: Tensor,
    *,
    block_size: int,
    kinds: Iterable[str] = (FULL,),
    window: int | None = None,
) -> dict[str, BlockMask]:
    """The same rules as `anchors.visible`, in the form that `attend` takes.

    Nothing here waits for the device or depends on the contents, so that one compiled kernel
    serves every micro-batch.

    Returns:
        For each kind of layer a mask over [Q, T + Q].
    """
    tokens, count = document_T.shape[0], anchors_N.shape[0]
    start_N = _document_start(document_T)[anchors_N.clamp(min=0)]
    masks = {}
    for kind in set(kinds):
        if kind != FULL and (kind != SLIDING or window is None):
            raise ValueError(f"kinds: is {kind} with window {window}; give {FULL} or {SLIDING}")
        reach = window if kind == SLIDING else None
        seen_IJ = _seen_tiles(anchors_N, start_N, tokens, block_size, reach)
        # The tiles that are seen come first, in ascending order.
        order_IJ = seen_IJ.int().argsort(dim=-1, descending=True, stable=True)
        masks[kind] = BlockMask.from_kv_blocks(
            seen_IJ.sum(-1, dtype=torch.int32)[None, None],
            order_IJ.int()[None, None],
            BLOCK_SIZE=TILE,
            mask_mod=_sees(anchors_N, start_N, tokens, block_size, reach),
            seq_lengths=(count * block_size, tokens + count * block_size),
        )
    return masks


def attend(
    queries_AQE: Tensor, keys_GSE: Tensor, values_GSE: Tensor, visible_QS: BlockMask
) -> Tensor:
    """Attention under tiles, out_AQE. To be compiled: as it is, it makes all scores."""
    out: Tensor = flex_attention(
        queries_AQE[None],
        keys_GSE[None],
        values_GSE[None],
        block_mask=visible_QS,
        enable_gqa=queries_AQE.shape[0] != keys_GSE.shape[0],
    )
    return out[0]


def _document_start(document_T: Tensor) -> Tensor:
    """start_T: flat place where a slot's document begins."""
    slot_T = torch.arange(document_T.shape[0], device=document_T.device)
    begins_T = torch.ones_like(document_T, dtype=torch.bool)
    begins_T[1:] = document_T[1:] != document_T[:-1]
    return torch.where(begins_T, slot_T, 0).cummax(0).values


def _sees(
    anchors_N: Tensor, start_N: Tensor, tokens: int, block_size: int, window: int | None
) -> Sees:
    last = anchors_N.shape[0] - 1

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del batch, head
        # The last tile may reach beyond the last block.
        block = (query // block_size).clamp(max=last)
        slot, other = query % block_size, (key - tokens) % block_size
        context = (key < anchors_N[block]) & (key >= start_N[block])
        own = (key >= tokens) & ((key - tokens) // block_size == block)
        if window is not None:
            context = context & (key >= anchors_N[block] + slot - (window - 1))
            own = own & (other <= slot) & (other > slot - window)
        return context | own

    return sees


def _seen_tiles(
    anchors_N: Tensor, start_N: Tensor, tokens: int, block_size: int, window: int | None
) -> Tensor:
    """seen_IJ: whether any query of a tile may see any key of the other."""
    count, device = anchors_N.shape[0], anchors_N.device
    width = count * block_size
    first_J = torch.arange(0, tokens + width, TILE, device=device)
    # Each block sees two intervals of keys: its context, and itself.
    block_N = torch.arange(count, device=device)
    oldest_N = start_N if window is None else torch.maximum(start_N, anchors_N - (window - 1))
    own_N = tokens + block_N * block_size
    seen_NJ = _meets(oldest_N, anchors_N, first_J) | _meets(own_N, own_N + block_size, first_J)
    # A block may lie across two tiles of queries.
    first_I = torch.arange(0, width, TILE, device=device)
    inside_IN = _meets(block_N * block_size, (block_N + 1) * block_size, first_I).T
    return (inside_IN.float() @ seen_NJ.float()) > 0


def _meets(begin_N: Tensor, end_N: Tensor, first_J: Tensor) -> Tensor:
    """Whether [begin, end) and [first, first + TILE) share anything; nothing where end <= begin."""
    begin_N1, end_N1 = begin_N[:, None], end_N[:, None]
    return (begin_N1 < end_N1) & (begin_N1 < first_J + TILE) & (end_N1 > first_J)
