"""A person's words: what is refused before any host is asked, and where the answers go."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tasks import cli, errors

ROOT = Path(__file__).resolve().parents[2]
FAB = Path(sys.executable).with_name("fab")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A checkout with the stub trainer, and hosts that are nowhere."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("fabfile.py", "fabric.yaml"):
        shutil.copy(ROOT / name, folder)
    for source, name in ((ROOT / "tasks", "tasks"), (ROOT / "tests/stub/trainer", "trainer")):
        shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "hosts.yaml").write_text(
        "run: {trainer: {output-dir: ~/out}}\n"
        "groups: {default: [gpu1]}\n"
        "hosts:\n"
        "  gpu1: {address: 127.0.0.1, port: 1}\n"
        "  gpu2: {address: 127.0.0.1, port: 1}\n"
    )
    return folder


def fab(project, *words, folder=".", **environment):
    return subprocess.run(
        [FAB, *words],
        cwd=project / folder,
        env={**os.environ, "CI": "true", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )


REFUSED = [
    (
        ["deploy", "--host", "gpu9"],
        "--host: no host named gpu9; hosts.yaml has gpu1, gpu2, default",
    ),
    (["-H", "gpu1,gpu9", "verify"], "--host: no host named gpu9"),
    (["launch", "--run-id", "mine"], "a run's id: is mine; its form is YYYYMMDD-HHMMSS-xxxx"),
    (["deploy", "--trainer", "tasks"], "--trainer: is tasks; name a folder called `trainer`"),
    (["logs", "--lines", "many"], "--lines: is many; give a number"),
    (["status", "-H", "gpu1", "--", "uptime"], "use `ssh HOST COMMAND`"),
]


@pytest.mark.parametrize(("words", "told"), REFUSED)
def test_what_cannot_be_meant_is_refused_in_a_line_with_exit_2(project, words, told):
    done = fab(project, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_from_a_folder_below_the_project_it_finds_hosts_and_trainer(project):
    done = fab(project, "status", "--host", "gpu9", folder="trainer")
    assert "hosts.yaml has gpu1, gpu2" in done.stderr


def test_a_trainer_that_does_not_parse_is_told_with_its_line_before_any_connection(
    project, tmp_path
):
    trainer = tmp_path / "trainer"
    shutil.copytree(project / "trainer", trainer)
    (trainer / "loop.py").write_text("def step(:\n")
    done = fab(project, "deploy", "--trainer", str(trainer))
    assert done.returncode == 2
    assert done.stderr.startswith("trainer/loop.py:1: ")


def test_json_has_the_error_and_the_summary_on_stdout_and_nothing_else(project):
    done = fab(project, "deploy", "--host", "gpu9", "--json")
    error, summary = map(json.loads, done.stdout.splitlines())
    assert (error["kind"], error["class"], error["exit_code"]) == ("error", "MissingHostError", 2)
    assert summary == {"kind": "summary", "task": "deploy", "exit_code": 2, "dry": False}


@pytest.mark.parametrize("words", [("--list",), ()])
def test_listing_is_the_first_page_of_the_manual(project, words):
    done = fab(project, *words)
    assert done.returncode == 0
    assert done.stdout.splitlines()[:8] == [
        "fab TASK [--host NAMES|GROUP|GLOB]     hosts, and what they run: hosts.yaml",
        "",
        "Every day:",
        "  deploy           Bring this trainer to the hosts, prove it there, and train.",
        "  status           Show what each host trains, and the last words of what died.",
        "  logs             Show the end of the run's log; -f follows it.",
        "  restart          Stop the run and start a new one of the same release.",
        "  kill             Let the run checkpoint and stop, until nothing of it is left.",
    ]


def test_listing_loads_neither_ssh_of_ours_nor_retries():
    # Fabric itself brings paramiko.
    code = "import sys, fabfile; print(sorted({'tenacity', 'tasks.link'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_a_bug_shows_its_traceback_and_exits_1(project, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(project, broken)
    (broken / "tasks/inventory/__init__.py").write_text("")
    done = fab(broken, "status")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


class Terminal(io.StringIO):
    def isatty(self):
        return True


def face(out, err, *, as_json=False, **environment):
    return cli.Face(out, err, environment, as_json=as_json)


def test_on_a_terminal_progress_is_replaced_by_what_follows():
    out, err = Terminal(), Terminal()
    its = face(out, err)
    its.progress("demo: loading")
    its.progress("demo: training")
    its.say("done")
    wipe = "\r\x1b[K"
    assert err.getvalue() == f"{wipe}demo: loading{wipe}demo: training{wipe}"
    assert out.getvalue() == "done\n"
    assert its.paper.colour


@pytest.mark.parametrize("plain", [{"CI": "true"}, {"TERM": "dumb"}])
def test_in_ci_all_is_plain_lines_even_on_a_terminal(plain):
    out, err = Terminal(), Terminal()
    its = face(out, err, **plain)
    its.progress("demo: loading")
    its.say("done")
    assert (err.getvalue(), out.getvalue()) == ("demo: loading\n", "done\n")
    assert its.paper == cli.report.Paper()


def test_no_color_takes_the_colour_and_leaves_the_folding():
    paper = face(Terminal(), Terminal(), NO_COLOR="1").paper
    assert (paper.colour, paper.fold) == (False, True)


def test_json_is_all_that_stdout_gets():
    out, err = io.StringIO(), io.StringIO()
    its = face(out, err, as_json=True)
    its.say("for people")
    its.tell("log", {"line": "x"})
    its.note("retry")
    assert (out.getvalue(), err.getvalue()) == ('{"kind": "log", "line": "x"}\n', "retry\n")


def test_work_goes_on_when_whoever_read_stdout_has_gone():
    code = (
        "import os, sys; from tasks import cli\n"
        "face = cli.Face(sys.stdout, sys.stderr, {}, as_json=False)\n"
        "for _ in range(3): face.say('x' * 100_000)\n"
        "face.note(f'still here, listening: {face.listening}')\n"
    )
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "still here, listening: False\n")


@pytest.mark.parametrize("number", [2, 15, 1])
def test_a_signal_ends_a_task_with_12_and_says_what_was_under_way(number, capsys):
    import signal

    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}

    def work(_):
        signal.raise_signal(number)
        return 0

    try:
        with pytest.raises(SystemExit) as ended:
            cli._speak(cli.Words(task="deploy"), work)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert ended.value.code == errors.Interrupted.exit_code
    assert capsys.readouterr().err == "fab deploy: interrupted: no host was asked yet\n"


def test_a_redrawn_line_of_a_log_is_shown_in_its_last_state():
    assert cli._last_state(r"loading  0%\x0dloading 50%\x0dloading 100%\x0d") == "loading 100%"
    assert cli._last_state("step 1") == "step 1"
