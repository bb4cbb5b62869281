"""The part of a target that training runs: its layers up to the last tap.

Shapes: T flat context tokens, t those that are no padding, D documents, F = taps x hidden size.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer.model import documents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# Slots that rows would take, as a share of their tokens, from which on they are not padded.
_WASTE = 1.125


class Trunk:
    """The lower layers of a decoder, with its weights.

    Attributes:
        layers: those that run.
    """

    def __init__(self, decoder: Any, tap_ids: Sequence[int], embedding_VH: Tensor) -> None:
        self.tap_ids, self._embedding_VH = tuple(tap_ids), embedding_VH
        self._hidden = embedding_VH.shape[1]
        self._decoder = _cut(decoder, max(tap_ids) + 1)
        self.layers: nn.ModuleList = self._decoder.layers

    def features(self, ids_T: Tensor, starts_D1: Tensor, *, packed: Callable[[], bool]) -> Tensor:
        """Context features of every token, as `Target.features` tells.

        Args:
            ids_T: documents one after the other; what follows the last one is padding.
            starts_D1: first slot of each document and the end of the last one.
            packed: whether documents may lie in one row; asked only where it matters.
        """
        starts = starts_D1.to("cpu", torch.int64)
        longest, total = max(starts.diff().tolist(), default=0), int(starts[-1])
        features_TF = self._zeros(ids_T.shape[0])
        padded = (len(starts) - 1) * longest
        if total and padded > total * _WASTE and packed():
            self._end_to_end(ids_T[:total], starts, features_TF)
        elif total:
            self._in_rows(ids_T[:total], starts, longest, features_TF)
        return features_TF

    def keeps_apart(self) -> bool:
        """Whether a document behind another has the features that it has alone, by trying it."""
        random = torch.Generator().manual_seed(0)
        ids = torch.randint(0, len(self._embedding_VH), (24,), generator=random)
        both, one, alone = self._zeros(24), self._zeros(24), self._zeros(12)
        try:
            self._end_to_end(ids, torch.tensor([0, 12, 24]), both)
        except (RuntimeError, TypeError, ValueError):
            return False  # its attention is not transformers' own, and stumbles over our mask
        self._in_rows(ids, torch.tensor([0, 24]), 24, one)
        self._in_rows(ids[12:], torch.tensor([0, 12]), 12, alone)
        # Rounding moves some values by a twentieth, in bfloat16 one of five; what stands before in
        # the same document moves nearly all.
        near_TF = 0.05 * alone.abs()
        moved, most = (
            ((each[12:] - alone).abs() > near_TF).double().mean() for each in (both, one)
        )
        return bool(moved < most / 2)

    @contextmanager
    def tapped(self) -> Iterator[dict[int, Tensor]]:
        """While it lasts, outputs of the tapped layers, whoever runs them, by their number."""
        outputs: dict[int, Tensor] = {}

        def keep(tap: int) -> Callable[[nn.Module, Any, Any], None]:
            def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
                outputs[tap] = output[0] if isinstance(output, tuple) else output

            return hook

        handles = [self.layers[tap].register_forward_hook(keep(tap)) for tap in self.tap_ids]
        try:
            yield outputs
        finally:
            for handle in handles:
                handle.remove()

    def _zeros(self, tokens: int) -> Tensor:
        return self._embedding_VH.new_zeros(tokens, len(self.tap_ids) * self._hidden)

    def _in_rows(self, ids_t: Tensor, starts: Tensor, longest: int, out_TF: Tensor) -> None:
        # One document a row, right-padded: attention is causal, so no token sees the padding.
        count, device = len(starts) - 1, out_TF.device
        row_t = torch.repeat_interleave(torch.arange(count), starts.diff())
        place_t = sent(row_t * longest + torch.arange(len(ids_t)) - starts[row_t], device)
        padded = ids_t.new_zeros(count * longest, device=device)
        padded[place_t] = sent(ids_t, device)
        self._run(out_TF, len(ids_t), place_t, input_ids=padded.view(count, longest))

    def _end_to_end(self, ids_t: Tensor, starts: Tensor, out_TF: Tensor) -> None:
        # All documents in one row.
        position_t = torch.arange(len(ids_t)) - torch.repeat_interleave(starts[:-1], starts.diff())
        self._run(
            out_TF,
            len(ids_t),
            slice(None),
            input_ids=sent(ids_t, out_TF.device)[None],
            position_ids=sent(position_t, out_TF.device)[None],
            attention_mask=documents.apart(documents.spans(starts.tolist()), out_TF.device),
        )

    def _run(self, out_TF: Tensor, total: int, place_t: Tensor | slice, **inputs: Tensor) -> None:
        # no_grad, not inference_mode: the drafter's backward must be able to save these.
        with torch.no_grad(), self.tapped() as outputs:
            self._decoder(use_cache=False, **inputs)
            for k, tap in enumerate(self.tap_ids):
                span = slice(k * self._hidden, (k + 1) * self._hidden)
                out_TF[:total, span] = outputs[tap].flatten(0, 1)[place_t]


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, without waiting for what the device is doing."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _cut(decoder: Any, layers: int) -> Any:
    """The decoder without the layers above `layers` and without final norm; shares all weights."""
    trunk = copy.copy(decoder)
    trunk._modules = dict(decoder._modules)  # noqa: SLF001 - copy.copy shares the dict itself
    trunk.layers = nn.ModuleList(list(trunk.layers)[:layers])
    trunk.norm = nn.Identity()
    return trunk
