"""The way back on a real host: by itself, by hand, and when there is none."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess

import pytest

from tasks import errors, plans
from tasks import release as releases
from tasks.fleet import carry_out
from tasks.link import Link
from tests.hosts.desk import Desk, plain, states
from tests.hosts.ground import until
from tests.hosts.machine import settings

PLANTED = '        raise RuntimeError("planted")\n'


@pytest.fixture
def desk(tmp_path, stub, machine):
    return Desk(tmp_path, stub, machine)


def edit(desk, text="# changed\n"):
    """Change the trainer; a text with an indent goes where the loop begins."""
    path = desk.folder / "trainer/loop.py"
    loop = path.read_text().replace(PLANTED, "")
    place = '        self.say("loading")\n'
    path.write_text(loop.replace(place, place + text, 1) if text[0] == " " else loop + text)


def latest(desk):
    return json.loads((desk.machine.home / "fab/runs/latest/spec.json").read_text())


def test_a_first_deploy_that_fails_says_what_to_do_and_leaves_nothing_running(desk):
    desk.write(hang_before_first_step=True)
    path = desk.folder / "hosts.yaml"
    path.write_text(path.read_text().replace("first_step_seconds: 20", "first_step_seconds: 2"))
    lines = [plain(line) for line in desk.fab("deploy", exits=10)]
    assert lines[-2].startswith("gpu1  kill             changed    ended pid N")
    assert lines[-1] == (
        "gpu1  put-back         FAILED     no first step: refused by the host: nothing to go back "
        "to: no other release made a step here; mend the trainer or its settings, then run "
        "`fab deploy`"
    )
    assert desk.err.splitlines()[-1] == (
        "fab deploy: exit 10; gpu1: await-progress, put-back failed; not rolled back: see "
        "`fab status --host gpu1`"
    )
    assert desk.trainers() == []
    assert "nobody holds it" in desk.fab("lease")[0]


def test_no_rollback_leaves_it_to_be_looked_at_and_rollback_by_hand_mends_it(desk):
    desk.fab("deploy")
    old = latest(desk)
    edit(desk, PLANTED)
    desk.fab("deploy", "--no-rollback", exits=10)
    assert desk.err.splitlines()[-1] == (
        "fab deploy: exit 10; gpu1: await-progress failed; `fab rollback --host gpu1` puts back "
        "what trained before"
    )
    assert desk.trainers() == []
    failed = latest(desk)["run_id"]
    (line,) = desk.fab("verify")
    assert line.endswith(f"warning: run {failed} of this release never made a step")
    assert latest(desk)["release"] != old["release"]
    dry = desk.fab("rollback", "--dry-run")
    assert states(dry) == [
        ("verify", "ok"),
        ("kill", "unchanged"),
        ("put-back", "would"),
        ("await-progress", "ok"),
    ]
    assert latest(desk)["run_id"] == failed
    *outcomes, summary = desk.objects("rollback")
    assert (summary["exit_code"], [each["back"] for each in outcomes]) == (0, [False] * 4)
    (facts,) = (each["facts"] for each in outcomes if each["operation"] == "put-back")
    assert (facts["like"], facts["instead_of"]) == (old["run_id"], failed)
    pids = desk.trainers()
    assert {state for _, state in states(desk.fab("rollback"))} == {"ok", "unchanged"}
    assert desk.trainers() == pids
    lines = (desk.machine.home / "fab/history.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    assert (last["verb"], last["who"], last["why"]) == (
        "put_back",
        "tester",
        "fab rollback --json",
    )


def test_settings_that_do_not_work_bring_the_old_ones_back(desk):
    desk.fab("deploy")
    old = latest(desk)
    desk.write(exit_before_first_step=True)
    assert ("put-back", "changed") in states(desk.fab("restart", exits=6))
    new = latest(desk)
    assert (new["spec_digest"], new["like"]) == (old["spec_digest"], old["run_id"])
    assert len(desk.trainers()) == 1


def test_any_kept_release_comes_back_by_its_name(desk):
    kept = []
    for text in ("# one\n", "# two\n", "# three\n"):
        edit(desk, text)
        desk.fab("deploy")
        kept.append(latest(desk)["release"])
    lines = desk.fab("rollback", "--to", kept[0][:10])
    assert f"release {kept[0][:12]} is back as run" in "\n".join(lines)
    pids = desk.trainers()
    assert ("put-back", "unchanged") in states(desk.fab("rollback", "--to", kept[0][:10]))
    assert desk.trainers() == pids
    desk.fab("rollback", "--to", kept[2])
    assert latest(desk)["release"] == kept[2]
    # What was put back is there; without a name it goes no further.
    assert ("put-back", "unchanged") in states(desk.fab("rollback"))
    (line,) = desk.fab("rollback", "--to", "012345", exits=7)
    assert "no release here begins so; there are: " in line
    assert len(desk.trainers()) == 1


def test_an_old_release_that_was_damaged_is_found_before_anything_is_stopped(desk):
    desk.fab("deploy")
    old = latest(desk)["release"]
    edit(desk)
    desk.fab("deploy")
    pids = desk.trainers()
    victim = desk.machine.home / "fab/releases" / old / "trainer/loop.py"
    victim.chmod(0o644)
    victim.write_text("raise ValueError\n")
    (line,) = desk.fab("rollback", exits=4)
    assert "trainer/loop.py: content differs" in line
    assert desk.trainers() == pids


def test_when_the_old_run_does_not_come_back_either_both_stories_are_told(desk):
    flag = desk.machine.home / "flag"
    edit(desk, f'        if os.path.exists({str(flag)!r}): raise OSError("the disk is gone")\n')
    desk.fab("deploy")
    flag.touch()
    edit(desk, PLANTED)
    lines = desk.fab("deploy", exits=10)
    assert [line for line in lines if line.startswith(("    | RuntimeE", "    | OSE"))] == [
        "    | RuntimeError: planted",
        "    | OSError: the disk is gone",
    ]
    assert sum("no first step: run" in line for line in lines) == 2


@pytest.fixture
def deploy(machine, notes):
    """`deploy(run)`: with the way back; gives (operation, state, part of the way back) and all."""

    def go(run, host=None):
        return carry_out(
            plans.DEPLOY,
            [host or machine.host()],
            run,
            links=lambda host: Link(host, notify=notes.append),
            on_outcome=lambda _: None,
            fallback=plans.BACK,
        )

    return go


def test_a_result_that_is_lost_on_the_way_back_is_read_again(
    machine, deploy, new_run, stub, monkeypatch
):
    deploy(new_run())
    loop = stub / "loop.py"
    loop.write_text(f"{loop.read_text()}\n# changed\n")
    link_ask = Link.ask

    def killed_after_acting(self, verb, arguments, **options):
        reply = link_ask(self, verb, arguments, **options)
        if verb == "put_back":
            raise errors.RemoteKilled(self.host.name, "put_back: by SIGKILL on the host")
        return reply

    broken = machine.host(run=settings(exit_before_first_step=True))
    with monkeypatch.context() as patched:
        patched.setattr(Link, "ask", killed_after_acting)
        *_, last = deploy(new_run(release=releases.read_tree(stub)), broken)
    assert (last.operation, last.error.exit_code) == ("put_back", 8)
    assert "; read again: run" in last.detail
    trainers = [p for p in machine.processes() if "trainer train" in p.words]
    assert len(trainers) == 1
    assert not (machine.home / "fab/lease").exists()


def test_ctrl_c_on_the_way_back_tells_what_was_under_way_and_gives_the_lease_back(desk):
    desk.write(load_seconds=1)
    desk.fab("deploy")
    desk.write(load_seconds=1, exit_before_first_step=True)
    given = desk.command("deploy")
    with subprocess.Popen(**given, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        for line in running.stdout:
            if "put-back" in line:
                break
        until(desk.trainers, what="the old trainer")
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=30)
    assert running.returncode == 12, err
    assert re.search(r"interrupted: (before await-progress|await-progress on gpu1 under way);", err)
    assert "nobody holds it" in desk.fab("lease")[0]
    assert len(desk.trainers()) == 1


def hold(desk, door, who="alice", seconds=60, host="her desk"):
    door(desk.machine.host()).ask(
        "lease_acquire",
        {"root": "~/fab", "seconds": seconds, "why": "fab deploy"},
        deadline=20,
        by={"who": who, "host": host, "why": "fab deploy"},
    )


def test_a_lease_is_waited_for_until_it_is_free(desk, door):
    hold(desk, door, seconds=3)
    assert ("sync", "changed") in states(desk.fab("sync", "--wait-lease", "30"))
    assert desk.err.startswith("gpu1: waiting for the lease: held by alice on her desk")
    assert len(desk.err.splitlines()) == 1


def test_waiting_for_a_lease_ends_and_then_says_whose_it_is(desk, door):
    hold(desk, door)
    (line,) = desk.fab("kill", "--wait-lease", "1", exits=5)
    assert "lease held: by alice on her desk (fab deploy) since" in line
    desk.fab("kill", "--wait-lease", "soon", exits=2)
    assert desk.err == "--wait-lease: is soon; give whole seconds, 0 to 99999\n"


def test_a_lease_of_others_is_freed_only_with_their_name(desk, door):
    hold(desk, door)
    (line,) = desk.fab("lease", "--release", exits=5)
    assert "`fab lease --release --of alice` ends it all the same" in line
    desk.fab("lease", "--release", "--of", "bob", exits=5)
    (line,) = desk.fab("lease", "--release", "--of", "alice")
    assert "freed: alice on her desk: `fab deploy`, since" in line
    assert states(desk.fab("lease", "--release")) == [("lease", "ok")]
    lines = (desk.machine.home / "fab/history.jsonl").read_text().splitlines()
    told = json.loads(lines[-1])
    assert (told["verb"], told["who"], told["of"]["who"]) == ("lease_free", "tester", "alice")
    hold(desk, door, who="tester", host=os.uname().nodename)
    assert "freed: tester" in desk.fab("lease", "--release")[0]


def test_a_lease_that_is_taken_away_ends_a_deploy_before_its_next_change(desk):
    main = desk.folder / "trainer/__main__.py"
    main.write_text(main.read_text().replace("time.sleep(120)", "time.sleep(5)"))
    desk.fab("deploy")
    pids = desk.trainers()
    desk.write(env={"STUB_HANG": "1"})
    given = desk.command("deploy", "--restart")
    with subprocess.Popen(**given, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        for line in running.stdout:
            if line.split()[1:3] == ["verify", "ok"]:
                break
        assert "freed: tester" in desk.fab("lease", "--release")[0]
        out, err = running.communicate(timeout=60)
    assert running.returncode == 5, err
    told = next(line for line in out.splitlines() if "kill" in line)
    assert "lease held: ours is gone: it ran out, or somebody freed it" in told
    assert "; read again: run" in told
    assert err.startswith("fab deploy: exit 5; gpu1: kill failed; not done: launch")
    assert desk.trainers() == pids
