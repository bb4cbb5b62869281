"""Hosts for tests: one lab a session, one machine that is emptied after each test."""

from __future__ import annotations

import shutil
import time
import zlib
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tasks import release as releases
from tasks.link import Link, dial
from tasks.link.exchange import Exchange, Question
from tasks.link.program import BOOT
from tasks.link.route import route
from tasks.operations import By, Run, new_run_id
from tests.hosts.asked import NONCE
from tests.hosts.ground import able, needs
from tests.hosts.lab import Lab

STUB = Path(__file__).resolve().parent.parent / "stub" / "trainer"


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.hosts)


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    needs("sshd")
    made = Lab(tmp_path_factory.mktemp("lab"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def _machine(lab):
    return lab.start("gpu1", mode="pidns" if able("pidns") else "shared")


@pytest.fixture
def machine(_machine):
    """A host of the best mode there is, emptied after each test."""
    yield _machine
    _machine.reset()


@pytest.fixture(scope="session")
def _contained(lab):
    return lab.start("contained", mode="pidns")


@pytest.fixture
def contained(_contained):
    """A host with a PID space of its own, or no test."""
    yield _contained
    _contained.reset()


@pytest.fixture
def tell(request):
    """`tell(text)`: a line with what was counted, shown however quiet the run is."""
    plugins = request.config.pluginmanager
    reporter, capture = map(plugins.get_plugin, ("terminalreporter", "capturemanager"))

    def say(text):
        with capture.global_and_fixture_disabled():
            reporter.ensure_newline()
            reporter.write_line(text)

    return say


@pytest.fixture
def notes():
    """What links told a person."""
    return []


@pytest.fixture
def door(notes):
    """`door(host)`: an open link; closed after the test."""
    made = []

    def make(host, **options):
        made.append(Link(host, notify=notes.append, **options))
        return made[-1]

    yield make
    for link in made:
        link.close()


@pytest.fixture
def say():
    """`say(host, source)`: what the desk makes of a host whose program is `source`."""
    calls = []

    def put(host, source, *, seconds=30.0, python="python3", on_progress=None, **options):
        call = dial.call(host.name, route(host), host.if_down, left=lambda: 10.0)
        calls.append(call)
        began = time.monotonic()
        question = Question(
            host=host.name,
            verb="sync",
            command=BOOT.format(python=python),
            program=zlib.compress(source.encode()),
            request={"nonce": NONCE},
            python=python,
        )
        stopped = options.pop("stopped", lambda: False)
        put.call = call
        return Exchange(
            question,
            call.transport,
            until=began + seconds,
            clock=time.monotonic,
            sleep=time.sleep,
            stopped=stopped,
        ).run(options.pop("blobs", None), on_progress)

    yield put
    for call in calls:
        call.close()


@pytest.fixture
def stub(tmp_path):
    """A copy of the stub trainer that a test may change."""
    return shutil.copytree(STUB, tmp_path / "trainer", ignore=shutil.ignore_patterns("__pycache__"))


@pytest.fixture
def new_run(stub):
    """`new_run()`: what one invocation of a task would do with the stub."""

    def make(**changes):
        facts = {
            "id": new_run_id(datetime.now(UTC)),
            "release": releases.read_tree(stub),
            "by": By(who="tester", host="desk", why="a test"),
        }
        return Run(**{**facts, **changes})

    return make
