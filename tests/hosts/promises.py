"""What must hold of a host at every moment, whatever happens to those who change it."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

EVERY_S = 0.02
LEASE_S = 900
"""The longest that a lease of a desk that died may last."""


class Watch:
    """Looks at a host from outside, again and again, and remembers what was wrong."""

    def __init__(self, home: Path) -> None:
        self.root, self.output = home / "fab", home / "out"
        self.wrong: list[str] = []
        self.looks = 0
        self._newest = 0
        self._pinned = False
        self._whole: set[str] = set()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        self._thread.join()

    def _watch(self):
        while not self._end.is_set():
            self._current()
            self._checkpoints()
            self.looks += 1
            time.sleep(EVERY_S)

    def _current(self):
        try:
            digest = (self.root / "current").readlink().name
        except FileNotFoundError:
            return
        if digest not in self._whole:
            found = differences(self.root / "releases" / digest)
            self.wrong += [f"current is {digest[:12]}: {each}" for each in found]
            self._whole.add(digest)

    def _checkpoints(self):
        # Names alone: each came by one rename, and what is deleted meanwhile is not opened.
        names = listed(self.output)
        aside = [self.output / name for name in names if name.startswith("aside-")]
        steps = [name for names in [names, *map(listed, aside)] for name in names]
        newest = max((int(name[5:]) for name in steps if name.startswith("step-")), default=0)
        if newest < self._newest:
            self.wrong.append(f"checkpoint {self._newest} is gone, the newest is {newest}")
        self._newest = max(newest, self._newest)
        # Twice: it is pinned anew first and unpinned afterwards, and the first look may miss that.
        pinned = is_pinned(self.output) or is_pinned(self.output)
        if self._pinned and not pinned:
            self.wrong.append("nothing is pinned any more")
        self._pinned = self._pinned or pinned

    def check(self, why):
        """Raise for all that was wrong so far, and for what is wrong now."""
        wrong = [*self.wrong, *torn(self.root, self.output)]
        assert not wrong, f"{why}: {wrong}"


def listed(folder: Path) -> list[str]:
    """Names in a folder; none where it is gone."""
    with suppress(FileNotFoundError):
        return os.listdir(folder)  # noqa: PTH208  # at once: iterdir reads on while names change
    return []


def is_pinned(output: Path) -> bool:
    return any((output / name / "PINNED").exists() for name in listed(output))


def differences(release: Path) -> list[str]:
    """What of a release is not as its manifest says."""
    manifest = release / "MANIFEST.json"
    if not manifest.is_file():
        return ["has no manifest"]
    files = json.loads(manifest.read_text())["files"]
    paths = {path.relative_to(release).as_posix() for path in release.rglob("*") if path.is_file()}
    extra = paths - {each["path"] for each in files} - {"MANIFEST.json"}
    wrong = [each["path"] for each in files if sha256_of(release / each["path"]) != each["sha256"]]
    return [*sorted(extra), *wrong]


def sha256_of(path: Path) -> str:
    with suppress(FileNotFoundError):
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return "missing"


def torn(root: Path, output: Path) -> list[str]:
    """Blobs that are not what their name says, checkpoints that are not whole, two at once."""
    wrong = [
        f"blob {path.name[:12]}"
        for path in (root / "blobs").glob("[0-9a-f]*")
        if sha256_of(path) != path.name
    ]
    wrong += [f"release {path.name[:12]}" for path in releases(root) if differences(path)]
    for path in output.glob("**/step-*/checkpoint.json"):
        with suppress(FileNotFoundError):  # the trainer keeps its newest two
            files = json.loads(path.read_text())["files"].items()
            if any(sha256_of(path.parent / name) not in {sha, "missing"} for name, sha in files):
                wrong.append(f"checkpoint {path.parent.name}")
    if (output / ".two").exists():
        wrong.append(f"two runs at once: {(output / '.two').read_text()} came to another one")
    return wrong


def releases(root: Path) -> list[Path]:
    return list((root / "releases").glob("[0-9a-f]*"))


def temporary(root: Path) -> list[str]:
    """Files that are nobody's."""
    return [str(path) for path in root.rglob(".tmp-*")]


def lease(root: Path) -> dict | None:
    """The lease as it lies there."""
    try:
        return json.loads((root / "lease/lease.json").read_text())
    except FileNotFoundError:
        return None


def free_in_time(root: Path) -> bool:
    """Whether nobody is kept out for longer than a lease lasts."""
    held = lease(root)
    left = 0.0 if held is None else held["until_boottime"] - boottime()
    return left <= LEASE_S


def let_lease_run_out(root: Path) -> None:
    """As if its time had passed."""
    held = lease(root)
    if held is not None:
        path = root / "lease/lease.json"
        path.write_text(json.dumps({**held, "until_boottime": boottime() - 1}))


def boottime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def in_order(machine, why):
    """What must hold after a success: one run, no lease, nobody's files gone."""
    root = machine.home / "fab"
    assert lease(root) is None, f"{why}: the lease is held by {lease(root)}"
    left = [*temporary(root), *temporary(machine.home / "out")]
    assert not left, f"{why}: {left}"
    trainers = {p.pid for p in machine.processes() if "trainer train" in p.words}
    assert len(trainers) == 1, f"{why}: {machine.processes()}"
