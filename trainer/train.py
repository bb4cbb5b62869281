"""The training loop: the whole story of a run."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trainer.build import assembled, build
from trainer.build.resuming import resumed
from trainer.build.run import ACCEPTED, BLOCKS, TOKENS
from trainer.build.saving import Saving
from trainer.errors import InputError, NonFiniteError
from trainer.record import events, metrics
from trainer.record.events import Events
from trainer.record.metrics import Metrics, Pace
from trainer.record.status import Status, Step, folder_of, release_digest
from trainer.stop import Stop
from trainer.update.gradients import DENOMINATOR, NUMERATOR, STOP
from trainer.update.optimizer import cosine_rate
from trainer.world import ALONE, join

if TYPE_CHECKING:
    from trainer.build import Say
    from trainer.build.run import Run, Stream
    from trainer.config import TrainConfig
    from trainer.data.arrow import TokenStore
    from trainer.data.batching import Position
    from trainer.model.drafter import DrafterConfig
    from trainer.model.target import Target
    from trainer.pipeline import Pipeline


def run(config: TrainConfig, stop: Stop, status: Status, say: Say, show: Say | None = None) -> None:
    """Train until the epochs are over or a stop is asked for; either way the end is a checkpoint.

    Args:
        config: the run.
        stop: whether it was asked to end.
        status: where others read how far it is.
        say: told what a person should know, a line each.
        show: told the line of every step, for a terminal; None: there is none.

    Raises:
        InputError: target, data or checkpoint are not what the run needs.
        NonFiniteError: loss or gradients are not finite; on all ranks, before weights are touched.
        Stopped: a stop was asked for before the first step.
    """
    world = join(config.dp_pairs, config.device)
    say, show = (say, show or _silent) if world.first else (_silent, _silent)
    if config.tensorboard:
        events.check()
    status.phase("loading")
    parts = build(config, world, pause=stop.check, say=say)
    total = parts.schedule.total(parts.start)
    if not total:
        raise InputError(
            f"--data-dir: {config.data_dir} fills less than the {parts.schedule.width}"
            " micro-batches of one step; lower --token-budget, --accumulation or --dp-pairs"
        )
    status.phase(
        "loading",
        step=parts.start.step,
        steps=total,
        release=release_digest(),
        checkpoint=parts.resumed_from and str(parts.resumed_from),
    )
    measures = _measures(parts) if world.first else Metrics(None)
    try:
        world.meet(stop)
        _train(parts, stop, status, measures, say, show=show, total=total)
    finally:
        measures.close()
        world.close()


def _measures(parts: Run) -> Metrics:
    config = parts.config
    board = Path(config.output_dir) / "tensorboard"
    drawn = Events(board, start=parts.start.step) if config.tensorboard else None
    return Metrics(folder_of(config.output_dir), events=drawn)


def _train(
    parts: Run,
    stop: Stop,
    status: Status,
    measures: Metrics,
    say: Say,
    *,
    show: Say,
    total: int,
) -> None:
    config, position = parts.config, parts.start
    stopping = False
    saved = position.step or None  # the step of the newest checkpoint, once it is written
    parts.warm_up()
    say(f"training  from step {position.step:,} to {total:,}")
    saving, pace = Saving(parts), Pace()
    try:
        with saving, parts.batches() as batches:
            stream = parts.stream(batches)
            while position.step < total and not stopping:
                done, position, stopping = step(parts, batches, stream, stop, total=total)
                _tell(saving.finished(), status, say)
                status.step(done)
                tried = parts.try_out(done.step, last=done.step == total)
                measures.step(done, tried)
                line = metrics.line(done, config.block_size, pace.left_s(done))
                due = done.step % config.log_interval == 0 or done.step == total
                (say if due else show)(line)
                if tried is not None:
                    say(metrics.trial_line(tried, done, config.block_size))
                if config.save_interval and done.step % config.save_interval == 0:
                    _save(saving, position, status, say)
                    saved = position.step
            status.phase("saving")
            if saved != position.step:
                _save(saving, position, status, say)
            _tell(saving.wait(), status, say)
    except NonFiniteError as error:
        raise error.with_checkpoint(saving.newest) from None
    status.phase("finished" if position.step >= total else "stopped")
    say(f"{'finished' if position.step >= total else 'stopped'}  at step {position.step:,}")


def rehearse(config: TrainConfig, store: TokenStore, target: Target, shape: DrafterConfig) -> Run:
    """Train on parts that were made in memory, by the same loop; for checks of what it promises."""
    parts = assembled(config, ALONE, store, target, shape, dtype=torch.float32)
    parts = resumed(parts, _silent)
    total = parts.schedule.total(parts.start)
    _train(parts, Stop(), Status(None), Metrics(None), _silent, show=_silent, total=total)
    return parts


def step(
    parts: Run, batches: Pipeline, stream: Stream, stop: Stop, *, total: int
) -> tuple[Step, Position, bool]:
    """One optimizer step.

    Returns:
        What it came to, where the next one starts, and whether any rank was asked to stop.
    """
    config, gradients = parts.config, parts.gradients
    began, waited = time.perf_counter(), batches.reader_wait_s
    stages = batches.stages_s()
    gradients.zero_()
    for _ in range(config.accumulation):
        micro = next(stream)
        parts.learn(micro)
    # The ranks agree on the step to stop after by adding this flag up with the gradients.
    gradients.extra_E[STOP] = float(stop.asked or parts.world.abandoned)
    gradients.sum_()
    stream.look_ahead()
    number = micro.position.step
    norm = gradients.clip_(config.clip_norm, step=number + 1)
    rate = cosine_rate(
        number,
        steps=total,
        peak=config.lr,
        warmup=math.ceil(config.warmup_ratio * total),
        floor=config.min_lr_ratio,
    )
    parts.optimizer.step_(rate)
    sums = gradients.extra_E.tolist()
    seconds = time.perf_counter() - began
    done = Step(
        step=number + 1,
        steps=total,
        epoch=micro.position.epoch,
        loss=sums[NUMERATOR] / max(sums[DENOMINATOR], 1e-30),
        accepted=sums[ACCEPTED] / max(sums[BLOCKS], 1.0),
        norm=norm,
        rate=rate,
        tokens_per_s=sums[TOKENS] / parts.world.size / seconds,
        wait=(batches.reader_wait_s - waited) / seconds,
        seconds=seconds,
        stages={
            name: min(1.0, (total_s - stages[name]) / seconds)
            for name, total_s in batches.stages_s().items()
        },
        memory_gb=parts.memory_gb(),
    )
    return done, parts.schedule.after(micro.position), sums[STOP] > 0


def _save(saving: Saving, position: Position, status: Status, say: Say) -> None:
    _tell(saving.wait(), status, say)
    saving.begin(position, release_digest)


def _tell(path: Path | None, status: Status, say: Say) -> None:
    if path is not None:
        status.note(checkpoint=str(path))
        say(f"saved     {path}")


def _silent(text: str) -> None:
    del text
