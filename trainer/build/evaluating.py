"""python -m trainer evaluate: a trained drafter in real speculative decoding, or replayed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trainer.build.trained import DTYPES, fits, load
from trainer.build.trial import Sample, rows_as_samples, summed
from trainer.data import arrow
from trainer.data.holdout import held_out
from trainer.errors import InputError
from trainer.flags import Parser
from trainer.model.target import Target
from trainer.prepare.completions import in_template
from trainer.prepare.prompts import read_prompts
from trainer.speculate import Generation, generate, generate_plain, replay
from trainer.world import gpus_a_pair

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from trainer.build.trained import Say
    from trainer.model.drafter import Drafter


class _Measured(NamedTuple):
    made: Generation
    same: bool
    seconds: float
    plain_seconds: float


def evaluate_command(argv: Sequence[str], say: Say) -> int:
    """Run `python -m trainer evaluate`; 0 when it is done. The last line is JSON.

    Raises:
        InputError: a flag, the target, the prompts or the checkpoint is not usable.
    """
    chosen = _flags(argv)
    path, drafter = load(Path(chosen.checkpoint).expanduser(), say)
    on_cuda = gpus_a_pair(1, chosen.device) > 0
    dtype = DTYPES.get(chosen.dtype) or (torch.bfloat16 if on_cuda else torch.float32)
    target = Target.load(
        Path(chosen.target_model).expanduser(),
        taps=drafter.config.tap_ids,
        device="cuda" if on_cuda else "cpu",
        dtype=dtype,
    )
    fits(target, drafter)
    drafter.to(target.device, dtype)
    samples = _samples(chosen, target)[: chosen.limit]
    say(f"{'prompt':>6}  {'tokens':>6}  {'blocks':>6}  accepted")
    measured = []
    for number, sample in enumerate(samples):
        one = _replayed if chosen.quick else _decoded
        measured.append(one(target, drafter, sample, chosen))
        made = measured[-1].made
        mean = f"{made.mean_length:.2f}" if made.lengths else "-"
        say(f"{number:>6}  {len(made.tokens):>6}  {made.blocks:>6}  {mean}")
    found = _summary(measured, drafter.config.block_size, path, chosen)
    for line in _histogram(found["lengths"]):
        say(line)
    say(json.dumps(found))
    return 0


def _flags(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m trainer evaluate",
        allow_abbrev=False,
        description="Decode prompts speculatively, and tell how many tokens a block gives (right"
        " drafts in a row, and the target's own), whether the text is the target's, and how fast"
        " it is beside plain decoding by the same code.",
    )
    add = parser.add_argument
    add("--target-model", required=True, metavar="PATH", help="Folder or .gguf file of the target.")
    add(
        "--checkpoint", required=True, metavar="PATH",
        help="A checkpoint, a run's output folder, or an exported drafter.",
    )  # fmt: skip
    add("--prompts", metavar="FILE", help="JSON lines with prompts or messages, as for prepare.")
    add("--data-dir", metavar="PATH", help="Instead: a data set; the prompts of its rows are used.")
    add(
        "--held-out", type=int, default=0, metavar="N",
        help="Of the data set only what `train --eval-rows N` keeps from training.",
    )  # fmt: skip
    add("--limit", type=int, default=16, metavar="N", help="Most prompts that are used (16).")
    add(
        "--max-new-tokens", type=int, default=256, metavar="N",
        help="Longest completion, in tokens (default 256).",
    )  # fmt: skip
    add("--zero-features", action="store_true", help="Hide the target from the drafter.")
    add(
        "--quick", action="store_true",
        help="Of a data set of greedy completions: the lengths that decoding would find, from a"
        " few forwards; no speed.",
    )  # fmt: skip
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="Where both run.")
    add("--dtype", default="auto", choices=("auto", *DTYPES), help="Of both (auto: as in train).")
    chosen = parser.parse_args(list(argv))
    if (chosen.prompts is None) == (chosen.data_dir is None):
        raise InputError("--prompts, --data-dir: give one of them")
    for flag, value in (("--limit", chosen.limit), ("--max-new-tokens", chosen.max_new_tokens)):
        if value < 1:
            raise InputError(f"{flag}: is {value}; give at least 1")
    if chosen.prompts is not None and (chosen.quick or chosen.held_out):
        raise InputError("--quick, --held-out: are for the completions of a --data-dir")
    return chosen


def _samples(chosen: argparse.Namespace, target: Target) -> list[Sample]:
    if chosen.prompts is not None:
        tokenizer = target.tokenizer()
        prompts = read_prompts(Path(chosen.prompts).expanduser())
        return [Sample(in_template(tokenizer, each), []) for each in prompts]
    store = arrow.load(Path(chosen.data_dir).expanduser(), budget=2**31 - 1)
    if chosen.held_out:
        _, store = held_out(store, chosen.held_out)
    found = [sample for sample in rows_as_samples(store) if sample.prompt]
    if not found:
        raise InputError(f"--data-dir: no row of {chosen.data_dir} begins with a prompt")
    return found


def _decoded(
    target: Target, drafter: Drafter, sample: Sample, chosen: argparse.Namespace
) -> _Measured:
    began = time.perf_counter()
    made = generate(
        target,
        drafter,
        sample.prompt,
        max_new_tokens=chosen.max_new_tokens,
        zero_features=chosen.zero_features,
    )
    between = time.perf_counter()
    plain = generate_plain(target, sample.prompt, max_new_tokens=chosen.max_new_tokens)
    return _Measured(made, made.tokens == plain, between - began, time.perf_counter() - between)


def _replayed(
    target: Target, drafter: Drafter, sample: Sample, chosen: argparse.Namespace
) -> _Measured:
    began = time.perf_counter()
    made = replay(
        target,
        drafter,
        sample.prompt,
        sample.completion[: chosen.max_new_tokens],
        zero_features=chosen.zero_features,
    )
    return _Measured(made, same=True, seconds=time.perf_counter() - began, plain_seconds=0.0)


def _summary(
    measured: Sequence[_Measured], block_size: int, path: Path, chosen: argparse.Namespace
) -> dict[str, Any]:
    seconds = sum(one.seconds for one in measured)
    tokens = sum(len(one.made.tokens) for one in measured)
    found = summed([one.made for one in measured], block_size, seconds)
    told = {
        "checkpoint": str(path),
        "prompts": len(measured),
        "tokens": tokens,
        "accepted": round(found.accepted, 4),
        "first": round(found.first, 4),
        "block_size": block_size,
        "lengths": found.lengths,
        "zero_features": chosen.zero_features,
    }
    if chosen.quick:
        return told | {"quick": True}
    return told | {
        "tokens_per_s": round(tokens / seconds, 2),
        "speedup": round(sum(one.plain_seconds for one in measured) / seconds, 3),
        # In float32 all are; bfloat16 rounds differently in a block and flips rare ties.
        "same_as_plain": sum(one.same for one in measured),
    }


def _histogram(lengths: Sequence[int]) -> list[str]:
    """How many blocks gave each number of tokens, and what share gave at least that many."""
    total = sum(lengths)
    if not total:
        return []
    widest = max(lengths)
    return ["", "  gave  blocks  at least"] + [
        f"{given:>6}  {count:>6}  {sum(lengths[given - 1 :]) / total:>8.1%}"
        f"  {'#' * round(40 * count / widest)}".rstrip()
        for given, count in enumerate(lengths, start=1)
    ]
