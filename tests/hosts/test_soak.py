"""Many cycles leave no more than few do."""

from __future__ import annotations

from tasks.agent.pruning import KEPT
from tests.hosts.soak import Soak

NEEDED = 3
"""Runs and releases beyond the newest: of the pinned checkpoint, and to go back to."""
BLOBS_A_RELEASE = 6


def test_many_cycles_of_deploy_restart_and_kill_leave_nothing_that_grows(
    machine, stub, rounds, tell
):
    cycles = rounds(5, 200)
    soak = Soak(machine, stub)
    for _ in range(3):  # what is made once, by the first ones
        soak.cycle()
    few = soak.counts()
    for _ in range(cycles - 3):
        soak.cycle()
    many = soak.counts()
    tell(f"soak: {cycles} cycles; {many}")
    bounded = {"runs": KEPT + NEEDED, "releases": KEPT + NEEDED, "blobs": KEPT + BLOBS_A_RELEASE}
    grown = {name: (few[name], many[name]) for name in few if many[name] > few[name]}
    too_many = {name: pair for name, pair in grown.items() if pair[1] > bounded.get(name, 0)}
    assert not too_many
    assert (many["processes on the host"], many["zombies on the host"]) == (0, 0)
    assert many["temporary files"] == 0
