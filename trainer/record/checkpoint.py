"""Checkpoints: folders that are complete because they were renamed into place.

`step-00000012/` holds safetensors files and checkpoint.json, which names the sha256 of each.
It is written beside, flushed to the disk, then renamed: whatever ends the process, a folder of
that name is whole. What a disk did to it later the hashes tell.

checkpoint.json also says which FORMAT it is in. A trainer reads its own and every one before it;
tests load a stored checkpoint of each.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import safetensors
import safetensors.torch

from trainer.errors import InputError, TrainerError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

Tensors = Mapping[str, "Tensor"]

FORMAT = 1
"""Raised when an older trainer could no longer read what is written; the first had no number."""

PINNED = "PINNED"
"""A file of this name in a checkpoint keeps it from being deleted."""

_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint on disk that was found whole."""

    path: Path
    step: int
    facts: dict[str, Any]
    """checkpoint.json."""

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of one of its files, on the CPU."""
        loaded: dict[str, Tensor] = safetensors.torch.load_file(self.path / f"{name}.safetensors")
        return loaded


def save(
    output_dir: Path,
    step: int,
    files: Mapping[str, Tensors],
    facts: Mapping[str, Any],
    *,
    keep: int,
) -> Path:
    """Write a checkpoint and remove old ones.

    Args:
        output_dir: where the checkpoints are.
        step: steps done.
        files: for each file, by its name without ending, its tensors.
        facts: what else a resume needs, as JSON values.
        keep: how many of the newest stay; 0: all. Pinned ones stay and are not counted.

    Returns:
        Its folder. If a whole checkpoint of this step is there already, that one is kept.

    Raises:
        TrainerError: the disk is full, or refuses.
    """
    path = output_dir / f"step-{step:08}"
    if path.exists() and not damage(path):
        return path
    beside = output_dir / f".{path.name}.partial"
    try:
        _write(beside, step, files, facts)
    except (OSError, safetensors.SafetensorError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise TrainerError(
            f"{path}: cannot be written: {error}; the checkpoint before it is whole"
        ) from error
    if path.exists():  # damaged, or it would have been kept
        shutil.rmtree(path.rename(_aside(path)))
    beside.rename(path)
    _flush(output_dir)
    _prune(output_dir, keep)
    return path


def _write(beside: Path, step: int, files: Mapping[str, Tensors], facts: Mapping[str, Any]) -> None:
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    hashes = {}
    for name, tensors in files.items():
        file = beside / f"{name}.safetensors"
        safetensors.torch.save_file({key: _whole(value) for key, value in tensors.items()}, file)
        _flush(file)
        hashes[file.name] = _sha256(file)
    told = beside / "checkpoint.json"
    text = json.dumps({"format": FORMAT, "step": step, "files": hashes, **facts}, indent=1)
    told.write_text(text + "\n", encoding="utf-8")
    _flush(told)
    _flush(beside)


def _whole(tensor: Tensor) -> Tensor:
    # Parameters are views into one buffer, which safetensors refuses to write.
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def newest(output_dir: Path, *, say: Callable[[str], None]) -> Checkpoint | None:
    """The newest whole checkpoint, or None where there is none at all.

    Args:
        output_dir: where the checkpoints are.
        say: told about each damaged one that was passed over.

    Raises:
        InputError: there are checkpoints, and every one is damaged; or one is of a newer trainer.
    """
    found = checkpoints(output_dir)
    for path in reversed(found):
        why = damage(path)
        if not why:
            return read(path)
        say(f"{path}: {why}; trying the checkpoint before it")
    if found:
        raise InputError(
            f"{output_dir}: every checkpoint is damaged; move them away to start anew, or give"
            " another --output-dir"
        )
    return None


def read(path: Path) -> Checkpoint:
    """A checkpoint that is known to be whole."""
    facts = json.loads((path / "checkpoint.json").read_text(encoding="utf-8"))
    return Checkpoint(path=path, step=facts["step"], facts=facts)


def checkpoints(output_dir: Path) -> list[Path]:
    """Folders of checkpoints, oldest first."""
    found = output_dir.glob("step-*") if output_dir.is_dir() else ()
    return sorted(
        (path for path in found if path.is_dir() and _NAME.fullmatch(path.name)),
        key=lambda path: int(path.name.partition("-")[2]),
    )


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, in words; None when it is whole.

    Raises:
        InputError: it is of a newer trainer, so that this one cannot tell.
    """
    try:
        facts = json.loads((path / "checkpoint.json").read_text(encoding="utf-8"))
        format_ = int(facts.get("format", 1))
        if format_ <= FORMAT:
            files = dict(facts["files"])
            int(facts["step"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its checkpoint.json is damaged ({error})"
    if format_ > FORMAT:
        # Not damage, which is passed over: training would go on from an older one unasked.
        raise InputError(
            f"{path}: is of format {format_}, and this trainer reads up to {FORMAT}; use the"
            " trainer that wrote it, or give another --output-dir"
        )
    for name, sha256 in files.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        if _sha256(path / name) != sha256:
            return f"{name} is damaged (its sha256 differs)"
    return None


def _prune(output_dir: Path, keep: int) -> None:
    # What a process left half written or half deleted when it was killed.
    for left in [*output_dir.glob(".step-*.partial"), *output_dir.glob(".step-*.old")]:
        shutil.rmtree(left, ignore_errors=True)
    loose = [path for path in checkpoints(output_dir) if not (path / PINNED).exists()]
    for path in loose[:-keep] if keep else []:
        # Renamed first: a folder of a checkpoint's name is never half deleted.
        shutil.rmtree(path.rename(_aside(path)))


def _aside(path: Path) -> Path:
    aside = path.with_name(f".{path.name}.old")
    shutil.rmtree(aside, ignore_errors=True)
    return aside


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
