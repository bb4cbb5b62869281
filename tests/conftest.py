"""What all tests share: which of them run, what could not, and that nothing is left behind."""

from __future__ import annotations

import functools
import json
import os
import secrets
import signal
import zlib
from collections import Counter
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from tests import imports, leftovers

TAG = "FAB_TEST_SESSION"
PROCESSES = {"agent", "demo", "scripts"}
"""Folders whose tests start processes of their own; those of `hosts` also talk to a real sshd."""
PARTS = ("fast", "torch", "processes", "hosts")
"""From light to heavy."""
HEAVY = {"torch", "transformers"}
NOT_RUN = "not run: "


def pytest_addoption(parser):
    group = parser.getgroup("this project")
    group.addoption(
        "--part",
        choices=PARTS,
        help="hosts: has a real sshd; processes: starts its own; torch: needs it; fast: the rest",
    )
    group.addoption("--share", metavar="K/N", help="of all files, the Kth of N equal shares")
    group.addoption("--long", action="store_true", help="full counts of rounds; they come last")
    group.addoption(
        "--leftovers-after",
        type=float,
        default=10,
        metavar="SECONDS",
        help="what a test started may take that long to end after the last test",
    )
    group.addoption("--tally", metavar="FILE", help="write how many tests passed, failed, skipped")


def pytest_keyboard_interrupt():
    # A second signal, sent to be sure, would cut short the ending that the first began.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def pytest_configure():
    os.environ[TAG] = secrets.token_hex(8)
    # A shell that starts us in the background has it ignored, and so would all that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # A cancelled run ends its fixtures, and with them what its tests started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # nohup ignores it, and what ignores it hands that on.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # Nothing here loads from a hub; without this a missing file is asked for there, and waited for.
    os.environ["HF_HUB_OFFLINE"] = "1"
    # Idle threads of torch must not spin: with as many runs at once as here, that costs more than
    # the work itself.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@functools.cache
def modules(root: Path) -> dict[str, imports.Module]:
    return imports.read_tree(root, ("tasks", "trainer", "tests"))


@functools.cache
def part_of_file(path: Path, root: Path) -> str:
    """By where it stands, and by whether importing it brings torch in."""
    folders = set(path.relative_to(root).parts)
    if "hosts" in folders:
        return "hosts"
    if PROCESSES & folders:
        return "processes"
    heavy = HEAVY & imports.outside(imports.read_file(path, root), modules(root))
    return "torch" if heavy else "fast"


def part_of(item: pytest.Item) -> str:
    """What its file is, unless the test alone is marked as something heavier."""
    known = {part_of_file(item.path, item.config.rootpath)}
    known |= {name for name in ("hosts", "torch") if item.get_closest_marker(name) is not None}
    return max(known, key=PARTS.index)


def pytest_ignore_collect(collection_path, config):
    if collection_path.suffix != ".py":
        return None
    if (share := config.getoption("--share")) and collection_path.name.startswith("test_"):
        which, of = map(int, share.split("/"))
        # By name, so that a file which cannot be collected fails in one share alone.
        if zlib.crc32(collection_path.name.encode()) % of != which - 1:
            return True
    # By what a file imports: importing torch alone takes longer than all quick tests together.
    part = config.getoption("--part")
    if part is None:
        return None
    # A test may be marked as heavier than its file, never as lighter.
    return PARTS.index(part) < PARTS.index(part_of_file(collection_path, config.rootpath)) or None


def pytest_collection_modifyitems(config, items):
    part = config.getoption("--part")
    keep, drop = [], []
    for item in items:
        wrong_part = part is not None and part != part_of(item)
        too_long = is_long(item) and not config.getoption("--long")
        (drop if wrong_part or too_long else keep).append(item)
    if drop:
        config.hook.pytest_deselected(items=drop)
    items[:] = sorted(keep, key=is_long)


def is_long(item: pytest.Item) -> bool:
    return item.get_closest_marker("long") is not None


@pytest.fixture(scope="session")
def long(request):
    """Whether this is a run at full counts."""
    return request.config.getoption("--long")


@pytest.fixture(scope="session")
def rounds(long):
    """`rounds(20, 500)`: how many to do now; 500 only in a run at full counts."""
    return lambda some, all_of_them: all_of_them if long else some


@pytest.fixture(scope="session")
def not_run():
    """`not_run("no PID namespace: ...")`: this machine lacks an ability; the summary counts it."""

    def tell(reason: str) -> None:
        pytest.skip(NOT_RUN + reason)

    return tell


_reasons: Counter[str] = Counter()


def pytest_runtest_logreport(report):
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if reason.startswith(NOT_RUN):
            _reasons[reason.removeprefix(NOT_RUN)] += 1


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    # Fixtures of the session have ended by now; nothing of ours has a reason to live.
    folder = session.config._tmp_path_factory.getbasetemp()
    tracker = resource_tracker._resource_tracker._pid
    left = leftovers.wait_for_none(
        session.config.getoption("--leftovers-after"),
        tag=f"{TAG}={os.environ[TAG]}",
        folder=folder,
        spared=frozenset() if tracker is None else frozenset({tracker}),
    )
    if left:
        leftovers.end(left)
        session.config.stash[LEFT] = left
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


LEFT = pytest.StashKey[list[leftovers.Process]]()


def pytest_terminal_summary(terminalreporter, config):
    left = config.stash.get(LEFT, [])
    if left:
        terminalreporter.section("left behind, now killed", red=True)
        for each in left:
            terminalreporter.write_line(f"pid {each.pid}: {each.words}")
    for reason, times in sorted(_reasons.items()):
        terminalreporter.write_line(f"not run: {times} for {reason}")
    if config.getoption("--tally"):
        count = {
            word: len(terminalreporter.getreports(word))
            for word in ("passed", "failed", "error", "skipped")
        }
        counted = {
            "passed": count["passed"],
            "failed": count["failed"] + count["error"] + bool(left),
            "skipped": count["skipped"],
            "not run": dict(_reasons),
        }
        Path(config.getoption("--tally")).write_text(json.dumps(counted), encoding="utf-8")
