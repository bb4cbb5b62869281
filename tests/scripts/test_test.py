"""scripts/test on small trees: its last line, its exit code, and how it ends when interrupted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import leftovers

ROOT = Path(__file__).resolve().parents[2]
FAST, TORCH, HOSTS = "tests/test_fast.py", "tests/trainer/test_torch.py", "tests/hosts/test_host.py"
PASS = "def test_it(): pass\n"
FAIL = "def test_it(): assert False\n"
LONG = "import pytest\n@pytest.mark.long\ndef test_long(): pass\n"


@pytest.fixture
def tree(tmp_path):
    """A checkout with one test in every part; `import torch` finds a stub."""
    for name in ("pyproject.toml", "scripts/test"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "scripts/setup").write_text("#!/bin/sh\n")
    (tmp_path / "scripts/setup").chmod(0o755)
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parent.parent)
    (tmp_path / "torch.py").write_text("")
    for name in ("conftest.py", "imports.py", "leftovers.py", "tally.py"):
        (tmp_path / "tests").mkdir(exist_ok=True)
        shutil.copy(ROOT / "tests" / name, tmp_path / "tests")
    write(tmp_path, FAST, PASS)
    write(tmp_path, TORCH, "import torch\n" + PASS)
    write(tmp_path, HOSTS, PASS)
    return tmp_path


def write(tree, where, text):
    (tree / where).parent.mkdir(exist_ok=True)
    (tree / where).write_text(text)


def run(tree, *words):
    """Exit code and last line."""
    done = subprocess.run(
        [tree / "scripts/test", *words],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
    )
    return done.returncode, done.stdout.splitlines()[-1]


def test_all_parts_are_added_up(tree):
    assert run(tree) == (0, "3 passed, 0 failed, 0 skipped")


@pytest.mark.parametrize("where", [FAST, TORCH, HOSTS])
def test_a_failure_in_any_part_fails_it(tree, where):
    write(tree, where, ("import torch\n" if where == TORCH else "") + FAIL)
    assert run(tree) == (1, "2 passed, 1 failed, 0 skipped")


def test_a_file_that_cannot_be_collected_fails_it(tree):
    write(tree, HOSTS, "import nothing_of_this_name\n")
    code, last = run(tree)
    assert code == 2
    assert last == "2 passed, 1 failed, 0 skipped"


def test_a_part_without_tests_is_no_failure_but_none_at_all_is(tree):
    (tree / TORCH).unlink()
    assert run(tree) == (0, "2 passed, 0 failed, 0 skipped")
    assert run(tree, "-k", "nothing") == (1, "0 passed, 0 failed, 0 skipped")


def test_fast_and_long_and_chosen_ones(tree):
    write(tree, FAST, PASS + LONG)
    assert run(tree, "--fast") == (0, "1 passed, 0 failed, 0 skipped")
    assert run(tree, "--long") == (0, "4 passed, 0 failed, 0 skipped")
    assert run(tree, "tests/hosts", "-k", "it") == (0, "1 passed, 0 failed, 0 skipped")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_nothing(tree, number):
    wait = """
import subprocess, time
def test_it(tmp_path):
    subprocess.Popen(['sleep', '300.5'], cwd=tmp_path, start_new_session=True)
    open('{}', 'w').close()
    time.sleep(300)
"""
    marks = [tree / "torch.waits", tree / "hosts.waits"]
    write(tree, TORCH, "import torch\n" + wait.format(marks[0]))
    write(tree, HOSTS, wait.format(marks[1]))
    # A session of its own: the signal reaches all of it, as a terminal's or a timeout's does.
    running = subprocess.Popen(
        [tree / "scripts/test"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=os.environ | {"TMPDIR": str(tree)},
    )
    until = time.monotonic() + 60
    while not all(each.exists() for each in marks):
        assert time.monotonic() < until
        time.sleep(0.05)
    os.killpg(running.pid, number)
    assert running.wait(60) == 128 + number
    left = leftovers.wait_for_none(10, tag="NONE=1", folder=tree)
    assert [each for each in left if "300.5" in each.words] == []
