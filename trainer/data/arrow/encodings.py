"""Any Arrow encoding of lists of integers, as spans of one flat array; nothing is copied.

Shapes: R rows of one record batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Int64 = npt.NDArray[np.int64]


class WrongColumnError(Exception):
    """A column cannot be read; the text says why, the row where it is known."""

    def __init__(self, text: str, row: int | None = None) -> None:
        self.row = row
        super().__init__(text)


class Spans(NamedTuple):
    """Row r is `values[starts_R[r]:starts_R[r] + lengths_R[r]]`; in bits, where `bits`."""

    values: npt.NDArray[Any]
    starts_R: Int64
    lengths_R: Int64
    """0 where a row is null."""
    address: int
    """Where the values lie in memory."""
    bits: bool = False
    """Values are packed by eight, the lowest bit first."""


def spans(column: pa.Array, *, bools: bool = False) -> Spans:
    """A column of lists of integers (or of bools, where asked).

    Raises:
        WrongColumnError: it holds something else, or is damaged.
    """
    kind = column.type
    layout = _LAYOUTS.get(kind.id)
    if layout is None and isinstance(column, pa.ExtensionArray):
        return spans(column.storage, bools=bools)
    if layout is None and pa.types.is_dictionary(kind):
        return _chosen(spans(column.dictionary, bools=bools), column)
    inner: Any = kind.value_type if layout else None
    if layout and pa.types.is_dictionary(inner):
        inner = inner.value_type
    if layout is None or not (pa.types.is_integer(inner) or (bools and pa.types.is_boolean(inner))):
        raise WrongColumnError(f"is {kind}; lists of integers are needed")
    child = column.values
    starts_R, lengths_R = _offsets(column, layout)
    if column.null_count:
        present = np.asarray(column.is_valid().to_numpy(zero_copy_only=False))
        # What stands under a null row means nothing, its offsets included.
        starts_R, lengths_R = np.where(present, starts_R, 0), np.where(present, lengths_R, 0)
    ordered = not (column.null_count or layout.sizes)
    _check_bounds(starts_R, lengths_R, len(child), ordered=ordered)
    try:
        # Constant time: are the buffers as long as they should be? It names no row, so comes last.
        column.validate()
    except pa.ArrowException as error:
        raise WrongColumnError(f"is damaged: {' '.join(str(error).split())}") from error
    if pa.types.is_dictionary(child.type):
        child = child.dictionary_decode()
    if child.null_count:
        _refuse_null(child, starts_R, lengths_R)
    buffer, first = child.buffers()[1], child.offset
    address = 0 if buffer is None else buffer.address
    if pa.types.is_boolean(child.type):
        packed = _view(buffer, np.dtype(np.uint8))
        return Spans(packed, starts_R + first, lengths_R, address, bits=True)
    values = _view(buffer, np.dtype(child.type.to_pandas_dtype()))
    return Spans(values[first : first + len(child)], starts_R, lengths_R, address)


def integers(column: pa.Array) -> Int64:
    """A column of one integer a row.

    Raises:
        WrongColumnError: it holds something else, or a null.
    """
    if not pa.types.is_integer(column.type):
        raise WrongColumnError(f"is {column.type}; one integer a row is needed")
    if column.null_count:
        row = int(pc.index(column.is_null(), value=True).as_py())
        raise WrongColumnError("is null", row)
    return np.asarray(column.to_numpy(zero_copy_only=False)).astype(np.int64)


class _Layout(NamedTuple):
    """How a kind of list says where its rows are."""

    offset: np.dtype[Any]
    sizes: bool = False
    """They stand beside the offsets, so that rows may lie anywhere."""
    fixed: bool = False
    """All rows are as long, and nothing is stored."""


_NARROW, _WIDE = np.dtype(np.int32), np.dtype(np.int64)
_LAYOUTS = {
    pa.list_(pa.int32()).id: _Layout(_NARROW),
    pa.large_list(pa.int32()).id: _Layout(_WIDE),
    pa.list_(pa.int32(), 1).id: _Layout(_WIDE, fixed=True),
    pa.list_view(pa.int32()).id: _Layout(_NARROW, sizes=True),
    pa.large_list_view(pa.int32()).id: _Layout(_WIDE, sizes=True),
}


def _offsets(column: pa.Array, layout: _Layout) -> tuple[Int64, Int64]:
    rows, first = len(column), column.offset
    if not rows:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    if layout.fixed:
        # A null row takes up its place all the same.
        size = column.type.list_size
        return (first + np.arange(rows, dtype=np.int64)) * size, np.full(rows, size, np.int64)
    buffers = column.buffers()
    # buffers() are those of the array before it was sliced; its offset alone says where it begins.
    if layout.sizes:
        starts, lengths = (
            _view(each, layout.offset)[first : first + rows] for each in buffers[1:3]
        )
        return starts.astype(np.int64), lengths.astype(np.int64)
    bounds = _view(buffers[1], layout.offset)[first : first + rows + 1].astype(np.int64)
    return bounds[:-1], bounds[1:] - bounds[:-1]


def _check_bounds(starts_R: Int64, lengths_R: Int64, count: int, *, ordered: bool) -> None:
    # Reading them costs nothing beside what follows; believing them would read foreign memory.
    if not len(starts_R):
        return
    # `reduce` itself: min() takes as long again to find it, and there are many small batches.
    least, most = np.minimum.reduce, np.maximum.reduce
    if ordered and least(lengths_R) >= 0 <= starts_R[0] and starts_R[-1] + lengths_R[-1] <= count:
        return
    ends_R = starts_R + lengths_R
    if least(lengths_R) < 0 or least(starts_R) < 0 or most(ends_R) > count:
        row = int(np.argmax((lengths_R < 0) | (starts_R < 0) | (ends_R > count)))
        raise WrongColumnError(
            f"is damaged: its offsets say values {starts_R[row]:,} to {ends_R[row]:,} of {count:,}",
            row,
        )


def _refuse_null(child: pa.Array, starts_R: Int64, lengths_R: Int64) -> None:
    nulls = np.flatnonzero(np.asarray(child.is_null().to_numpy(zero_copy_only=False)))
    held = np.searchsorted(nulls, starts_R + lengths_R) > np.searchsorted(nulls, starts_R)
    if held.any():
        # Its slot holds some number, 0 mostly, which nobody meant.
        raise WrongColumnError("holds a null", int(np.argmax(held)))


def _chosen(held: Spans, column: pa.Array) -> Spans:
    present = np.asarray(column.indices.is_valid().to_numpy(zero_copy_only=False))
    places = np.asarray(column.indices.fill_null(0).to_numpy(zero_copy_only=False)).astype(np.int64)
    if not len(held.starts_R):
        zeros = np.zeros(len(present), np.int64)
        return held._replace(starts_R=zeros, lengths_R=zeros)
    lengths_R = np.where(present, held.lengths_R[places], 0)
    return held._replace(starts_R=held.starts_R[places], lengths_R=lengths_R)


def _view(buffer: pa.Buffer | None, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if buffer is None or not buffer.size:
        return np.zeros(0, dtype)
    return np.frombuffer(buffer, dtype, buffer.size // dtype.itemsize)
