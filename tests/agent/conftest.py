from __future__ import annotations

import subprocess

import pytest

from tests.agent.machine import Machine


@pytest.fixture
def machine(tmp_path):
    one = Machine(tmp_path)
    yield one
    one.close()


@pytest.fixture
def bystander():
    """A process that nobody may touch, with a command line like a run's."""
    words = ["python3", "-m", "trainer", "train", "--output-dir", "x"]
    with subprocess.Popen(["sleep", "60"], executable="/bin/sleep") as plain:
        with subprocess.Popen(
            ["bash", "-c", "exec -a 'python3 -m trainer train' sleep 60", *words]
        ) as same:
            yield same
            assert same.poll() is None
            assert plain.poll() is None
            same.kill()
        plain.kill()
