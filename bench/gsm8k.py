r"""From a file of prompts to a drafter that is measured, on one GPU and within minutes.

    python -m bench.gsm8k --target-model MODEL --prompts gsm8k_train_prompts.jsonl \
        --held-out gsm8k_test_prompts_128.jsonl --out DIR --minutes 8.5

It runs `python -m trainer` as a person would: prepare, prepare, train; then measures. Called again
with the same --out it goes on where the last call was out of time, until all is done; then it
prints the table, and the same as JSON in its last line.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

SPARE_S = 45
"""What an evaluation needs at least; a call with less left leaves it to the next."""


@dataclass
class Call:
    """This call: what it may use, and what it has run."""

    out: Path
    until: float
    """When it must be over, by time.monotonic()."""
    began: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        """Seconds that are left; below 0 when it is late."""
        return self.until - time.monotonic()

    def run(self, stage: str, words: list[str]) -> bool:
        """Run `python -m trainer WORDS`; False when time was up before it ended.

        Raises:
            SystemExit: it failed.
        """
        print(f"\n$ python -m trainer {shlex.join(words)}", flush=True)
        began = time.monotonic()
        process = subprocess.Popen([sys.executable, "-m", "trainer", *words])
        try:
            code = process.wait(timeout=max(1.0, self.left_s))
        except subprocess.TimeoutExpired:
            # It keeps what it has: answers as they come, or a checkpoint of this very step.
            process.send_signal(signal.SIGTERM)
            code = process.wait()
            self.note(stage, began, "out of time")
            return False
        if code:
            raise SystemExit(f"{stage}: exit {code}; see above")
        self.note(stage, began, "done")
        return True

    def note(self, stage: str, began: float, ending: str) -> None:
        """Keep how long a stage took in this call."""
        line = {"stage": stage, "seconds": round(time.monotonic() - began, 1), "ending": ending}
        with (self.out / "calls.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Keep how long the whole call took."""
        self.note("call", self.began, "over")


def main() -> int:
    """Go on until all is done or time is up; 0 when it is done, 3 when another call is needed."""
    chosen = _arguments()
    out = Path(chosen.out)
    out.mkdir(parents=True, exist_ok=True)
    call = Call(out, time.monotonic() + 60 * chosen.minutes)
    try:
        done = all(stage(call, chosen) for stage in (_target, _held_out, _data, _train, _evaluate))
    finally:
        call.close()
    if not done:
        print("\nout of time: the same command again goes on from here")
        return 3
    _report(out)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gsm8k", allow_abbrev=False)
    add = parser.add_argument
    add("--target-model", required=True, metavar="PATH", help="A folder, or a .gguf file.")
    add("--prompts", required=True, metavar="FILE", help="To train on.")
    add("--held-out", required=True, metavar="FILE", help="To measure on.")
    add("--out", required=True, metavar="DIR", help="All that is made goes here.")
    add("--minutes", type=float, default=8.5, help="Of this call (default 8.5).")
    add("--max-new-tokens", type=int, default=256, help="Of a completion (default 256).")
    add("--samples", type=int, default=5, help="Sampled completions a prompt, besides the greedy.")
    add("--temperature", type=float, default=0.6, help="Of the sampled completions.")
    add("--steps", type=int, default=6500, help="Of the training (default 6500).")
    add("--token-budget", type=int, default=16384, help="Of a step (default 16384).")
    add("--max-anchors", type=int, default=2048, help="Of a step (default 2048).")
    add("--block-size", type=int, default=16, help="Of the drafter (default 16).")
    add("--lr", type=float, default=1.2e-3, help="At its highest (default 0.0012).")
    add("--draft-layers", type=int, default=8, help="Of the drafter (default 8).")
    add("--loss", default="dpace", help="Weight of a block's slots (default dpace).")
    add("--save-interval", type=int, default=2500, help="Steps between two points of the curve.")
    add("--decoded", type=int, default=8, help="Prompts that are really decoded, too.")
    add("--train-flags", default="", help="More flags of `trainer train`, in one word.")
    return parser.parse_args()


def _model(chosen: argparse.Namespace) -> str:
    given = Path(chosen.target_model)
    return str(Path(chosen.out) / "target" if given.suffix == ".gguf" else given)


def _target(call: Call, chosen: argparse.Namespace) -> bool:
    model = _model(chosen)
    if model == chosen.target_model or (Path(model) / "config.json").exists():
        return True
    words = ["prepare", "--target-model", chosen.target_model, "--save-target", model]
    return call.run("save target", words)


def _held_out(call: Call, chosen: argparse.Namespace) -> bool:
    # In float32, in which a block and single tokens round alike: what is replayed is then what
    # decoding does.
    more = ["--dtype", "float32"]
    return _prepare(call, chosen, chosen.held_out, "held-out", more)


