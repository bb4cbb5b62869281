"""Deploy something broken on purpose: what a person reads, the exit code, and that work goes on."""

# ruff: noqa: E501 - what a person reads stands here as it is read

from __future__ import annotations

import json
import os
import re
import socket
import sys
from pathlib import Path

import pytest

from tests.hosts.desk import Desk, plain
from tests.hosts.ground import until


@pytest.fixture
def desk(tmp_path, stub, machine):
    """A desk whose trainer trains on gpu1."""
    made = Desk(tmp_path, stub, machine)
    made.fab("deploy")
    made.old = only_run(made)
    return made


def only_run(desk):
    """The record of the newest run, and the pid of the only trainer."""
    record = json.loads((desk.machine.home / "fab/runs/latest/spec.json").read_text())
    (record["pid"],) = desk.trainers()
    return record


def break_(desk, old, new, file="loop.py"):
    path = desk.folder / "trainer" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def read(desk, *words, exits):
    """What a person reads, less what differs each time; stderr follows stdout."""
    out = desk.fab(*words, exits=exits)
    phases = {"gpu1: starting", "gpu1: loading", "gpu1: training"}
    text = "\n".join([*out, "---", *(line for line in desk.err.splitlines() if line not in phases)])
    text = text.replace(str(desk.machine.home), "~")
    text = re.sub(r"step +[\d,]+/[\d,]+  loss [\d.]+", "step N/N  loss N", text)
    text = re.sub(r"step-\d{8}", "step-N", text)
    text = re.sub(r"port \d+: is taken by pid \w+", "port N: is taken by pid N", text)
    # Of a log's last words the last: tracebacks look different in each Python.
    text = re.sub(r"(    \| .*\n)+(?=    \| )", "    | ...\n", text)
    return plain(text).replace(sys.version.split()[0], "VERSION").splitlines()


BEFORE = [
    "gpu1  probe            ok         python VERSION, 0 GPUs, run RUN training",
    "gpu1  sync             changed    release RELEASE: 1 file, N bytes sent",
    "gpu1  verify           ok         running other code",
]
STOPPED = [
    *BEFORE,
    "gpu1  verify-features  ok         6 features",
    "gpu1  kill             changed    ended pid N at step N",
    "gpu1  launch           changed    run RUN, pid N",
]
BACK = [
    "gpu1  kill             unchanged  nothing ran",
    "gpu1  put-back         changed    release RELEASE is back as run RUN from step-N",
    "gpu1  await-progress   ok         step N, loss N after N s",
    "    | step N/N  loss N",
    "---",
    "fab deploy: exit 6; gpu1: await-progress failed; rolled back: run RUN of release RELEASE trains",
]


def assert_reads(found, wanted):
    """In both logs' last words it does not matter whether there were some before the last."""
    assert [line for line in found if line != "    | ..."] == wanted


def assert_never_stopped(desk):
    assert only_run(desk) == desk.old


def assert_back(desk):
    """The old release trains in a new run with its old settings, from where it was stopped."""
    run = only_run(desk)
    assert run["run_id"] != desk.old["run_id"]
    for name in ("release", "spec_digest"):
        assert run[name] == desk.old[name]
    assert run["like"] == desk.old["run_id"]
    assert (desk.machine.home / "fab/current").readlink().name == desk.old["release"]
    assert not (desk.machine.home / "fab/lease").exists()
    log = (desk.machine.home / "fab/runs/latest/train.log").read_text()
    (pinned,) = (desk.machine.home / "out").glob("step-*/PINNED")
    first = int(re.match(r"step +([\d,]+)/", log)[1].replace(",", ""))
    assert first == int(pinned.parent.name[5:]) + 1


def test_a_syntax_error(desk):
    break_(desk, "    def say(", "    def say(:")
    text = (desk.folder / "trainer/loop.py").read_text()
    line = text[: text.index("say(:")].count("\n") + 1
    assert_reads(
        read(desk, "deploy", exits=2),
        ["---", f"trainer/loop.py:{line}: invalid syntax; nothing was sent"],
    )
    assert_never_stopped(desk)


def test_a_missing_import(desk):
    break_(desk, "import argparse\n", "import argparse\nimport no_such_module\n")
    words = "ModuleNotFoundError: No module named 'no_such_module'"
    assert_reads(
        read(desk, "deploy", exits=4),
        [
            *BEFORE[:-1],
            f"gpu1  verify           FAILED     verification failed: RELEASE: trainer check: {words}",
            "---",
            (
                "fab deploy: exit 4; gpu1: verify failed; not done: "
                "verify-features, kill, launch, await-progress"
            ),
        ],
    )
    assert_never_stopped(desk)


