"""Measures a drafter while it trains, as in decoding, on completions that it never sees.

Shapes: S tokens of a prompt and its completion, F feature width, B slots of a block.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from trainer.data.holdout import parts
from trainer.errors import InputError
from trainer.prepare.completions import complete, in_template
from trainer.prepare.prompts import read_prompts
from trainer.record.status import Trialled
from trainer.speculate import replay_features

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from trainer.build import Say
    from trainer.data.arrow import TokenStore
    from trainer.model.drafter import Drafter
    from trainer.model.target import Target
    from trainer.speculate import Generation

LONGEST = 256
"""New tokens of an answer to one of `--eval-prompts`."""


class Sample(NamedTuple):
    """A prompt and what the target says to it."""

    prompt: list[int]
    completion: list[int]


class Ends(NamedTuple):
    """Embedding and head of the target, where the drafter is."""

    embedding_VH: Tensor
    head_VH: Tensor


class _Held(NamedTuple):
    ids_S: Tensor
    features_SF: Tensor
    prompt: int


@dataclass(frozen=True)
class Trial:
    """Samples with the features that the target gives them.

    The target is frozen, so they are made once, before training begins, and kept in memory of the
    host. In training the target belongs to its stage of the pipeline: nobody else may run it.
    """

    held: tuple[_Held, ...]

    @classmethod
    def of(cls, samples: Sequence[Sample], target: Target) -> Trial:
        """Run the target over the samples; those without a block to draft are left out.

        Raises:
            InputError: none is left.
        """
        held = []
        for prompt, completion in samples:
            if not prompt or len(completion) < 2:
                continue
            ids_S = torch.tensor([*prompt, *completion])
            features_SF = target.features(ids_S, torch.tensor([0, len(ids_S)])).cpu()
            held.append(_Held(ids_S, features_SF, len(prompt)))
        if not held:
            raise InputError(
                "--eval-rows, --eval-prompts: no sample has a prompt and a completion of two tokens"
            )
        return cls(tuple(held))

    def measure(self, drafter: Drafter, ends: Ends) -> Trialled:
        """What decoding these samples would come to, with the drafter as it is now.

        Nothing of the drafter changes, no gradient is made, and no random number is drawn.
        """
        began = time.perf_counter()
        device = ends.head_VH.device
        made = [
            replay_features(ends, drafter, ids_S.to(device), features_SF.to(device), prompt=prompt)
            for ids_S, features_SF, prompt in self.held
        ]
        return summed(made, drafter.config.block_size, time.perf_counter() - began)


def summed(made: Sequence[Generation], block_size: int, seconds: float) -> Trialled:
    """Acceptance of some completions together."""
    whole = [one for one in made if one.lengths]
    counted = Counter(length for one in whole for length in one.lengths)
    return Trialled(
        samples=len(made),
        accepted=sum(one.mean_length for one in whole) / max(1, len(whole)),
        lengths=tuple(counted[length] for length in range(1, block_size + 1)),
        seconds=seconds,
    )


def rows_as_samples(store: TokenStore) -> list[Sample]:
    """Every row of a data set."""
    return [Sample(*parts(store, row)) for row in range(len(store.lengths))]


def prompts_as_samples(target: Target, path: Path, say: Say) -> list[Sample]:
    """Prompts of a file, each with the target's greedy answer.

    Raises:
        InputError: the file holds a line that is no prompt, or the target has no tokenizer.
    """
    tokenizer = target.tokenizer()
    prompts = [in_template(tokenizer, each) for each in read_prompts(path)]
    rows = complete(target, prompts, max_new_tokens=LONGEST, batch_size=32, say=say)
    return [Sample(row.prompt, row.completion) for row in rows]
