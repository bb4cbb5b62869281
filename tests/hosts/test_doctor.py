"""A check-up of hosts that are well, and of hosts that are not, each in its own way."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import subprocess

import pytest

from tasks import errors
from tasks.operations import Doctor
from tests.hosts.desk import Desk
from tests.hosts.ground import needs, until
from tests.hosts.machine import settings


@pytest.fixture
def examine(door, new_run):
    """`examine(host)`: (rows by check, the error or None)."""

    def make(host, **options):
        link = door(host, sleep=lambda _: None)
        try:
            facts = Doctor(**options)(host, new_run(), link).facts
        except errors.DeployError as error:
            return {row["check"]: row for row in error.facts["checks"]}, error
        return {row["check"]: row for row in facts["checks"]}, None

    return make


def states(rows, wanted):
    return {name for name, row in rows.items() if row["state"] == wanted}


def test_a_host_that_is_well_passes_and_is_left_as_it_was(machine, examine):
    before = sorted(str(path) for path in machine.home.rglob("*"))
    rows, error = examine(machine.host())
    assert error is None, rows
    assert states(rows, "broken") == set()
    assert {
        *("name", "route", "port", "banner", "host key", "login", "exec", "shell"),
        *("python", "home", "locale", "PATH", "tools", "logout", "PID 1", "root"),
        *("disk (root)", "write (root)", "exec (root)", "disk (output)", "write (output)"),
        *(
            "exec (tmp)",
            "run port",
            "GPU",
            "interpreter",
            "torch",
            "lease",
            "release",
            "run",
            "clock",
        ),
    } <= rows.keys()
    assert sorted(str(path) for path in machine.home.rglob("*")) == before
    assert machine.processes() == []
    assert not [row for row in rows.values() if row["state"] != "ok" and not row["mend"]]


@pytest.mark.parametrize(
    ("changes", "layer", "kind"),
    [
        ({"address": "no-such-host.invalid"}, "name", errors.Unreachable),
        ({"port": 1}, "port", errors.Unreachable),
        ({"port": "mute"}, "banner", errors.Unreachable),
        ({"known_hosts": "/dev/null"}, "host key", errors.HostKeyWrong),
        ({"identity_file": "stranger"}, "login", errors.LoginRefused),
        ({"agent_python": "python9"}, "python", errors.RemoteFailure),
    ],
)
def test_the_layer_that_fails_is_named_and_those_before_it_are_well(  # noqa: PLR0917
    examine, machine, changes, layer, kind, monkeypatch
):
    lab = machine.lab
    monkeypatch.setattr("tasks.link.asking.CONNECT_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        changes = dict(changes)
        if changes.get("port") == "mute":
            changes["port"] = mute.getsockname()[1]
        if "identity_file" in changes and not (lab.folder / "nobody").exists():
            lab.new_key("nobody")
        if "identity_file" in changes:
            changes["identity_file"] = str(lab.folder / "nobody")
        rows, error = examine(machine.host(**changes))
    assert type(error) is kind
    assert states(rows, "broken") == {layer}
    assert list(rows)[-1] == layer
    assert rows[layer]["mend"]


def test_a_login_without_a_shell_fails_at_exec(lab, examine):
    there = lab.start("menu", sshd=('ForceCommand sh -c "echo no >&2; exit 1"',))
    rows, error = examine(there.host())
    assert states(rows, "broken") == {"exec"}
    assert "ForceCommand" in rows["exec"]["mend"]
    assert error.exit_code == 7


def test_noise_and_a_foreign_locale_are_told_and_harmless(lab, examine):
    needs("pidns")
    # sshd takes the first SetEnv alone.
    line = f"SetEnv LC_ALL=xx_YY.UTF-8 HOME={lab.folder}/noisy/home"
    there = lab.start("noisy", mode="pidns", shell=shutil.which("bash"), sshd=(line,))
    (there.home / ".bashrc").write_text("echo 'Welcome \x1b[31mback'; echo more >&2\n")
    rows, error = examine(there.host())
    assert error is None
    assert "lines around our answer: Welcome \\x1b[31mback" in rows["shell"]["detail"]
    assert rows["locale"]["state"] == "warn"
    assert "LC_ALL=xx_YY.UTF-8 is not installed" in rows["locale"]["detail"]


def test_a_clock_that_is_wrong_is_told(machine, examine):
    rows, error = examine(machine.host(), now=lambda: 1_000_000.0)
    assert error is None
    assert rows["clock"]["state"] == "warn"
    assert "ahead of this desk's" in rows["clock"]["detail"]


def test_all_that_is_broken_on_a_host_is_told_at_once(contained, examine):
    machine = contained
    root = machine.home / "fab"
    (root / "releases").mkdir(parents=True)
    (root / "machine.json").write_text(json.dumps({"machine_id": "other", "uid": 0, "host": "h"}))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        host = machine.host(python="/nowhere/python", devices=(0, 1))
        run = dataclasses.replace(
            settings(target_model="/nowhere/model"), env={"MASTER_PORT": str(port)}
        )
        rows, error = examine(dataclasses.replace(host, run=run))
    assert states(rows, "broken") == {"root", "interpreter", "target", "run port", "GPU"}
    assert "/nowhere/python" in rows["interpreter"]["detail"]
    assert type(error) is errors.Ailing
    assert error.exit_code == 7


def test_full_read_only_and_noexec_disks_are_told(contained, examine):
    small = contained.home / "small"
    small.mkdir()
    inside = contained.inside
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m,noexec,nr_inodes=50", "tmpfs", str(small)]
    assert inside(mount).returncode == 0
    try:
        inside(["sh", "-c", f"head -c 6M /dev/zero > {small}/full"])
        host = contained.host(root=f"{small}/fab")
        rows, error = examine(host)
        assert {"disk (root)", "write (root)"} <= states(rows, "broken")
        assert "No space left" in rows["write (root)"]["detail"]
        assert rows["exec (root)"]["state"] == "warn"
        assert "noexec" in rows["exec (root)"]["detail"]
        assert error.exit_code == 7
        assert inside(["mount", "-o", "remount,ro", str(small)]).returncode == 0
        rows, _ = examine(host)
        assert "Read-only" in rows["write (root)"]["detail"]
    finally:
        assert inside(["umount", str(small)]).returncode == 0


def test_fab_doctor_prints_a_table_and_json(tmp_path, stub, machine):
    desk = Desk(tmp_path, stub, machine)
    lines = desk.fab("doctor")
    assert lines[0] == "gpu1:"
    assert [line for line in lines if line.split()[:2] == ["run", "ok"]]
    desk.fab("deploy")
    os.kill(desk.trainers()[0], 9)
    until(lambda: not desk.trainers())
    until(lambda: not [p for p in machine.processes() if "keeper" in p.name])
    lines = desk.fab("doctor", exits=7)
    at = next(number for number, line in enumerate(lines) if line.split()[:2] == ["run", "broken"])
    assert "killed by SIGKILL" in lines[at]
    assert lines[at + 1].strip().startswith("-> `fab logs`")
    assert desk.err == "fab doctor: exit 7; gpu1 (broken)\n"
    *_, outcome, summary = desk.objects("doctor", exits=7)
    assert outcome["error"]["class"] == "Ailing"
    assert {row["state"] for row in outcome["facts"]["checks"]} <= {"ok", "warn", "broken"}
    assert summary["exit_code"] == 7
    desk.hosts["gpu1"]["port"] = 1
    desk.write()
    lines = desk.fab("doctor", exits=3)
    assert [line for line in lines if line.split()[:2] == ["port", "broken"]]


def test_fab_trust_shows_the_key_before_it_stores_it(tmp_path, stub, machine):
    desk = Desk(tmp_path, stub, machine)
    known = tmp_path / "known"
    desk.hosts["gpu1"]["known_hosts"] = str(known)
    desk.write()
    words = ["ssh-keygen", "-lf", str(machine.folder / "host_key.pub")]
    own = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[1]
    assert desk.fab("trust", exits=2)[0].endswith("or --yes unseen")
    assert own in desk.fab("trust", exits=2)[0]
    wrong = desk.fab("trust", "--fingerprint", "SHA256:AAAA", exits=3)
    assert "was expected" in wrong[0]
    assert not known.exists()
    (line,) = desk.fab("trust", "--fingerprint", own)
    assert "changed" in line
    assert own in line
    assert machine.host_key in known.read_text()
    (line,) = desk.fab("trust", "--yes")
    assert "unchanged" in line
    assert desk.fab("health", exits=11)
    known.write_text(
        known.read_text().replace(
            machine.host_key, (machine.lab.key.with_suffix(".pub")).read_text().strip()
        )
    )
    assert "ssh-keygen -R" in desk.fab("trust", "--yes", exits=3)[0]


@pytest.mark.parametrize(("answer", "exits"), [("yes\n", 0), ("no\n", 3)])
def test_on_a_terminal_a_person_is_asked(tmp_path, stub, machine, answer, exits):
    import pty

    desk = Desk(tmp_path, stub, machine)
    desk.hosts["gpu1"]["known_hosts"] = str(tmp_path / "known")
    desk.write()
    ours, theirs = pty.openpty()
    os.write(ours, answer.encode())
    try:
        desk.fab("trust", stdin=theirs, exits=exits)
    finally:
        os.close(ours)
        os.close(theirs)
    assert "the same? yes or no:" in desk.err
    assert (tmp_path / "known").exists() == (exits == 0)
