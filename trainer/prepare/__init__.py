"""Prompts -> completions of the target -> an Arrow dataset that `train` reads.

A drafter learns to say what its target would say, so the completions are the target's own, greedy
or sampled, under the target's own chat template.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers

from trainer.errors import InputError
from trainer.flags import Parser
from trainer.model.target import Target, convert
from trainer.prepare.completions import Answers, Sampling, complete, in_template
from trainer.prepare.dataset import refuse_existing, write_dataset
from trainer.prepare.prompts import read_prompts

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

__all__ = ["add_arguments", "main", "run"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def main(argv: Sequence[str], say: Callable[[str], None]) -> int:
    """Run `python -m trainer prepare`; 0 when it is done.

    Args:
        argv: the flags.
        say: takes a line for the person who waits.

    Raises:
        InputError: a flag, the target or a prompt is not usable, or what would be written exists.
    """
    parser = Parser(prog="python -m trainer prepare", allow_abbrev=False)
    add_arguments(parser)
    run(parser.parse_args(list(argv)), say)
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `python -m trainer prepare`."""
    parser.description = (
        "Let the target answer prompts, and write its answers as the dataset that `train` reads."
    )
    add = parser.add_argument
    add("--target-model", required=True, metavar="PATH", help="Folder or .gguf file of the target.")
    add("--prompts", metavar="FILE", help='Lines of JSON: {"prompt": text} or {"messages": [...]}.')
    add("--out", metavar="DIR", help="Where the dataset goes; none may be there yet.")
    add(
        "--max-new-tokens", type=int, default=1024, metavar="N",
        help="Longest completion, in tokens (default 1024).",
    )  # fmt: skip
    add(
        "--batch-size", type=int, default=0, metavar="N",
        help="Answers made together (0, the default: what the GPU's memory allows; 16 on a CPU).",
    )  # fmt: skip
    add(
        "--samples", type=int, default=0, metavar="N",
        help="Sampled answers to each prompt, besides the greedy one (default 0).",
    )  # fmt: skip
    add(
        "--temperature", type=float, default=0.8, metavar="X",
        help="Of the sampled answers (default 0.8).",
    )  # fmt: skip
    add("--seed", type=int, default=0, metavar="N", help="Of the sampled answers (default 0).")
    add(
        "--save-target", metavar="DIR",
        help="Write a .gguf target as safetensors, which load in a second, and use those.",
    )  # fmt: skip
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="Where the target runs.")
    add(
        "--dtype", default="auto", choices=("auto", *_DTYPES),
        help="auto: bfloat16 on cuda, else float32.",
    )  # fmt: skip


def run(arguments: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Do what the flags ask for; `main` tells what may be raised."""
    _check(arguments)
    target_path = arguments.target_model
    if arguments.save_target is not None:
        say(f"writing {target_path} as safetensors to {arguments.save_target}")
        convert(target_path, arguments.save_target)
        target_path = arguments.save_target
    if arguments.prompts is None:
        return
    conversations = read_prompts(Path(arguments.prompts))
    cuda = arguments.device == "cuda" or (arguments.device == "auto" and torch.cuda.is_available())
    dtype = arguments.dtype if arguments.dtype != "auto" else "bfloat16" if cuda else "float32"
    target = Target.load(target_path, device="cuda" if cuda else "cpu", dtype=_DTYPES[dtype])
    tokenizer = target.tokenizer()
    prompts = [in_template(tokenizer, each) for each in conversations]
    asked = {
        "target": _identity(Path(target_path)),
        "dtype": dtype,
        "template": tokenizer.chat_template,
        "prompts_sha256": hashlib.sha256(Path(arguments.prompts).read_bytes()).hexdigest(),
        "max_new_tokens": arguments.max_new_tokens,
        "samples": arguments.samples,
        "temperature": arguments.temperature if arguments.samples else None,
        "seed": arguments.seed,
    }
    out = Path(arguments.out)
    kept = Answers(out.with_name(f".{out.name}.answers.jsonl"), json.dumps(asked, sort_keys=True))
    if kept.found:
        say(f"going on with {len(kept.found):,} answers that were made before")
    began = time.monotonic()
    rows = complete(
        target,
        prompts,
        max_new_tokens=arguments.max_new_tokens,
        batch_size=arguments.batch_size,
        sampling=Sampling(
            samples=arguments.samples, temperature=arguments.temperature, seed=arguments.seed
        ),
        kept=kept,
        say=say,
    )
    seconds = time.monotonic() - began
    facts = {
        "command": _command(arguments),
        **asked,
        "rows": len(rows),
        "prompt_tokens": sum(len(row.prompt) for row in rows),
        "completion_tokens": sum(len(row.completion) for row in rows),
        "cut_off": sum(row.completion[-1] not in target.eos_ids for row in rows),
        "made_with": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    write_dataset(out, rows, facts)
    kept.path.unlink()
    say(
        f"{arguments.out}: {len(rows):,} rows, {facts['completion_tokens']:,} completion tokens, "
        f"{facts['cut_off']:,} cut off at {arguments.max_new_tokens:,}, {seconds:,.1f} s"
    )


def _check(arguments: argparse.Namespace) -> None:
    for name, least in (("max_new_tokens", 1), ("batch_size", 0), ("samples", 0), ("seed", 0)):
        if getattr(arguments, name) < least:
            flag = "--" + name.replace("_", "-")
            raise InputError(f"{flag}: is {getattr(arguments, name)}; give at least {least}")
    if not 0 < arguments.temperature < math.inf:
        raise InputError(f"--temperature: is {arguments.temperature}; give more than 0")
    if (arguments.prompts is None) != (arguments.out is None):
        raise InputError("--prompts and --out: one is given; give both, or neither")
    if arguments.prompts is None and arguments.save_target is None:
        raise InputError("--prompts: is missing; give it with --out, or give --save-target")
    if arguments.out is not None:
        refuse_existing(Path(arguments.out))


def _identity(path: Path) -> dict[str, object]:
    """Which target it was: file names and sizes of its weights, and the sum of its config."""
    folder = path if path.is_dir() else path.parent
    files = sorted(folder.glob("*.safetensors")) if path.is_dir() else [path]
    config = folder / "config.json"
    return {
        "name": path.name,
        "weights": {each.name: each.stat().st_size for each in files},
        "config_sha256": hashlib.sha256(config.read_bytes()).hexdigest()
        if config.exists()
        else None,
    }


def _command(arguments: argparse.Namespace) -> str:
    words = ["python", "-m", "trainer", "prepare"]
    names = ("target_model", "prompts", "out", "max_new_tokens", "batch_size", "samples")
    for name in (*names, "temperature", "seed"):
        words += ["--" + name.replace("_", "-"), str(getattr(arguments, name))]
    return shlex.join(words)
