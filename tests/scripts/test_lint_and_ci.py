"""scripts/lint finds a planted fault of each kind; .ci/run fails when one of its two parts does."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CLEAN = '"""A room."""\n'
PARTS = ["format", "code", "types", "shell"]


def stub(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def run(*words, **changes):
    return subprocess.run(
        words, env=os.environ | changes, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def tree(tmp_path):
    """A small clean checkout."""
    for name in ("pyproject.toml", ".ci/run", "scripts/lint"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    stub(tmp_path / "scripts/setup", "exit 0")
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parent.parent)
    (tmp_path / "fabfile.py").write_text(CLEAN)
    for room in ("tasks", "trainer"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text(CLEAN)
    return tmp_path


def test_a_clean_tree_is_clean(tree):
    done = run(tree / "scripts/lint")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("lint: clean (format code types shell)\n")


@pytest.mark.parametrize(
    ("part", "where", "planted"),
    [
        ("format", "tasks/room.py", CLEAN + "A = [1,2]\n"),
        ("code", "tasks/room.py", CLEAN + "import os\n"),
        ("types", "tasks/room.py", CLEAN + "\nA: int = 'no'\n"),
        ("shell", "scripts/broken", "#!/bin/sh\nif true; then\n"),
        ("shell", "scripts/careless", "#!/bin/sh\nrm -rf $1/*\n"),
    ],
)
def test_a_planted_fault_fails_its_part(tree, part, where, planted):
    (tree / where).write_text(planted)
    done = run(tree / "scripts/lint", part)
    assert done.returncode == 1, done.stdout
    assert done.stderr.endswith(f"lint: failed: {part}\n")


def test_every_failing_part_is_told(tree):
    (tree / "tasks/room.py").write_text(CLEAN + "import os\nA: int = 'no'\n")
    done = run(tree / "scripts/lint")
    assert done.returncode == 1
    assert done.stderr.endswith("lint: failed: format code types\n")


def test_the_hooks_are_the_parts(tree):
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert [hook["entry"] for hook in hooks] == [f"./scripts/lint {part}" for part in PARTS]
    done = run(tree / "scripts/lint", "spelling")
    assert done.returncode == 2
    assert re.search("; there are format, code, types, shell$", done.stderr.strip())


@pytest.mark.parametrize(("lint", "test"), [(0, 0), (1, 0), (0, 3), (1, 1)])
def test_ci_runs_both_and_fails_when_one_does(tree, lint, test):
    stub(tree / "scripts/lint", f"echo linted CI=$CI; exit {lint}")
    stub(tree / "scripts/test", f"echo '2 passed, 0 failed, 0 skipped'; exit {test}")
    stub(tree / "bin/dpkg-query", "echo 'install ok installed'")
    done = run("bash", tree / ".ci/run", PATH=f"{tree}/bin:{os.environ['PATH']}")
    assert done.returncode == (1 if lint or test else 0)
    assert done.stdout == "linted CI=true\n2 passed, 0 failed, 0 skipped\n"


def test_ci_installs_what_a_new_machine_lacks_and_nothing_else(tree):
    stub(tree / "scripts/lint", "exit 0")
    stub(tree / "scripts/test", "exit 0")
    stub(
        tree / "bin/dpkg-query",
        'case "$4" in fish|tcsh) exit 1 ;; esac; echo "install ok installed"',
    )
    stub(tree / "bin/id", "echo 0")
    stub(tree / "bin/apt-get", 'echo "apt-get $*"')
    done = run("bash", tree / ".ci/run", PATH=f"{tree}/bin:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "apt-get -q update"
    assert second.endswith(" install -y --no-install-recommends fish tcsh")
