"""What a drafter is worth on held-out prompts: replayed for all, really decoded for some.

The data set holds the target's own greedy completions, so a few masked forwards find the accepted
lengths of every block (`speculate.replay`). Real decoding of a few prompts, in float32, stands
beside it: it must reach the same lengths and emit exactly what the target alone does.
"""

from __future__ import annotations

import json
import platform
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import torch

from trainer.build.trained import load
from trainer.model.drafter import Drafter
from trainer.model.target import Target
from trainer.speculate import Generation, generate, generate_plain, replay

if TYPE_CHECKING:
    from pathlib import Path

Pairs = list[tuple[list[int], list[int]]]


def measure(
    target_model: Path, run: Path, held_out: Path, *, decoded: int, max_new_tokens: int
) -> dict[str, Any]:
    """Measure every checkpoint of a run, and the last one closely.

    Args:
        target_model: the target's folder.
        run: the output folder of the training.
        held_out: data set of greedy completions.
        decoded: how many of its prompts are really decoded.
        max_new_tokens: of those completions.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    checkpoints = sorted(run.glob("step-*"))
    _, last = load(checkpoints[-1], print)
    target = Target.load(target_model, taps=last.config.tap_ids, device=device, dtype=torch.float32)
    last.to(device)
    pairs = completions(held_out)
    curve = []
    for path in checkpoints:
        _, drafter = load(path, print)
        accepted = mean(replayed(target, drafter.to(device), pairs))
        curve.append({"step": int(path.name.removeprefix("step-")), "accepted": accepted})
        print(f"step {curve[-1]['step']:>7,}  accepted {accepted:.3f}", flush=True)
    untrained = Drafter(last.config)
    untrained.initialise_(0)
    found = replayed(target, last, pairs)
    zeroed = replayed(target, last, pairs, zero_features=True)
    return {
        "machine": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "block_size": last.config.block_size,
        "prompts": len(pairs),
        "untrained": mean(replayed(target, untrained.to(device), pairs)),
        "accepted": mean(found),
        "zeroed": mean(zeroed),
        "histogram": _histogram(found),
        "histogram_zeroed": _histogram(zeroed),
        "curve": curve,
        "decoded": _decoded(target, last, pairs[:decoded], max_new_tokens),
        "training": _thinned(run / "metrics.jsonl"),
    }


def completions(folder: Path) -> Pairs:
    """Prompt and completion of each row of a data set."""
    found = []
    for path in sorted(folder.glob("*.arrow")):
        with pa.memory_map(str(path)) as file:
            for row in pa.ipc.open_stream(file).read_all().to_pylist():
                length = row["loss_mask"].index(1)
                found.append((row["input_ids"][:length], row["input_ids"][length:]))
    return found


def replayed(
    target: Target, drafter: Drafter, pairs: Pairs, *, zero_features: bool = False
) -> list[Generation]:
    """Each completion as decoding would have gone."""
    return [
        replay(target, drafter, prompt, completion, zero_features=zero_features)
        for prompt, completion in pairs
    ]


def mean(found: list[Generation]) -> float:
    """Mean accepted length: the mean over samples of each one's mean, bonus token included."""
    means = [each.mean_length for each in found if each.lengths]
    return sum(means) / max(1, len(means))


def _histogram(found: list[Generation]) -> dict[int, int]:
    return dict(sorted(Counter(length for each in found for length in each.lengths).items()))


def _decoded(target: Target, drafter: Drafter, pairs: Pairs, max_new_tokens: int) -> dict[str, Any]:
    generate(target, drafter, pairs[0][0], max_new_tokens=8)  # starts libraries
    real, plain, seconds = [], [], [0.0, 0.0]
    for prompt, _ in pairs:
        began = time.perf_counter()
        real.append(generate(target, drafter, prompt, max_new_tokens=max_new_tokens))
        between = time.perf_counter()
        plain.append(generate_plain(target, prompt, max_new_tokens=max_new_tokens))
        seconds[0] += between - began
        seconds[1] += time.perf_counter() - between
    again = [
        replay(target, drafter, prompt, tokens)
        for (prompt, _), tokens in zip(pairs, plain, strict=True)
    ]
    tokens = sum(len(each.tokens) for each in real)
    return {
        "prompts": len(pairs),
        "same": sum(each.tokens == alone for each, alone in zip(real, plain, strict=True)),
        "accepted": mean(real),
        "replayed": mean(again),
        "tokens": tokens,
        "tokens_per_s": tokens / seconds[0],
        "plain_tokens_per_s": sum(map(len, plain)) / seconds[1],
    }


def _thinned(path: Path, most: int = 400) -> list[dict[str, float]]:
    """The course of a training as at most `most` means of neighbouring steps."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    width = -(-len(lines) // most)
    return [
        {
            "step": part[-1]["step"],
            **{
                name: sum(line[name] for line in part) / len(part)
                for name in ("loss", "accepted", "tokens_per_s")
            },
        }
        for part in (lines[at : at + width] for at in range(0, len(lines), width))
    ]
