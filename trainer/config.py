"""A run as one value: its fields are the flags, and the text under each is its help.

Standard library only, so that `--help` and a wrong value are answered at once.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import itertools
import math
import sys
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from trainer.errors import InputError

if typing.TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run."""

    target_model: str
    """Folder of the frozen target in HuggingFace layout (or a .gguf file)."""
    data_dir: str
    """Tokenised completions: HuggingFace `save_to_disk` folder, or Arrow or Parquet files."""
    data_split: str = ""
    """Which split of a data set that has several; empty: train."""
    data_check: str = "full"
    """Read all data once at the start (full), or look at each batch as it is made (lazy)."""
    output_dir: str
    """Folder of the checkpoints; a run resumes from the newest complete one in it."""
    overlong: str = "error"
    """What becomes of a row longer than the token budget: error, truncate or drop."""

    epochs: int = 6
    """Passes over the data."""
    steps: int = 0
    """Optimizer steps after which the run is finished; 0: what the epochs give."""
    token_budget: int = 8192
    """Slots of one micro-batch, in tokens."""
    layout: str = "auto"
    """How rows share the budget: packed end to end, padded to the longest, or auto: packed where
    the target keeps documents apart."""
    max_anchors: int = 512
    """Blocks drawn from one micro-batch of one pair."""
    accumulation: int = 1
    """Micro-batches of each pair in one optimizer step."""
    seed: int = 0
    """Of the order of rows, the anchors and the drafter's first weights."""

    block_size: int = 16
    """Tokens of a block: the anchor and the slots drafted after it."""
    draft_layers: int = 5
    """Decoder layers of the drafter."""
    tap_count: int = 5
    """Target layers whose output the drafter sees, spread by the DFlash rule."""
    target_layer_ids: tuple[int, ...] = ()
    """Target layers to tap instead, comma-separated, counted from 0."""
    draft_intermediate: int = 0
    """Width of the drafter's MLP; 0: the target's."""
    draft_heads: int = 0
    """Query heads of the drafter; 0: the target's."""
    draft_kv_heads: int = 0
    """Key/value heads of the drafter; 0: the target's."""
    draft_head_dim: int = 0
    """Width of a head of the drafter; 0: the target's."""
    sliding_window: int = 0
    """Context tokens that all drafter layers but the last see; 0: every layer sees all."""
    mask_token_id: int = -1
    """Row of the target's embedding that stands for a slot to be drafted; -1: chosen and logged."""

    lr: float = 6e-4
    """Learning rate after warm-up."""
    min_lr_ratio: float = 0.0
    """Learning rate at the end of the cosine, as a share of --lr."""
    warmup_ratio: float = 0.04
    """Share of the steps over which the learning rate rises."""
    weight_decay: float = 0.0
    """Decoupled weight decay of the matrices."""
    beta1: float = 0.9
    """AdamW's decay of the first moment."""
    beta2: float = 0.95
    """AdamW's decay of the second moment."""
    clip_norm: float = 1.0
    """Largest L2 norm of all gradients together; larger ones are scaled down to it."""
    loss: str = "decay"
    """Weight of a block's slots: decay (exp(-(k-1)/gamma)) or dpace."""
    gamma: float = 0.0
    """Decay of the slots' weight, in slots; 0: the paper's for the block size."""

    dp_pairs: int = 1
    """Data-parallel replicas on this machine, one process each."""
    device: str = "auto"
    """cpu, cuda, or auto: cuda where there is one."""
    dtype: str = "auto"
    """float32, bfloat16, float64, or auto: bfloat16 on cuda (fp32 master weights), else float32."""
    overlap: bool = True
    """Run the target for the next batches while the drafter trains on this one."""
    depth: int = 2
    """Batches that may wait between two stages when they overlap."""
    threads: int = 0
    """CPU threads of one process; 0: torch's choice, shared out among the pairs."""

    log_interval: int = 10
    """Steps between two lines of the log; metrics.jsonl has every step."""
    save_interval: int = 5000
    """Steps between two checkpoints; 0: only at the end and at SIGTERM."""
    keep: int = 3
    """Newest checkpoints that stay; 0: all. Pinned ones always do."""

    def __post_init__(self) -> None:
        for name in ("target_model", "data_dir", "output_dir"):
            text = getattr(self, name)
            self._need(name, bool(text.strip()), "a path")
            object.__setattr__(self, name, str(Path(text).expanduser()))
        for name, words in CHOICES.items():
            self._need(name, getattr(self, name) in words, "one of " + ", ".join(words))
        for name, least in _LEAST.items():
            self._need(name, getattr(self, name) >= least, f"at least {least}")
        for name in ("lr", "clip_norm"):
            self._need(name, 0 < getattr(self, name) < math.inf, "more than 0")
        for name in ("beta1", "beta2", "warmup_ratio"):
            self._need(name, 0 <= getattr(self, name) < 1, "from 0 up to, not including, 1")
        self._need("min_lr_ratio", 0 <= self.min_lr_ratio <= 1, "from 0 to 1")
        for name in ("weight_decay", "gamma"):
            self._need(name, 0 <= getattr(self, name) < math.inf, "0 or more")
        taps = self.target_layer_ids
        different = len(set(taps)) == len(taps) and min(taps, default=0) >= 0
        self._need("target_layer_ids", different, "different numbers from 0, as 1,7,13")

    def _need(self, name: str, holds: bool, wish: str) -> None:
        if not holds:
            raise InputError(f"{flag(name)}: is {_shown(getattr(self, name))}; give {wish}")


