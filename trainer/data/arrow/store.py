"""Rows of tokens, wherever they lie: an index of 24 bytes a row over arrays that are not copied.

Shapes: T slots of a micro-batch, R rows. numpy only.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainer.data.arrow.mapped import Mapped

Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

NONZERO, BITS, LABELS, PROMPT = "nonzero", "bits", "labels", "prompt"
"""How a chunk tells what is trained on: values that are not 0, the same bit-packed, labels that
are not -100, or all that follows a prompt's length."""
IGNORED = -100


class Chunk(NamedTuple):
    """Rows that share one array of ids: a record batch of a file, or what was decoded from it."""

    ids: npt.NDArray[np.integer[Any]]
    mask: Any
    """None under the rule `prompt`, whose starts are the prompt's lengths."""
    rule: str
    where: str
    """File that it is from."""
    first_row: int
    """Its first row's number in that file."""
    mapped: Mapped | None = None
    """The file, where the arrays are views of it."""

    def train(self, start: int, out: Bool) -> None:
        """Write which of `len(out)` tokens from `start` on are trained on."""
        count = len(out)
        if self.rule == NONZERO:
            # To bool numpy converts by asking whether it is 0; 256 stays true.
            out[:] = self.mask[start : start + count]
        elif self.mask is None:
            out[:start] = False
            out[start:] = True
        elif self.rule == BITS:
            packed = self.mask[start >> 3 : (start + count + 7) >> 3]
            bits = np.unpackbits(packed, bitorder="little")
            out[:] = bits[start & 7 : (start & 7) + count]
        else:
            np.not_equal(self.mask[start : start + count], IGNORED, out=out)


ROW = np.dtype([("ids", "i8"), ("mask", "i8"), ("length", "i4"), ("number", "i4")])
"""Where a row lies: its first id in its chunk's ids; its first mask value, or the length of its
prompt; how many tokens; its number among all rows of all files, before any was left out. Together,
not in a column each: a batch picks rows from all over, and each costs a miss of the cache."""


