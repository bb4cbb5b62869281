"""Attention over documents that lie end to end in one row, none of which sees another.

Shapes: S tokens of one row. Each document (or run of short ones) goes through the attention
kernel on its own: what is paid is the sum of the squared lengths, not the square of the sum, and no
mask of S x S is ever made.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

# Documents this short share a kernel call: a masked square of it costs less than its launches.
SHORT = 512


# transformers' form of an attention function: module, query, key, value, mask, and more by name.
Attend = Callable[..., "tuple[Tensor, Tensor | None]"]


@dataclass
class Span:
    """One call of the kernel: a document, or several short ones."""

    start: int
    end: int
    starts: list[int]
    """Of its documents, from `start` on."""
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, device: torch.device) -> Tensor | None:
        """Bool [1, 1, S, S], True is seen; None where causal is all that is asked."""
        count = self.end - self.start
        if len(self.starts) == 1 and (window is None or window >= count):
            return None
        if window not in self._masks:
            place = torch.arange(count)
            document = torch.bucketize(place, torch.tensor(self.starts), right=True)
            seen = (document[:, None] == document) & (place[:, None] >= place)
            if window is not None:
                seen &= place[:, None] - place < window
            self._masks[window] = seen[None, None].to(device)
        return self._masks[window]


# Not an argument of the model: every model hands its arguments down in its own way, and none
# forgets this one. Each thread has its own.
_spans: ContextVar[tuple[Span, ...]] = ContextVar("spans")


def spans(starts: Sequence[int]) -> tuple[Span, ...]:
    """The kernel calls for documents that start here; the last number is where the last ends."""
    made: list[Span] = []
    for start, end in itertools.pairwise(starts):
        if made and end - made[-1].start <= SHORT:
            made[-1].starts.append(start - made[-1].start)
            made[-1].end = end
        elif end > start:
            made.append(Span(start, end, [0]))
    return tuple(made)


def apart(held: tuple[Span, ...], device: torch.device) -> Tensor:
    """Make `by_document` keep these apart, in this thread, wherever it meets the answer as mask.

    Returns:
        A mask that models hand down as it is, because it has the four dimensions of a finished one.
    """
    _spans.set(held)
    return torch.empty(1, 1, 0, 0, dtype=torch.bool, device=device)


def by_document(attend: Attend) -> Attend:
    """`attend`, document by document where the mask is the one that `apart` made."""

    # The number of documents differs from batch to batch: compiled, each would be its own program.
    @torch.compiler.disable  # type: ignore[untyped-decorator] # torch leaves it untyped
    def one_by_one(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **more: Any
    ) -> tuple[Tensor, None]:
        window = more.get("sliding_window")
        parts = [
            attend(
                module,
                *(each[:, :, span.start : span.end] for each in (query, key, value)),
                span.mask(window, query.device),
                **more,
            )[0]
            for span in _spans.get()
        ]
        return torch.cat(parts, dim=1), None

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if attention_mask is not None and attention_mask.shape[-1] == 0:
            return one_by_one(module, query, key, value, **more)  # type: ignore[no-any-return]
        return attend(module, query, key, value, attention_mask, **more)

    return attention
