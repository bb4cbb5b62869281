"""TensorBoard events: the measures of a run as curves, for who asks for them."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from trainer.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.record.status import Step, Trialled


def check() -> None:
    """See that events can be written here.

    Raises:
        InputError: the package tensorboard is missing; training itself does not need it.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise InputError(
            "--tensorboard: the package tensorboard is missing here; run"
            " `pip install tensorboard`, or leave the flag out"
        )


class Events:
    """Writes one point of each curve a step.

    Args:
        folder: where the event files are; TensorBoard's --logdir, or below it.
        start: steps that were done before. What an earlier process wrote of later ones, which
            its checkpoint did not reach, TensorBoard then leaves out.
    """

    def __init__(self, folder: Path, *, start: int) -> None:
        # Here: it is slow to import, and most runs do not ask for it.
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

        self._writer = SummaryWriter(str(folder), purge_step=start + 1)

    def step(self, done: Step, tried: Trialled | None) -> None:
        """One step more is done; after some of them the drafter was tried out."""
        points = {
            "train/loss": done.loss,
            "train/accepted": done.accepted,
            "train/norm": done.norm,
            "train/rate": done.rate,
            "speed/tokens_per_s": done.tokens_per_s,
            "speed/wait": done.wait,
            **{f"speed/{name}": share for name, share in done.stages.items()},
            "memory/gb": done.memory_gb,
        }
        if tried is not None:
            points |= {"eval/accepted": tried.accepted, "eval/first": tried.first}
        for name, value in points.items():
            self._writer.add_scalar(name, value, done.step)

    def close(self) -> None:
        """Write what is left, and let the file go."""
        self._writer.close()
