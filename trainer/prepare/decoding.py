"""Decodes many prompts at once, and drops a row as soon as it has ended.

Shapes: R rows, W tokens of the longest prompt, V vocabulary, G key/value heads, E head size,
N new tokens at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer.model.target import Target

_TIDY = 32
"""Tokens between two looks at which rows have ended: a look waits for the device."""
_STRIDE = 64
"""Cached slots are shown in steps of this many, so that shapes change rarely."""


class Room(CacheLayerMixin):  # type: ignore[misc] # transformers ships no types
    """Keys and values of one layer in room taken once: a token more copies that token alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width, self.used = width, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Take the room; zeros, as what is not yet written is multiplied by a weight of 0."""
        rows, heads, _, size = key_states.shape
        self.keys = key_states.new_zeros(rows, heads, self._width, size)
        self.values = value_states.new_zeros(rows, heads, self._width, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the newest tokens; what is returned may reach beyond them, see `shown`."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.used + key_states.shape[2]
        self.keys[:, :, self.used : end] = key_states
        self.values[:, :, self.used : end] = value_states
        self.used = end
        shown = self.shown(end)
        return self.keys[:, :, :shown], self.values[:, :, :shown]

    def shown(self, tokens: int) -> int:
        """Slots that attention is given when `tokens` are written."""
        return min(self._width, -(-tokens // _STRIDE) * _STRIDE)

    def keep(self, rows: Tensor) -> None:
        """Forget all other rows."""
        self.keys, self.values = self.keys[rows], self.values[rows]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys of a mask that transformers makes itself: for the prompt alone."""
        return self.used + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens that are written."""
        return self.used

    def get_max_length(self) -> int:
        """Tokens that may be."""
        return self._width


def can_decode(target: Target) -> bool:
    """Whether all layers see all tokens; others keep state that only their own code handles."""
    config = target.model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    return kinds == {"full_attention"} and not getattr(config, "sliding_window", None)


@torch.no_grad()
def decode(
    target: Target,
    prompts: Sequence[list[int]],
    temperatures: Sequence[float],
    *,
    max_new_tokens: int,
    seed: int,
) -> list[list[int]]:
    """Completions, in the order of the prompts, up to and with their first end token.

    Args:
        target: whose completions they are; `can_decode` holds.
        prompts: token ids, at least one each.
        temperatures: of each row; 0 is greedy.
        max_new_tokens: longest completion.
        seed: of the sampled ones.
    """
    device = target.device
    decoder = target.model.get_decoder()
    lengths = [len(each) for each in prompts]
    width, ends = max(lengths), torch.tensor(sorted(target.eos_ids), device=device)
    # Right-padded, so that the prompts run under plain causal attention; the gap between a
    # prompt and its completion is masked afterwards, and positions go on as if it were not there.
    ids_RW = torch.tensor([each + [0] * (width - len(each)) for each in prompts], device=device)
    length_R = torch.tensor(lengths, device=device)
    heat_R1 = torch.tensor(temperatures, device=device)[:, None]
    sampled = max(temperatures) > 0
    noise = torch.Generator(device).manual_seed(seed)
    rooms = [Room(width + max_new_tokens) for _ in range(target.layers)]
    cache = transformers.Cache(layers=rooms)
    hidden_RWH = decoder(input_ids=ids_RW, use_cache=True, cache=cache)[0]
    hidden_RH = hidden_RWH[torch.arange(len(prompts), device=device), length_R - 1]
    slot_S = torch.arange(width + max_new_tokens, device=device)
    number_R = torch.arange(len(prompts))
    made_RN = torch.zeros(len(prompts), max_new_tokens, dtype=torch.int64, device=device)
    answers: dict[int, list[int]] = {}
    for step in range(max_new_tokens):
        scores_RV = (hidden_RH @ target.head_VH.T).float()
        if sampled:
            # The largest of scores + T x Gumbel noise is a sample at temperature T.
            drawn_RV = torch.empty_like(scores_RV).exponential_(generator=noise)
            scores_RV -= heat_R1 * drawn_RV.log_()
        made_RN[:, step] = scores_RV.argmax(-1)
        if step + 1 == max_new_tokens:
            break
        if (step + 1) % _TIDY == 0:
            ended_R = torch.isin(made_RN[:, : step + 1], ends).any(1).cpu()
            gone = ended_R.float().mean().item()
            if gone == 1:
                break
            # Moving the rest costs about as much as a few steps of it.
            if gone > 0.2:
                rows = made_RN[ended_R.to(device)].tolist()
                answers.update(zip(number_R[ended_R].tolist(), rows, strict=True))
                left_R = (~ended_R).to(device)
                number_R = number_R[~ended_R]
                made_RN, length_R, heat_R1 = made_RN[left_R], length_R[left_R], heat_R1[left_R]
                for room in rooms:
                    room.keep(left_R)
        shown = rooms[0].shown(width + step + 1)
        slot_s = slot_S[:shown]
        seen_RS = (slot_s < length_R[:, None]) | ((slot_s >= width) & (slot_s <= width + step))
        hidden_RH = decoder(
            input_ids=made_RN[:, step, None],
            attention_mask=seen_RS[:, None, None],
            position_ids=(length_R + step)[:, None],
            use_cache=True,
            cache=cache,
        )[0][:, 0]
    answers.update(zip(number_R.tolist(), made_RN.tolist(), strict=True))
    return [up_to_end(answers[row], target.eos_ids) for row in range(len(prompts))]


def up_to_end(ids: list[int], ends: frozenset[int]) -> list[int]:
    """What comes before the first end token, and that token."""
    end = next((at for at, token in enumerate(ids) if token in ends), len(ids))
    return ids[: end + 1]
