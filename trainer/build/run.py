"""A run: its parts, and how a micro-batch goes through them.

Shapes: T slots of a micro-batch, N anchors, Q block tokens, H hidden size, F feature width.
"""

from __future__ import annotations

import dataclasses
import resource
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional

from trainer.build.trial import Ends
from trainer.data.batching import Batch, Plan, Position, Schedule, assemble
from trainer.model import anchors
from trainer.model.loss import block_loss
from trainer.model.tiles import tiles
from trainer.model.trunk import sent
from trainer.pipeline import Pipeline, Stage
from trainer.update.gradients import NON_FINITE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor
    from torch.nn.attention.flex_attention import BlockMask

    from trainer.build.trial import Trial
    from trainer.config import TrainConfig
    from trainer.data.arrow import TokenStore
    from trainer.model.drafter import Drafter
    from trainer.model.loss import Weigh
    from trainer.model.target import Target
    from trainer.record.status import Trialled
    from trainer.update.gradients import FlatGradients
    from trainer.update.optimizer import AdamW
    from trainer.world import World

ACCEPTED, BLOCKS, TOKENS = range(NON_FINITE + 1, NON_FINITE + 4)
"""Places of our own among the numbers that ride along with the gradients."""


# Micro-batches whose rows the kernel is asked for before they are made.
_LOOKAHEAD = 16


class Work(NamedTuple):
    """One micro-batch before it is made."""

    position: Position
    """Where its step starts."""
    number: int
    """Over all pairs and epochs, from 0."""
    rows: NDArray[np.int64]


class Assembled(NamedTuple):
    """One micro-batch as arrays."""

    position: Position
    batch: Batch
    anchors_N: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One micro-batch, ready for the drafter, on the drafter's device."""

    position: Position
    tokens: int
    features_TF: Tensor
    position_T: Tensor
    embedded_QH: Tensor
    blocks: anchors.Blocks
    visible: Mapping[str, Tensor | BlockMask]


