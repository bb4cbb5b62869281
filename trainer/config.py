"""A run as one value: its fields are the flags, and the text under each is its help.

Standard library only, so that `--help` and a wrong value are answered at once.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import itertools
import math
import sys
import typing
from dataclasses import dataclass
from pathlib import Path

from trainer import flags
from trainer.errors import InputError
from trainer.flags import flag

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
    the target keeps documents apart, but padded on a GPU."""
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
    """Positions that a slot of a sliding layer sees, itself counted; 0: every layer sees all."""
    sliding_layers: int = -1
    """How many of the first layers are sliding ones, given a window; -1: all but the last."""
    mask_token_id: int = -1
    """Row of the target's embedding that stands for a slot to be drafted; -1: chosen and logged."""
    init_drafter: str = ""
    """Folder of an exported drafter (z-lab or speculators layout) to start from, in its shape."""

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
    compile: bool = True
    """On cuda, compile drafter and target, with attention that skips what no block sees."""
    threads: int = 0
    """CPU threads of one process; 0: torch's choice, shared out among the pairs."""

    log_interval: int = 10
    """Steps between two lines of the log; metrics.jsonl has every step."""
    save_interval: int = 5000
    """Steps between two checkpoints; 0: only at the end and at SIGTERM."""
    keep: int = 3
    """Newest checkpoints that stay; 0: all. Pinned ones always do."""
    tensorboard: bool = False
    """Write TensorBoard events to OUTPUT_DIR/tensorboard too; needs the package tensorboard."""
    eval_interval: int = 0
    """Steps between two measures of the drafter, as in decoding, on what it never saw; 0: none."""
    eval_rows: int = 0
    """Prompts of the data that are kept from training, with all their answers, to measure on."""
    eval_prompts: str = ""
    """JSONL of prompts to measure on too; the target answers them greedily at the start."""

    def __post_init__(self) -> None:
        for name in ("target_model", "data_dir", "output_dir"):
            text = getattr(self, name)
            self._need(name, bool(text.strip()), "a path")
            object.__setattr__(self, name, str(Path(text).expanduser()))
        for name in ("init_drafter", "eval_prompts"):
            if text := getattr(self, name):
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
        slides = self.sliding_layers <= 0 or self.sliding_window > 0
        self._need("sliding_layers", slides, "--sliding-window with it")
        self._need(
            "sliding_layers", self.sliding_layers <= self.draft_layers, "no more than layers"
        )
        judged = not self.eval_interval or self.eval_rows > 0 or self.eval_prompts != ""
        self._need("eval_interval", judged, "--eval-rows or --eval-prompts with it")

    def _need(self, name: str, holds: bool, wish: str) -> None:
        if not holds:
            raise InputError(f"{flag(name)}: is {flags.shown(getattr(self, name))}; give {wish}")


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
    "draft_kv_heads": 0, "draft_head_dim": 0, "sliding_window": 0, "sliding_layers": -1,
    "mask_token_id": -1, "dp_pairs": 1, "depth": 1, "threads": 0, "log_interval": 1,
    "save_interval": 0, "keep": 0, "eval_interval": 0, "eval_rows": 0,
}  # fmt: skip
GROUPS = {
    "what": ("target_model", "data_dir", "output_dir", "data_split", "data_check", "overlong"),
    "how much": (
        "epochs", "steps", "token_budget", "layout", "max_anchors", "accumulation", "seed",
    ),
    "the drafter": (
        "block_size", "draft_layers", "tap_count", "target_layer_ids", "draft_intermediate",
        "draft_heads", "draft_kv_heads", "draft_head_dim", "sliding_window",
        "sliding_layers", "mask_token_id", "init_drafter",
    ),
    "how far a step goes": (
        "lr", "min_lr_ratio", "warmup_ratio", "weight_decay", "beta1", "beta2", "clip_norm", "loss",
        "gamma",
    ),
    "where": ("dp_pairs", "device", "dtype", "overlap", "depth", "compile", "threads"),
    "what is kept and told": (
        "log_interval", "save_interval", "keep", "tensorboard", "eval_interval", "eval_rows",
        "eval_prompts",
    ),
}  # fmt: skip


def read(argv: Sequence[str], *, program: str = "python -m trainer train") -> TrainConfig:
    """The run that a command line asks for.

    Raises:
        InputError: a flag is unknown, missing, unreadable or out of range; one line that names it.
        SystemExit: `--help` was asked for and printed.
    """
    return TrainConfig(**vars(_parser(program).parse_args(list(argv))))


def _parser(program: str) -> flags.Parser:
    parser = flags.Parser(
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
            flags.add(
                group,
                name,
                types[name],
                default=defaults[name],
                text=helps[name],
                words=CHOICES.get(name, ()),
            )
    return parser


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
