"""The real `fab`, as a person runs it, against a real sshd with the stub trainer."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys

import pytest

from tests.hosts.desk import Desk, plain, states
from tests.hosts.ground import until


@pytest.fixture
def desk(tmp_path, stub, machine):
    return Desk(tmp_path, stub, machine)


def test_a_deploy_from_nothing_reads_like_this_and_a_second_one_changes_nothing(desk):
    first = desk.fab("deploy")
    assert [plain(line) for line in first] == [
        f"gpu1  probe            ok         python {sys.version.split()[0]}, 0 GPUs, no run",
        "gpu1  sync             changed    release RELEASE: 5 files, N bytes sent",
        "gpu1  verify           ok         deployed, not running",
        "gpu1  verify-features  ok         6 features",
        "gpu1  kill             unchanged  nothing ran",
        "gpu1  launch           changed    run RUN, pid N",
        "gpu1  await-progress   ok         step N, loss N after N s",
        "gpu1: training, step N, loss N; fab logs -f --host gpu1",
    ]
    pids, files = desk.trainers(), desk.files()
    assert len(pids) == 1
    assert states(desk.fab("deploy")) == [
        ("probe", "ok"),
        ("sync", "unchanged"),
        ("verify", "ok"),
        ("verify-features", "ok"),
        ("kill", "unchanged"),
        ("launch", "unchanged"),
        ("await-progress", "ok"),
    ]
    assert (desk.trainers(), desk.files()) == (pids, files)


def test_a_changed_file_travels_alone_and_the_run_goes_on_where_it_stopped(desk):
    desk.fab("deploy")
    (old,) = desk.trainers()
    loop = desk.folder / "trainer/loop.py"
    loop.write_text(f"{loop.read_text()}\n# changed\n")
    lines = desk.fab("deploy")
    told = dict(zip([name for name, _ in states(lines)], lines, strict=False))
    assert re.search(r"changed .*: 1 files?, [\d,]+ bytes sent", told["sync"])
    (stopped,) = re.findall(r"ended pid \d+ at step (\d+)", told["kill"])
    (resumed,) = re.findall(r"step (\d+), loss", told["await-progress"])
    assert int(resumed) > int(stopped)
    assert desk.trainers() != [old]


def test_every_task_but_restart_changes_nothing_the_second_time(desk):
    desk.fab("deploy")
    for task in ("sync", "launch", "verify", "verify-features", "health", "status", "kill"):
        desk.fab(task)
        before = desk.trainers(), desk.files()
        again = desk.fab(task)
        assert not {state for _, state in states(again)} & {"changed", "FAILED", "would"}, again
        assert (desk.trainers(), desk.files()) == before, task


def test_restart_makes_a_new_run_and_the_same_invocation_makes_no_second(desk):
    desk.fab("deploy")
    (old,) = desk.trainers()
    mine = "20261130-185839-ab12"
    desk.fab("restart", "--run-id", mine)
    (new,) = desk.trainers()
    assert new != old
    assert ("launch", "unchanged") in states(desk.fab("restart", "--run-id", mine))
    assert desk.trainers() == [new]


@pytest.mark.parametrize("edit", ["# an edit under way\n", "def half_an_edit(:\n"])
def test_restart_runs_what_is_deployed_whatever_the_desk_has(desk, edit):
    desk.fab("deploy")
    (old,) = desk.trainers()
    current = (desk.machine.home / "fab/current").readlink()
    loop = desk.folder / "trainer/loop.py"
    loop.write_text(loop.read_text() + edit)
    lines = [plain(line) for line in desk.fab("restart")]
    assert "gpu1  verify           ok         release RELEASE, running this" in lines
    assert desk.trainers() not in ([], [old])
    assert (desk.machine.home / "fab/current").readlink() == current
    desk.fab("kill")
    desk.fab("verify-features")
    desk.fab("launch")
    desk.fab("launch")
    assert len(desk.trainers()) == 1
    assert (desk.machine.home / "fab/current").readlink() == current


@pytest.mark.parametrize("task", ["restart", "launch", "verify-features"])
def test_where_nothing_is_deployed_that_is_told_with_what_to_do(desk, task):
    lines = desk.fab(task, exits=4)
    assert lines[-1].split("FAILED")[1].strip() == (
        "verification failed: nothing is deployed; run `fab deploy`"
    )


def test_a_dry_run_tells_the_plan_and_touches_nothing(desk):
    desk.fab("deploy")
    before = desk.trainers(), desk.files()
    loop = desk.folder / "trainer/loop.py"
    loop.write_text(f"{loop.read_text()}\n# changed\n")
    for words in (["deploy", "--dry-run"], ["-R", "deploy"]):
        lines = desk.fab(*words)
        assert lines[0].startswith("plan: probe, sync, verify, verify-features, kill, launch")
        assert ("sync", "would") in states(lines)
        assert ("kill", "would") in states(lines)
        assert ("launch", "would") in states(lines)
        assert lines[-1] == "dry run: nothing was changed"
    assert (desk.trainers(), desk.files()) == before


def test_json_is_one_object_a_line_with_the_summary_last(desk):
    *outcomes, summary = desk.objects("deploy")
    assert [each["operation"] for each in outcomes][-1] == "await-progress"
    assert {each["kind"] for each in outcomes} == {"outcome"}
    assert outcomes[-1]["facts"]["step"] >= 1
    assert summary == {"kind": "summary", "task": "deploy", "exit_code": 0, "dry": False}
    status, _ = desk.objects("status")
    assert (status["host"], status["state"], status["error"]) == ("gpu1", "training", None)
    log, *_ = desk.objects("logs", "-n", "1")
    assert (log["kind"], log["run_id"]) == ("log", status["run_id"])


def test_exit_2_when_the_root_is_not_ours(desk):
    desk.fab("deploy")
    path = desk.machine.home / "fab/machine.json"
    path.chmod(0o600)
    path.write_text(json.dumps({**json.loads(path.read_text()), "machine_id": "another"}))
    desk.fab("kill", exits=2)
    assert len(desk.trainers()) == 1


def test_exit_3_says_how_to_start_a_host_that_is_down(desk):
    desk.hosts["gpu1"]["port"] = 1
    desk.write()
    lines = desk.fab("status", exits=3)
    assert lines[1].split()[:2] == ["gpu1", "no"]
    assert re.search("gpu1: not reachable: .*start the lab", desk.err)


def test_exit_4_stops_nothing(desk):
    desk.fab("verify", exits=4)
    desk.fab("deploy")
    pids = desk.trainers()
    desk.write(env={"STUB_FAILING": "exact-resume"}, features=["exact-resume"])
    lines = desk.fab("deploy", exits=4)
    assert ("verify-features", "FAILED") in states(lines)
    assert "exact-resume" in "\n".join(lines)
    assert desk.err == (
        "fab deploy: exit 4; gpu1: verify-features failed; not done: kill, launch, await-progress\n"
    )
    assert desk.trainers() == pids


def test_exit_5_while_somebody_else_may_change_the_host(desk, door):
    door(desk.machine.host()).ask(
        "lease_acquire",
        {"root": "~/fab", "seconds": 60, "why": "fab deploy"},
        deadline=20,
        by={"who": "alice", "host": "her desk", "why": "fab deploy"},
    )
    (line,) = desk.fab("kill", exits=5)
    assert "alice" in line
    assert "alice on her desk: `fab deploy`" in desk.fab("lease")[0]


def test_exit_7_when_another_run_is_alive(desk):
    desk.fab("deploy")
    desk.write(chatter=1)
    assert ("launch", "FAILED") in states(desk.fab("launch", exits=7))
    assert len(desk.trainers()) == 1


def test_exit_9_for_different_failures_and_each_host_is_told(desk):
    desk.hosts["gpu2"] = desk.host(port=1)
    desk.write()
    lines = desk.fab("-H", "gpu1,gpu2", "verify", exits=9)
    assert [(line.split()[0], line.split()[2]) for line in lines] == [
        ("gpu1", "FAILED"),
        ("gpu2", "FAILED"),
    ]


def test_exit_10_tells_the_last_words_of_a_run_that_makes_no_step(desk):
    desk.write(exit_before_first_step=True)
    lines = desk.fab("deploy", exits=10)
    assert ("await-progress", "FAILED") in states(lines)
    assert any(line.startswith("    | ") for line in lines)


def test_exit_11_when_the_run_is_not_well_and_its_last_words_are_told(desk):
    assert "no run" in desk.fab("health", exits=11)[0]
    desk.write(crash_at=100)
    desk.fab("deploy")
    until(lambda: not desk.trainers(), 20, what="the crash")
    lines = desk.fab("health", exits=11)
    assert "crashed" in lines[0]
    assert re.match(r"    \| \w*Error", lines[-1])
    told = desk.fab("status")
    assert told[1].split()[:2] == ["gpu1", "crashed"]
    assert told[-2] == lines[-1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_exit_12_gives_the_lease_back_and_tells_what_was_under_way(desk, number):
    desk.write(hang_before_first_step=True)
    given = desk.command("deploy")
    with subprocess.Popen(**given, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        for line in running.stdout:
            if "launch" in line:
                break
        until(desk.trainers, what="the trainer")
        until(desk.machine.verbs, what="the wait for its first step")
        running.send_signal(number)
        _, err = running.communicate(timeout=30)
    assert running.returncode == 12, err
    assert "interrupted: await-progress on gpu1 under way" in err
    assert "Traceback" not in err
    assert "nobody holds it" in desk.fab("lease")[0]


def test_many_hosts_are_one_plan_with_a_barrier_and_one_connection_each(desk, lab):
    second = lab.start("gpu2")
    try:
        desk.hosts["gpu2"] = desk.host(port=second.port, root="~/fab")
        desk.write()
        before = desk.machine.log().count("Accepted publickey")
        lines = desk.fab("-H", "gpu1,gpu2", "deploy")
        order = [line.split()[1] for line in lines if re.match("gpu[12] ", line)]
        assert order == [name for name in order[::2] for _ in range(2)]
        assert lines[-1] == "2 hosts: 2 changed"
        assert desk.machine.log().count("Accepted publickey") == before + 1
        logs = desk.fab("-H", "gpu1,gpu2", "logs", "-n", "1")
        assert sorted(line.split()[0] for line in logs) == ["gpu1", "gpu2"]
        desk.fab("kill", "--host", "gpu?")
        assert second.processes() == []
    finally:
        second.close()


def test_logs_follow_over_lost_connections_without_losing_or_repeating_a_line(desk):
    desk.write(steps=400)
    desk.fab("deploy")
    given = desk.command("logs", "-f", "--lines", "5")
    lost = []
    with subprocess.Popen(**given, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as following:
        got = []
        for line in following.stdout:
            got.append(line)
            if len(got) % 60 == 20 and len(lost) < 4:
                lost.append(len(got))
                desk.machine.kill_sessions()
        err = following.stderr.read()
    assert following.returncode == 0, err
    assert len(lost) == 4
    assert "has ended" in err
    log = (desk.machine.home / "fab/runs/latest/train.log").read_text().splitlines(keepends=True)
    assert got == log[log.index(got[0]) :]
    assert len(got) > 200


def test_ctrl_c_ends_following_in_one_line(desk):
    desk.fab("deploy")
    given = desk.command("logs", "-f")
    with subprocess.Popen(**given, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as following:
        assert following.stdout.readline()
        following.send_signal(signal.SIGINT)
        _, err = following.communicate(timeout=30)
    assert following.returncode == 12
    assert err == "fab: interrupted: logs on gpu1 under way; see `fab status`\n"


def test_following_ends_when_nobody_reads_on(desk):
    desk.fab("deploy")
    given = desk.command("logs", "-f")
    with subprocess.Popen(**given, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as following:
        assert following.stdout.readline()
        following.stdout.close()
        assert following.wait(30) == 0
        assert following.stderr.read() == ""


def test_a_terminal_gets_colour_and_progress_in_place(desk):
    leader, follower = pty.openpty()
    given = {**desk.command("deploy"), "stdout": follower, "stderr": follower, "stdin": follower}
    given["env"] = {**given["env"], "CI": "", "TERM": "xterm", "COLUMNS": "80"}
    del given["text"]
    said = b""
    with subprocess.Popen(**given) as running:
        os.close(follower)
        while True:
            try:
                chunk = os.read(leader, 65536)
            except OSError:  # Linux's end of file of a terminal
                break
            said += chunk
    os.close(leader)
    assert running.returncode == 0
    assert b"\x1b[33mchanged" in said
    assert b"\r\x1b[K" in said
    shown = re.sub(rb"\x1b\[[\d;]*[mK]", b"", said).decode()
    assert max(len(line.split("\r")[-1]) for line in shown.split("\r\n")) <= 80
