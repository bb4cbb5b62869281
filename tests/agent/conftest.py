from __future__ import annotations

import subprocess

import pytest

from tests.agent.machine import Machine


@pytest.fixture(scope="session")
def template(tmp_path_factory):
    """A root with a lease and the stub's release: made once, copied by each test."""
    one = Machine(tmp_path_factory.mktemp("template"))
    one.deploy()
    yield one
    one.close()


@pytest.fixture
def machine(tmp_path, template):
    one = Machine(tmp_path, template=template)
    yield one
    one.close()


@pytest.fixture
def bare(tmp_path):
    """A host where nothing of ours ever was."""
    one = Machine(tmp_path)
    yield one
    one.close()


@pytest.fixture
def bystander():
    """A process that nobody may touch, with a command line like a run's."""
    words = "exec -a 'python3 -m trainer train --output-dir x' sleep 60"
    with subprocess.Popen(["bash", "-c", words]) as same:
        yield same
        assert same.poll() is None
        same.kill()
