"""Makes the parts of a run and joins them: the only room that knows them all.

Shapes: T slots of a micro-batch, N anchors, Q block tokens, H hidden size, F feature width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional

from trainer.data import arrow
from trainer.data.batching import Batch, Plan, Position, Schedule, assemble
from trainer.errors import InputError
from trainer.model import anchors
from trainer.model.drafter import Drafter, DrafterConfig
from trainer.model.loss import block_loss, default_gamma, weigh_by_decay, weigh_by_pace
from trainer.model.mask_token import choose_mask_token
from trainer.model.target import Target
from trainer.pipeline import Pipeline
from trainer.record import checkpoint
from trainer.update.gradients import NON_FINITE, FlatGradients
from trainer.update.optimizer import AdamW

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from trainer.config import TrainConfig
    from trainer.data.arrow import TokenStore
    from trainer.model.loss import Weigh
    from trainer.world import World

ACCEPTED, BLOCKS, TOKENS = range(NON_FINITE + 1, NON_FINITE + 4)
"""Places of our own among the numbers that ride along with the gradients."""

Say = Callable[[str], None]


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
    visible: dict[str, Tensor]


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
    resumed_from: Path | None = None
    """The checkpoint it goes on from."""

    def batches(self) -> Pipeline:
        """This pair's micro-batches from `start` on, as a pipeline that is not started yet."""
        config = self.config
        return Pipeline(
            self._work(),
            [("assemble", self._assemble), ("target", self._read)],
            depth=config.depth if config.overlap else 0,
        )

    def learn(self, micro: MicroBatch) -> None:
        """Draft a micro-batch, and add its gradients and sums."""
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

    def save(self, position: Position, release: str | None) -> Path:
        """Write a checkpoint of the run as it is at `position`."""
        facts = {
            "position": dataclasses.asdict(position),
            "drafter": dataclasses.asdict(self.drafter.config),
            "data": _data_facts(self.config, self.store),
            "config": dataclasses.asdict(self.config),
            "release": release,
            "torch": torch.__version__,
        }
        files = {"drafter": self.drafter.state_dict(), "optimizer": self.optimizer.state_dict()}
        return checkpoint.save(
            Path(self.config.output_dir), position.step, files, facts, keep=self.config.keep
        )

    def _work(self) -> Iterator[Work]:
        first = self.world.rank * self.schedule.accumulation
        for position, step in self.schedule.steps(self.start):
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
            each.to(device)
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
        return MicroBatch(
            position=made.position,
            tokens=batch.tokens,
            features_TF=features_TF.to(device),
            position_T=position_T,
            embedded_QH=embedded_QH.to(device),
            blocks=blocks,
            visible=anchors.visible(
                anchors_N,
                document_T,
                block_size=shape.block_size,
                kinds=shape.layer_types,
                window=shape.sliding_window,
            ),
        )


def build(config: TrainConfig, world: World, *, pause: Callable[[], None], say: Say) -> Run:
    """Load data and target, make the drafter, and take up where a checkpoint left.

    Args:
        config: the run.
        world: this process's place in it.
        pause: called between the parts, so that a stop need not wait for all of them.
        say: told what a person should know.

    Raises:
        InputError: target, data or checkpoint are not what the run needs.
    """
    _share_threads(config, world)
    store = arrow.load(config.data_dir, budget=config.token_budget, overlong=config.overlong)
    say(f"data      {_told(store)}")
    pause()
    dtype = _dtype(config, world)
    target = Target.load(
        config.target_model,
        taps=config.target_layer_ids or None,
        tap_count=config.tap_count,
        device=world.target_device,
        dtype=dtype,
    )
    if int(store.tokens.max()) >= target.vocabulary:
        # Read again, only to name the file and the row.
        arrow.load(
            config.data_dir,
            vocab_size=target.vocabulary,
            budget=config.token_budget,
            overlong=config.overlong,
        )
    pause()
    shape = _drafter_config(config, target, store)
    say(f"target    {target.shape.family}, taps {','.join(map(str, target.tap_ids))}")
    run = assembled(config, world, store, target, shape, dtype=dtype)
    say(f"drafter   {_count(run.drafter):,} parameters, mask token {shape.mask_token_id}")
    pause()
    return _resumed(run, say)


