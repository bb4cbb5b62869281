"""Which rows make a micro-batch, and the micro-batch itself.

Shapes: T slots of a micro-batch (the token budget), D documents in it.
Two layouts: `packed` fills the slots with documents of any length, for targets that keep documents
apart; `padded` takes documents of like length, so that right-padded to the longest they still fit.
Either way a micro-batch is documents end to end; only which ones differs.
A plan is a pure function of lengths, budget, seed and epoch: every rank makes the same one, and a
resumed run makes it again, so that nothing of it is state.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainer.data.arrow import TokenStore

Int64 = npt.NDArray[np.int64]

# Rows whose lengths are compared: enough to fill batches to 99 %, few enough that a batch mixes
# rows from all over the data.
WINDOW = 4096
PACKED, PADDED = "packed", "padded"


class Batch(NamedTuple):
    """One micro-batch: documents end to end in T slots; what is left at the end is padding."""

    ids_T: Int64
    """0 in the padding."""
    trainable_T: npt.NDArray[np.bool_]
    document_T: npt.NDArray[np.int32]
    """Which document a slot belongs to, from 0; -1 in the padding."""
    position_T: Int64
    """From 0 in each document; 0 in the padding."""
    starts_D1: npt.NDArray[np.int32]
    """Where each document starts, and where the last one ends."""
    tokens: int
    """Slots that are not padding."""
    epoch: int
    number: int
    """Over all pairs and epochs, from 0; anchors are drawn by it."""


class Plan:
    """The micro-batches of each epoch, as arrays of row numbers.

    Rows are shuffled, then put together inside windows of that order, then the micro-batches of
    all windows are shuffled.

    Attributes:
        layout: packed (best fit, longest first) or padded (of like length; rows x longest stays
            within the budget).
    """

    def __init__(
        self, lengths: Int64, budget: int, seed: int, *, layout: str = PADDED, window: int = WINDOW
    ) -> None:
        self.lengths, self.budget, self.seed, self.window = lengths, budget, seed, window
        self.layout = layout
        self._counts: dict[int, int] = {}

    def batches(self, epoch: int) -> list[Int64]:
        """All micro-batches of an epoch; each row stands in exactly one."""
        # Philox is counter-based: its key alone makes the stream, whatever ran before.
        random = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
        order = random.permutation(len(self.lengths))
        put_together = _packed if self.layout == PACKED else _padded
        made = []
        for first in range(0, len(order), self.window):
            rows = order[first : first + self.window]
            rows = rows[np.argsort(-self.lengths[rows], kind="stable")]
            made += put_together(rows, self.lengths[rows].tolist(), self.budget)
        self._counts[epoch] = len(made)
        return [made[index] for index in random.permutation(len(made))]

    def count(self, epoch: int) -> int:
        """Micro-batches of an epoch."""
        return self._counts[epoch] if epoch in self._counts else len(self.batches(epoch))


def _padded(rows: Int64, lengths: list[int], budget: int) -> list[Int64]:
    made, taken = [], 0
    while taken < len(rows):
        fits = budget // lengths[taken]
        made.append(rows[taken : taken + fits])
        taken += fits
    return made


def _packed(rows: Int64, lengths: list[int], budget: int) -> list[Int64]:
    # Longest first, each into the fullest micro-batch that still takes it. Bit r of `free` says
    # that some micro-batch has room for r tokens: the lowest bit from the row's length on is the
    # best fit, found in one operation on one large integer.
    shortest = lengths[-1]
    places: list[list[int]] = []
    with_room: dict[int, list[int]] = {}
    free = 0
    for place, length in enumerate(lengths):
        fitting = free >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            waiting = with_room[room]
            number = waiting.pop()
            if not waiting:
                free ^= 1 << room
            places[number].append(place)
        else:
            room, number = budget, len(places)
            places.append([place])
        rest = room - length
        if rest >= shortest:
            waiting = with_room.setdefault(rest, [])
            if not waiting:
                free |= 1 << rest
            waiting.append(number)
    return [rows[each] for each in places]


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a run stands in its data: all that a resume needs."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    index: int = 0
    """Micro-batches of this epoch used, by all pairs together."""
    number: int = 0
    """Micro-batches used since the start, by all pairs together."""


class Schedule:
    """Which micro-batches each pair takes in each step.

    A step takes the next `pairs * accumulation` micro-batches of the epoch; pair r takes the r-th
    `accumulation` of them. Two pairs without accumulation so take the same as one pair with two.
    What is left of an epoch and makes no whole step is dropped, on all pairs alike.

    The plan knows nothing of pairs, and a position counts micro-batches. So a run that goes on
    with other pairs or another accumulation takes the very next micro-batch of the same epoch:
    none is trained on twice and none is left out, but for the end of an epoch, whose rest is
    smaller than the step it then has.
    """

    def __init__(
        self, plan: Plan, *, epochs: int, pairs: int, accumulation: int, steps: int = 0
    ) -> None:
        self.plan, self.epochs, self.pairs, self.accumulation = plan, epochs, pairs, accumulation
        self._limit = steps

    @property
    def width(self) -> int:
        """Micro-batches of one step."""
        return self.pairs * self.accumulation

    def total(self, start: Position) -> int:
        """Steps of the whole run, of which `start.step` are done."""
        done = start.step
        for epoch in range(start.epoch, self.epochs):
            if self._limit and done >= self._limit:
                break
            used = start.index if epoch == start.epoch else 0
            done += (self.plan.count(epoch) - used) // self.width
        return min(done, self._limit) if self._limit else done

    def steps(self, start: Position) -> Iterator[tuple[Position, list[Int64]]]:
        """Each step from `start` on: where it starts, and its micro-batches, pair by pair."""
        position = start
        while position.epoch < self.epochs:
            batches = self.plan.batches(position.epoch)
            while position.index + self.width <= len(batches):
                if self._limit and position.step >= self._limit:
                    return
                yield position, batches[position.index : position.index + self.width]
                position = self.after(position)
            position = Position(
                step=position.step, epoch=position.epoch + 1, number=position.number
            )

    def after(self, position: Position) -> Position:
        """Where the step that starts at `position` ends."""
        return Position(
            step=position.step + 1,
            epoch=position.epoch,
            index=position.index + self.width,
            number=position.number + self.width,
        )


def assemble(store: TokenStore, rows: Int64, *, budget: int, epoch: int, number: int) -> Batch:
    """The rows of one micro-batch, copied row by row as whole slices.

    The arrays are fresh: the stages after this one hold several batches at once, and a ring of
    buffers would save some microseconds of a step that lasts a tenth of a second.

    Raises:
        InputError: a row holds an id that the store refuses.
    """
    ids_T = np.empty(budget, np.int64)
    trainable_T = np.empty(budget, np.bool_)
    starts = store.fill(rows, ids_T, trainable_T)
    tokens = starts[-1]
    ids_T[tokens:] = 0
    trainable_T[tokens:] = False
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    documents = np.arange(len(lengths) + 1, dtype=np.int32)
    documents[-1] = -1
    count_T, zero_T = _counting(budget)
    document_T = documents.repeat([*lengths, budget - tokens])
    position_T = np.concatenate([*(count_T[:length] for length in lengths), zero_T[tokens:]])
    return Batch(
        ids_T=ids_T, trainable_T=trainable_T, document_T=document_T, position_T=position_T,
        starts_D1=np.array(starts, np.int32), tokens=tokens, epoch=epoch, number=number,
    )  # fmt: skip


@functools.lru_cache(maxsize=4)
def _counting(budget: int) -> tuple[Int64, Int64]:
    return np.arange(budget), np.zeros(budget, np.int64)