def _data(call: Call, chosen: argparse.Namespace) -> bool:
    more = ["--samples", str(chosen.samples), "--temperature", str(chosen.temperature)]
    return _prepare(call, chosen, chosen.prompts, "completions", more)


def _prepare(
    call: Call, chosen: argparse.Namespace, prompts: str, name: str, more: list[str]
) -> bool:
    if (call.out / name / "state.json").exists():
        return True
    words = ["prepare", "--target-model", _model(chosen), "--prompts", prompts]
    words += ["--out", str(call.out / name), "--max-new-tokens", str(chosen.max_new_tokens)]
    return call.left_s > 5 and call.run(f"prepare {name}", words + more)


def _train(call: Call, chosen: argparse.Namespace) -> bool:
    status = call.out / "run/status.json"
    if status.exists() and json.loads(status.read_text())["phase"] == "finished":
        return True
    words = ["train", "--target-model", _model(chosen), "--data-dir", str(call.out / "completions")]
    words += ["--output-dir", str(call.out / "run"), "--steps", str(chosen.steps)]
    words += ["--epochs", "10000", "--keep", "0", "--log-interval", "250"]
    # Rows of like length in one batch: a GPU runs the target on them in few kernels.
    words += ["--layout", "padded"]
    names = ("token_budget", "max_anchors", "block_size", "draft_layers", "loss", "lr")
    for name in (*names, "save_interval"):
        words += ["--" + name.replace("_", "-"), str(getattr(chosen, name))]
    return call.left_s > 30 and call.run("train", words + shlex.split(chosen.train_flags))


def _evaluate(call: Call, chosen: argparse.Namespace) -> bool:
    path = call.out / "measures.json"
    if path.exists():
        return True
    if call.left_s < SPARE_S:
        return False
    # Here, not at the top: the stages before need no torch in this process.
    from bench import gsm8k_measures  # noqa: PLC0415

    print("\nmeasuring", flush=True)
    began = time.monotonic()
    found = gsm8k_measures.measure(
        Path(_model(chosen)), call.out / "run", call.out / "held-out", decoded=chosen.decoded,
        max_new_tokens=chosen.max_new_tokens,
    )  # fmt: skip
    beside = path.with_suffix(".partial")
    beside.write_text(json.dumps(found, indent=1))
    beside.rename(path)
    call.note("evaluate", began, "done")
    return True


def _report(out: Path) -> None:
    found = json.loads((out / "measures.json").read_text())
    lines = [json.loads(line) for line in (out / "calls.jsonl").read_text().splitlines()]
    calls = [line["seconds"] for line in lines if line["stage"] == "call"]
    stages: dict[str, float] = {}
    for line in lines:
        stages[line["stage"]] = stages.get(line["stage"], 0.0) + line["seconds"]
    facts = json.loads((out / "completions/provenance.json").read_text())
    steps = [json.loads(line) for line in (out / "run/metrics.jsonl").read_text().splitlines()]
    speeds = sorted(step["tokens_per_s"] for step in steps)
    rows = [
        ("accepted before training", f"{found['untrained']:.2f}"),
        ("accepted after", f"{found['accepted']:.2f} of {found['block_size']}"),
        ("accepted after, context features zeroed", f"{found['zeroed']:.2f}"),
        ("after / zeroed", f"{found['accepted'] / found['zeroed']:.2f}"),
        (
            f"really decoded, {found['decoded']['prompts']} prompts",
            f"{found['decoded']['accepted']:.2f} (replayed: {found['decoded']['replayed']:.2f})",
        ),
        ("the same as plain decoding", f"{found['decoded']['same']} of these"),
        ("tokens/s plain", f"{found['decoded']['plain_tokens_per_s']:.1f}"),
        ("tokens/s speculative", f"{found['decoded']['tokens_per_s']:.1f}"),
        ("completions", f"{facts['rows']:,} of {facts['completion_tokens']:,} tokens"),
        ("training steps", f"{steps[-1]['step']:,}"),
        ("training tokens/s, median", f"{speeds[len(speeds) // 2]:,.0f}"),
        *((f"seconds of {name}", f"{seconds:,.0f}") for name, seconds in stages.items()),
        ("calls", ", ".join(f"{seconds:.0f} s" for seconds in calls)),
    ]
    print()
    for name, value in rows:
        print(f"{name:42} {value}")
    last = {
        **{name: found[name] for name in ("accepted", "zeroed", "untrained", "block_size")},
        "decoded": found["decoded"],
        "completions": facts["rows"],
        "completion_tokens": facts["completion_tokens"],
        "steps": steps[-1]["step"],
        "train_tokens_per_s": speeds[len(speeds) // 2],
        "stage_s": {name: round(seconds, 1) for name, seconds in stages.items()},
        "calls_s": calls,
        "machine": found["machine"],
    }
    print(json.dumps(last))


if __name__ == "__main__":
    sys.exit(main())
