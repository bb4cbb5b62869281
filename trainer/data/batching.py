"""Which rows make a micro-batch, and the micro-batch itself.

Shapes: T slots of a micro-batch (the token budget), D documents in it.
A plan is a pure function of lengths, budget, seed and epoch: every rank makes the same one, and a
resumed run makes it again, so that nothing of it is state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainer.data.arrow import TokenStore

Int64 = npt.NDArray[np.int64]

# Rows whose lengths are compared: enough to fill batches to 99 %, few enough that a batch mixes
# rows from all over the data.
WINDOW = 4096


@dataclass(frozen=True, kw_only=True)
class Batch:
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

    Rows are shuffled, then sorted by length inside windows, so that rows x longest stays within
    the budget with little padding; then the batches are shuffled.
    """

    def __init__(self, lengths: Int64, budget: int, seed: int, *, window: int = WINDOW) -> None:
        self.lengths, self.budget, self.seed, self.window = lengths, budget, seed, window

    def batches(self, epoch: int) -> list[Int64]:
        """All micro-batches of an epoch; each row stands in exactly one."""
        # Philox is counter-based: its key alone makes the stream, whatever ran before.
        random = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
        order = random.permutation(len(self.lengths))
        made = []
        for first in range(0, len(order), self.window):
            rows = order[first : first + self.window]
            rows = rows[np.argsort(-self.lengths[rows], kind="stable")]
            taken = 0
            while taken < len(rows):
                fits = self.budget // int(self.lengths[rows[taken]])
                made.append(rows[taken : taken + fits])
                taken += fits
        return [made[index] for index in random.permutation(len(made))]


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
            done += (len(self.plan.batches(epoch)) - used) // self.width
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
    """
    lengths = store.lengths_of(rows)
    starts_D1 = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(lengths, out=starts_D1[1:])
    tokens = int(starts_D1[-1])
    ids_T = np.zeros(budget, np.int64)
    trainable_T = np.zeros(budget, np.bool_)
    document_T = np.full(budget, -1, np.int32)
    position_T = np.zeros(budget, np.int64)
    for to, source, length in zip(starts_D1[:-1], store.starts[rows], lengths, strict=True):
        ids_T[to : to + length] = store.tokens[source : source + length]
        trainable_T[to : to + length] = store.trainable[source : source + length]
    document_T[:tokens] = np.repeat(np.arange(len(rows), dtype=np.int32), lengths)
    position_T[:tokens] = np.arange(tokens) - np.repeat(starts_D1[:-1], lengths)
    return Batch(
        ids_T=ids_T, trainable_T=trainable_T, document_T=document_T, position_T=position_T,
        starts_D1=starts_D1, tokens=tokens, epoch=epoch, number=number,
    )  # fmt: skip
