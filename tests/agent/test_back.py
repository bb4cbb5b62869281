"""Which run comes back, and on which checkpoint."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.agent.call import RefusalError, wait_for
from tests.agent.machine import canonical


def change(machine, text):
    machine.change(f"# {text}\n")
    return machine.sync()["digest"]


def start(machine, *flags, **more):
    """A run that makes its first step; its id."""
    run_id = machine.launch(*flags, **more)["run_id"]
    machine.ask("await_progress", run_id=run_id)
    return run_id


def fail(machine, *flags, **more):
    """A run that is given up before its first step; its id."""
    run_id = machine.launch(*flags, **more)["run_id"]
    with pytest.raises(RefusalError) as caught:
        machine.ask("await_progress", run_id=run_id)
    assert caught.value.code == "no-first-step"
    return run_id


def back(machine, *, instead_of=None, to=None, **more):
    words = {"instead_of": instead_of, "to": to}
    return machine.ask("put_back", run_id=machine.run_id(), back=words, **more)


def checkpoints(machine):
    return sorted(path.name for path in machine.output.glob("step-*"))


def checkpoint(machine, step):
    path = machine.output / f"step-{step:08d}"
    path.mkdir()
    (path / "checkpoint.json").write_text(json.dumps({"step": step, "files": {}}))


def test_the_old_release_comes_back_with_its_settings_on_the_pinned_checkpoint(machine):
    old = machine.deploy()
    first = start(machine, "--steps", 900_000)
    stopped = machine.kill()["step"]
    change(machine, "new")
    failed = fail(machine, "--crash-at", stopped + 2, "--nan-at", stopped + 1)
    assert json.loads((machine.run_folder(failed) / "failed.json").read_text())["why"] == "crashed"
    checkpoint(machine, stopped + 1)  # as if it had saved before it died
    answer = back(machine, instead_of=failed)
    assert (answer["release"], answer["like"], answer["instead_of"]) == (old, first, failed)
    assert answer["aside"] == [str(machine.output / f"aside-{failed}" / f"step-{stopped + 1:08d}")]
    assert answer["checkpoint"].endswith(f"step-{stopped:08d}")
    assert answer["spec_digest"] == canonical(machine.spec("--steps", 900_000))
    assert str((machine.root / "current").readlink()) == f"releases/{old}"
    step = machine.ask("await_progress", run_id=answer["run_id"])
    assert step["step"] > stopped
    assert step["last_lines"][-1].startswith("step")
    lines = [json.loads(line) for line in (machine.root / "history.jsonl").read_text().splitlines()]
    assert [line["verb"] for line in lines][-2:] == ["set_aside", "put_back"]
    again = back(machine, instead_of=failed)
    assert (again["changed"], again["run_id"], again["aside"]) == (
        False,
        answer["run_id"],
        answer["aside"],
    )
    # By hand, right after: what was put back is there.
    assert back(machine)["changed"] is False
    kept = machine.kill(keep={"run_id": None, "pair": None, "back": {}})
    assert kept["kept"] == answer["run_id"]


def test_by_hand_the_run_before_the_newest_comes_back_and_goes_on_from_its_checkpoint(machine):
    machine.deploy()
    first = start(machine)
    machine.kill()
    change(machine, "better, it seemed")
    second = start(machine)
    stopped = machine.kill()["step"]
    dry = back(machine, dry=True)
    assert (dry["changed"], dry["like"], dry["aside"]) == (True, first, [])
    answer = back(machine)
    assert (answer["like"], answer["instead_of"], answer["aside"]) == (first, second, [])
    assert answer["checkpoint"].endswith(f"step-{stopped:08d}")


def test_only_settings_changed_and_the_old_settings_come_back(machine):
    digest = machine.deploy()
    first = start(machine, "--steps", 500_000)
    machine.kill()
    failed = fail(machine, "--exit-before-first-step")
    answer = back(machine, instead_of=failed)
    assert (answer["release"], answer["like"]) == (digest, first)


def test_work_of_a_run_that_died_by_itself_is_never_set_aside(machine):
    machine.deploy()
    start(machine)
    machine.kill()
    died = start(machine, "--save-interval", 40, "--die-at", 10_000)
    saved = wait_for(lambda: len(checkpoints(machine)) > 2 and checkpoints(machine))[-1]
    trainer = machine.record(died)["trainer"]["pid"]
    os.kill(trainer, signal.SIGKILL)
    wait_for(lambda: machine.health()["state"] == "killed")
    saved = checkpoints(machine)[-1]
    failed = fail(machine, "--exit-before-first-step")
    answer = back(machine, instead_of=failed)
    assert answer["aside"] == []
    assert answer["checkpoint"] == str(machine.output / saved)
    assert answer["like"] == died


def test_what_failed_is_taken_only_when_it_is_named(machine):
    oldest = machine.deploy()
    first = start(machine)
    machine.kill()
    newer = change(machine, "newer")
    second = start(machine)
    machine.kill()
    failed = fail(machine, "--exit-before-first-step", digest=newer)
    # `second` is of the same release, with settings under which it made steps.
    assert back(machine, instead_of=failed, dry=True)["like"] == second
    named = back(machine, to=oldest[:8], dry=True)
    assert (named["release"], named["like"]) == (oldest, first)
    with pytest.raises(RefusalError, match="no release here begins so; there are: "):
        back(machine, to="0" * 12, dry=True)
    with pytest.raises(RefusalError, match="give 6 to 64 hex digits"):
        back(machine, to="xyz", dry=True)


def test_a_pair_that_failed_later_is_passed_over_by_hand(machine):
    oldest = machine.deploy()
    start(machine)
    machine.kill()
    flag = machine.home / "flag"
    machine.change(f"import os\nif os.path.exists({str(flag)!r}): raise SystemExit(9)\n")
    newer = machine.sync()["digest"]
    second = start(machine)
    machine.kill()
    flag.touch()
    failed = fail(machine)
    assert back(machine, instead_of=failed, dry=True)["like"] == second
    answer = back(machine, instead_of=failed)
    with pytest.raises(RefusalError):
        machine.ask("await_progress", run_id=answer["run_id"])
    by_hand = back(machine, dry=True)
    assert by_hand["release"] == oldest
    assert back(machine, to=newer, dry=True)["release"] == newer
    warnings = machine.ask("verify", digest=newer)["warnings"]
    assert f"run {answer['run_id']} of this release never made a step" in warnings


def test_where_nothing_made_a_step_there_is_nothing_to_go_back_to(machine):
    digest = machine.deploy()
    failed = fail(machine, "--exit-before-first-step")
    for words in ({"instead_of": failed}, {}):
        with pytest.raises(RefusalError, match="nothing to go back to: no other release made a"):
            back(machine, **words)
    assert back(machine, to=digest, dry=True)["like"] == failed
    unused = change(machine, "never ran")
    with pytest.raises(RefusalError, match="never ran here, so its settings are not known"):
        back(machine, to=unused)


def test_a_run_that_lives_is_in_the_way(machine):
    machine.deploy()
    start(machine)
    machine.kill()
    change(machine, "new")
    start(machine)
    with pytest.raises(RefusalError, match=r"is training in this root .*; run `fab kill` first"):
        back(machine)
    assert back(machine, dry=True)["changed"]


def test_who_only_looks_marks_nothing(machine):
    machine.deploy()
    run_id = machine.launch("--exit-before-first-step")["run_id"]
    machine.token = None
    with pytest.raises(RefusalError):
        machine.ask("await_progress", run_id=run_id)
    assert not (machine.run_folder(run_id) / "failed.json").exists()
