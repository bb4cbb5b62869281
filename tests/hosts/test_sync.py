"""Files on their way: large ones, and a path or a program that ends in the middle of them."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
import signal
import threading

import pytest

from tasks import errors
from tasks import release as releases
from tasks.operations import new_lease, sync, take_lease, verify
from tests.hosts.ground import until
from tests.hosts.relay import Relay

SIZE = 12 << 20
"""More than the windows of SSH and the buffers of a loopback socket hold."""


@pytest.fixture
def large(stub, new_run):
    """A run whose release has one large file that no compression makes small."""
    (stub / "table.bin").write_bytes(random.Random(0).randbytes(SIZE))
    return new_run(release=releases.read_tree(stub), lease=new_lease())


def whole(machine, run):
    top = machine.home / "fab/releases" / run.release.digest
    return all(
        hashlib.sha256((top / file.path).read_bytes()).hexdigest() == file.sha256
        for file in run.release.files
    )


def test_a_large_file_arrives_whole(machine, door, large):
    host = machine.host()
    link = door(host)
    take_lease(host, large, link)
    effect = sync(host, large, link)
    assert effect.facts["sent_bytes"] > SIZE
    assert whole(machine, large)
    assert verify(host, large, link).detail.startswith("deployed, not running")


def test_a_path_cut_in_the_middle_leaves_nothing_torn_and_the_rest_is_sent(
    machine, door, large, notes
):
    with Relay(machine.port) as relay:
        host = machine.host(port=relay.port, host_key=machine.host_key)
        link = door(host)
        take_lease(host, large, link)
        at = relay.sent

        def cut():
            until(lambda: relay.sent > at + SIZE // 2)
            relay.cut()

        cutter = threading.Thread(target=cut)
        cutter.start()
        effect = sync(host, large, link)
        cutter.join()
    assert effect.changed
    assert [note for note in notes if "sync asked again" in note]
    assert whole(machine, large)
    top = machine.home / "fab"
    assert [path.name for path in (top / "releases").iterdir()] == [large.release.digest]


def test_a_program_killed_in_the_middle_is_told_and_a_repetition_ends_the_work(
    machine, door, large
):
    with Relay(machine.port) as relay:
        host = machine.host(port=relay.port, host_key=machine.host_key)
        link = door(host)
        take_lease(host, large, link)
        at = relay.sent

        def kill():
            until(lambda: relay.sent > at + SIZE // 4)
            relay.stalled = True
            os.kill(machine.verbs()[0].pid, signal.SIGKILL)
            relay.stalled = False

        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(errors.RemoteKilled, match="sync: by SIGKILL"):
            sync(host, large, link)
        killer.join()
        assert not (machine.home / "fab/releases" / large.release.digest).exists()
        assert sync(host, large, link).changed
        assert not sync(host, dataclasses.replace(large), link).changed
    assert whole(machine, large)