def assembled(
    config: TrainConfig,
    world: World,
    store: TokenStore,
    target: Target,
    shape: DrafterConfig,
    *,
    dtype: torch.dtype,
) -> Run:
    """A run at the start of its data, from parts that are loaded."""
    drafter = Drafter(shape)
    drafter.initialise_(config.seed)
    drafter.to(world.device, dtype)
    gradients = FlatGradients(drafter.parameters(), world, extra=TOKENS + 1)
    optimizer = AdamW(
        gradients, betas=(config.beta1, config.beta2), weight_decay=config.weight_decay
    )
    gamma = config.gamma or default_gamma(config.block_size)
    decays = config.loss == "decay"
    return Run(
        config=config,
        world=world,
        store=store,
        schedule=Schedule(
            Plan(store.lengths, config.token_budget, config.seed),
            epochs=config.epochs,
            pairs=world.size,
            accumulation=config.accumulation,
            steps=config.steps,
        ),
        target=target,
        drafter=drafter,
        gradients=gradients,
        optimizer=optimizer,
        start=Position(),
        head_VH=target.head_VH.to(world.device),
        weigh=weigh_by_decay(config.block_size, gamma) if decays else weigh_by_pace(),
    )


def _resumed(run: Run, say: Say) -> Run:
    found = checkpoint.newest(Path(run.config.output_dir), say=say)
    if found is None:
        return run
    for part, here in (
        ("drafter", dataclasses.asdict(run.drafter.config)),
        ("data", _data_facts(run.config, run.store)),
    ):
        _same(found, part, here)
    run.optimizer.load_state_dict(found.tensors("optimizer"))
    say(f"resumed   from {found.path}")
    start = Position(**found.facts["position"])
    return dataclasses.replace(run, start=start, resumed_from=found.path.resolve())


def _same(found: checkpoint.Checkpoint, part: str, here: dict[str, Any]) -> None:
    # Through JSON, as the other side went: a tuple is a list there.
    there = found.facts[part]
    for name, value in here.items():
        value = list(value) if isinstance(value, tuple) else value  # noqa: PLW2901
        if there.get(name) != value:
            raise InputError(
                f"{found.path}: was written with {part} {name} {there.get(name)}, this run has"
                f" {value}; give another --output-dir, or the flags of the first start"
            )


def _data_facts(config: TrainConfig, store: TokenStore) -> dict[str, Any]:
    # What decides which rows make which micro-batch; a position means nothing without it.
    return {
        "fingerprint": store.fingerprint,
        "rows": len(store.lengths),
        "token_budget": config.token_budget,
        "seed": config.seed,
    }


def _drafter_config(config: TrainConfig, target: Target, store: TokenStore) -> DrafterConfig:
    shape = target.shape
    mask_token_id = choose_mask_token(
        target,
        explicit=config.mask_token_id if config.mask_token_id >= 0 else None,
        occurs=lambda token: bool((store.tokens == token).any()),
    )
    try:
        return DrafterConfig(
            hidden_size=shape.hidden_size,
            intermediate_size=config.draft_intermediate or shape.intermediate_size,
            layers=config.draft_layers,
            heads=config.draft_heads or shape.heads,
            kv_heads=config.draft_kv_heads or shape.kv_heads,
            head_dim=config.draft_head_dim or shape.head_dim,
            vocabulary=shape.vocabulary,
            tap_ids=target.tap_ids,
            target_layers=shape.layers,
            mask_token_id=mask_token_id,
            block_size=config.block_size,
            rope_theta=shape.rope_theta,
            eps=shape.eps,
            max_positions=shape.max_positions,
            sliding_layers=config.draft_layers - 1 if config.sliding_window else 0,
            sliding_window=config.sliding_window or None,
        )
    except ValueError as error:
        raise InputError(f"drafter: {error}") from error


def _dtype(config: TrainConfig, world: World) -> torch.dtype:
    if config.dtype == "auto":
        return torch.bfloat16 if world.device.type == "cuda" else torch.float32
    dtype = getattr(torch, config.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _share_threads(config: TrainConfig, world: World) -> None:
    torch.set_num_threads(config.threads or max(1, torch.get_num_threads() // world.size))


def _count(drafter: Drafter) -> int:
    return sum(parameter.numel() for parameter in drafter.parameters())


def _told(store: TokenStore) -> str:
    words = [f"{len(store.lengths):,} rows, {len(store.tokens):,} tokens"]
    words += [f"{count:,} dropped ({why})" for why, count in store.dropped.items()]
    if store.truncated:
        words.append(f"{store.truncated:,} truncated")
    return ", ".join(words)
