"""What people write to load and batch tokens, each way as its own users would write it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import torch

if TYPE_CHECKING:
    from pathlib import Path

Rows = list[tuple[list[int], list[int]]]
"""Ids and mask of each row of a batch, as Python lists."""
Batch = tuple[torch.Tensor, torch.Tensor, "torch.Tensor | list[int]"]
"""Ids, mask, and what tells the rows apart: lengths, or a mask of the padding."""


def open_dataset(folder: Path) -> datasets.Dataset:
    """Open without reading; progress bars off."""
    datasets.disable_progress_bars()
    return datasets.load_from_disk(str(folder))


def pad_by_element(rows: Rows) -> Batch:
    """The first version of many trainers: tensors of zeros, filled token by token."""
    longest = max(len(ids) for ids, _ in rows)
    input_ids, loss_mask, attention_mask = (
        torch.zeros(len(rows), longest, dtype=torch.long) for _ in range(3)
    )
    for i, (ids, mask) in enumerate(rows):
        for j in range(len(ids)):
            input_ids[i, j] = ids[j]
            loss_mask[i, j] = mask[j]
            attention_mask[i, j] = 1
    return input_ids, loss_mask, attention_mask


def pad_lists(rows: Rows) -> Batch:
    """The careful version: lists padded by concatenation, one tensor made of each."""
    longest = max(len(ids) for ids, _ in rows)
    rests = [[0] * (longest - len(ids)) for ids, _ in rows]
    together = list(zip(rows, rests, strict=True))
    return (
        torch.tensor([ids + rest for (ids, _), rest in together]),
        torch.tensor([mask + rest for (_, mask), rest in together]),
        torch.tensor([[1] * len(ids) + rest for (ids, _), rest in together]),
    )


def fetch_tensors(held: datasets.Dataset, rows: list[int]) -> Batch:
    """As a torch DataLoader fetches from a data set in torch format, then put end to end."""
    items = held.__getitems__(rows)
    input_ids = [each["input_ids"] for each in items]
    return (
        torch.cat(input_ids),
        torch.cat([each["loss_mask"] for each in items]),
        [len(each) for each in input_ids],
    )


def fetch_arrow(held: datasets.Dataset, rows: list[int]) -> Batch:
    """Past the formats: the rows as an Arrow table, whose flat values are taken by hand."""
    table = held[rows]
    ids, mask = (table[name].combine_chunks() for name in _COLUMNS)
    return (
        torch.from_numpy(ids.flatten().to_numpy().astype(np.int64)),
        torch.from_numpy(mask.flatten().to_numpy() != 0),
        ids.value_lengths().to_pylist(),
    )


_COLUMNS = ("input_ids", "loss_mask")


def preload(folder: Path) -> tuple[Any, ...]:
    """The simple fix for slow random reads: all chunks combined, then copied into flat tensors."""
    table = open_dataset(folder).data.table.combine_chunks()
    ids, mask = (table[name].combine_chunks() for name in _COLUMNS)
    ids, mask = (each.chunk(0) if hasattr(each, "chunk") else each for each in (ids, mask))
    return (
        torch.from_numpy(ids.values.to_numpy().astype(np.int32)),
        torch.from_numpy(mask.values.to_numpy() != 0),
        torch.from_numpy(ids.offsets.to_numpy().astype(np.int64)),
    )