@dataclass(frozen=True, kw_only=True)
class TokenStore:
    """Every usable row of a data set, by number.

    Nothing but the index is held in memory where files could be mapped; a row is read when a
    batch asks for it.
    """

    chunks: Sequence[Chunk]
    first_C: Int64
    """Number of each chunk's first row, among all rows of all files."""
    index: npt.NDArray[np.void]
    """A `ROW` for each row."""
    dropped: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Rows left out, by reason."""
    cut_numbers: Int64 = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))
    """Numbers of the rows that were cut to the token budget."""
    notes: tuple[str, ...] = ()
    """What a person should know of how it was found."""
    vocab_size: int | None = None
    """Ids from this on are refused when a batch is made; None: not looked at."""
    mask_token_id: int | None = None
    """An id that no batch may hold; None: not looked at."""
    seen_V: Bool | None = None
    """Which ids occur; None before everything was read."""

    @classmethod
    def in_memory(cls, tokens: npt.NDArray[Any], trainable: Bool, starts: Int64) -> TokenStore:
        """A store of rows that lie end to end; row r is `tokens[starts[r]:starts[r + 1]]`."""
        chunk = Chunk(ids=tokens, mask=trainable, rule=NONZERO, where="memory", first_row=0)
        starts = np.asarray(starts, np.int64)
        index = np.empty(len(starts) - 1, ROW)
        index["ids"] = index["mask"] = starts[:-1]
        index["length"], index["number"] = np.diff(starts), np.arange(len(index))
        return cls(chunks=(chunk,), first_C=np.zeros(1, np.int64), index=index)

    @property
    def lengths(self) -> Int64:
        """Tokens of each row."""
        return self.index["length"].astype(np.int64)

    @property
    def tokens(self) -> int:
        """Of all rows together."""
        return int(self.index["length"].sum(dtype=np.int64))

    @property
    def truncated(self) -> int:
        """Rows cut to the token budget."""
        return len(self.cut_numbers)

    @property
    def fingerprint(self) -> str:
        """Of the rows' lengths, in order: two stores with the same one make the same batches."""
        return hashlib.sha256(self.lengths.tobytes()).hexdigest()[:16]

    @functools.cached_property
    def files(self) -> tuple[Mapped, ...]:
        """The mapped ones."""
        # Keys of a dict: each once, in order.
        return tuple({each.mapped: None for each in self.chunks if each.mapped is not None})

    def fill(self, rows: Int64, ids_T: Int64, trainable_T: Bool) -> list[int]:
        """Write rows end to end into buffers that hold them; what follows is left as it is.

        Returns:
            Where each row starts, and where the last one ends.

        Raises:
            InputError: an id is outside the target's vocabulary, or is the mask token; not looked
                at where all were looked at before.
        """
        first, parts = self._parts
        at, starts, bytes_T = 0, [0], trainable_T.view(np.uint8)
        for ids_at, mask_at, count, number in self.index.take(rows).tolist():
            ids, mask, chunk = parts[bisect_right(first, number) - 1]
            end = at + count
            ids_T[at:end] = ids[ids_at : ids_at + count]
            if mask is None:
                chunk.train(mask_at, trainable_T[at:end])
            else:
                bytes_T[at:end] = mask[mask_at : mask_at + count]
            starts.append(end)
            at = end
        np.not_equal(bytes_T[:at], 0, out=trainable_T[:at])
        if self.seen_V is None:
            self._refuse(rows, ids_T[:at], starts)
        return starts

    def row(self, row: int) -> tuple[Int64, Bool]:
        """Ids of one row, and which of them are trained on."""
        count = int(self.index["length"][row])
        ids, trainable = np.empty(count, np.int64), np.empty(count, np.bool_)
        self.fill(np.array([row]), ids, trainable)
        return ids, trainable

    def occurs(self, token: int) -> bool:
        """Whether an id stands anywhere in the data; False while nothing was read."""
        return self.seen_V is not None and token < len(self.seen_V) and bool(self.seen_V[token])

    def prefetch(self, rows: Int64) -> None:
        """Ask the kernel to read these rows, and wait for none of them."""
        if not self.files:
            return
        first, _ = self._parts
        for ids_at, mask_at, count, number in self.index[rows].tolist():
            chunk = self.chunks[bisect_right(first, number) - 1]
            if chunk.mapped is not None:
                chunk.mapped.prefetch(chunk.ids[ids_at : ids_at + count])
                if chunk.mask is not None and chunk.rule != BITS:
                    chunk.mapped.prefetch(chunk.mask[mask_at : mask_at + count])

    def unchanged(self) -> None:
        """See that no mapped file was written to or replaced since it was opened.

        Raises:
            InputError: one was; what is read from it now is not what was indexed.
        """
        for file in self.files:
            file.unchanged()

    def place_of(self, row: int) -> str:
        """File and row of one of our rows, for messages."""
        number = int(self.index["number"][row])
        first, _ = self._parts
        place = bisect_right(first, number) - 1
        chunk = self.chunks[place]
        return f"{chunk.where}: row {chunk.first_row + number - first[place]:,}"

    @functools.cached_property
    def _parts(self) -> tuple[list[int], list[tuple[Any, Any, Chunk]]]:
        # What `fill` needs of each chunk; the mask where it is bytes, which are copied as they are
        # and asked whether they are 0 all together.
        parts = []
        for chunk in self.chunks:
            plain = chunk.rule == NONZERO and chunk.mask.itemsize == 1
            parts.append((chunk.ids, chunk.mask.view(np.uint8) if plain else None, chunk))
        return self.first_C.tolist(), parts

    def refuse(self, row: int, ids: Int64) -> None:
        """Say which of a row's ids the target lacks.

        Raises:
            InputError: it lacks one.
        """
        limit = self.vocab_size or 2**31
        wrong = np.flatnonzero((ids < 0) | (ids >= limit))
        if len(wrong):
            raise InputError(
                f"{self.place_of(row)}: id {ids[wrong[0]]} at position {wrong[0]:,}; the target"
                f" has ids 0 to {limit - 1:,}; tokenize with the target's own tokenizer"
            )

    def _refuse(self, rows: Int64, ids: Int64, starts: list[int]) -> None:
        # As unsigned, a negative id is a very large one: a single pass sees both.
        if self.vocab_size is not None and int(ids.view(np.uint64).max(initial=0)) >= (
            self.vocab_size
        ):
            for place, row in enumerate(rows.tolist()):
                self.refuse(row, ids[starts[place] : starts[place + 1]])
        if self.mask_token_id is not None and (ids == self.mask_token_id).any():
            place = int(np.searchsorted(starts, np.argmax(ids == self.mask_token_id), "right")) - 1
            raise InputError(
                f"{self.place_of(int(rows[place]))}: holds token {self.mask_token_id}, which stands"
                " for the mask; give another --mask-token-id"
            )
