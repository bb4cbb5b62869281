"""Which columns say what a row is and what is trained on; a record batch as a chunk of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.data.arrow import store
from trainer.data.arrow.encodings import Spans, WrongColumnError, integers, spans
from trainer.data.arrow.store import Chunk
from trainer.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

    from trainer.data.arrow.mapped import Mapped

Int64 = npt.NDArray[np.int64]
IDS = ("input_ids", "tokens", "token_ids")
MASKS = ("loss_mask", "completion_mask", "assistant_masks")
LABELS = "labels"
PROMPTS = ("prompt_length", "prompt_len")


class Rows(NamedTuple):
    """The rows of one record batch, all of them."""

    chunk: Chunk
    ids_R: Int64
    mask_R: Int64
    """Or the prompts' lengths."""
    lengths_R: Int64


def needed(path: Path, names: list[str]) -> tuple[str, str]:
    """Which of a file's columns hold the ids, and what is trained on.

    Raises:
        InputError: there is none for one of them.
    """
    ids_name = _first(IDS, names)
    mask_name = _first((*MASKS, LABELS, *PROMPTS), names)
    if ids_name is None:
        raise InputError(
            f"{path}: has no column {IDS[0]}; it has {', '.join(names) or 'none'};"
            f" name it {', '.join(IDS[:-1])} or {IDS[-1]}"
        )
    if mask_name is None:
        raise InputError(
            f"{path}: has no column {MASKS[0]}; it has {', '.join(names)}; add one, or"
            f" {', '.join((*MASKS[1:], LABELS))} or {PROMPTS[0]}"
        )
    return ids_name, mask_name


def rows_of(batch: pa.RecordBatch, path: Path, first_row: int, mapped: Mapped | None) -> Rows:
    """A record batch as rows of one chunk.

    What is a view of the mapped file stays there. What had to be decoded (Parquet, compressed
    batches) is held at 5 bytes a token, so that the batch can go.

    Raises:
        InputError: a column is missing, is of another kind or is damaged, or two do not agree.
    """
    ids_name, mask_name = needed(path, batch.schema.names)
    told = _Told(path, first_row)
    ids = told.spans(batch, ids_name)
    if mask_name in PROMPTS:
        return _by_prompt(batch, told, ids, mask_name, mapped)
    mask = told.spans(batch, mask_name, bools=True)
    differ_R = ids.lengths_R != mask.lengths_R
    if differ_R.any():
        row = int(np.argmax(differ_R))
        raise InputError(
            f"{path}: row {first_row + row:,}: {ids.lengths_R[row]:,} {ids_name} but"
            f" {mask.lengths_R[row]:,} {mask_name}; make them as long"
        )
    rule = store.BITS if mask.bits else store.LABELS if mask_name == LABELS else store.NONZERO
    held_ids, ids_R = _kept(ids, mapped, np.int32)
    if mapped is not None and mapped.holds(mask.address):
        held_mask, mask_R = mask.values, mask.starts_R
    else:
        held_mask, mask_R, rule = _decoded(mask, rule)
    chunk = Chunk(
        ids=held_ids, mask=held_mask, rule=rule, where=str(path), first_row=first_row,
        mapped=mapped if held_ids is ids.values and held_mask is mask.values else None,
    )  # fmt: skip
    return Rows(chunk=chunk, ids_R=ids_R, mask_R=mask_R, lengths_R=ids.lengths_R)


def _by_prompt(
    batch: pa.RecordBatch, told: _Told, ids: Spans, name: str, mapped: Mapped | None
) -> Rows:
    prompts = told.integers(batch, name)
    wrong = np.flatnonzero((prompts < 0) | (prompts > ids.lengths_R))
    if len(wrong):
        row = int(wrong[0])
        raise InputError(
            f"{told.path}: row {told.first_row + row:,}: {name} is {prompts[row]:,}, but the row"
            f" has {ids.lengths_R[row]:,} tokens; give the number of the prompt's tokens"
        )
    held_ids, ids_R = _kept(ids, mapped, np.int32)
    chunk = Chunk(
        ids=held_ids, mask=None, rule=store.PROMPT, where=str(told.path),
        first_row=told.first_row, mapped=mapped if held_ids is ids.values else None,
    )  # fmt: skip
    return Rows(chunk=chunk, ids_R=ids_R, mask_R=prompts, lengths_R=ids.lengths_R)


def _kept(
    held: Spans, mapped: Mapped | None, narrow: type[np.integer[Any]]
) -> tuple[npt.NDArray[Any], Int64]:
    if mapped is not None and mapped.holds(held.address):
        return held.values, held.starts_R
    values, starts = _end_to_end(held)
    limits = np.iinfo(narrow)
    fits = not len(values) or (values.min() >= limits.min and values.max() <= limits.max)
    # An id that does not fit is wrong; it is told later, with its row, by its own value.
    return (values.astype(narrow) if fits else values.astype(np.int64)), starts


def _decoded(mask: Spans, rule: str) -> tuple[npt.NDArray[np.bool_], Int64, str]:
    if mask.bits:
        values = np.unpackbits(mask.values, bitorder="little").view(np.bool_)
        return values, mask.starts_R, store.NONZERO
    values, starts = _end_to_end(mask)
    wanted = store.IGNORED if rule == store.LABELS else 0
    return values != wanted, starts, store.NONZERO


def _end_to_end(held: Spans) -> tuple[npt.NDArray[Any], Int64]:
    # A slice of a decoded batch must not keep what lies around it.
    starts, lengths = held.starts_R, held.lengths_R
    if not len(starts):
        return held.values[:0], starts
    low, high = int(starts.min()), int((starts + lengths).max())
    return held.values[low:high].copy(), np.maximum(starts - low, 0)


class _Told:
    """Reads columns, and tells what is wrong with one by file and row."""

    def __init__(self, path: Path, first_row: int) -> None:
        self.path, self.first_row = path, first_row

    def spans(self, batch: pa.RecordBatch, name: str, *, bools: bool = False) -> Spans:
        try:
            return spans(batch.column(batch.schema.names.index(name)), bools=bools)
        except WrongColumnError as error:
            raise self._error(name, error) from error

    def integers(self, batch: pa.RecordBatch, name: str) -> Int64:
        try:
            return integers(batch.column(batch.schema.names.index(name)))
        except WrongColumnError as error:
            raise self._error(name, error) from error

    def _error(self, name: str, error: WrongColumnError) -> InputError:
        row = "" if error.row is None else f" row {self.first_row + error.row:,}:"
        damaged = str(error).startswith("is damaged")
        remedy = "copy it again" if damaged else "write it again, as lists of whole numbers"
        return InputError(f"{self.path}:{row} column {name} {error}; {remedy}")


def _first(names: tuple[str, ...], there: list[str]) -> str | None:
    return next((name for name in names if name in there), None)
