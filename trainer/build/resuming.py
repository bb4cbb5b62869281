"""Where a run begins: at its data's start, or where a checkpoint of the same run left off."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.data.batching import PADDED, Position
from trainer.errors import InputError
from trainer.record import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer.build.run import Run


def resumed(run: Run, say: Callable[[str], None], *, any_layout: bool = False) -> Run:
    """A run that goes on from the newest checkpoint in its output folder, if there is one.

    Args:
        run: at the start of its data.
        say: told what was found.
        any_layout: the person left the layout open, so it stays the one that the run began with.

    Raises:
        InputError: the checkpoint is of another drafter or other data; or all are damaged.
    """
    found = checkpoint.newest(Path(run.config.output_dir), say=say)
    if found is None:
        return run
    # Before there were two, all were padded.
    held = found.facts["data"].setdefault("layout", PADDED)
    if any_layout and held == PADDED != run.config.layout:
        say(f"layout    {held}, as the run began")
        run = run.in_layout(held)
    for part, here in (
        ("drafter", dataclasses.asdict(run.drafter.config)),
        ("data", run.data_facts()),
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
