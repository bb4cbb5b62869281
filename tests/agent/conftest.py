from __future__ import annotations

import os
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


@pytest.fixture
def small_disk(bare, not_run):
    """A host whose home has 20 MiB: `fill()` takes all of them, `empty()` gives them back."""
    if os.getuid() != 0:
        not_run("needs root for a small file system")
    mount = f"mount -t tmpfs -o size=20m tmpfs {bare.home} && echo && exec sleep 60"
    words = ["unshare", "--mount", "--propagation", "private", "sh", "-c", mount]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as space:
        if not space.stdout.readline():
            not_run("unshare and mount are not allowed here")
        bare.prefix = ["nsenter", "-t", str(space.pid), "--mount"]
        zeros = f"{bare.home}/zeros"

        def inside(words):
            return subprocess.run(
                [*bare.prefix, "sh", "-c", words], capture_output=True, text=True, check=False
            ).stdout

        bare.inside = inside
        bare.fill = lambda: inside(f"cat /dev/zero > {zeros}")
        bare.empty = lambda: inside(f"rm {zeros}")
        bare.deploy()
        yield bare
        space.kill()
