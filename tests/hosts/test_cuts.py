"""A deploy cut anywhere: what must hold holds at every moment, and the next one succeeds."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import time
from collections import Counter

import pytest
import yaml

from tasks import errors
from tasks import release as releases
from tasks.fleet import carry_out
from tasks.link import Link, asking, dial, exchange
from tasks.plans import BACK, DEPLOY
from tests.hosts.desk import Desk
from tests.hosts.ground import until
from tests.hosts.harm import Path, draw
from tests.hosts.machine import settings
from tests.hosts.promises import Watch, free_in_time, in_order, let_lease_run_out

TABLE_BYTES = 300_000
"""Uploaded at each change, so that many of the moments lie inside of an upload."""
SILENCE_S, LOGIN_S = 4.0, 3.0
"""Instead of 15 and 10: the host still says something each 2 s, and a login takes 0.2 s."""
EXPECTED = (errors.ResultLost, errors.Unreachable)
STEPS = {"step_seconds": 0.01, "save_interval": 7}


@pytest.fixture
def change(stub):
    """`change(seed)`: an edit of one line, and a new table that nothing compresses."""
    loop = stub / "loop.py"
    text = loop.read_text()

    def edit(seed):
        loop.write_text(f"{text}\n# edit {seed}\n")
        (stub / "table.bin").write_bytes(random.Random(seed).randbytes(TABLE_BYTES))

    return edit


@pytest.fixture
def messages(monkeypatch):
    """Count the messages of questions and answers at `messages.path`."""
    start, result = exchange.Exchange._start, exchange.Exchange._next

    class Here:
        path: Path | None = None

    def counted(method):
        def call(self, *given):
            if method is start:
                Here.path.message()
                return start(self)
            frame = result(self, *given)
            Here.path.message()
            return frame

        return call

    monkeypatch.setattr(exchange.Exchange, "_start", counted(start))
    monkeypatch.setattr(exchange.Exchange, "_next", counted(result))
    monkeypatch.setattr(exchange, "SILENCE_SECONDS", SILENCE_S)
    monkeypatch.setattr(exchange, "CHANNEL_SECONDS", LOGIN_S)
    for module in (asking, dial):
        monkeypatch.setattr(module, "CONNECT_SECONDS", LOGIN_S)
    return Here


@pytest.fixture
def deploy(machine, messages):
    """`deploy(path, run)`: the plan, from this process; gives what failed."""

    def go(path, run):
        messages.path = path
        host = machine.host(
            port=path.port, host_key=machine.host_key, run=settings(**STEPS), name="gpu1"
        )
        done = carry_out(
            DEPLOY,
            [host],
            run,
            links=lambda host: Link(host, notify=lambda _: None, sleep=lambda _: time.sleep(0.02)),
            on_outcome=lambda _: None,
            fallback=BACK,
        )
        return [each for each in done if each.error]

    return go


def test_after_a_cut_anywhere_the_next_deploy_succeeds(  # noqa: PLR0917  # fixtures
    machine, change, new_run, stub, deploy, rounds, tell
):
    def next_run(seed, chance):
        change(seed)
        release = releases.read_tree(stub)
        return dataclasses.replace(new_run(), release=release, fresh=chance.random() < 0.3)

    endings = Counter()
    with Watch(machine.home) as watch:
        with Path(machine) as path:
            assert deploy(path, new_run()) == []
            before = dict(path.passed)
            assert deploy(path, next_run(0, random.Random(0))) == []
            whole = {name: path.passed[name] - before[name] for name in before}
        # These four are of four kinds; silence alone takes its time.
        for seed in rounds(range(6, 10), range(1, 151)):
            chance = random.Random(-seed)
            harm = draw(
                seed,
                bytes_up=whole["up"],
                bytes_down=whole["down"],
                messages=whole["message"],
                desk=False,
            )
            with Path(machine, harm) as path:
                run = next_run(seed, chance)
                first = deploy(path, run)
                for each in first:
                    assert isinstance(each.error, EXPECTED), f"{harm}: {each.error!r}"
                    assert "a bug in our program" not in str(each.error), f"{harm}: {each.error}"
                endings[type(first[0].error).__name__ if first else "went on by itself"] += 1
                watch.check(harm)
                assert free_in_time(machine.home / "fab"), str(harm)
                # A desk whose farewell got lost waits for its own lease, or begins with that.
                let_lease_run_out(machine.home / "fab")
                again = run if chance.random() < 0.5 else next_run(seed, chance)
                second = deploy(path, again)
                assert second == [], f"{harm}: then {[str(each.error) for each in second]}"
                watch.check(harm)
                in_order(machine, harm)
            until(lambda: not machine.verbs(), 30, what=f"{harm}: end of all verbs")
    tell(f"cuts of a deploy: {sum(endings.values())}, {dict(endings)}, {watch.looks} looks")


def test_after_a_killed_desk_the_next_deploy_succeeds(  # noqa: PLR0917  # fixtures
    tmp_path, machine, change, stub, rounds, tell
):
    desk = Desk(tmp_path, stub, machine)

    def through(path):
        desk.hosts = {"gpu1": desk.host(port=path.port, host_key=machine.host_key)}
        desk.write(**STEPS)
        text = yaml.safe_load((desk.folder / "hosts.yaml").read_text())
        assert text["hosts"]["gpu1"]["port"] == path.port

    def deploy_and_die(path):
        with subprocess.Popen(
            **desk.command("deploy"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as running:
            path.desk = running.pid
            return running.wait(90)

    exits = Counter()
    with Watch(machine.home) as watch:
        with Path(machine) as path:
            through(path)
            desk.fab("deploy")
            change(0)
            before = dict(path.passed)
            desk.fab("deploy")
            whole = {name: path.passed[name] - before[name] for name in before}
        for seed in range(1001, 1001 + rounds(2, 50)):
            harm = draw(seed, bytes_up=whole["up"], bytes_down=whole["down"], messages=1, desk=True)
            change(seed)
            with Path(machine, harm) as path:
                through(path)
                code = deploy_and_die(path)
                assert code in {-9, 0}, f"{harm}: exit {code}"
                exits[code] += 1
                # What it had asked for is done, or stops: only then the host is as it stays.
                until(lambda: not machine.verbs(), 30, what=f"{harm}: end of all verbs")
                watch.check(harm)
                assert free_in_time(machine.home / "fab"), str(harm)
                let_lease_run_out(machine.home / "fab")
                desk.fab("deploy")
                watch.check(harm)
                in_order(machine, harm)
    tell(f"killed desks: {exits[-9]}, and {exits[0]} that ended before, {watch.looks} looks")
