"""Two desks at once on one host: one of them changes it, and the other knows who that is."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections import Counter

import pytest

from tests.hosts.desk import Desk
from tests.hosts.promises import Watch, in_order

WAIT = ("--wait-lease", "60")


@pytest.fixture
def two(tmp_path, stub, machine):
    """The desks of alice and bob, whose trainers differ."""
    made = {}
    for name in ("alice", "bob"):
        folder = tmp_path / name
        folder.mkdir()
        shutil.copytree(stub, folder / "trainer")
        made[name] = Desk(folder, folder / "trainer", machine)
    return made


def start(desk, name, *words):
    given = desk.command("deploy", *words)
    given["env"] = {**given["env"], "USER": name, "GITHUB_ACTOR": ""}
    return subprocess.Popen(**given, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def edit(desk, name, seed):
    with (desk.folder / "trainer/loop.py").open("a") as loop:
        loop.write(f"\n# edit {seed} of {name}\n")


def test_of_two_deploys_one_wins_and_the_other_says_whose_lease_it_is_or_waits(
    two, machine, rounds, tell
):
    endings = Counter()
    with Watch(machine.home) as watch:
        for seed in range(rounds(3, 20)):
            chance = random.Random(seed)
            waits = seed % 4 == 2
            order = chance.sample(sorted(two), 2)
            running = {}
            for name in order:
                edit(two[name], name, seed)
            for name in order:
                running[name] = start(two[name], name, *(WAIT if waits else ()))
                time.sleep(chance.uniform(0, 0.05))  # not to wait for anything: it is the race
            said = {name: each.communicate(timeout=120) for name, each in running.items()}
            codes = {name: each.returncode for name, each in running.items()}
            why = f"seed {seed}: {codes} {said}"
            assert sorted(codes.values()) == ([0, 0] if waits else [0, 5]), why
            watch.check(why)
            in_order(machine, why)
            if not waits:
                (winner,) = [name for name in codes if codes[name] == 0]
                (loser,) = [name for name in codes if codes[name] == 5]
                told = "".join(said[loser])
                assert f"lease held: by {winner} on {os.uname().nodename} (fab deploy)" in told, why
                current = (machine.home / "fab/current/trainer/loop.py").read_text()
                assert f"# edit {seed} of {winner}\n" in current, why
                assert f"# edit {seed} of {loser}\n" not in current, why
            endings["waited its turn" if waits else "exit 5"] += 1
    tell(f"races of two desks: {sum(endings.values())}, the second one {dict(endings)}")
