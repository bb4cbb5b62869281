"""What is done with a drafter that was trained: load it, and export it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trainer.errors import InputError
from trainer.export import export, export_speculators, read
from trainer.flags import Parser
from trainer.model.drafter import Drafter, DrafterConfig
from trainer.model.target import Target
from trainer.record import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Say = Callable[[str], None]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def load(path: Path, say: Say) -> tuple[Path, Drafter]:
    """A trained drafter, on the CPU in float32.

    Args:
        path: a checkpoint; or the output folder of a run: then its newest whole checkpoint; or
            the folder of an exported drafter.
        say: told about damaged checkpoints that were passed over.

    Returns:
        The folder that it is from, and the drafter.

    Raises:
        InputError: there is none, or it is damaged.
    """
    if (path / "config.json").is_file():
        served = read(path, flag="--checkpoint")
        drafter = Drafter(served.config)
        drafter.load_state_dict(served.tensors)
        return path, drafter.eval().requires_grad_(False)
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
        help="A checkpoint, a run's output folder, or a drafter that was exported already.",
    )
    add("--out", required=True, metavar="DIR", help="The folder to make; none may be there yet.")
    add("--dtype", default="bfloat16", choices=DTYPES, help="Of the weights (default bfloat16).")
    add("--eos-token-id", type=int, metavar="N", help="The target's end token, if a server asks.")
    add(
        "--layout", default="z-lab", choices=("z-lab", "speculators"),
        help="z-lab: SGLang, vLLM, z-lab's code (default); speculators: `vllm serve DIR` alone.",
    )  # fmt: skip
    add(
        "--target-model", metavar="PATH",
        help="For speculators, which copies its embedding and head; as the server will find it.",
    )  # fmt: skip
    chosen = parser.parse_args(list(argv))
    path, drafter = load(Path(chosen.checkpoint).expanduser(), say)
    tensors, out = dict(drafter.named_parameters()), Path(chosen.out).expanduser()
    dtype, end = DTYPES[chosen.dtype], chosen.eos_token_id
    if chosen.layout == "z-lab":
        export(tensors, drafter.config, out, dtype=dtype, eos_token_id=end)
    else:
        target = _target_of(drafter, chosen.target_model)
        export_speculators(
            tensors,
            drafter.config,
            out,
            embedding_VH=target.embedding_VH,
            head_VH=target.head_VH,
            verifier=chosen.target_model,
            verifier_architectures=target.model.config.architectures or [],
            dtype=dtype,
            eos_token_id=end,
        )
    say(f"exported  {path} to {out}")
    return 0


def _target_of(drafter: Drafter, path: str | None) -> Target:
    if path is None:
        raise InputError("--target-model: is missing; --layout speculators copies its embedding")
    target = Target.load(
        Path(path).expanduser(), taps=drafter.config.tap_ids, device="cpu", dtype=torch.bfloat16
    )
    fits(target, drafter)
    return target


def fits(target: Target, drafter: Drafter) -> None:
    """See that a drafter can draft for a target.

    Raises:
        InputError: they are of different sizes.
    """
    own = drafter.config
    if (own.hidden_size, own.vocabulary) != (target.hidden_size, target.vocabulary):
        raise InputError(
            f"--target-model: has hidden size {target.hidden_size:,} and {target.vocabulary:,}"
            f" tokens, the drafter {own.hidden_size:,} and {own.vocabulary:,}; give the target"
            " that it was trained with"
        )
