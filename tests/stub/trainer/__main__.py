"""Words of the command line to one of the two things the stub can do."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time

from trainer import faults
from trainer.loop import Loop
from trainer.record import release_of_imported

FEATURES = (
    "flat-gradients",
    "preloaded-dataset",
    "tensor-batches",
    "overlapped-pipeline",
    "anchored-blocks",
    "exact-resume",
)


def features() -> int:
    """Print what this trainer can do, as the real one does; the last line is JSON."""
    print("some library greets on stdout", flush=True)
    if os.environ.get("STUB_HANG"):
        time.sleep(120)
    faults.burn(float(os.environ.get("STUB_BURN", "0")))
    missing, failing = os.environ.get("STUB_MISSING"), os.environ.get("STUB_FAILING")
    found = [
        {
            "name": name,
            "ok": name != failing,
            "detail": "a planted fault" if name == failing else "as promised",
            "seconds": 0.01,
        }
        for name in FEATURES
        if name != missing
    ]
    answer = {
        "release": release_of_imported(),
        "python": platform.python_version(),
        "torch": None,
        "features": found,
    }
    print(json.dumps(answer), flush=True)
    return 0 if all(each["ok"] for each in found) else 4


def train(words: list[str]) -> int:
    """Make steps until the end, a signal or a fault."""
    parser = argparse.ArgumentParser(prog="trainer train", allow_abbrev=False)
    parser.add_argument("--output-dir", required=True)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--step-seconds", type=float, default=0.02)
    parser.add_argument("--save-seconds", type=float, default=0.0)
    parser.add_argument("--save-interval", type=int, default=0)
    parser.add_argument("--load-seconds", type=float, default=0.0)
    parser.add_argument("--chatter", type=int, default=0)
    for number in ("children", "crash-at", "die-at", "nan-at", "hang-at"):
        parser.add_argument("--" + number, type=int, default=0)
    for flag in (
        "ignore-term",
        "new-session-child",
        "orphan-child",
        "bare-child",
        "exit-before-first-step",
        "hang-before-first-step",
        "burn",
    ):
        parser.add_argument("--" + flag, action="store_true")
    known, _unknown = parser.parse_known_args(words)
    loop = Loop(known)
    faults.start_children(known)
    return loop.run()


def main(words: list[str]) -> int:
    """Choose the command; 2 for words that name none."""
    if words[:1] == ["train"]:
        return train(words[1:])
    if words[:1] == ["features"]:
        return features()
    if words[:1] == ["check"]:
        wrong = [word for word in words if word.startswith("--wrong")]
        if wrong:
            print(f"{wrong[0]}: unknown flag", file=sys.stderr)
        return 2 if wrong else 0
    print(f"trainer: no command {words[:1]}; give train, check or features", file=sys.stderr)
    return 2


sys.exit(main(sys.argv[1:]))