class Stream:
    """The micro-batches of a pipeline, as the drafter takes them.

    Args:
        batches: what the pipeline gives.
        read: the target, where it runs on the drafter's GPU. Then it runs in this thread: two
            that start kernels on one device take turns at the interpreter (one H200, 32,768
            tokens: 65 ms one after the other, 124 ms from two threads).
    """

    def __init__(
        self, batches: Iterator[Any], read: Callable[[Assembled], MicroBatch] | None
    ) -> None:
        self._batches, self._read = batches, read
        self._held: MicroBatch | None = None

    def __next__(self) -> MicroBatch:
        """The next one.

        Raises:
            StopIteration: there is none.
        """
        if self._read is None:
            micro: MicroBatch = next(self._batches)
            return micro
        self.look_ahead()
        held, self._held = self._held, None
        if held is None:
            raise StopIteration
        return held

    def look_ahead(self) -> None:
        """Start the target on the next one, behind the kernels that the GPU still works on."""
        if self._read is not None and self._held is None:
            made = next(self._batches, None)
            self._held = None if made is None else self._read(made)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that a training run is made of."""

    config: TrainConfig
    world: World
    store: TokenStore
    schedule: Schedule
    target: Target
    drafter: Drafter
    gradients: FlatGradients
    optimizer: AdamW
    start: Position
    """Where this process begins; the start of the data, or of what a checkpoint left."""
    head_VH: Tensor
    """The target's, on the drafter's device."""
    weigh: Weigh
    compiled: bool = False
    """The drafter wants tiles instead of a dense mask."""
    resumed_from: Path | None = None
    """The checkpoint it goes on from."""
    trial: Trial | None = None
    """What the drafter is measured on as it trains; on the first rank alone."""

    def batches(self) -> Pipeline:
        """This pair's micro-batches from `start` on, as a pipeline that is not started yet."""
        config = self.config
        stages: list[Stage] = [("assemble", self._assemble)]
        if not self.shares_gpu:
            stages.append(("target", self._read))
        return Pipeline(self._work(), stages, depth=config.depth if config.overlap else 0)

    def stream(self, batches: Pipeline) -> Stream:
        """The micro-batches of a pipeline that is started, ready for the drafter."""
        return Stream(iter(batches), self._read if self.shares_gpu else None)

    @property
    def shares_gpu(self) -> bool:
        """Whether target and drafter run on one GPU, and so from one thread."""
        return self.world.device.type == "cuda" and self.world.target_device == self.world.device

    def warm_up(self) -> None:
        """Compile what is to be compiled, on the first micro-batch; what it learns is forgotten.

        Here, not in the first step: the compiler is not made for two threads, and the pipeline's
        would meet it at once.
        """
        if self.compiled:
            # Every shape of the drafter is the same in each step; the target's rows vary.
            self.drafter.compile(fullgraph=True, dynamic=False)
            self.target.compile_()
            self.learn(self._read(self._assemble(next(self._work()))))
            self.gradients.zero_()

    def learn(self, micro: MicroBatch) -> None:
        """Draft a micro-batch, and add its gradients and sums."""
        with self.gradients.aside():
            hidden_QH = self.drafter(
                micro.embedded_QH,
                micro.features_TF,
                micro.position_T,
                micro.blocks.positions_Q,
                micro.visible,
            )
        loss = block_loss(
            hidden_QH, self.head_VH, micro.blocks.labels_NB, micro.blocks.supervised_NB, self.weigh
        )
        loss.numerator.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
        self.gradients.add_(loss.numerator, loss.denominator)
        self.gradients.extra_E[ACCEPTED] += loss.accepted * loss.blocks
        self.gradients.extra_E[BLOCKS] += loss.blocks
        self.gradients.extra_E[TOKENS] += micro.tokens

    def try_out(self, step: int, *, last: bool) -> Trialled | None:
        """Measure the drafter, where a trial is due after `step` steps."""
        if self.trial is None or not (last or step % self.config.eval_interval == 0):
            return None
        embedding_VH = self.target.embedding_VH.to(self.world.device)
        return self.trial.measure(self.drafter, Ends(embedding_VH, self.head_VH))

    def memory_gb(self) -> float:
        """Most memory that was ever in use: of the fullest GPU, or of this process on a CPU."""
        devices = {self.world.device, self.world.target_device}
        if self.world.device.type == "cuda":
            return max(map(torch.cuda.max_memory_allocated, devices)) / 1e9
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9

    def data_facts(self) -> dict[str, str | int]:
        """What decides which rows make which micro-batch; a position means nothing without it."""
        return {
            "fingerprint": self.store.fingerprint,
            "rows": len(self.store.lengths),
            "token_budget": self.config.token_budget,
            "layout": self.schedule.plan.layout,
            "seed": self.config.seed,
        }

    def in_layout(self, layout: str) -> Run:
        """This run with its rows put together in another way."""
        old, config = self.schedule, self.config
        schedule = Schedule(
            Plan(old.plan.lengths, config.token_budget, config.seed, layout=layout),
            epochs=config.epochs,
            pairs=old.pairs,
            accumulation=old.accumulation,
            steps=config.steps,
        )
        config = dataclasses.replace(config, layout=layout)
        return dataclasses.replace(self, config=config, schedule=schedule)

    def _work(self) -> Iterator[Work]:
        # What comes soon is read from disk meanwhile, so that a batch finds it in memory.
        coming: deque[Work] = deque()
        for work in self._mine():
            self.store.prefetch(work.rows)
            coming.append(work)
            if len(coming) > _LOOKAHEAD:
                yield coming.popleft()
        yield from coming

    def _mine(self) -> Iterator[Work]:
        first = self.world.rank * self.schedule.accumulation
        epoch = -1
        for position, step in self.schedule.steps(self.start):
            if position.epoch != epoch:
                self.store.unchanged()
                epoch = position.epoch
            mine = range(first, first + self.schedule.accumulation)
            yield from (Work(position, position.number + i, step[i]) for i in mine)

    def _assemble(self, work: Work) -> Assembled:
        config, epoch = self.config, work.position.epoch
        batch = assemble(
            self.store, work.rows, budget=config.token_budget, epoch=epoch, number=work.number
        )
        drawn_N = anchors.draw(
            batch.trainable_T,
            batch.document_T,
            count=config.max_anchors,
            seed=config.seed,
            epoch=epoch,
            number=work.number,
        )
        return Assembled(work.position, batch, drawn_N)

    # Gradient mode belongs to a thread: the main thread's does not reach the one this runs in.
    @torch.no_grad()
    def _read(self, made: Assembled) -> MicroBatch:
        batch, device, shape = made.batch, self.world.device, self.drafter.config
        ids_T = torch.from_numpy(batch.ids_T)
        features_TF = self.target.features(ids_T, torch.from_numpy(batch.starts_D1))
        anchors_N, ids_T, trainable_T, document_T, position_T = (
            sent(each, device)
            for each in (
                torch.from_numpy(made.anchors_N),
                ids_T,
                torch.from_numpy(batch.trainable_T),
                torch.from_numpy(batch.document_T),
                torch.from_numpy(batch.position_T),
            )
        )
        blocks = anchors.blocks(
            anchors_N,
            ids_T,
            trainable_T,
            document_T,
            position_T,
            block_size=shape.block_size,
            mask_token_id=shape.mask_token_id,
        )
        embedding_VH = self.target.embedding_VH
        embedded_QH = functional.embedding(blocks.ids_Q.to(embedding_VH.device), embedding_VH)
        visible = tiles if self.compiled else anchors.visible
        return MicroBatch(
            position=made.position,
            tokens=batch.tokens,
            features_TF=features_TF.to(device),
            position_T=position_T,
            embedded_QH=embedded_QH.to(device),
            blocks=blocks,
            visible=visible(
                anchors_N,
                document_T,
                block_size=shape.block_size,
                kinds=shape.layer_types,
                window=shape.sliding_window,
            ),
        )
