"""The steps of the stub."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import sys
import time
from pathlib import Path

from trainer.record import (
    boottime,
    claim,
    despite_disk,
    newest,
    release_of_imported,
    save,
    write_whole,
)


class Loop:
    """One run: loads, steps, and stops after the step under way when SIGTERM has come."""

    def __init__(self, wanted: argparse.Namespace) -> None:
        self.wanted = wanted
        self.output = Path(wanted.output_dir)
        self.output.mkdir(parents=True, exist_ok=True)
        claim(self.output)
        self.record = Path(os.environ.get("TRAINER_RUN_DIR") or wanted.output_dir)
        self.stopping = False
        self.step = newest(self.output)
        self.durations: list[float] = []
        self.stepped_at: float | None = None
        self.loss: float | None = None
        self.checkpoint = f"step-{self.step:08d}" if self.step else None
        self.release = release_of_imported()
        ignore = wanted.ignore_term
        signal.signal(signal.SIGTERM, signal.SIG_IGN if ignore else self._stop)

    def _stop(self, _number: int, _frame: object) -> None:
        self.stopping = True

    def say(self, phase: str) -> None:
        """Write status.json."""
        seconds = statistics.median(self.durations) if self.durations else None
        status = {
            "run_id": os.environ.get("TRAINER_RUN_ID"),
            "release": self.release,
            "pid": os.getpid(),
            "phase": phase,
            "step": self.step,
            "steps": self.wanted.steps,
            "loss": self.loss,
            "accepted": 1.5,
            "tokens_per_s": 1000.0,
            "step_boottime": self.stepped_at,
            "median_step_s": seconds,
            "boottime": boottime(),
            "checkpoint": self.checkpoint,
        }
        with despite_disk():
            write_whole(self.record / "status.json", status)

    def run(self) -> int:
        """Make the steps; the exit code of the process."""
        wanted = self.wanted
        self.say("starting")
        if wanted.exit_before_first_step:
            print("trainer: --data-dir is missing; give a folder", file=sys.stderr)
            return 2
        self.say("loading")
        time.sleep(600 if wanted.hang_before_first_step else wanted.load_seconds)
        while self.step < wanted.steps and not self.stopping:
            if not self._one():
                return 3
        self.say("saving")
        self.checkpoint = save(self.output, self.step, wanted.save_seconds).name
        self.say("finished" if self.step >= wanted.steps else "stopped")
        return 0

    def _one(self) -> bool:
        wanted, began, number = self.wanted, time.monotonic(), self.step + 1
        if number == wanted.crash_at:
            raise RuntimeError(f"planted at step {number}")
        if number == wanted.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if wanted.burn:
            end = time.process_time() + wanted.step_seconds
            while time.process_time() < end:
                sum(range(5_000))
        else:
            time.sleep(600 if number == wanted.hang_at else wanted.step_seconds)
        self.loss = math.nan if number == wanted.nan_at else 3.0 / number
        self.step, self.stepped_at = number, boottime()
        self.durations = [*self.durations[-19:], time.monotonic() - began]
        line = {"step": number, "loss": self.loss, "accepted": 1.5, "norm": 1.0, "rate": 1e-4}
        line.update(tokens_per_s=1000.0, wait=0.0, epoch=0, time=time.time())
        with despite_disk(), (self.record / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps(line) + "\n")
        with despite_disk():
            print(f"step {number:6,}/{wanted.steps:,}  loss {self.loss:.3f}", flush=True)
            if wanted.chatter:
                print("x" * (wanted.chatter - 1), flush=True)
        if math.isnan(self.loss):
            print(f"step {number}: loss is nan; resume from the last checkpoint", file=sys.stderr)
            return False
        if wanted.save_interval and number % wanted.save_interval == 0:
            self.checkpoint = save(self.output, number, wanted.save_seconds).name
        self.say("training")
        return True
