"""scripts/setup in a copied tree whose requirement files are empty, so nothing is downloaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = (
    "requirements.txt",
    "tasks/requirements.txt",
    "trainer/requirements.txt",
    "tests/requirements.txt",
    "tests/constraints.txt",
    "tests/models.txt",
)


class Tree:
    """A checkout with nothing to install."""

    def __init__(self, root):
        self.root = root
        for name in FILES:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text("# nothing\n")
        (root / "scripts").mkdir()
        shutil.copy(ROOT / "scripts/setup", root / "scripts/setup")

    def setup(self, *, before=(), cwd="/", **changes):
        return subprocess.run(
            [*before, self.root / "scripts/setup"],
            cwd=cwd,
            env=os.environ | {"PIP_NO_INDEX": "1", "PYTHON": sys.executable} | changes,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path / "a checkout")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One whose set-up is done; tests put back what they change."""
    tree = Tree(tmp_path_factory.mktemp("setup") / "a checkout")
    tree.first = tree.setup()
    assert tree.first.returncode == 0, tree.first.stderr
    return tree


def stub(folder, name, text):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_it_works_in_a_path_with_spaces_and_from_anywhere(finished):
    words = [line.split()[1] for line in finished.first.stdout.splitlines()]
    assert words == ["making", "installing", "done"]
    assert (finished.root / ".venv/bin/python").exists()
    assert not (finished.root / ".venv/setup.underway").exists()


def test_a_second_run_says_nothing_and_takes_no_second(finished):
    took = []
    for _ in range(3):
        began = time.monotonic()
        again = finished.setup()
        took.append(time.monotonic() - began)
        assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert min(took) < 1


def test_a_changed_requirement_is_installed_into_what_is_there(finished):
    kept = finished.root / ".venv/kept"
    kept.write_text("")
    (finished.root / "tests/requirements.txt").write_text("# something else\n")
    done = finished.setup()
    assert "installing requirements" in done.stdout
    assert "removing" not in done.stdout
    assert kept.exists()


def test_one_that_failed_is_begun_anew(finished):
    lines = finished.root / "tests/requirements.txt"
    lines.write_text("no-such-package-of-ours==1\n")
    failed = finished.setup()
    assert failed.returncode != 0
    assert "no-such-package-of-ours" in failed.stderr
    assert "done" not in failed.stdout
    lines.write_text("# nothing\n")
    done = finished.setup()
    assert done.returncode == 0, done.stderr
    assert "removing .venv: its set-up was interrupted" in done.stdout
    assert finished.setup().stdout == ""


def test_a_moved_one_is_made_anew(finished, tmp_path):
    shutil.copytree(finished.root, tmp_path / "moved", symlinks=True)
    moved = Tree.__new__(Tree)
    moved.root = tmp_path / "moved"
    done = moved.setup()
    assert "made in another place" in done.stdout
    assert done.returncode == 0


def test_two_at_once_take_turns(tree):
    both = [
        subprocess.Popen(
            [tree.root / "scripts/setup"],
            env=os.environ | {"PIP_NO_INDEX": "1", "PYTHON": sys.executable},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    said = sorted((each.communicate(timeout=120)[0] for each in both), key=len)
    assert [each.returncode for each in both] == [0, 0]
    assert said[0] == "", said
    assert said[1].count("making .venv") == 1


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("exit 1", "is no Python 3.11 or newer"),
        # A Python that somebody built without ensurepip.
        (
            (
                'case "$*" in *ensurepip*) exit 1 ;; *realpath*) echo /opt/python; exit ;; esac\n'
                f'exec {sys.executable} "$@"'
            ),
            "has no venv or ensurepip",
        ),
    ],
)
def test_a_broken_python_gets_one_clear_line(tree, tmp_path, script, told):
    done = tree.setup(PYTHON=str(stub(tmp_path, "python", script)))
    assert done.returncode == 2
    assert done.stdout == ""
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tree.root / ".venv").exists()


def test_what_it_may_not_install_is_named(tree, tmp_path, not_run):
    # In a mount namespace of its own, sshd is no program; `id` and `sudo` are a plain user's.
    hide = "mount --bind /dev/null /usr/sbin/sshd 2>/dev/null || exit 77; exec"
    before = ["unshare", "--mount", "sh", "-c", f'{hide} "$@"', "sh"]
    if subprocess.run([*before, "true"], capture_output=True, check=False).returncode:
        not_run("no mount namespace")
    stub(tmp_path, "id", "echo 1000")
    stub(tmp_path, "sudo", "exit 1")
    done = tree.setup(before=before, PATH=f"{tmp_path}:/usr/bin:/bin")
    assert done.returncode == 2
    assert done.stderr.endswith("run: sudo apt-get install openssh-server\n")
