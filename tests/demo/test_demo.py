"""scripts/demo in a copied checkout: every ending with the stub, the real trainer by --long."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.ground import everyone, needs, until

ROOT = Path(__file__).resolve().parents[2]
VENV = Path(sys.executable).parent.parent
TYPED = [
    "$ fab deploy --host demo",
    "$ fab status",
    "$ cp -R trainer .demo/trainer",
    "$ echo 'print(\"a changed trainer\")' >> .demo/trainer/train.py",
    "$ fab deploy --host demo --trainer .demo/trainer",
    "$ fab restart --host demo",
    "$ fab logs --host demo --lines 9",
    "$ fab kill --host demo",
]


def copied(folder, trainer):
    """A checkout that is set up, with a model that needs no conversion."""
    quiet = shutil.ignore_patterns("__pycache__")
    for name in ("fabfile.py", "fabric.yaml", "hosts.yaml"):
        shutil.copy(ROOT / name, folder)
    for name in ("scripts", "tasks", "data"):
        shutil.copytree(ROOT / name, folder / name, ignore=quiet)
    shutil.copytree(trainer, folder / "trainer", ignore=quiet)
    (folder / "scripts/setup").write_text("#!/bin/sh\n")
    (folder / ".venv").symlink_to(VENV)
    (folder / ".demo/home/models/smollm2-135m").mkdir(parents=True)
    return folder


@pytest.fixture
def checkout(tmp_path):
    needs("sshd")
    folder = tmp_path / "a checkout"
    folder.mkdir()
    yield copied(folder, ROOT / "tests/stub/trainer")
    assert alive(folder) == []


def alive(folder):
    """What runs from there: by its words, its working folder, or its environment."""
    return [
        p
        for p in everyone()
        if p.state != "Z" and (str(folder) in p.words or p.carries(str(folder)))
    ]


def command(folder, *words):
    return {
        "args": ["./scripts/demo", *words],
        "cwd": folder,
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
    }


def demo(folder, *words, before=(), timeout=120):
    given = command(folder, *words)
    given["args"] = [*before, *given["args"]]
    done = subprocess.run(**given, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout
    return done.stdout.splitlines()


def tree(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def followed(lines):
    """What every demo shows, whatever its trainer."""
    assert [line for line in lines if line.startswith("$ ")] == TYPED
    (sent,) = [line for line in lines if " sync  " in line and ": 1 file, " in line]
    assert "changed" in sent
    stops = [line for line in lines if "  kill  " in line and "ended pid" in line]
    steps = [line for line in lines if "await-progress" in line and " step " in line]
    assert (len(stops), len(steps)) == (3, 3)
    numbers = [
        int(line.partition(" step ")[2].split(",")[0].split()[0])
        for pair in zip(steps, stops, strict=True)
        for line in pair
    ]
    assert numbers == sorted(numbers)
    assert "sshd is stopped, and nothing is left running" in lines


def test_it_follows_its_story_and_leaves_the_checkout_as_it_was(checkout):
    before = tree(checkout / "trainer")
    followed(demo(checkout))
    assert tree(checkout / "trainer") == before
    assert (checkout / ".demo/home/models/smollm2-135m").is_dir()


def test_kept_it_goes_on_and_can_be_begun_again(checkout):
    lines = demo(checkout, "--keep")
    assert "$ fab kill --host demo" not in lines
    assert "  .venv/bin/fab logs -f" in lines
    shown = subprocess.run(
        [".venv/bin/fab", "status"], cwd=checkout, capture_output=True, text=True, check=True
    )
    assert shown.stdout.splitlines()[1].split()[:2] == ["demo", "training"]
    again = demo(checkout)
    assert "# taking down the demo host that --keep left up" in again
    followed(again)


def kill_group(running):
    os.killpg(running.pid, signal.SIGINT)


def stop_reading(running):
    running.stdout.close()


@pytest.mark.parametrize(
    ("accident", "code"),
    [(kill_group, 130), (subprocess.Popen.terminate, 143), (stop_reading, 141)],
)
def test_whatever_ends_it_early_nothing_is_left_running(checkout, accident, code):
    given = {**command(checkout, "--keep"), "start_new_session": True}
    with subprocess.Popen(**given) as running:
        for line in running.stdout:
            if "launch" in line:
                break
        assert alive(checkout)
        accident(running)
        if not running.stdout.closed:
            running.stdout.read()
        assert running.wait(60) == code
    until(lambda: not alive(checkout), what="the end of all")


def test_a_second_one_at_the_same_time_is_refused(checkout):
    with subprocess.Popen(**command(checkout)) as running:
        for line in running.stdout:
            if "sshd runs" in line:
                break
        second = subprocess.run(**command(checkout), timeout=60, check=False)
        running.stdout.read()
    assert second.returncode == 2
    assert "another demo of this checkout is running" in second.stdout
    assert running.returncode == 0


def test_a_demo_host_that_is_not_up_says_how_to_start_it(checkout):
    done = subprocess.run(
        [".venv/bin/fab", "status"], cwd=checkout, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert "`./scripts/demo --keep` starts it" in done.stderr


def test_a_plain_user_may_run_it_too(checkout, tmp_path):
    needs("pidns")
    # A system user, in a mount namespace where it has a login shell, and no /run/sshd.
    passwd = Path("/etc/passwd").read_text().splitlines()
    lines = [
        f"{line.rpartition(':')[0]}:/bin/sh" if line.startswith("daemon:") else line
        for line in passwd
    ]
    (tmp_path / "passwd").write_text("\n".join(lines) + "\n")
    base = sys.base_prefix
    inside = [
        f"mount --bind '{tmp_path}/passwd' /etc/passwd",
        "mount -t tmpfs tmpfs /run",
        # Others may not look into /root, where some Pythons live.
        f"mkdir /run/base && mount --bind {base} /run/base",
        "mount -t tmpfs tmpfs /root",
        f"mkdir -p {base} && mount --bind /run/base {base}",
        'exec setpriv --reuid=daemon --regid=daemon --clear-groups -- "$@"',
    ]
    for path in [checkout, *checkout.rglob("*")]:
        shutil.chown(path, "daemon", "daemon") if not path.is_symlink() else None
    for above in [checkout.parent, *checkout.parent.parents][:4]:
        above.chmod(above.stat().st_mode | 0o111)
    followed(demo(checkout, before=["unshare", "--mount", "sh", "-ec", "\n".join(inside), "sh"]))


@pytest.mark.long
def test_the_real_trainer_takes_under_four_minutes(checkout):
    if not (ROOT / ".demo/home/models/smollm2-135m").is_dir():
        pytest.skip("not run: no converted model in this checkout's .demo; ./scripts/demo makes it")
    shutil.rmtree(checkout / "trainer")
    quiet = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "trainer", checkout / "trainer", ignore=quiet)
    models = checkout / ".demo/home/models"
    shutil.rmtree(models)
    models.symlink_to(ROOT / ".demo/home/models")
    lines = demo(checkout, timeout=240)
    followed(lines)
    assert "a changed trainer" in lines
    assert any(line.startswith("resumed") for line in lines)
