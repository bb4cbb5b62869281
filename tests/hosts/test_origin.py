"""The failures that this project started from, as they were, beside what it does instead.

The two texts kill whatever matches them, the shell that runs them included: they run only on a
host with a PID space of its own.
"""

from __future__ import annotations

import sys
import threading

import fabric
import paramiko
import pytest

from tasks import errors, plans
from tasks.fleet import carry_out
from tasks.inventory import RunSettings
from tasks.link import Link
from tests.hosts.ground import until

NAME = "train_dflash_online.py"

# Seed 1, as it was typed.
ONE_LINER = (
    'pgrep -f "python3.*train_dflash" | xargs kill 2>/dev/null; echo "killed"; sleep 2; '
    'pgrep -f "python3.*train_dflash" | wc -l'
)

# Seed 2: the bracket hides the pattern from itself, and the launch line further down shows it.
BRACKET_TRICK = r"""
ps aux | grep "[p]ython3.*train_dflash" | awk "{print \$2}" | xargs -r kill 2>/dev/null
sleep 3
echo "Old killed"
grep -c "overlap_pool\|build_batches_from_preloaded\|Pre-loading dataset" /root/train_dflash_online.py
echo "New features confirmed"
source /root/venv/bin/activate
cd /root
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True nohup python3 train_dflash_online.py \
  --target-model /dev/shm/Qwen3.6-27B \
  --data-dir /workspace/tokenized_completions \
  --output-dir /workspace/checkpoints \
  --epochs 6 --lr 6e-4 --max-anchors 512 --token-budget 8192 \
  --block-size 16 --dp-pairs 2 --log-interval 10 --save-interval 5000 \
  > /workspace/train.log 2>&1 &
echo "PID=$!"
sleep 2
kill -0 $! 2>/dev/null && echo "ALIVE" || echo "DEAD"
"""  # noqa: E501 - as it was typed

TEXTS = pytest.mark.parametrize("text", [ONE_LINER, BRACKET_TRICK], ids=["one-liner", "bracket"])


def through_fabric(machine, text):
    """Run a text as the origin did; gives Fabric's result, and whether the connection lived."""
    host = machine.host()
    with fabric.Connection(
        host.address,
        user=host.user,
        port=host.port,
        connect_kwargs={"key_filename": host.identity_file, "allow_agent": False},
        config=fabric.Config(lazy=True, ssh_config=paramiko.SSHConfig()),
    ) as connection:
        result = connection.run(text, hide=True, warn=True, in_stream=False, timeout=30)
        return result, connection.is_connected


@pytest.fixture
def restart(notes):
    """`restart(host, run)`: the plan of `fab restart`; every operation must succeed."""

    def go(host, run):
        done = carry_out(
            plans.RESTART,
            [host],
            run,
            links=lambda host: Link(host, notify=notes.append),
            on_outcome=lambda _: None,
        )
        assert not [outcome for outcome in done if outcome.error], done
        return {outcome.operation: outcome for outcome in done}

    return go


@TEXTS
def test_the_texts_kill_their_own_shell_and_say_nothing(contained, text):
    result, connected = through_fabric(contained, text)
    assert result.exited == -1
    assert (result.stdout, result.stderr) == ("", "")
    assert connected


@TEXTS
def test_the_texts_end_the_old_trainer_and_start_no_new_one(contained, text):
    old = contained.start(["python3", "-c", "import time; time.sleep(60)", NAME])
    try:
        until(lambda: [p for p in contained.processes() if NAME in p.words])
        result, _ = through_fabric(contained, text)
        assert (result.exited, result.stdout) == (-1, "")
        old.wait(10)
        assert not [p for p in contained.processes() if NAME in p.words]
    finally:
        old.kill()
        old.wait()


@pytest.mark.parametrize("shell", ["bash", "sh"])
@TEXTS
def test_a_restart_in_the_same_situation_stops_exactly_the_old_run(
    contained, new_run, restart, text, shell
):
    # The run's own command line holds the pattern and, as the value of a flag, the whole text.
    host = contained.host(
        run=RunSettings(
            trainer={
                "output-dir": "~/out",
                "steps": 100_000,
                "step-seconds": 0.02,
                "note": f"python3 {NAME} {text}",
            },
            grace_seconds=10,
            first_step_seconds=20,
        )
    )
    old = new_run(fresh=True)
    carry_out(
        (plans.sync,),
        [host],
        old,
        links=lambda host: Link(host, notify=print),
        on_outcome=lambda _: None,
    )
    restart(host, old)

    def trainers(run):
        return [p for p in contained.processes() if p.carries(f"TRAINER_RUN_ID={run.id}\0")]

    assert f"python3 {NAME}" in trainers(old)[0].words
    # Bystanders: a shell whose command line holds the text, and a program that looks like ours.
    bystanders = [
        contained.start([shell, "-c", f"sleep 60\n: {text}"]),
        contained.start([sys.executable, "-c", "import time; time.sleep(60)", NAME, text]),
    ]
    try:
        until(lambda: sum(NAME in p.words or "pgrep" in p.words for p in contained.processes()) > 2)
        new = new_run(fresh=True)
        outcomes = restart(host, new)
        assert outcomes["kill"].state == "changed"
        assert outcomes["launch"].state == "changed"
        assert not trainers(old)
        assert trainers(new)
        assert [each.poll() for each in bystanders] == [None, None]
        for outcome in outcomes.values():
            assert outcome.detail
    finally:
        for each in bystanders:
            each.kill()
            each.wait()


def test_a_restart_with_nothing_running_starts_the_run(contained, new_run, restart):
    host, run = (
        contained.host(run=RunSettings(trainer={"output-dir": "~/out", "steps": 9})),
        new_run(),
    )
    carry_out(
        (plans.sync,),
        [host],
        run,
        links=lambda host: Link(host, notify=print),
        on_outcome=lambda _: None,
    )
    outcomes = restart(host, run)
    assert outcomes["kill"].state == "unchanged"
    assert outcomes["launch"].state == "changed"


def asked_until_killed(link):
    for _ in range(200):  # a verb may have answered before the killer came
        link.ask("health", {"root": "~/fab", "run_id": None}, deadline=20)


def test_the_same_death_of_a_verb_is_told_as_killed(contained, door):
    # What the origin met, at our door: the program there is killed before it can say anything.
    link = door(contained.host())
    before = contained.log().count("Accepted publickey")

    told = threading.Event()

    def kill_every_verb():
        while not told.is_set():
            contained.inside(["pkill", "-9", "-f", "zlib.decompress"])

    killer = threading.Thread(target=kill_every_verb)
    killer.start()
    try:
        with pytest.raises(errors.RemoteKilled, match="SIGKILL on the host"):
            asked_until_killed(link)
    finally:
        told.set()
        killer.join()
    # Told, and not asked again behind the person's back: one connection, still open.
    assert contained.log().count("Accepted publickey") <= before + 1
    assert link.ask("health", {"root": "~/fab", "run_id": None}, deadline=20)["state"] == "absent"
