"""Tokenised completions from disk: Arrow and Parquet files as rows that are read when asked for.

What is encoded as it is used stays in the mapped file, shared by all processes of a machine and
larger than memory if need be; what is compressed is decoded once. An index of 24 bytes a row says
where each row lies.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trainer.data.arrow.columns import Rows, needed, rows_of
from trainer.data.arrow.containers import batches, indices
from trainer.data.arrow.discover import Found, find
from trainer.data.arrow.scan import USELESS, scan
from trainer.data.arrow.store import ROW, TokenStore
from trainer.errors import InputError

if TYPE_CHECKING:
    import numpy.typing as npt

    Int64 = npt.NDArray[np.int64]

__all__ = ["TokenStore", "load", "scanned"]


def load(
    data_dir: str | Path,
    *,
    budget: int,
    vocab_size: int | None = None,
    overlong: str = "error",
    split: str = "",
    whole: bool = True,
) -> TokenStore:
    """Open a data set.

    Args:
        data_dir: HuggingFace `save_to_disk` folder (one data set, or a dictionary of splits), a
            folder of Arrow (file or stream) or Parquet files, or one such file.
        budget: in tokens, the longest row a batch can hold.
        vocab_size: ids from this on are refused; None refuses none but negative ones.
        overlong: what becomes of longer rows: error, truncate or drop.
        split: which of several; empty: `train`.
        whole: read everything once, to refuse wrong ids and to leave out rows that teach nothing.
            Without it only offsets are read, and ids are looked at batch by batch.

    Raises:
        InputError: what was found is not such a data set; the message names file and row.
    """
    found = find(Path(data_dir), split)
    parts: list[Rows] = []
    for path in found.files:
        row = 0
        for batch, mapped in batches(path, needed):
            if batch.num_rows or not parts:
                parts.append(rows_of(batch, path, row, mapped))
            row += batch.num_rows
    index, first_C = _joined(parts)
    if found.indices:
        index = index[_order(found, len(index))]
    store = TokenStore(
        chunks=tuple(each.chunk for each in parts),
        first_C=first_C,
        index=index,
        notes=(*found.notes, *_decoded(parts)),
        vocab_size=vocab_size,
    )
    store = _not_empty(_within(store, budget, overlong), data_dir)
    return scanned(store, data_dir, vocab_size=vocab_size) if whole else store


def scanned(store: TokenStore, data_dir: str | Path, *, vocab_size: int | None) -> TokenStore:
    """Read all of an opened data set once; see `scan.scan`.

    Raises:
        InputError: an id is refused, or no row is left.
    """
    return _not_empty(scan(store, vocab_size), data_dir)


def _not_empty(store: TokenStore, data_dir: str | Path) -> TokenStore:
    if len(store.index):
        return store
    left_out = ", ".join(f"{count:,} {why}" for why, count in store.dropped.items())
    raise InputError(
        f"{data_dir}: has no row to train on ({left_out or 'no rows at all'});"
        " look at what wrote it"
    )


def _joined(parts: list[Rows]) -> tuple[npt.NDArray[np.void], Int64]:
    first_C = np.concatenate([[0], np.cumsum([len(each.lengths_R) for each in parts])])
    first_C = first_C.astype(np.int64)
    total = int(first_C[-1])
    if total >= 2**31:
        raise InputError(f"--data-dir: holds {total:,} rows; give fewer than {2**31:,}")
    index = np.empty(total, ROW)
    index["number"] = np.arange(total)
    for first, each in zip(first_C[:-1].tolist(), parts, strict=True):
        span = slice(first, first + len(each.lengths_R))
        index["ids"][span], index["mask"][span] = each.ids_R, each.mask_R
        index["length"][span] = each.lengths_R
    return index, first_C[:-1]


def _order(found: Found, rows: int) -> Int64:
    order = np.concatenate([indices(path).to_numpy() for path in found.indices])
    wrong = np.flatnonzero((order < 0) | (order >= rows))
    if len(wrong):
        raise InputError(
            f"{found.indices[0]}: row {wrong[0]:,}: chooses row {order[wrong[0]]:,}, but there are"
            f" {rows:,}; save the data set again after flatten_indices()"
        )
    return np.asarray(order, np.int64)


def _within(store: TokenStore, budget: int, overlong: str) -> TokenStore:
    # What lengths alone decide; no token is read.
    index, lengths = store.index, store.index["length"]
    over = np.flatnonzero(lengths > budget)
    if overlong == "error" and len(over):
        row = int(over[0])
        raise InputError(
            f"{store.place_of(row)}: {lengths[row]:,} tokens; raise --token-budget above"
            f" {budget:,}, or give --overlong truncate (or drop)"
        )
    kept = lengths >= 2
    dropped = Counter({"empty": int((lengths == 0).sum()), USELESS: int((lengths == 1).sum())})
    if overlong == "drop":
        kept[over] = False
        dropped["longer than the token budget"] = len(over)
        over = over[:0]
    cut_numbers = index["number"][over].astype(np.int64)
    # The index is ours alone yet.
    index["length"][over] = budget
    return dataclasses.replace(
        store,
        index=index if kept.all() else index[kept],
        dropped=dict(+dropped),
        cut_numbers=cut_numbers,
    )


def _decoded(parts: list[Rows]) -> tuple[str, ...]:
    held = [each.chunk for each in parts if each.chunk.mapped is None]
    files = {each.where for each in held}
    size = sum(each.ids.nbytes + (0 if each.mask is None else each.mask.nbytes) for each in held)
    if not size:
        return ()
    note = (
        f"{len(files):,} compressed or Parquet files are held in memory, decoded:"
        f" {size / 2**30:.2f} GiB in each process"
    )
    return (note,)