def test_a_feature_that_was_removed(desk):
    desk.write(features=["flat-gradients", "exact-resume"])
    break_(desk, '    "exact-resume",\n', "", file="__main__.py")
    assert_reads(
        read(desk, "deploy", exits=4),
        [
            *BEFORE,
            "gpu1  verify-features  FAILED     verification failed: features: exact-resume: missing",
            "---",
            "fab deploy: exit 4; gpu1: verify-features failed; not done: kill, launch, await-progress",
        ],
    )
    assert_never_stopped(desk)


def test_a_port_that_is_taken(desk):
    with socket.create_server(("127.0.0.1", 0)) as server:
        desk.write(env={"MASTER_PORT": str(server.getsockname()[1])})
        said = read(desk, "deploy", exits=4)
    assert_reads(
        said,
        [
            BEFORE[0],
            "gpu1  sync             unchanged  release RELEASE is there",
            "gpu1  verify           FAILED     verification failed: RELEASE: port N: is taken by pid N",
            "---",
            "fab deploy: exit 4; gpu1: verify failed; not done: verify-features, kill, launch, await-progress",
        ],
    )
    assert_never_stopped(desk)


def test_a_crash_before_the_first_step(desk):
    old = "        wanted, began, number ="
    planted = '        save(self.output, self.step + 1, 0)\n        raise RuntimeError("planted")\n'
    break_(desk, old, planted + old)
    aside = "; set aside: ~/out/aside-RUN/step-N"
    assert_reads(
        read(desk, "deploy", exits=6),
        [
            *STOPPED,
            "gpu1  await-progress   FAILED     no first step: run RUN died: exit 1 at step N: RuntimeError: planted; see `fab logs --run RUN`",
            "    | RuntimeError: planted",
            BACK[0],
            BACK[1] + aside,
            *BACK[2:],
        ],
    )
    assert_back(desk)


def test_a_hang_before_the_first_step(desk):
    desk.write(hang_before_first_step=True)
    path = desk.folder / "hosts.yaml"
    path.write_text(path.read_text().replace("first_step_seconds: 20", "first_step_seconds: 3"))
    assert_reads(
        read(desk, "deploy", exits=6),
        [
            BEFORE[0],
            "gpu1  sync             unchanged  release RELEASE is there",
            "gpu1  verify           ok         running this",
            *STOPPED[3:],
            "gpu1  await-progress   FAILED     no first step: run RUN made none in its time: loading; see `fab logs --run RUN`",
            "gpu1  kill             changed    ended pid N at step N",
            *BACK[1:],
        ],
    )
    assert_back(desk)


def test_an_exit_0_before_the_first_step(desk):
    break_(desk, '        self.say("loading")\n', '        self.say("loading")\n        return 0\n')
    assert_reads(
        read(desk, "deploy", exits=6),
        [
            *STOPPED,
            "gpu1  await-progress   FAILED     no first step: run RUN ended: finished at step N; see `fab logs --run RUN`",
            *BACK,
        ],
    )
    assert_back(desk)


HOG = '        self.say("loading")\n        hog = bytearray(2 << 30)\n        hog[::4096] = hog[::4096]\n'


def limited(desk, words):
    """Let the host's Python run under a limit."""
    path = desk.machine.home / "limited"
    path.write_text(f'#!/bin/sh\n{words} {sys.executable} "$@"\n')
    path.chmod(0o700)
    desk.hosts["gpu1"]["python"] = "~/limited"
    desk.write()
    break_(desk, '        self.say("loading")\n', HOG)


def test_memory_that_a_limit_refuses(desk):
    limited(desk, "exec prlimit --as=600000000")
    assert_reads(
        read(desk, "deploy", exits=6),
        [
            *STOPPED,
            "gpu1  await-progress   FAILED     no first step: run RUN died: exit 1 at step N: MemoryError; see `fab logs --run RUN`",
            "    | MemoryError",
            *BACK,
        ],
    )
    assert_back(desk)


@pytest.fixture
def cgroup(not_run):
    """A memory control group of 100 MiB: path of its list of processes."""
    group = Path(f"/sys/fs/cgroup/memory/fab-test-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(100 << 20))
    except OSError as error:
        not_run(f"a memory control group (v1): {error.strerror}")
    yield group / "cgroup.procs"
    until(lambda: not (group / "cgroup.procs").read_text(), what="the group's end")
    group.rmdir()


def test_memory_that_the_kernel_takes_back(desk, cgroup):
    limited(desk, f"echo $$ > {cgroup}; exec")
    assert_reads(
        read(desk, "deploy", exits=6),
        [
            *STOPPED,
            "gpu1  await-progress   FAILED     no first step: run RUN died: killed by SIGKILL at step N; see `fab logs --run RUN`",
            *BACK,
        ],
    )
    assert_back(desk)
