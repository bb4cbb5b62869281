"""Lets the target answer, many prompts at once, and keeps what is answered at once."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers

from trainer.errors import InputError
from trainer.prepare.decoding import can_decode, decode, up_to_end

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from trainer.model.target import Target

ON_A_CPU = 16
"""Rows of a batch where there is no GPU."""
AT_MOST = 4096
"""Rows of a batch where memory does not matter: more are hardly faster."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One conversation, in token ids."""

    prompt: list[int]
    completion: list[int]
    """Ends in an end token, unless the target was cut off at `--max-new-tokens`."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Which answers each prompt gets."""

    greedy: bool = True
    """The most likely one."""
    samples: int = 0
    """How many sampled ones."""
    temperature: float = 0.8
    """Of the sampled ones, above 0."""
    seed: int = 0

    def temperatures(self) -> list[float]:
        """Of each answer of a prompt; 0 is greedy."""
        return [0.0] * self.greedy + [self.temperature] * self.samples


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
    sampling: Sampling = Sampling(),
    kept: Answers | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Row]:
    """The target's answers to every prompt, in the order of the prompts.

    Prompts of like length are answered together, the longest first: if memory does not suffice,
    that shows at once.

    Args:
        target: who answers.
        prompts: token ids.
        max_new_tokens: longest completion.
        batch_size: answers made together; 0: what memory allows.
        say: told how far it is, every few seconds.
        sampling: which answers each prompt gets.
        kept: where answers are kept as they come; those it holds already are not made again.
        clock: in seconds.

    Raises:
        InputError: a prompt and its completion do not fit the target's positions.
    """
    longest = max(map(len, prompts)) + max_new_tokens
    if longest > target.shape.max_positions:
        raise InputError(
            f"--max-new-tokens: with the longest prompt that is {longest:,} tokens; "
            f"the target has {target.shape.max_positions:,} positions"
        )
    heats = sampling.temperatures()
    jobs = [(prompt, heat) for prompt in prompts for heat in heats]
    answers = dict(kept.found) if kept is not None else {}
    left = [job for job in range(len(jobs)) if job not in answers]
    left.sort(key=lambda job: (-len(jobs[job][0]), job))
    batch_size = batch_size or rows_that_fit(target, longest)
    began = told = clock()
    made = tokens = 0
    for at in range(0, len(left), batch_size):
        batch = left[at : at + batch_size]
        completions = _answer(
            target,
            [jobs[job][0] for job in batch],
            [jobs[job][1] for job in batch],
            max_new_tokens=max_new_tokens,
            # By its first answer: whatever was kept before, other batches draw otherwise.
            seed=sampling.seed * 1_000_003 + batch[0],
        )
        answers.update(zip(batch, completions, strict=True))
        if kept is not None:
            kept.add(batch, completions)
        made += len(batch)
        tokens += sum(map(len, completions))
        now = clock()
        if now - told >= 5:
            told = now
            wait = (now - began) / made * (len(left) - made)
            say(
                f"answered {len(answers):,}/{len(jobs):,}  "
                f"{tokens / (now - began):,.0f} tok/s  about {wait:,.0f} s left"
            )
    return [Row(prompt=jobs[job][0], completion=answers[job]) for job in range(len(jobs))]


class Answers:
    """Answers in a file, a line each, so that an interrupted preparation goes on.

    Args:
        path: of the file.
        key: says what is asked; a file of another key is begun anew.
    """

    def __init__(self, path: Path, key: str) -> None:
        self.path, self.found = path, dict[int, list[int]]()
        if path.exists():
            head, *lines = path.read_text("utf-8").split("\n")
            if head == json.dumps({"key": key}):
                # What stands behind the last line break was cut while it was written.
                for line in lines[:-1]:
                    job, completion = json.loads(line)
                    self.found[job] = completion
        path.parent.mkdir(parents=True, exist_ok=True)
        if not self.found:
            path.write_text(json.dumps({"key": key}) + "\n", "utf-8")
        else:
            self._cut()

    def add(self, jobs: Sequence[int], completions: Sequence[list[int]]) -> None:
        """Write more of them."""
        with self.path.open("a", encoding="utf-8") as file:
            for job, completion in zip(jobs, completions, strict=True):
                file.write(json.dumps([job, completion], separators=(",", ":")) + "\n")

    def _cut(self) -> None:
        held = self.path.read_bytes()
        end = held.rfind(b"\n") + 1
        if end < len(held):
            self.path.write_bytes(held[:end])


def rows_that_fit(target: Target, longest: int) -> int:
    """How many rows of `longest` tokens may be answered together."""
    if target.device.type != "cuda":
        return ON_A_CPU
    shape, size = target.shape, target.head_VH.element_size()
    cached = 2 * shape.layers * shape.kv_heads * shape.head_dim * size * longest
    # The prompts run at once, and the scores of the next token are wide and copied.
    row = cached + 16 * shape.vocabulary + 6 * size * shape.intermediate_size * longest
    free, _ = torch.cuda.mem_get_info(target.device)
    # Moving the rows that are left takes the room of one layer more; half leaves enough.
    return max(1, min(AT_MOST, free // (2 * row)))


def _answer(
    target: Target,
    prompts: list[list[int]],
    heats: list[float],
    *,
    max_new_tokens: int,
    seed: int,
) -> list[list[int]]:
    if can_decode(target):
        return decode(target, prompts, heats, max_new_tokens=max_new_tokens, seed=seed)
    answers: dict[int, list[int]] = {}
    for heat in sorted(set(heats)):
        rows = [row for row, each in enumerate(heats) if each == heat]
        texts = generated(target, [prompts[row] for row in rows], heat, max_new_tokens, seed)
        answers.update(zip(rows, texts, strict=True))
    return [answers[row] for row in range(len(prompts))]


def generated(
    target: Target, prompts: list[list[int]], heat: float, max_new_tokens: int, seed: int
) -> list[list[int]]:
    """Completions by transformers' own loop: for any target, and the reference for `decode`."""
    width = max(map(len, prompts))
    pad = min(target.eos_ids, default=0)  # hidden by the mask, whatever it is
    # Left-padded: every row's next token then stands in the last column.
    ids_RS = torch.tensor([[pad] * (width - len(each)) + each for each in prompts])
    seen_RS = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in prompts])
    drawn = {"do_sample": True, "temperature": heat, "top_k": 0} if heat else {"do_sample": False}
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed)
        full_RS: Tensor = target.model.generate(
            input_ids=ids_RS.to(target.device),
            attention_mask=seen_RS.to(target.device),
            generation_config=transformers.GenerationConfig(
                **drawn,
                max_new_tokens=max_new_tokens,
                eos_token_id=sorted(target.eos_ids) or None,
                pad_token_id=pad,
            ),
        )
    return [up_to_end(row[width:], target.eos_ids) for row in full_RS.tolist()]
