"""What is done with a drafter that was trained: measure it, and export it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainer.data import arrow
from trainer.errors import InputError
from trainer.export import export
from trainer.flags import Parser
from trainer.model.drafter import Drafter, DrafterConfig
from trainer.model.target import Target
from trainer.record import checkpoint
from trainer.speculate import generate, generate_plain
from trainer.world import gpus_a_pair

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    Say = Callable[[str], None]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def load(path: Path, say: Say) -> tuple[Path, Drafter]:
    """A trained drafter, on the CPU in float32.

    Args:
        path: a checkpoint, or the output folder of a run: then its newest whole checkpoint.
        say: told about damaged checkpoints that were passed over.

    Returns:
        The checkpoint's folder, and the drafter.

    Raises:
        InputError: there is none, or it is damaged.
    """
    if (path / "checkpoint.json").is_file():
        if why := checkpoint.damage(path):
            raise InputError(f"{path}: {why}; give another checkpoint")
        found = checkpoint.read(path)
    else:
        newest = checkpoint.newest(path, say=say)
        if newest is None:
            raise InputError(f"--checkpoint: {path} holds no checkpoint")
        found = newest
    shape = found.facts["drafter"]
    drafter = Drafter(DrafterConfig(**shape | {"tap_ids": tuple(shape["tap_ids"])}))
    # The master weights in the dtype of the run may be wider than these; served ones are not.
    drafter.load_state_dict(found.tensors("drafter"))
    return found.path, drafter.eval().requires_grad_(False)


def export_command(argv: Sequence[str], say: Say) -> int:
    """Run `python -m trainer export`; 0 when it is done.

    Raises:
        InputError: a flag or the checkpoint is not usable, or the folder exists.
    """
    parser = Parser(
        prog="python -m trainer export",
        allow_abbrev=False,
        description="Write a trained drafter as a folder that SGLang, vLLM and z-lab's code load.",
    )
    add = parser.add_argument
    add(
        "--checkpoint",
        required=True,
        metavar="PATH",
        help="A checkpoint, or a run's output folder.",
    )
    add("--out", required=True, metavar="DIR", help="The folder to make; none may be there yet.")
    add("--dtype", default="bfloat16", choices=_DTYPES, help="Of the weights (default bfloat16).")
    add("--eos-token-id", type=int, metavar="N", help="The target's end token, if a server asks.")
    chosen = parser.parse_args(list(argv))
    path, drafter = load(Path(chosen.checkpoint).expanduser(), say)
    out = export(
        dict(drafter.named_parameters()),
        drafter.config,
        Path(chosen.out).expanduser(),
        dtype=_DTYPES[chosen.dtype],
        eos_token_id=chosen.eos_token_id,
    )
    say(f"exported  {path} to {out}")
    return 0


def evaluate_command(argv: Sequence[str], say: Say) -> int:
    """Run `python -m trainer evaluate`; 0 when it is done.

    Prompts are the rows of a data set up to their first trained token. The last line is JSON.

    Raises:
        InputError: a flag, the target, the data or the checkpoint is not usable.
    """
    chosen = _evaluation(argv)
    path, drafter = load(Path(chosen.checkpoint).expanduser(), say)
    on_cuda = gpus_a_pair(1, chosen.device) > 0
    dtype = _DTYPES.get(chosen.dtype) or (torch.bfloat16 if on_cuda else torch.float32)
    target = Target.load(
        Path(chosen.target_model).expanduser(),
        taps=drafter.config.tap_ids,
        device="cuda" if on_cuda else "cpu",
        dtype=dtype,
    )
    if target.hidden_size != drafter.config.hidden_size:
        raise InputError(
            f"--target-model: has hidden size {target.hidden_size}, the drafter"
            f" {drafter.config.hidden_size}; give the target that it was trained with"
        )
    drafter.to(target.device, dtype)
    store = arrow.load(Path(chosen.data_dir).expanduser(), budget=2**31 - 1)
    say(f"{'prompt':>6}  {'tokens':>6}  {'blocks':>6}  accepted")
    kept = []
    for number, prompt in enumerate(_prompts(store, chosen.prompts)):
        kept.append(_measured(target, drafter, prompt, chosen))
        one = kept[-1]
        say(f"{number:>6}  {one['tokens']:>6}  {one['blocks']:>6}  {one['accepted']:.2f}")
    if not kept:
        raise InputError(f"--data-dir: no row of {chosen.data_dir} begins with a prompt")
    say(json.dumps(_summary(kept, path, drafter.config.block_size)))
    return 0


def _evaluation(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m trainer evaluate",
        allow_abbrev=False,
        description="Decode the prompts of a data set speculatively, and tell how many tokens a"
        " block gives (right drafts in a row, and the target's own) and how fast that is.",
    )
    add = parser.add_argument
    add("--target-model", required=True, metavar="PATH", help="Folder or .gguf file of the target.")
    add(
        "--checkpoint",
        required=True,
        metavar="PATH",
        help="A checkpoint, or a run's output folder.",
    )
    add("--data-dir", required=True, metavar="PATH", help="A data set; its prompts are used.")
    add("--prompts", type=int, default=16, metavar="N", help="How many of them (default 16).")
    add(
        "--max-new-tokens", type=int, default=256, metavar="N",
        help="Longest completion, in tokens (default 256).",
    )  # fmt: skip
    add("--zero-features", action="store_true", help="Hide the target from the drafter.")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="Where both run.")
    add("--dtype", default="auto", choices=("auto", *_DTYPES), help="Of both (auto: as in train).")
    return parser.parse_args(list(argv))


def _prompts(store: arrow.TokenStore, count: int) -> Iterator[list[int]]:
    found = 0
    for row in range(len(store.lengths)):
        ids, trainable = store.row(row)
        length = int(np.argmax(trainable))
        if length and found < count:
            found += 1
            yield ids[:length].tolist()


def _measured(
    target: Target, drafter: Drafter, prompt: list[int], chosen: argparse.Namespace
) -> dict[str, Any]:
    began = time.perf_counter()
    made = generate(
        target,
        drafter,
        prompt,
        max_new_tokens=chosen.max_new_tokens,
        zero_features=chosen.zero_features,
    )
    between = time.perf_counter()
    plain = generate_plain(target, prompt, max_new_tokens=chosen.max_new_tokens)
    return {
        "tokens": len(made.tokens),
        "blocks": made.blocks,
        "accepted": made.mean_length,
        "whole": bool(made.lengths),
        "same": made.tokens == plain,
        "seconds": between - began,
        "plain_seconds": time.perf_counter() - between,
    }


def _summary(kept: list[dict[str, Any]], path: Path, block_size: int) -> dict[str, Any]:
    whole = [one["accepted"] for one in kept if one["whole"]]
    tokens, seconds = (sum(one[name] for one in kept) for name in ("tokens", "seconds"))
    return {
        "checkpoint": str(path),
        "prompts": len(kept),
        "tokens": tokens,
        "accepted": round(sum(whole) / max(1, len(whole)), 4),
        "block_size": block_size,
        "tokens_per_s": round(tokens / seconds, 2),
        "speedup": round(sum(one["plain_seconds"] for one in kept) / seconds, 3),
        # In float32 all are; bfloat16 rounds differently in a block and flips rare ties.
        "same_as_plain": sum(one["same"] for one in kept),
    }
