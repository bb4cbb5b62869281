"""A run that starts from a drafter that was trained before, in that drafter's shape."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import InputError
from trainer.export import read
from trainer.flags import flag, shown

if TYPE_CHECKING:
    from trainer.config import TrainConfig
    from trainer.export import Served
    from trainer.model.drafter import DrafterConfig
    from trainer.model.target import Target


def adopted(config: TrainConfig) -> tuple[TrainConfig, Served | None]:
    """The run with the shape of `--init-drafter`, and the drafter; None where there is none.

    Raises:
        InputError: the folder holds no drafter, or a flag asks for another shape.
    """
    if not config.init_drafter:
        return config, None
    served = read(Path(config.init_drafter))
    shape = served.config
    held: dict[str, Any] = {
        "block_size": shape.block_size,
        "draft_layers": shape.layers,
        "target_layer_ids": shape.tap_ids,
        "draft_intermediate": shape.intermediate_size,
        "draft_heads": shape.heads,
        "draft_kv_heads": shape.kv_heads,
        "draft_head_dim": shape.head_dim,
        "sliding_window": shape.sliding_window or 0,
        "sliding_layers": shape.sliding_layers,
        "mask_token_id": shape.mask_token_id,
    }
    defaults = {each.name: each.default for each in dataclasses.fields(config)}
    for name, value in held.items():
        asked = getattr(config, name)
        if asked not in (defaults[name], value):
            raise InputError(
                f"{flag(name)}: is {shown(asked)}, and the drafter in {config.init_drafter} has"
                f" {shown(value)}; leave the flag out"
            )
    return dataclasses.replace(config, **held), served


def fitted(served: Served, shape: DrafterConfig, target: Target) -> DrafterConfig:
    """The shape of a run that starts from `served`: its own where the target does not decide.

    Raises:
        InputError: it drafts for another target.
    """
    for name in ("hidden_size", "vocabulary"):
        here, there = getattr(shape, name), getattr(served.config, name)
        if here != there:
            raise InputError(
                f"--init-drafter: has {name} {there:,}, the target {target.path} {here:,}; give a"
                " drafter of this target"
            )
    own = served.config
    return dataclasses.replace(
        shape, rope_theta=own.rope_theta, eps=own.eps, max_positions=own.max_positions
    )
