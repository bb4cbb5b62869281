"""A long and lossy path, one that is down for a while, and one that swallows everything."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from tasks import release as releases
from tasks.fleet import carry_out
from tasks.link import Link
from tasks.link.exchange import SILENCE_SECONDS
from tasks.plans import DEPLOY
from tests.hosts.abroad import Abroad
from tests.hosts.ground import needs, until
from tests.hosts.machine import settings
from tests.hosts.promises import in_order

ROUND_TRIP_MS, LOSS = 80, 0.05
NUMBERS = itertools.count()


@pytest.fixture
def abroad(lab):
    needs("network")
    made = Abroad(lab, f"abroad-{next(NUMBERS)}", round_trip_ms=ROUND_TRIP_MS, loss=LOSS)
    yield made
    made.close()


@pytest.fixture
def deploy(abroad, stub, new_run, notes):
    """`deploy(**settings)`: begin the whole plan at the far desk; gives what waits for failures."""

    def go(**flags):
        run = new_run(release=releases.read_tree(stub))
        host = abroad.host(run=settings(**flags))

        def work():
            done = carry_out(
                DEPLOY,
                [host],
                run,
                links=lambda host: Link(host, notify=notes.append),
                on_outcome=lambda _: None,
            )
            return [str(each.error) for each in done if each.error]

        return abroad.at_the_desk(work)

    return go


def arriving(machine):
    """Bytes of the file that is on its way."""
    parts = (machine.home / "fab/blobs").glob(".tmp-*")
    return sum(path.stat().st_size for path in parts)


@pytest.mark.long
def test_a_deploy_over_a_long_and_lossy_path(abroad, deploy, stub, tell):
    began = time.monotonic()
    assert deploy()() == []
    first = time.monotonic() - began
    loop = stub / "loop.py"
    loop.write_text(f"{loop.read_text()}\n# changed\n")
    began = time.monotonic()
    assert deploy()() == []
    in_order(abroad.machine, "after a change")
    tell(
        f"deploy over {ROUND_TRIP_MS} ms and {LOSS:.0%} loss: first {first:.1f} s,"
        f" one file changed {time.monotonic() - began:.1f} s"
    )


@pytest.mark.parametrize(
    ("seconds", "size"), [(2, 1 << 19), pytest.param(10, 4 << 20, marks=pytest.mark.long)]
)
def test_a_link_that_is_down_in_the_middle_of_an_upload(  # noqa: PLR0917  # fixtures
    abroad, deploy, stub, notes, tell, seconds, size
):
    (stub / "table.bin").write_bytes(random.Random(0).randbytes(size))
    ended = deploy()
    until(lambda: arriving(abroad.machine) > size // 8, 60, what="the upload")
    abroad.link(up=False)
    time.sleep(seconds)  # how long it is down is what is tested
    abroad.link(up=True)
    began = time.monotonic()
    assert ended() == []
    in_order(abroad.machine, "after the outage")
    again = len([note for note in notes if "sync asked again" in note])
    tell(
        f"link down for {seconds} s in an upload: done {time.monotonic() - began:.1f} s after it"
        f" was back, sync repeated {again} times"
    )


@pytest.mark.long
def test_a_path_that_swallows_everything_is_noticed_in_time(abroad, deploy, notes, tell):
    ended = deploy(hang_before_first_step=True)
    until(lambda: any(abroad.machine.home.glob("fab/runs/2*/status.json")), 60, what="the run")
    until(abroad.machine.verbs, 30, what="the wait for its first step")
    time.sleep(1)  # the verb is in the middle of its work, whatever that is
    abroad.link(up=False)
    began = time.monotonic()
    told = until(lambda: [n for n in notes if "lost" in n], 60, what="the notice")
    noticed = time.monotonic() - began
    assert ended() != []
    tell(f"black hole noticed after {noticed:.1f} s: {told[0]}")
    assert noticed <= SILENCE_SECONDS + 1
