"""Greedy speculative decoding with a trained drafter: draft, verify, accept.

Shapes: S tokens, B slots of a block, K = B - 1 drafted slots, F feature width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from trainer.model.drafter import Drafter
    from trainer.model.target import Target


class Drafting(Protocol):
    """Proposes the next tokens of one sequence."""

    block_size: int

    def extend(self, features_SF: Tensor) -> None:
        """Take the context features of the next S accepted tokens."""

    def propose(self, anchor: Tensor) -> Tensor:
        """draft_K, int64: what should follow `anchor`, a 0-D token id."""


@dataclass(frozen=True)
class Generation:
    """One completion, and how it came about."""

    tokens: tuple[int, ...]
    """New tokens; they end with an end token, if one came."""
    lengths: tuple[int, ...]
    """Accepted length of each block, 1 to B: right drafts in a row, and the target's bonus.

    A last block that the end token or `max_new_tokens` cut is not among them: what it would
    have reached is not known.
    """
    blocks: int
    """How many times the target ran after the prompt, cut block included."""

    @property
    def mean_length(self) -> float:
        """Mean accepted length in tokens; 0 when no block was whole."""
        return sum(self.lengths) / len(self.lengths) if self.lengths else 0.0


class BlockDrafting:
    """A drafter with its context, for one sequence."""

    def __init__(self, drafter: Drafter, target: Target, *, zero_features: bool = False) -> None:
        self.block_size = drafter.config.block_size
        self._drafter = drafter
        self._embedding_VH = target.embedding_VH
        self._head_VH = target.head_VH
        self._mask = drafter.config.mask_token_id
        self._zero_features = zero_features
        self._context = drafter.new_context()

    def extend(self, features_SF: Tensor) -> None:
        """Take the context features of the next S accepted tokens."""
        if self._zero_features:
            features_SF = torch.zeros_like(features_SF)
        self._drafter.extend(self._context, features_SF)

    def propose(self, anchor: Tensor) -> Tensor:
        """draft_K: the best token of each slot behind the anchor."""
        ids_B = torch.full((self.block_size,), self._mask, device=anchor.device)
        ids_B[0] = anchor
        hidden_BH = self._drafter.draft(self._embedding_VH[ids_B], self._context)
        return (hidden_BH[1:] @ self._head_VH.to(hidden_BH.dtype).T).argmax(-1)


def generate(
    target: Target,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    zero_features: bool = False,
) -> Generation:
    """Complete a prompt greedily: the very tokens that the target alone would choose.

    Args:
        target: decides every token.
        drafter: proposes them, on the target's device.
        prompt_ids: token ids, at least one.
        max_new_tokens: longest completion.
        zero_features: hide the target's context features from the drafter, to see what they
            are worth.

    Raises:
        InputError: the target's cache cannot be cropped.
    """
    drafting = BlockDrafting(drafter, target, zero_features=zero_features)
    return generate_with(target, drafting, prompt_ids, max_new_tokens=max_new_tokens)


@torch.no_grad()
def generate_with(
    target: Target, drafting: Drafting, prompt_ids: Sequence[int], *, max_new_tokens: int
) -> Generation:
    """`generate` with any way of drafting."""
    cache = target.new_cache()
    prompt_S = torch.tensor(list(prompt_ids), dtype=torch.int64, device=target.device)
    scores_SV, features_SF = target.extend(prompt_S, cache)
    anchor = scores_SV[-1].argmax()
    tokens = [int(anchor)]
    lengths: list[int] = []
    blocks = 0
    while len(tokens) < max_new_tokens and tokens[-1] not in target.eos_ids:
        drafting.extend(features_SF)
        draft_K = drafting.propose(anchor)
        scores_BV, features_BF = target.extend(torch.cat([anchor[None], draft_K]), cache)
        blocks += 1
        chosen_B = scores_BV.argmax(-1)
        # Right drafts in a row; the target's own choice behind them is right by definition.
        right = int((draft_K == chosen_B[:-1]).long().cumprod(0).sum())
        target.crop(cache, len(draft_K) - right)
        emitted = chosen_B[: right + 1].tolist()
        kept = _until_end(emitted, target.eos_ids, max_new_tokens - len(tokens))
        tokens += kept
        if len(kept) < len(emitted):
            break
        lengths.append(right + 1)
        features_SF, anchor = features_BF[: right + 1], chosen_B[right]
    return Generation(tuple(tokens), tuple(lengths), blocks)


def _until_end(tokens: list[int], ends: frozenset[int], room: int) -> list[int]:
    kept: list[int] = []
    for token in tokens[:room]:
        kept.append(token)
        if token in ends:
            break
    return kept


@torch.no_grad()
def generate_plain(
    target: Target, prompt_ids: Sequence[int], *, max_new_tokens: int
) -> tuple[int, ...]:
    """The target's own greedy completion, token by token; the reference for `generate`."""
    cache = target.new_cache()
    next_ids = torch.tensor(list(prompt_ids), dtype=torch.int64, device=target.device)
    tokens: list[int] = []
    while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in target.eos_ids):
        scores_SV, _ = target.extend(next_ids, cache)
        next_ids = scores_SV[-1:].argmax(-1)
        tokens.append(int(next_ids))
    return tuple(tokens)
