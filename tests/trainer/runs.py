"""What a run left in its output folder."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file


def state(out):
    """All tensors of the newest checkpoint."""
    newest = max(out.glob("step-*"))
    held = load_file(newest / "drafter.safetensors") | load_file(newest / "optimizer.safetensors")
    # Copies: what was loaded is mapped, and a test may damage the file.
    return {name: tensor.clone() for name, tensor in held.items()}


def same(one, other):
    """Equal to the bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def status(out):
    return json.loads((out / "status.json").read_text())


def phase(out):
    return status(out)["phase"] if (out / "status.json").exists() else None


def measures(out):
    file = out / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def steps_seen(out):
    return [each["step"] for each in measures(out)]
