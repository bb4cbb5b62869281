"""status.json: where a run is, for whoever watches it from outside. Standard library only."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import statistics
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
PACKAGE = Path(__file__).resolve().parents[1]
_RECENT = 101  # steps the median is taken over; odd, so that it is one of them


def boottime() -> float:
    """Seconds since this machine booted, sleep included: no clock setting moves it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@contextlib.contextmanager
def despite_disk() -> Iterator[None]:
    """Go on where a disk takes nothing: days of training do not end for want of a line about them.

    Checkpoints are not written so: a run that cannot save must say it.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise


def write_whole(path: Path, text: str) -> None:
    """Replace a file by one rename, so that a reader sees the old text or the new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step came to; the same names stand in the log, status.json and metrics.jsonl."""

    step: int
    """Steps done, this one included."""
    steps: int
    """Of the whole run."""
    epoch: int
    loss: float
    """Nats a token, weighted, over all pairs."""
    accepted: float
    """Mean tokens a block would have given: its right ones up to the first wrong one, and one."""
    norm: float
    """L2 norm of all gradients, before clipping."""
    rate: float
    """Learning rate."""
    tokens_per_s: float
    """Of one pair."""
    wait: float
    """Share of the step spent waiting for a batch."""
    seconds: float
    stages: Mapping[str, float] = field(default_factory=dict)
    """Of each stage of the pipeline, `busy_NAME` and `wait_NAME`: shares of the step's seconds."""
    memory_gb: float = 0.0
    """Most that was ever in use: of the fullest GPU, or of this process on a CPU."""


@dataclass(frozen=True, kw_only=True)
class Trialled:
    """How a drafter did on completions that it does not train on."""

    samples: int
    accepted: float
    """Mean over the samples of the mean tokens a block gave, the target's own included."""
    lengths: tuple[int, ...]
    """How many blocks gave 1, 2, ... tokens."""
    seconds: float

    @property
    def first(self) -> float:
        """Share of the blocks whose first drafted token was right."""
        return 1.0 - self.lengths[0] / max(1, sum(self.lengths))


class Status:
    """Writes status.json; other ranks than the first hold one that writes nothing."""

    def __init__(
        self,
        folder: Path | None,
        *,
        clock: Callable[[], float] = boottime,
        release: str | None = None,
    ) -> None:
        """Take `folder` as the place of status.json; None: write nothing."""
        self._path = folder / "status.json" if folder else None
        self._clock = clock
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._facts: dict[str, Any] = {
            "run_id": os.environ.get("TRAINER_RUN_ID"),
            "release": release,
            "pid": os.getpid(),
            "phase": "starting",
            "step": 0,
            "steps": None,
            "loss": None,
            "accepted": None,
            "tokens_per_s": None,
            "step_boottime": None,
            "median_step_s": None,
            "boottime": None,
            "checkpoint": None,
        }

    def phase(self, phase: str, **facts: Any) -> None:
        """Enter a phase: starting, loading, training, saving, stopped or finished."""
        self._facts.update(facts, phase=phase)
        self._write()

    def note(self, **facts: Any) -> None:
        """Know something more; the phase stays."""
        self._facts.update(facts)
        self._write()

    def step(self, done: Step) -> None:
        """One step more is done."""
        self._recent.append(done.seconds)
        self._facts.update(
            phase="training",
            step=done.step,
            steps=done.steps,
            loss=done.loss,
            accepted=done.accepted,
            tokens_per_s=round(done.tokens_per_s, 1),
            step_boottime=self._clock(),
            median_step_s=statistics.median(self._recent),
        )
        self._write()

    def _write(self) -> None:
        if self._path is not None:
            self._facts["boottime"] = self._clock()
            with despite_disk():
                write_whole(self._path, json.dumps(self._facts) + "\n")


def folder_of(output_dir: str | Path, environment: Mapping[str, str] = os.environ) -> Path:
    """Where status.json and metrics.jsonl go: the run's own folder if it has one."""
    return Path(environment.get("TRAINER_RUN_DIR") or output_dir)


def release_digest(package: Path = PACKAGE) -> str | None:
    """The release this process runs, or None where it is none (a checkout, an edited file).

    Computed from the files that were imported, not believed from a name: each must be, byte for
    byte, what the manifest beside the package says.
    """
    manifest = package.parent / "MANIFEST.json"
    if not manifest.is_file():
        return None
    files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
    known = {entry["path"]: entry["sha256"] for entry in files}
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file is None or not Path(file).resolve().is_relative_to(package):
            continue
        path = Path(file).resolve()
        name = path.relative_to(package.parent).as_posix()
        if known.get(name) != hashlib.sha256(path.read_bytes()).hexdigest():
            return None
    lines = sorted((entry["path"], entry["mode"], entry["sha256"]) for entry in files)
    text = "".join(f"{mode} {sha256} {path}\n" for path, mode, sha256 in lines)
    return hashlib.sha256(text.encode()).hexdigest()
