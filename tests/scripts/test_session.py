"""The shared conftest: which tests run in which part, what is counted, and what may not be left."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import leftovers
from tests.tally import summary

ROOT = Path(__file__).resolve().parents[2]

LEAVES = {
    "a child": "subprocess.Popen(WORDS)",
    "one of its own session": "subprocess.Popen(WORDS, start_new_session=True)",
    # The environment is clean, and its parent is gone: what is left is where it stands.
    "a re-parented one": (
        "subprocess.run(['sh', '-c', ' '.join(WORDS) + ' &'], env={'PATH': '/usr/bin:/bin'},"
        " cwd=tmp_path, start_new_session=True)"
    ),
    "one that knows a path": (
        "subprocess.run(['sh', '-c', ' '.join(WORDS) + ' &'], cwd='/', start_new_session=True,"
        " env={'PATH': '/usr/bin:/bin', 'TRAINER_RUN_DIR': str(tmp_path)})"
    ),
}


@pytest.fixture
def house(tmp_path):
    """A small tree with our conftest, and a runner of pytest in it."""
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name in ("conftest.py", "imports.py", "leftovers.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path / "tests")

    class House:
        root = tmp_path

        @staticmethod
        def write(where, text):
            (tmp_path / where).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / where).write_text(text)

        @staticmethod
        def run(*words):
            """Exit code, output, and what the tally holds."""
            done = subprocess.run(
                [
                    *(sys.executable, "-m", "pytest", "-v", *words),
                    *("--leftovers-after=0.3", f"--tally={tmp_path}/tally"),
                    f"--basetemp={tmp_path}/work",
                ],
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=60,
                check=False,
                env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
            )
            return done.returncode, done.stdout, json.loads((tmp_path / "tally").read_text())

    return House


@pytest.mark.parametrize("how", LEAVES.values(), ids=LEAVES)
def test_a_process_left_behind_fails_the_session(house, how):
    house.write(
        "tests/test_planted.py",
        f"import subprocess\nWORDS = ['sleep', '300.25']\ndef test_it(tmp_path):\n    {how}\n"
        # Popen's own warning about a child that still runs is not what is looked at here.
        "import gc, pytest\npytestmark = pytest.mark.filterwarnings('ignore')\n",
    )
    bystander = subprocess.Popen(["sleep", "300.25"], cwd="/")
    try:
        code, said, tally = house.run("-W", "ignore")
        assert code == 1, said
        assert "left behind, now killed" in said
        assert "sleep 300.25" in said
        assert tally == {"passed": 1, "failed": 1, "skipped": 0, "not run": {}}
        alive = leftovers.alive(tag="NONE=1", folder=house.root / "work")
        assert [each.pid for each in alive if each.words == "sleep 300.25"] == [bystander.pid]
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_what_the_machine_cannot_do_is_counted_by_its_reason(house):
    house.write(
        "tests/test_planted.py",
        "import pytest\n"
        "@pytest.mark.parametrize('n', [1, 2])\n"
        "def test_a(n, not_run): not_run('no PID namespace')\n"
        "def test_b(): pytest.skip('for another reason')\n"
        "@pytest.fixture\ndef broken(): raise OSError\n"
        "def test_c(broken): pass\n",
    )
    code, said, tally = house.run()
    assert code == 1
    assert "not run: 2 for no PID namespace" in said
    assert tally == {"passed": 0, "failed": 1, "skipped": 3, "not run": {"no PID namespace": 2}}


def test_the_fast_part_holds_what_needs_neither_torch_nor_sshd(house):
    house.write("trainer/__init__.py", "")
    house.write("trainer/plain.py", "import json\nfrom typing import TYPE_CHECKING\n"
                "if TYPE_CHECKING:\n    import torch\n")  # fmt: skip
    house.write("trainer/model.py", "import torch\n")
    house.write("trainer/middle.py", "from trainer import model\n")
    tests = {
        "tests/test_plain.py": "from trainer import plain\ndef test_plain(): pass\n",
        "tests/test_mark.py": "import pytest\n@pytest.mark.torch\ndef test_mark(): pass\n",
        "tests/agent/test_agent.py": "import torch\ndef test_agent(): pass\n",
        "tests/hosts/test_host.py": "import torch\ndef test_host(): pass\n",
        "tests/test_both.py": "import pytest, torch\n@pytest.mark.hosts\n"
        "def test_marked_host(): pass\n",
        # Collecting this one would fail where there is no torch.
        "tests/test_heavy.py": "def test_heavy():\n    from trainer import middle\n",
    }
    for where, text in tests.items():
        house.write(where, text)
    house.write("torch.py", "")
    names = ["test_plain", "test_mark", "test_heavy", "test_agent", "test_host", "test_marked_host"]
    ran = {}
    for part in ("fast", "torch", "processes", "hosts"):
        _, said, _ = house.run(f"--part={part}")
        ran[part] = [name for name in names if f"::{name} PASSED" in said]
    assert ran == {
        "fast": names[:1],
        "torch": names[1:3],
        "processes": names[3:4],
        "hosts": names[4:],
    }


def test_shares_hold_every_file_once(house):
    names = [f"test_{letter}" for letter in "abc"]
    for name in names:
        house.write(f"tests/{name}.py", f"def {name}(): pass\n")
    ran = []
    for share in ("1/2", "2/2"):
        _, said, _ = house.run(f"--share={share}")
        ran += [name for name in names if f"::{name} PASSED" in said]
        assert ran
    assert sorted(ran) == names


def test_long_ones_run_when_asked_for_and_last(house):
    house.write(
        "tests/test_planted.py",
        "import pytest\n"
        "@pytest.mark.long\ndef test_a(): pass\n"
        "def test_b(rounds, long): assert rounds(2, 50) == (50 if long else 2)\n",
    )
    _, said, tally = house.run()
    assert tally["passed"] == 1, said
    _, said, tally = house.run("--long")
    assert tally["passed"] == 2, said
    assert said.index("::test_b PASSED") < said.index("::test_a PASSED")


def test_the_last_line_adds_up_all_runs():
    first = {"passed": 3, "failed": 0, "skipped": 1, "not run": {"no fish": 1}}
    second = {"passed": 4, "failed": 2, "skipped": 2, "not run": {"no fish": 1, "no root": 1}}
    assert summary([first, second]) == (
        ["not run: 2 for no fish", "not run: 1 for no root", "7 passed, 2 failed, 3 skipped"],
        2,
    )