CHOICES = {
    "overlong": ("error", "truncate", "drop"),
    "data_check": ("full", "lazy"),
    "layout": ("auto", "packed", "padded"),
    "loss": ("decay", "dpace"),
    "device": ("auto", "cpu", "cuda"),
    "dtype": ("auto", "float32", "bfloat16", "float64"),
}
_LEAST = {
    "epochs": 1, "steps": 0, "token_budget": 2, "max_anchors": 1, "accumulation": 1, "seed": 0,
    "block_size": 2, "draft_layers": 1, "tap_count": 1, "draft_intermediate": 0, "draft_heads": 0,
    "draft_kv_heads": 0, "draft_head_dim": 0, "sliding_window": 0,
    "mask_token_id": -1, "dp_pairs": 1, "depth": 1, "threads": 0, "log_interval": 1,
    "save_interval": 0, "keep": 0,
}  # fmt: skip
GROUPS = {
    "what": ("target_model", "data_dir", "output_dir", "data_split", "data_check", "overlong"),
    "how much": (
        "epochs", "steps", "token_budget", "layout", "max_anchors", "accumulation", "seed",
    ),
    "the drafter": (
        "block_size", "draft_layers", "tap_count", "target_layer_ids", "draft_intermediate",
        "draft_heads", "draft_kv_heads", "draft_head_dim", "sliding_window", "mask_token_id",
    ),
    "how far a step goes": (
        "lr", "min_lr_ratio", "warmup_ratio", "weight_decay", "beta1", "beta2", "clip_norm", "loss",
        "gamma",
    ),
    "where": ("dp_pairs", "device", "dtype", "overlap", "depth", "threads"),
    "what is kept": ("log_interval", "save_interval", "keep"),
}  # fmt: skip


def flag(name: str) -> str:
    """The flag of a field."""
    return "--" + name.replace("_", "-")


def read(argv: Sequence[str], *, program: str = "python -m trainer train") -> TrainConfig:
    """The run that a command line asks for.

    Raises:
        InputError: a flag is unknown, missing, unreadable or out of range; one line that names it.
        SystemExit: `--help` was asked for and printed.
    """
    return TrainConfig(**vars(_parser(program).parse_args(list(argv))))


class Parser(argparse.ArgumentParser):
    """A parser that answers a wrong line with one sentence, and knows what was probably meant."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and leaving."""
        message = message.removeprefix("argument ")
        if message.startswith("unrecognized arguments: "):
            word = message.split()[2].split("=")[0]
            close = difflib.get_close_matches(word, self._option_string_actions, n=1)
            hint = f"; did you mean {close[0]}?" if close else f"; see {self.prog} --help"
            message = f"{word}: unknown flag{hint}"
        raise InputError(message)


def _parser(program: str) -> Parser:
    parser = Parser(
        prog=program,
        usage="%(prog)s --target-model PATH --data-dir PATH --output-dir PATH [FLAGS]",
        description="Train a DFlash drafter for a frozen target. Started again with the same"
        " --output-dir it goes on exactly where it was; SIGTERM and Ctrl-C write a checkpoint.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=100),
    )
    helps, types = _docstrings(), typing.get_type_hints(TrainConfig)
    defaults = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    for title, names in GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names:
            _add(group, name, types[name], defaults[name], helps[name])
    return parser


def _add(
    group: argparse._ArgumentGroup, name: str, kind: object, default: object, text: str
) -> None:
    required = default is dataclasses.MISSING
    text = text if required or default in ("", ()) else f"{text[:-1]} (default {_shown(default)})."
    text = text.replace("%", "%%")
    if kind is bool:
        group.add_argument(
            flag(name), action=argparse.BooleanOptionalAction, default=default, help=text
        )
        return
    reader = {int: _integer, float: _number, str: str}.get(kind, _integers)  # type: ignore[call-overload]
    shown = "|".join(CHOICES[name]) if name in CHOICES else {int: "N", float: "X"}.get(kind)  # type: ignore[call-overload]
    metavar = shown or ("PATH" if kind is str else "N,N")
    group.add_argument(
        flag(name), type=reader, metavar=metavar, required=required, help=text,
        default=None if required else default,
    )  # fmt: skip


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text!r}; give a whole number") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"is {text!r}; give a number") from None


def _integers(text: str) -> tuple[int, ...]:
    return tuple(_integer(part) for part in text.split(",") if part.strip())


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value) or "empty"


def _docstrings() -> dict[str, str]:
    # The text under a field is for readers of the code and of --help alike; Python itself drops it.
    source = Path(sys.modules[__name__].__file__ or "").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == TrainConfig.__name__:
            return {
                field.target.id: text.value.value
                for field, text in itertools.pairwise(node.body)
                if isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            }
    raise AssertionError("TrainConfig stands in this file")
