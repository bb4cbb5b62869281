"""python -m trainer COMMAND: words in, exit code out; alone prints, alone exits."""

# ruff: noqa: T201, PLC0415 - it prints, and imports torch only for the commands that need it

from __future__ import annotations

import importlib
import json
import math
import os
import shutil
import sys
import time
from typing import TYPE_CHECKING

from trainer.errors import FeatureError, TrainerError
from trainer.stop import Stop, Stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import TextIO

USAGE = """\
usage: python -m trainer COMMAND [FLAGS]

Trains a DFlash drafter: a small model that drafts a block of tokens at once, for
speculative decoding with a frozen target.

  train      train a drafter (also when only flags are given)
  prepare    prompts -> completions of the target -> a data set
  evaluate   speculative decoding with a trained drafter: acceptance length, speed
  export     a checkpoint as a folder that SGLang, vLLM and z-lab's code load
  features   run a check of everything this trainer promises (--json for machines)
  check      read the flags of `train`, and say what is wrong with them

`python -m trainer COMMAND --help` tells a command's flags.

  python -m trainer train --target-model ~/models/Qwen3-8B --data-dir ~/completions \\
      --output-dir ~/checkpoints --epochs 6 --lr 6e-4
"""
_REDRAWN_S = 0.2
# Imported only for its own command, as each brings in much.
ROOMS = {
    "prepare": ("trainer.prepare", "main"),
    "evaluate": ("trainer.build.evaluating", "evaluate_command"),
    "export": ("trainer.build.trained", "export_command"),
}


def main(argv: Sequence[str]) -> int:
    """Run one command; 0 done or stopped, 1 a bug, 2 bad input, 3 not finite, 4 a feature fails."""
    command, rest = (argv[0], argv[1:]) if argv and argv[0][:1] != "-" else ("train", argv)
    try:
        if not argv or argv[0] in ("-h", "--help") or command == "help":
            print(USAGE, end="")
            return 0
        if command == "train":
            return _train(rest)
        if command == "features":
            return _features(rest)
        if command == "check":
            from trainer import config

            config.read(rest)
            return 0
        if command in ROOMS:
            module, name = ROOMS[command]
            code: int = getattr(importlib.import_module(module), name)(rest, _say)
            return code
        print(f"{command}: unknown command; see python -m trainer --help", file=sys.stderr)
    except TrainerError as error:
        if getattr(error, "bug", False):
            raise  # a stage of the pipeline failed as no person can mend: with its traceback
        print(_named(error), file=sys.stderr)
        return error.exit_code
    return 2


def _train(argv: Sequence[str]) -> int:
    from trainer import config as configs
    from trainer.record.status import Status, folder_of

    config = configs.read(argv)
    first = os.environ.get("RANK", "0") == "0"
    folder = folder_of(config.output_dir)
    _make(folder)
    status = Status(folder if first else None)
    stop = Stop()
    try:
        stop.listen()
        status.phase("starting")
        from trainer import world

        if config.dp_pairs > 1 and not world.is_rank():
            world.gpus_a_pair(config.dp_pairs, config.device)
            return world.launch(config.dp_pairs, argv, stop)
        from trainer import train

        screen = Screen(sys.stdout)
        try:
            train.run(config, stop, status, screen.say, screen.show)
        finally:
            screen.clear()
    except Stopped:
        from trainer import world

        world.leave()
        status.phase("stopped")
        print("stopped   before the first step", flush=True)
    finally:
        stop.deafen()
    return 0


class Screen:
    """Prints lines; on a terminal also one that the next line replaces, a few times a second."""

    def __init__(self, out: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._out, self._clock = out, clock
        self._drawn_at = -math.inf if out.isatty() else math.inf
        self._drawn = False

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self.clear()
        print(text, file=self._out, flush=True)

    def show(self, text: str) -> None:
        """Draw a line that the next one replaces; nothing where nobody looks."""
        if self._clock() - self._drawn_at < _REDRAWN_S:
            return
        self.clear()
        # Cut: a line that wraps could not be taken back.
        print(text[: shutil.get_terminal_size().columns - 1], end="", file=self._out, flush=True)
        self._drawn, self._drawn_at = True, self._clock()

    def clear(self) -> None:
        """Take the drawn line back."""
        if self._drawn:
            print("\r\x1b[K", end="", file=self._out, flush=True)
            self._drawn = False


def _say(text: str) -> None:
    from trainer.record.status import despite_disk

    with despite_disk():
        print(text, flush=True)


def _features(argv: Sequence[str]) -> int:
    from trainer.flags import Parser

    parser = Parser(
        prog="python -m trainer features", description="Run a check of everything promised here."
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, last on stdout")
    as_json = parser.parse_args(list(argv)).json
    from trainer import features, train

    report = features.report(train.rehearse)
    for each in report["features"]:
        if not as_json:
            word = "ok" if each["ok"] else "FAILED"
            print(f"{each['name']:20} {word:7} {each['seconds']:.2f} s  {each['detail']}")
    if as_json:
        print(json.dumps(report))
    return 0 if all(each["ok"] for each in report["features"]) else FeatureError.exit_code


def _make(folder: Path) -> None:
    from trainer.errors import InputError

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--output-dir: {folder} cannot be made: {error.strerror}") from error


def _named(error: TrainerError) -> str:
    rank = os.environ.get("RANK", "0")
    return str(error) if rank == "0" else f"rank {rank}: {error}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
