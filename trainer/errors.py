"""What can end a run, each with the exit code of `python -m trainer`.

Messages have the form `where: what is, with the value; what to do next`.
Anything that is not a `TrainerError` is a bug: it keeps its traceback and exits 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class TrainerError(Exception):
    """A run cannot go on, and the message says why in one line."""

    exit_code = 1


class InputError(TrainerError):
    """A flag, a file or the data is not what a run needs; the person can mend it."""

    exit_code = 2


class NonFiniteError(TrainerError):
    """The loss or the gradient is not a finite number."""

    exit_code = 3

    def __init__(
        self,
        step: int,
        what: str,
        value: float,
        where: str = "on every rank",
        checkpoint: str | None = None,
    ) -> None:
        self.step, self.what, self.value, self.where = step, what, value, where
        self.checkpoint = checkpoint
        last = f", {checkpoint}," if checkpoint else ""
        super().__init__(
            f"step {step:,}: {what} is {value} {where}; "
            f"resume from the last checkpoint{last} with a lower --lr"
        )

    def with_checkpoint(self, path: Path | None) -> NonFiniteError:
        """The same, naming the newest whole checkpoint; None: there is none that is known."""
        told = None if path is None else str(path)
        return NonFiniteError(self.step, self.what, self.value, self.where, told)


class FeatureError(TrainerError):
    """A capability that this trainer promises is missing here, or its check fails."""

    exit_code = 4
