"""Lets the target answer, greedily and many prompts at once.

Shapes: R prompts answered together, S tokens of the longest of them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers

from trainer.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from trainer.model.target import Target


@dataclass(frozen=True, kw_only=True)
class Row:
    """One conversation, in token ids."""

    prompt: list[int]
    completion: list[int]
    """Ends in an end token, unless the target was cut off at `--max-new-tokens`."""


def in_template(tokenizer: Any, conversation: list[dict[str, str]]) -> list[int]:
    """Token ids of a conversation, up to where the target's answer begins.

    Raises:
        InputError: the target has no chat template.
    """
    if not tokenizer.chat_template:
        raise InputError("--target-model: has no chat template; take an instruction-tuned target")
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    # The template writes the special tokens itself.
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def complete(
    target: Target,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    batch_size: int,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> list[Row]:
    """The target's greedy answer to every prompt, in the order of the prompts.

    Prompts of like length are answered together, the longest first: if memory does not suffice,
    that shows at once.

    Raises:
        InputError: a prompt and its completion do not fit the target's positions.
    """
    longest = max(map(len, prompts)) + max_new_tokens
    if longest > target.shape.max_positions:
        raise InputError(
            f"--max-new-tokens: with the longest prompt that is {longest:,} tokens; "
            f"the target has {target.shape.max_positions:,} positions"
        )
    order = sorted(range(len(prompts)), key=lambda row: (-len(prompts[row]), row))
    answers: dict[int, list[int]] = {}
    began = told = clock()
    for at in range(0, len(order), batch_size):
        rows = order[at : at + batch_size]
        completions = _greedy(target, [prompts[row] for row in rows], max_new_tokens)
        answers.update(zip(rows, completions, strict=True))
        now = clock()
        if now - told >= 5:
            told = now
            tokens = sum(map(len, answers.values()))
            left = (now - began) / len(answers) * (len(prompts) - len(answers))
            say(
                f"answered {len(answers):,}/{len(prompts):,}  "
                f"{tokens / (now - began):,.0f} tok/s  about {left:,.0f} s left"
            )
    return [Row(prompt=prompt, completion=answers[row]) for row, prompt in enumerate(prompts)]


def _greedy(target: Target, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    """Completions up to and with their first end token."""
    width = max(map(len, prompts))
    pad = min(target.eos_ids, default=0)  # hidden by the mask, whatever it is
    # Left-padded: every row's next token then stands in the last column.
    ids_RS = torch.tensor([[pad] * (width - len(each)) + each for each in prompts])
    seen_RS = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in prompts])
    with torch.no_grad():
        full_RS: Tensor = target.model.generate(
            input_ids=ids_RS.to(target.device),
            attention_mask=seen_RS.to(target.device),
            generation_config=transformers.GenerationConfig(
                do_sample=False,
                max_new_tokens=max_new_tokens,
                eos_token_id=sorted(target.eos_ids) or None,
                pad_token_id=pad,
            ),
        )
    return [_up_to_end(row[width:], target.eos_ids) for row in full_RS.tolist()]


def _up_to_end(ids: list[int], ends: frozenset[int]) -> list[int]:
    end = next((at for at, token in enumerate(ids) if token in ends), len(ids))
    return ids[: end + 1]
