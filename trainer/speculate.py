"""Greedy speculative decoding with a trained drafter: draft, verify, accept.

Shapes: S tokens, B slots of a block, K = B - 1 drafted slots, F feature width; N blocks that are
drafted at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from trainer.model.anchors import blocks, visible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from trainer.model.drafter import Drafter
    from trainer.model.target import Target


class Words(Protocol):
    """Turns token ids into hidden states, and hidden states into scores: a target, or its ends."""

    @property
    def embedding_VH(self) -> Tensor:
        """A row for each token."""

    @property
    def head_VH(self) -> Tensor:
        """A row for each token."""


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


@torch.no_grad()
def replay(
    target: Target,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    *,
    zero_features: bool = False,
    at_once: int = 256,
) -> Generation:
    """What `generate` does with a prompt whose greedy completion is known, without decoding it.

    A block behind every token is drafted in a few masked forwards, and the chain of accepted
    blocks is walked afterwards: the same lengths, but for rounding, in a small part of the time.

    Args:
        target: gives the context features.
        drafter: proposes, on the target's device.
        prompt_ids: token ids, at least one.
        completion_ids: the target's own, greedy; up to its end token or the longest allowed.
        zero_features: as in `generate`.
        at_once: N, blocks of one forward.
    """
    ids_S = torch.tensor([*prompt_ids, *completion_ids])
    features_SF = target.features(ids_S, torch.tensor([0, len(ids_S)]))
    if zero_features:
        features_SF = torch.zeros_like(features_SF)
    return replay_features(
        target,
        drafter,
        ids_S.to(target.device),
        features_SF,
        prompt=len(prompt_ids),
        at_once=at_once,
    )


@torch.no_grad()
def replay_features(
    words: Words,
    drafter: Drafter,
    ids_S: Tensor,
    features_SF: Tensor,
    *,
    prompt: int,
    at_once: int = 256,
) -> Generation:
    """`replay` with context features that are at hand; the target itself is not run.

    Args:
        words: embedding and head, on the drafter's device.
        drafter: proposes.
        ids_S: prompt and completion, on the drafter's device.
        features_SF: of all of them, on the drafter's device.
        prompt: how many tokens are the prompt's.
        at_once: N, blocks of one forward.
    """
    # Every token of the completion begins a block, but for the last, behind which nothing comes.
    anchors_A = torch.arange(prompt, len(ids_S) - 1, device=ids_S.device)
    right = [
        count
        for at in range(0, len(anchors_A), at_once)
        for count in _right_drafts(
            words, drafter, ids_S, features_SF, anchors_A[at : at + at_once]
        ).tolist()
    ]
    return walk(tuple(ids_S[prompt:].tolist()), right)


def walk(completion: tuple[int, ...], right: Sequence[int]) -> Generation:
    """The blocks that decoding goes through, of those behind every token.

    Args:
        completion: the whole of it.
        right: right drafts in a row behind each of its tokens but the last; none beyond its end.
    """
    lengths: list[int] = []
    blocks_run, at = 0, 0
    while at < len(completion) - 1:
        blocks_run += 1
        if right[at] == len(completion) - 1 - at:
            break  # all that is left was right; what else would have been is not known
        lengths.append(right[at] + 1)
        at += right[at] + 1
    return Generation(completion, tuple(lengths), blocks_run)


def _right_drafts(
    words: Words, drafter: Drafter, ids_S: Tensor, features_SF: Tensor, anchors_N: Tensor
) -> Tensor:
    shape = drafter.config
    document_S = torch.zeros_like(ids_S, dtype=torch.int32)
    position_S = torch.arange(len(ids_S), device=ids_S.device)
    laid = blocks(
        anchors_N,
        ids_S,
        torch.ones_like(ids_S, dtype=torch.bool),
        document_S,
        position_S,
        block_size=shape.block_size,
        mask_token_id=shape.mask_token_id,
    )
    # Not drafter(...): one that training has compiled would be compiled anew for each length.
    hidden_QH = drafter.forward(
        words.embedding_VH[laid.ids_Q],
        features_SF,
        position_S,
        laid.positions_Q,
        visible(
            anchors_N,
            document_S,
            block_size=shape.block_size,
            kinds=shape.layer_types,
            window=shape.sliding_window,
        ),
    )
    hidden_NKH = hidden_QH.view(len(anchors_N), shape.block_size, -1)[:, 1:]
    draft_NK = (hidden_NKH @ words.head_VH.to(hidden_NKH.dtype).T).argmax(-1)
    right_NK = (draft_NK == laid.labels_NB[:, 1:]) & laid.supervised_NB[:, 1:]
    right_N: Tensor = right_NK.long().cumprod(1).sum(1)
    return right_N
