from __future__ import annotations

import os
import sys

import pytest

from tasks.agent import gpus
from tests.agent.call import RefusalError


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """`smi(*lines)`: a host whose nvidia-smi prints these."""

    def make(*lines, status=0):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        script = folder / "nvidia-smi"
        text = "\n".join(lines)
        script.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {status}\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    return make


def line(index, free):
    return f"{index}, NVIDIA H200, GPU-{index}, 143771, {free}"


def test_gpus_are_read_and_noise_is_left_out():
    text = f"Warning: something\n{line(0, 5)}\n{line(1, '[N/A]')}\n"
    first, second = gpus.parse(text)
    assert first == {
        "index": 0,
        "name": "NVIDIA H200",
        "uuid": "GPU-0",
        "total_mib": 143_771,
        "free_mib": 5,
        "holders": [],
    }
    assert second["free_mib"] is None


def test_status_and_probe_show_gpus_and_a_broken_driver(machine, smi):
    smi(line(0, 100), line(1, 200))
    for verb in ("probe", "status"):
        assert [gpu["free_mib"] for gpu in machine.ask(verb)["gpus"]] == [100, 200]
    smi("NVIDIA-SMI has failed", status=9)
    found = machine.ask("probe")
    assert found["gpus"] == []
    assert found["warnings"] == ["nvidia-smi: exit 9; the driver may be broken"]


def features(machine, **more):
    digest = machine.manifest()[0]
    return machine.ask("features", digest=digest, python=sys.executable, required=[], **more)


def test_a_full_gpu_is_left_alone_by_the_checks(machine, smi):
    machine.deploy()
    smi(line(0, 1500), line(1, 2047))
    assert features(machine)["warnings"] == ["not checked: GPU full"]
    smi(line(0, 1500), line(1, 99_000))
    assert features(machine)["warnings"] == []
    assert features(machine, devices=[0])["warnings"] == ["not checked: GPU full"]


def test_devices_that_are_not_there_are_a_difference(machine, smi):
    digest = machine.deploy()
    smi(line(0, 1500), line(1, 2047))
    spec = machine.spec(devices=[1, 7])
    with pytest.raises(RefusalError) as caught:
        machine.ask("verify", digest=digest, spec=spec)
    assert caught.value.data["differences"] == ["devices [7]: this host has [0, 1]"]


def test_a_check_up_tells_missing_gpus_a_broken_driver_and_a_torch_that_sees_none(machine, smi):
    def rows(**more):
        checks = machine.ask("doctor", python=sys.executable, **more)["checks"]
        return {row["check"]: row for row in checks}

    smi(line(0, 100), line(1, 200))
    found = rows()
    assert found["GPU"]["state"] == "ok"
    assert "2 by nvidia-smi; 0: 100 MiB free" in found["GPU"]["detail"]
    assert found["torch"]["state"] == "ok"
    found = rows(devices=[1, 2])
    assert found["GPU"]["state"] == "broken"
    assert "devices [2] are not there" in found["GPU"]["detail"]
    assert found["torch"]["state"] == "broken"
    smi("NVIDIA-SMI has failed", status=9)
    assert rows()["GPU driver"]["state"] == "broken"
