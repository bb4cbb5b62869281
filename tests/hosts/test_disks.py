"""Disks full, read-only or out of inodes: a clear line, nothing half there, no run lost."""

from __future__ import annotations

import dataclasses
import os
import random
from pathlib import Path

import pytest

from tasks import release as releases
from tasks.fleet import carry_out
from tasks.link import Link
from tasks.operations import probe, sync
from tasks.operations.words import changes
from tasks.plans import DEPLOY
from tests.hosts.machine import settings

LARGE = 6 << 20
"""Of one file that is sent."""
PIECE = 1 << 18


class Disk:
    """A small disk under the root of a host that trains there."""

    def __init__(self, machine, size):
        self.machine, self.size = machine, size
        self.root = f"{machine.home}/fab"
        self.do(f"mkdir '{self.root}' && mount -t tmpfs -o {size} tmpfs '{self.root}'")
        # The host's own view: its mounts are not ours.
        self.seen = Path(f"/proc/{machine.first()}/root{self.root}")

    def do(self, words):
        return self.machine.inside(["sh", "-c", words])

    def fill(self, left=0):
        """Take all of it but `left` bytes."""
        disk = os.statvfs(self.seen)
        take = f"head -c {disk.f_bavail * disk.f_frsize - left}" if left else "cat"
        self.do(f"{take} /dev/zero > '{self.root}/zeros'")

    def empty(self):
        self.do(f"rm '{self.root}/zeros'")

    def close(self):
        self.machine.inside(["umount", "-l", self.root])

    def trees(self):
        """What of releases and blobs stands there under a final name, and what does not."""
        found = [*self.seen.glob("releases/*"), *self.seen.glob("blobs/*")]
        names = {path.name for path in found}
        return names, {name for name in names if name.startswith(".tmp-")}


@pytest.fixture
def disk(contained):
    made = []

    def make(size):
        made.append(Disk(contained, size))
        return made[-1]

    yield make
    for each in made:
        for process in contained.processes():
            contained.inside(["kill", "-9", str(process.pid)])
        each.close()


@pytest.fixture
def work(contained, stub, new_run):
    """`work(plan)`: do it with a tree of the stub; gives what failed, and how the run is."""
    host = contained.host(run=settings())

    def go(plan=DEPLOY, **harm):
        run = new_run(release=releases.read_tree(stub), **harm)
        done = carry_out(
            plan,
            [host],
            run,
            links=lambda host: Link(host, notify=lambda _: None),
            on_outcome=lambda _: None,
        )
        return [(each.operation, str(each.error)) for each in done if each.error]

    return go


def edit(stub, size=0, files=0):
    loop = stub / "loop.py"
    loop.write_text(f"{loop.read_text()}\n# edit\n")
    if size:
        (stub / "table.bin").write_bytes(random.Random(size).randbytes(size))
    for number in range(files):
        (stub / f"small{number}.txt").write_text(f"{number}\n")


def trains(machine):
    """Give the pid of the one trainer that lives there."""
    (pid,) = [p.pid for p in machine.processes() if "trainer train" in p.words]
    return pid


def test_a_full_disk_before_a_sync_stops_it_and_nothing_else(contained, disk, work, stub):
    space = disk("size=40m")
    assert work() == []
    pid, before = trains(contained), space.trees()
    edit(stub)
    space.fill()
    ((operation, text),) = work()
    assert operation == "sync"
    assert f"{space.root}: disk full, 0 MiB free" in text
    assert text.endswith("free some, then repeat")
    assert (trains(contained), space.trees()) == (pid, before)
    space.empty()
    assert work() == []
    assert trains(contained) != pid


@pytest.mark.parametrize(
    "when", [pytest.param("in the middle", marks=pytest.mark.long), "at the very end"]
)
def test_a_disk_that_fills_up_during_a_sync(contained, disk, work, stub, when):
    space = disk("size=64m")
    assert work() == []
    pid, before = trains(contained), space.trees()
    edit(stub, LARGE)

    @changes
    def interrupted_sync(host, run, link):
        # At the very end: the content itself still fits, and its copy in the release does not.
        left = 0 if when == "in the middle" else LARGE + (1 << 20)
        return sync(
            host, dataclasses.replace(run, release=_Filling(run.release, space, left)), link
        )

    failed = work((probe, interrupted_sync, *DEPLOY[2:]))
    assert [operation for operation, _ in failed] == ["interrupted_sync"]
    assert "disk full, 0 MiB free; free some" in failed[0][1]
    assert trains(contained) == pid
    now, torn = space.trees()
    assert torn == set()
    assert not [name for name in now - before[0] if (space.seen / "releases" / name).exists()]
    space.empty()
    assert work() == []
    assert trains(contained) != pid


class _Filling:
    """A release on its way to a disk that fills up as soon as its large file begins to arrive."""

    def __init__(self, release, space, left):
        self.digest, self.manifest = release.digest, release.manifest
        self._release, self._space, self._left = release, space, left

    def stream(self, wanted):
        sent = 0
        for part in self._release.stream(wanted):
            for at in range(0, len(part), PIECE):
                yield part[at : at + PIECE]
                sent += PIECE
                if sent > LARGE // 4 and self._space:
                    self._space.fill(self._left)
                    self._space = None


@pytest.mark.long
def test_a_root_that_became_read_only_is_named_and_the_run_goes_on(contained, disk, work, stub):
    space = disk("size=64m")
    assert work() == []
    pid = trains(contained)
    edit(stub)
    # As a broken disk does: open files stay writable, nothing new is opened. Bound beneath the
    # desk alone, since a busy file system cannot be remounted.
    space.do(f"mount --bind '{space.root}' '{space.root}'")
    space.do(f"mount -o remount,bind,ro '{space.root}'")
    ((operation, text),) = work()
    assert operation in {"probe", "sync"}
    assert "Read-only file system" in text
    assert "put that right on the host, then repeat" in text
    contained.inside(["umount", "-l", space.root])
    assert trains(contained) == pid
    assert work() == []


def test_no_inodes_are_told_before_anything_is_sent(contained, disk, work, stub):
    space = disk("size=64m,nr_inodes=120")
    assert work() == []
    pid, before = trains(contained), space.trees()
    edit(stub, files=60)
    ((operation, text),) = work()
    assert operation == "sync"
    assert "no inodes left" in text
    assert (trains(contained), space.trees()) == (pid, before)


@pytest.mark.long
def test_inodes_that_run_out_meanwhile_are_told_as_that(contained, disk, work, stub):
    """A quota on files looks like this too: space is free, and nothing new can be made."""
    space = disk("size=64m,nr_inodes=400")
    assert work() == []
    pid = trains(contained)
    edit(stub)
    space.do(f"cd '{space.root}' && mkdir many && cd many && seq 400 | xargs -n 50 touch")
    ((operation, text),) = work()
    assert operation in {"probe", "sync"}
    assert "inodes" in text
    assert trains(contained) == pid
    space.do(f"rm -r '{space.root}/many'")
    assert work() == []
