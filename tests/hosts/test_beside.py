"""Verification while the old run trains: what it costs that run."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from tests.hosts.desk import Desk, states
from tests.hosts.ground import needs, until

STEP_S = 0.03
"""Of computing, with nobody else on the CPU."""
BURN_S = 2.5
"""How long a check computes on every CPU."""
SLOWER = 1.4
"""Most that a step may take of what it took before. Checks of equal priority would double it."""


@pytest.fixture
def desk(tmp_path, stub, machine):
    return Desk(tmp_path, stub, machine)


def steps(machine, *, after=0.0):
    """Give when steps ended, by the run's own clock."""
    lines = (machine.home / "fab/runs/latest/metrics.jsonl").read_text().splitlines()
    return [at for at in (json.loads(line)["time"] for line in lines) if at >= after]


def mean_step(times):
    return (times[-1] - times[0]) / (len(times) - 1)


def memory(pid):
    """Give the most that a process ever held, in KiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def test_checks_on_a_host_whose_run_uses_every_cpu_do_not_slow_it_down(desk, machine, tell):
    desk.write(burn=True, step_seconds=STEP_S, env={"STUB_BURN": str(BURN_S)})
    desk.fab("deploy")
    (pid,) = leaders(machine)
    heaviest = memory(pid)
    ratios = []
    for _ in range(3):  # others share this machine, and may begin just then
        began = time.time()
        until(lambda began=began: len(steps(machine, after=began)) > 25, 30, what="25 steps")
        before = steps(machine, after=began)
        desk.fab("verify")
        during = beside_the_check(desk, machine)
        ratios.append(mean_step(during) / mean_step(before))
        if ratios[-1] < SLOWER:
            break
    tell(f"a step beside verification: {ratios[-1]:.2f} of its time before, {len(during)} steps")
    assert ratios[-1] < SLOWER, ratios
    assert memory(pid) <= heaviest + 1024
    assert leaders(machine) == {pid}


def beside_the_check(desk, machine):
    """Give when steps ended while a check of features computed."""
    with subprocess.Popen(**desk.command("verify-features"), stdout=subprocess.PIPE) as running:
        until(lambda: [p for p in machine.processes() if "trainer features" in p.words], 30)
        began = time.time()
        lines = running.stdout.read().splitlines()
        ended = time.time()
    assert ("verify-features", "ok") in states(lines)
    return [at for at in steps(machine, after=began) if at <= ended]


def leaders(machine):
    """Pids of the trainers themselves, as their runs recorded them; numbered as from outside."""
    found = [p for p in machine.processes() if "trainer train" in p.words]
    pids = {p.pid for p in found}
    return {p.pid for p in found if p.parent not in pids}


@pytest.mark.long
def test_a_gpu_that_the_run_has_filled_is_not_touched(lab, tmp_path, stub):
    needs("pidns")
    tools = tmp_path / "tools"
    tools.mkdir()
    smi = tools / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '0, NVIDIA H200, GPU-0, 143771, 300'\n")
    smi.chmod(0o755)
    shell = tmp_path / "shell-with-a-gpu"
    shell.write_text(f'#!/bin/sh\nPATH={tools}:$PATH\nexport PATH\nexec /bin/sh "$@"\n')
    shell.chmod(0o755)
    there = lab.start("gpu-full", mode="pidns", shell=str(shell))
    try:
        folder = tmp_path / "desk"
        folder.mkdir()
        desk = Desk(folder, stub, there)
        desk.fab("deploy")
        pids = desk.trainers()
        lines = desk.fab("verify-features")
        assert any("6 features; warning: not checked: GPU full" in line for line in lines), lines
        assert desk.trainers() == pids
    finally:
        there.close()
        lab.machines.remove(there)
