"""Any Arrow encoding of lists of integers, as spans of one flat array; nothing is copied.

Shapes: R rows of one record batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True, kw_only=True)
class Spans:
    """Row r is `values[starts_R[r]:starts_R[r] + lengths_R[r]]`; in bits, where `bits`."""

    values: npt.NDArray[Any]
    starts_R: Int64
    lengths_R: Int64
    """0 where a row is null."""
    bits: bool = False
    """Values are packed by eight, the lowest bit first."""

    @property
    def address(self) -> int:
        """Where the values lie in memory."""
        return int(self.values.__array_interface__["data"][0])


def spans(column: pa.Array, *, bools: bool = False) -> Spans:
    """A column of lists of integers (or of bools, where asked).

    Raises:
        WrongColumnError: it holds something else, or is damaged.
    """
    kind = column.type
    if isinstance(column, pa.ExtensionArray):
        return spans(column.storage, bools=bools)
    if pa.types.is_dictionary(kind):
        return _chosen(spans(column.dictionary, bools=bools), column)
    listed = any(is_it(kind) for is_it in _LISTS)
    inner: Any = kind.value_type if listed else None
    if listed and pa.types.is_dictionary(inner):
        inner = inner.value_type
    if not listed or not (pa.types.is_integer(inner) or (bools and pa.types.is_boolean(inner))):
        raise WrongColumnError(f"is {kind}; lists of integers are needed")
    try:
        # Constant time: are the buffers as long as they should be?
        column.validate()
    except pa.ArrowException as error:
        raise WrongColumnError(f"is damaged: {' '.join(str(error).split())}") from error
    starts_R, lengths_R = _offsets(column)
    if column.null_count:
        present = np.asarray(column.is_valid().to_numpy(zero_copy_only=False))
        # What stands under a null row means nothing, its offsets included.
        starts_R, lengths_R = np.where(present, starts_R, 0), np.where(present, lengths_R, 0)
    child = column.values
    _check_bounds(starts_R, lengths_R, len(child))
    if pa.types.is_dictionary(child.type):
        child = child.dictionary_decode()
    if child.null_count:
        _refuse_null(child, starts_R, lengths_R)
    if pa.types.is_boolean(child.type):
        packed = _view(child.buffers()[1], np.dtype(np.uint8))
        return Spans(
            values=packed, starts_R=starts_R + child.offset, lengths_R=lengths_R, bits=True
        )
    values = _view(child.buffers()[1], np.dtype(child.type.to_pandas_dtype()))
    values = values[child.offset : child.offset + len(child)]
    return Spans(values=values, starts_R=starts_R, lengths_R=lengths_R)


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


_LISTS = (
    pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list,
    pa.types.is_list_view, pa.types.is_large_list_view,
)  # fmt: skip


def _offsets(column: pa.Array) -> tuple[Int64, Int64]:
    kind, rows, first = column.type, len(column), column.offset
    if not rows:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    if pa.types.is_fixed_size_list(kind):
        # No offsets are stored; a null row takes up its place all the same.
        starts = (first + np.arange(rows, dtype=np.int64)) * kind.list_size
        return starts, np.full(rows, kind.list_size, np.int64)
    wide = pa.types.is_large_list(kind) or pa.types.is_large_list_view(kind)
    dtype = np.dtype(np.int64 if wide else np.int32)
    buffers = column.buffers()
    # buffers() are those of the array before it was sliced; its offset alone says where it begins.
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        starts = _view(buffers[1], dtype)[first : first + rows].astype(np.int64)
        return starts, _view(buffers[2], dtype)[first : first + rows].astype(np.int64)
    bounds = _view(buffers[1], dtype)[first : first + rows + 1].astype(np.int64)
    return bounds[:-1], np.diff(bounds)


def _check_bounds(starts_R: Int64, lengths_R: Int64, count: int) -> None:
    # Reading them costs nothing beside what follows; believing them would read foreign memory.
    wrong = np.flatnonzero((lengths_R < 0) | (starts_R < 0) | (starts_R + lengths_R > count))
    if len(wrong):
        row = int(wrong[0])
        first, last = int(starts_R[row]), int(starts_R[row] + lengths_R[row])
        raise WrongColumnError(
            f"is damaged: its offsets say values {first:,} to {last:,} of {count:,}", row
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
        return Spans(values=held.values, starts_R=zeros, lengths_R=zeros, bits=held.bits)
    return Spans(
        values=held.values,
        starts_R=held.starts_R[places],
        lengths_R=np.where(present, held.lengths_R[places], 0),
        bits=held.bits,
    )


def _view(buffer: pa.Buffer | None, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if buffer is None or not buffer.size:
        return np.zeros(0, dtype)
    return np.frombuffer(buffer, dtype, buffer.size // dtype.itemsize)
