"""All gradients of a drafter in one buffer, summed over the ranks in one collective.

Shapes: G elements of all parameters, E extra numbers that travel with them.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch

from trainer.errors import NonFiniteError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor, nn

NUMERATOR, DENOMINATOR, STOP, NON_FINITE = range(4)
"""Places of the extra numbers: the loss's two sums, and how many ranks raised a flag."""


class Ranks(Protocol):
    """What is needed of a world."""

    def sum_(self, tensor: Tensor) -> None:
        """Sum over all ranks, in place. A collective."""


class FlatGradients:
    """The gradients of `parameters`, as views into one buffer.

    `backward` adds into the views, so nothing is copied before the collective or after it, and
    the ranks meet once a step instead of once a parameter. A few extra numbers lie behind the
    gradients and ride along: what the loss is divided by, and whether any rank wants to stop.

    Gradients are kept in at least float32, whatever the parameters are.

    Attributes:
        parameters: matrices first, so that what weight decay touches is one contiguous piece.
        matrices: how many elements belong to matrices.
        flat_G: all gradients.
        extra_E: NUMERATOR, DENOMINATOR, STOP, NON_FINITE, then free ones.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], world: Ranks, *, extra: int = 4) -> None:
        if extra <= NON_FINITE:
            raise ValueError(f"extra: is {extra}; give at least {NON_FINITE + 1}")
        self.parameters = sorted(parameters, key=lambda parameter: parameter.ndim < 2)
        self.matrices = sum(each.numel() for each in self.parameters if each.ndim >= 2)
        self._world = world
        first = self.parameters[0]
        dtypes = {each.dtype for each in self.parameters}
        if len(dtypes) > 1:
            raise ValueError(f"parameters: are {dtypes}; give one dtype")
        count = sum(each.numel() for each in self.parameters)
        wide = torch.promote_types(first.dtype, torch.float32)
        self._buffer = torch.zeros(count + extra, dtype=wide, device=first.device)
        self.flat_G = self._buffer[:count]
        self.extra_E = self._buffer[count:]
        self._views = views_like(self.flat_G, self.parameters)
        for parameter, view in zip(self.parameters, self._views, strict=True):
            if parameter.dtype != wide:
                parameter.grad_dtype = wide
            parameter.grad = view

    def zero_(self) -> None:
        """Forget the last step. `zero_grad` must not be called: it would drop the views."""
        self._buffer.zero_()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Take the gradients off the parameters while a compiled forward runs.

        The compiler refuses a parameter whose gradient is wider than itself; `backward` does not.
        """
        for parameter in self.parameters:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, view in zip(self.parameters, self._views, strict=True):
                parameter.grad = view

    def add_(self, numerator: Tensor, denominator: Tensor) -> None:
        """Add one micro-batch's sums, and flag them if the loss is not finite."""
        numerator = numerator.detach()
        self.extra_E[NUMERATOR] += numerator
        self.extra_E[DENOMINATOR] += denominator.detach()
        self.extra_E[NON_FINITE] += ~numerator.isfinite()

    def sum_(self) -> None:
        """Sum over all ranks, in place. A collective: every rank calls it once a step.

        Raises:
            AssertionError: something replaced a gradient, so that the buffer misses it.
        """
        self.check_views()
        self._world.sum_(self._buffer)

    def check_views(self) -> None:
        """Make sure that every parameter's gradient still lies in the buffer."""
        for parameter, view in zip(self.parameters, self._views, strict=True):
            grad = parameter.grad
            assert grad is not None and grad.data_ptr() == view.data_ptr(), (  # noqa: PT018 - one rule
                "a gradient no longer lies in the flat buffer: zero_grad or .grad = was called"
            )

    def clip_(self, limit: float, *, step: int) -> float:
        """Divide by DENOMINATOR and scale down to an L2 norm of at most `limit`, in one pass.

        After `sum_`: ranks then clip by the same factor, and all raise or none does.

        Args:
            limit: largest norm of all gradients together.
            step: named in the error.

        Returns:
            The norm before clipping. Where nothing was supervised on any rank it is 0.

        Raises:
            NonFiniteError: the loss or the norm is not finite.
        """
        denominator = self.extra_E[DENOMINATOR]
        divisor = torch.where(denominator > 0, denominator, torch.ones_like(denominator))
        norm = torch.linalg.vector_norm(self.flat_G) / divisor
        factor = (limit / (norm + 1e-6)).clamp(max=1.0) / divisor
        self.flat_G.mul_(factor)
        # The one wait for the device in a step.
        value, flagged, numerator = torch.stack(
            [norm, self.extra_E[NON_FINITE], self.extra_E[NUMERATOR]]
        ).tolist()
        if flagged:
            raise NonFiniteError(step, "loss", numerator, f"on {flagged:.0f} of the ranks")
        if not math.isfinite(value):
            raise NonFiniteError(step, "gradient norm", value)
        return float(value)


def views_like(flat: Tensor, parameters: Iterable[Tensor]) -> list[Tensor]:
    """Cut a flat tensor into pieces of the parameters' shapes, in their order."""
    views, start = [], 0
    for parameter in parameters:
        views.append(flat[start : start + parameter.numel()].view_as(parameter))
        start += parameter.numel()
    return views
