"""Makes the parts of a run and joins them: the only room that knows them all."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trainer.build import data, warm_start
from trainer.build.resuming import resumed
from trainer.build.run import TOKENS, Run
from trainer.build.trial import Trial, prompts_as_samples, rows_as_samples
from trainer.data.batching import PADDED, Plan, Position, Schedule
from trainer.errors import InputError
from trainer.model.drafter import Drafter, DrafterConfig
from trainer.model.loss import default_gamma, weigh_by_decay, weigh_by_pace
from trainer.model.mask_token import choose_mask_token
from trainer.model.target import Target
from trainer.update.gradients import FlatGradients
from trainer.update.optimizer import AdamW

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer.config import TrainConfig
    from trainer.data.arrow import TokenStore
    from trainer.export import Served
    from trainer.world import World

    Say = Callable[[str], None]


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
    config, served = warm_start.adopted(config)
    store = data.opened(config)
    pause()
    dtype = _dtype(config, world)
    target = Target.load(
        config.target_model,
        taps=config.target_layer_ids or None,
        tap_count=config.tap_count,
        device=world.target_device,
        dtype=dtype,
    )
    store = data.checked(store, config, vocab_size=target.vocabulary)
    for line in data.told(store):
        say(f"data      {line}")
    store, held = data.divided(store, config)
    chosen = data.layout(config, target)
    pause()
    shape = _drafter_config(config, target, store)
    if served is not None:
        shape = warm_start.fitted(served, shape, target)
    # What was not read at the start is looked at in each batch.
    store = dataclasses.replace(store, mask_token_id=shape.mask_token_id)
    say(f"target    {target.shape.family}, taps {','.join(map(str, target.tap_ids))}")
    settled = dataclasses.replace(config, layout=chosen)
    run = assembled(settled, world, store, target, shape, dtype=dtype, served=served)
    say(f"drafter   {_count(run.drafter):,} parameters, mask token {shape.mask_token_id}")
    pause()
    if config.eval_interval and world.first:
        run = dataclasses.replace(run, trial=_trial(config, held, target, say))
        pause()
    return resumed(run, say, any_layout=config.layout == data.AUTO)


def _trial(config: TrainConfig, held: TokenStore | None, target: Target, say: Say) -> Trial:
    samples = rows_as_samples(held) if held is not None else []
    if config.eval_prompts:
        samples += prompts_as_samples(target, Path(config.eval_prompts), say)
    made = Trial.of(samples, target)
    say(f"eval      {len(made.held):,} samples, every {config.eval_interval:,} steps")
    return made


def assembled(
    config: TrainConfig,
    world: World,
    store: TokenStore,
    target: Target,
    shape: DrafterConfig,
    *,
    dtype: torch.dtype,
    served: Served | None = None,
) -> Run:
    """A run at the start of its data, from parts that are loaded; padded unless told otherwise."""
    layout = config.layout if config.layout != data.AUTO else PADDED
    drafter = Drafter(shape)
    drafter.initialise_(config.seed)
    if served is not None:
        drafter.load_state_dict(served.tensors)
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
            Plan(store.lengths, config.token_budget, config.seed, layout=layout),
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
        weigh=weigh_by_decay(config.block_size, gamma, world.device) if decays else weigh_by_pace(),
        compiled=config.compile and world.device.type == "cuda",
    )


def _drafter_config(config: TrainConfig, target: Target, store: TokenStore) -> DrafterConfig:
    shape = target.shape
    mask_token_id = choose_mask_token(
        target,
        explicit=config.mask_token_id if config.mask_token_id >= 0 else None,
        occurs=store.occurs,
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
            sliding_layers=_sliding_layers(config),
            sliding_window=config.sliding_window or None,
        )
    except ValueError as error:
        raise InputError(f"drafter: {error}") from error


def _sliding_layers(config: TrainConfig) -> int:
    if not config.sliding_window:
        return 0
    return config.sliding_layers if config.sliding_layers >= 0 else config.draft_layers - 1


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
