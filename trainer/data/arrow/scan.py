"""One look at every token: are all ids the target's, and which rows teach anything?"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from trainer.data.arrow.store import BITS, IGNORED, LABELS, Bool, Chunk, Int64, TokenStore

if TYPE_CHECKING:
    from collections.abc import Iterator

USELESS = "without two trained tokens in a row"
# Values looked at together: enough to forget the interpreter, little enough to stay in the cache.
_PIECE = 1 << 20


def scan(store: TokenStore, vocab_size: int | None) -> TokenStore:
    """Read everything once: refuse ids that the target lacks, drop rows that teach nothing.

    A block needs an anchor that is trained on, and a trained token after it, in the same row.

    Args:
        store: as it was opened.
        vocab_size: ids from this on are refused; None refuses none but negative ones.

    Raises:
        InputError: an id is refused, with its file and row.
    """
    store = dataclasses.replace(store, vocab_size=vocab_size)
    seen = np.zeros(vocab_size or 0, np.bool_)
    kept = np.ones(len(store.index), np.bool_)
    for file in store.files:
        file.read_ahead()
    for chunk, rows in _by_chunk(store):
        seen = _look_at_ids(store, chunk, rows, seen)
        kept[rows] = _teach(store, chunk, rows)
    for file in store.files:
        file.read_scattered()
    useless = int((~kept).sum())
    if not useless:
        return dataclasses.replace(store, seen_V=seen)
    index, cut = store.index[kept], store.cut_numbers
    return dataclasses.replace(
        store,
        seen_V=seen,
        index=index,
        dropped={**store.dropped, USELESS: store.dropped.get(USELESS, 0) + useless},
        cut_numbers=cut[np.isin(cut, index["number"])],
    )


def _by_chunk(store: TokenStore) -> Iterator[tuple[Chunk, Int64]]:
    # Chunk by chunk, whatever order an indices file gave the rows.
    numbers = store.index["number"]
    order = np.argsort(numbers, kind="stable")
    ends = np.searchsorted(numbers[order], [*store.first_C[1:], np.iinfo(np.int64).max])
    at = 0
    for chunk, end in zip(store.chunks, ends.tolist(), strict=True):
        if end > at:
            yield chunk, order[at:end]
        at = end


def _look_at_ids(store: TokenStore, chunk: Chunk, rows: Int64, seen: Bool) -> Bool:
    starts = store.index["ids"][rows]
    ends = starts + store.index["length"][rows]
    low, high = int(starts.min()), int(ends.max())
    if (ends - starts).sum() * 2 > high - low:
        pieces = [(at, min(at + _PIECE, high)) for at in range(low, high, _PIECE)]
    else:  # a few rows of many
        pieces = list(zip(starts.tolist(), ends.tolist(), strict=True))
    limit = store.vocab_size or 2**31
    for first, last in pieces:
        piece = chunk.ids[first:last]
        # As unsigned, a negative id is a very large one.
        largest = int(piece.view(f"u{piece.itemsize}").max(initial=0))
        if largest >= limit:
            # What lies between rows is no row's business; else this names the first one.
            for row in rows.tolist():
                store.refuse(row, store.row(row)[0])
            continue
        if largest >= len(seen):
            seen = np.concatenate([seen, np.zeros(largest + 1 - len(seen), np.bool_)])
        seen[piece] = True
    return seen


def _teach(store: TokenStore, chunk: Chunk, rows: Int64) -> Bool:
    lengths = store.index["length"][rows].astype(np.int64)
    starts = store.index["mask"][rows]
    if chunk.mask is None:
        return np.asarray(lengths - starts >= 2)
    teaches = np.zeros(len(rows), np.bool_)
    if chunk.rule != BITS:
        # Nearly every row ends in its completion: its last two tokens answer for it.
        ends = starts + lengths
        unlike = IGNORED if chunk.rule == LABELS else 0
        teaches = (chunk.mask[ends - 1] != unlike) & (chunk.mask[ends - 2] != unlike)
    for place in np.flatnonzero(~teaches).tolist():
        trainable = np.empty(lengths[place], np.bool_)
        chunk.train(int(starts[place]), trainable)
        teaches[place] = (trainable[:-1] & trainable[1:]).any()
    return teaches
