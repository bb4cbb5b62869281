"""Checkpoints of a run, written while it trains on.

What a step waits for is one copy of the state into memory of the host; hashing, writing and
flushing are done beside it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer.pipeline import Beside, StageError
from trainer.record import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor
    from typing_extensions import Self

    from trainer.build.run import Run
    from trainer.data.batching import Position


class Saving:
    """Writes the checkpoints of the first rank; on others it does nothing.

    Use as a context manager: leaving it waits for a checkpoint that is being written, also when
    an error ends the run, so that the newest one is as new as it can be.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._beside: Beside[Path] = Beside("checkpoint")
        self._held: dict[str, dict[str, Tensor]] = {}
        self.newest = run.resumed_from
        """The newest whole checkpoint that is known of."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.wait()
        except StageError:
            # What ends the run already is told; the failed checkpoint must not hide it.
            if error is None:
                raise

    def begin(self, position: Position, release: Callable[[], str | None]) -> None:
        """Write a checkpoint of the run as it is at `position`; the one before is waited for.

        Args:
            position: where the next step starts.
            release: tells what code runs; asked beside, as it looks at every module.

        Raises:
            StageError: the one before could not be written.
        """
        if not self._run.world.first:
            return
        self.wait()
        files = self._copied()
        facts, config = facts_of(self._run, position), self._run.config
        self._beside.start(
            lambda: checkpoint.save(
                Path(config.output_dir),
                position.step,
                files,
                facts | {"release": release()},
                keep=config.keep,
            )
        )

    def finished(self) -> Path | None:
        """A checkpoint that was written since this was last asked.

        Raises:
            StageError: it could not be written.
        """
        return self._known(self._beside.finished())

    def wait(self) -> Path | None:
        """Like `finished`, but wait for the one that is being written.

        Raises:
            StageError: it could not be written.
        """
        return self._known(self._beside.wait())

    def _known(self, path: Path | None) -> Path | None:
        if path is not None:
            self.newest = path = path.resolve()
        return path

    def _copied(self) -> dict[str, dict[str, Tensor]]:
        run = self._run
        live: dict[str, Mapping[str, Tensor]] = {
            "drafter": run.drafter.state_dict(),
            "optimizer": run.optimizer.live_state(),
        }
        device = run.world.device
        on_cuda = device.type == "cuda"
        for file, tensors in live.items():
            held = self._held.setdefault(file, {})
            for name, tensor in tensors.items():
                if name not in held:
                    # Kept for the next time: to make pinned memory takes longer than to fill it.
                    held[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_cuda)
                held[name].copy_(tensor.detach(), non_blocking=True)
        if on_cuda:
            torch.cuda.current_stream(device).synchronize()
        return self._held


def facts_of(run: Run, position: Position) -> dict[str, Any]:
    """What a resume needs beside the tensors.

    No state of a random generator is among it: every draw is keyed by seed, epoch and number.
    """
    return {
        "position": dataclasses.asdict(position),
        "drafter": dataclasses.asdict(run.drafter.config),
        "data": run.data_facts(),
        "config": dataclasses.asdict(run.config),
        "torch": torch.__version__,
    }
