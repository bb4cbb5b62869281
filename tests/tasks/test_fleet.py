"""The barrier, leases, and what is told when something goes wrong; with hosts that are made up."""

# ruff: noqa: ARG001 - stand-ins have the signature of the real thing

from __future__ import annotations

import dataclasses
import threading
from datetime import UTC, datetime

import pytest

from tasks import errors, operations
from tasks.fleet import carry_out
from tasks.operations import Run, new_run_id
from tasks.operations.words import changes
from tasks.outcome import Effect
from tests.tasks.doors import RUN


def look(host, run, link):
    return Effect(changed=False, detail="looked")


@changes
def act(host, run, link):
    return Effect(changed=True, detail=f"acted with {run.lease and 'a lease'}")


@changes
def rest(host, run, link):
    return Effect(changed=False, detail="nothing to do")


def test_states_say_what_happened(fleet):
    outcomes = fleet((look, act, rest), count=1)
    assert [(o.operation, o.state) for o in outcomes] == [
        ("look", "ok"),
        ("act", "changed"),
        ("rest", "unchanged"),
    ]
    assert list(outcomes) == fleet.told


def test_outcomes_are_in_the_order_of_plan_and_hosts(fleet):
    outcomes = fleet((look, act))
    assert [(o.operation, o.host) for o in outcomes] == [
        (operation, f"gpu{number}") for operation in ("look", "act") for number in (1, 2, 3)
    ]


def test_no_host_begins_an_operation_before_all_ended_the_one_before(fleet):
    done, lock = [], threading.Lock()

    def first(host, run, link):
        with lock:
            done.append("first")
        return Effect(changed=False, detail="")

    def second(host, run, link):
        with lock:
            assert done.count("first") == 3
        return Effect(changed=False, detail="")

    assert {o.state for o in fleet((first, second))} == {"ok"}


def test_hosts_are_worked_on_at_the_same_time_and_bounded(fleet):
    together = threading.Barrier(3, timeout=10)

    def meet(host, run, link):
        together.wait()
        return Effect(changed=False, detail="")

    assert {o.state for o in fleet((meet,))} == {"ok"}
    now, most, lock = [0], [0], threading.Lock()

    def count(host, run, link):
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        with lock:
            now[0] -= 1
        return Effect(changed=False, detail="")

    fleet((count,), count=40, at_once=2)
    assert most[0] <= 2


def test_a_lease_is_taken_before_the_first_change_and_given_back_at_the_end(fleet):
    outcomes = fleet((look, act, rest), count=1)
    assert outcomes[1].detail == "acted with a lease"
    asked = [verb for verb, _ in fleet.doors["gpu1"].asked]
    assert asked == ["lease_acquire", "lease_release"]
    tokens = {lease for _, lease in fleet.doors["gpu1"].asked}
    assert len(tokens) == 1
    assert fleet.doors["gpu1"].closed


def test_a_lease_is_renewed_when_a_third_of_it_is_over(fleet):
    now = [0]

    def pass_time(host, run, link):
        now[0] += 200
        return Effect(changed=False, detail="")

    fleet((act, pass_time, act, pass_time, act), count=1, clock=lambda: now[0])
    asked = [verb for verb, _ in fleet.doors["gpu1"].asked]
    # At the beginning, and after 400 s; not after 200 s.
    assert asked.count("lease_acquire") == 2


def test_what_is_verified_is_under_the_lease_and_the_probe_is_not(fleet):
    fleet((look, act), count=1)
    assert fleet.doors["gpu1"].asked[0][0] == "lease_acquire"
    fleet((operations.probe, look), count=1)
    assert [verb for verb, _ in fleet.doors["gpu1"].asked] == ["probe"]
    fleet((operations.probe, look, act), count=1)
    assert [verb for verb, _ in fleet.doors["gpu1"].asked][:2] == ["probe", "lease_acquire"]


def test_a_lease_of_somebody_else_is_waited_for_and_told_once(fleet):
    now = [0]
    held = errors.LeaseHeld("gpu1", "by anna", facts={"who": "anna", "since": "10:00"})
    waiting = dataclasses.replace(RUN, wait_lease=10)

    def sleep(seconds):
        now[0] += seconds
        if now[0] >= 6:
            fleet.doors["gpu1"]._answers.clear()

    given = {"count": 1, "clock": lambda: now[0], "sleep": sleep}
    (outcome,) = fleet((act,), run=waiting, answers={"lease_acquire": held}, **given)
    assert (outcome.state, now[0]) == ("changed", 6)
    assert fleet.doors["gpu1"].notes == ["gpu1: waiting for the lease: held by anna"]
    now[0] = -20  # this time nobody gives it back
    (outcome,) = fleet((act,), run=waiting, answers={"lease_acquire": held}, **given)
    assert (outcome.error.exit_code, now[0]) == (5, -10)


def test_a_lease_that_was_lost_ends_the_plan_and_the_state_is_read_again(fleet):
    @changes
    def lose(host, run, link):
        raise errors.LeaseHeld(host.name, "ours is gone")

    health = {"state": "training", "run_id": "r1"}
    outcomes = fleet((act, lose, act), count=1, answers={"health": health})
    assert [o.state for o in outcomes] == ["changed", "FAILED", "skipped"]
    assert outcomes[1].detail.endswith("ours is gone; read again: run r1 is training")
    assert "lease_release" not in [verb for verb, _ in fleet.doors["gpu1"].asked]


def test_a_lease_whose_answer_was_lost_is_given_back_all_the_same(fleet):
    lost = errors.ConnectionLost("gpu1", "lease_acquire: it ended before the answer")
    fleet((act,), count=1, answers={"lease_acquire": lost})
    (_, token), *_, (verb, same) = fleet.doors["gpu1"].asked
    assert (verb, same) == ("lease_release", token)


def test_looking_and_dry_runs_take_no_lease(fleet):
    fleet((look,), count=1)
    assert fleet.doors["gpu1"].asked == []
    dry = Run(id=RUN.id, dry=True)
    assert [o.state for o in fleet((act, rest), count=1, run=dry)] == ["would change", "unchanged"]
    assert fleet.doors["gpu1"].asked == []


def test_a_host_that_failed_is_skipped_and_the_others_go_on(fleet):
    @changes
    def fragile(host, run, link):
        if host.name == "gpu2":
            raise errors.VerificationFailed("gpu2", "loop.py differs", "run `fab sync`")
        return Effect(changed=True, detail="")

    outcomes = {(o.operation, o.host): o for o in fleet((fragile, act, look))}
    assert outcomes["fragile", "gpu2"].state == "FAILED"
    assert isinstance(outcomes["fragile", "gpu2"].error, errors.VerificationFailed)
    assert outcomes["act", "gpu2"].state == outcomes["look", "gpu2"].state == "skipped"
    assert outcomes["act", "gpu2"].detail == "fragile failed"
    assert outcomes["look", "gpu3"].state == "ok"
    # Its lease was given back when it failed, not when the others were done.
    assert [verb for verb, _ in fleet.doors["gpu2"].asked][-1] == "lease_release"


def test_somebody_elses_lease_fails_the_plan_before_it_begins(fleet):
    held = errors.LeaseHeld("gpu1", "anna deploys since 10:00", "wait for 3 min")
    outcomes = fleet((look, act, look), count=1, answers={"lease_acquire": held})
    assert [o.state for o in outcomes] == ["FAILED", "skipped", "skipped"]
    assert "anna" in outcomes[0].detail
    assert "lease_release" not in [verb for verb, _ in fleet.doors["gpu1"].asked]


@pytest.mark.parametrize(
    "kind",
    [
        errors.RemoteKilled,
        errors.ConnectionLost,
        errors.RemoteTimeout,
        errors.UnreadableReply,
    ],
)
def test_after_a_lost_result_the_state_is_read_again_and_told(fleet, kind):
    def lose(host, run, link):
        raise kind(host.name, "launch: no answer")

    health = {"state": "training", "run_id": "r1", "pid": 7, "step": 1240}
    (outcome,) = fleet((lose,), count=1, answers={"health": health})
    assert outcome.detail.endswith("; read again: run r1 is training, pid 7, step 1,240")
    assert outcome.error.exit_code == 8


def test_a_state_that_cannot_be_read_again_is_told_too(fleet):
    def lose(host, run, link):
        raise errors.ConnectionLost(host.name, "launch: no answer")

    gone = errors.Unreachable("gpu1", "nothing listens")
    (outcome,) = fleet((lose,), count=1, answers={"health": gone})
    assert outcome.detail.endswith("; it could not be read again: not reachable")


def test_a_lease_that_cannot_be_given_back_is_told_and_fails_nothing(fleet):
    gone = errors.Unreachable("gpu1", "nothing listens")
    outcomes = fleet((act,), count=1, answers={"lease_release": gone})
    assert outcomes[0].state == "changed"
    (note,) = fleet.doors["gpu1"].notes
    assert "the lease ends by itself in 900 s" in note


def test_a_bug_is_raised_after_all_leases_were_given_back(fleet):
    @changes
    def buggy(host, run, link):
        if host.name == "gpu1":
            raise ZeroDivisionError
        return Effect(changed=True, detail="")

    with pytest.raises(ZeroDivisionError):
        fleet((buggy, look))
    for door in fleet.doors.values():
        assert door.asked[-1][0] == "lease_release"
        assert door.closed
    assert len(fleet.told) == 2


def test_ctrl_c_ends_what_is_under_way_gives_leases_back_and_tells(fleet, monkeypatch):
    begun = threading.Barrier(2, timeout=10)

    @changes
    def kill(host, run, link):
        begun.wait()
        link.wait_for_stop()

    real = carry_out.__globals__["wait"]
    pressed = []

    def wait_and_press(futures, **options):
        if not pressed and options:
            pressed.append(True)
            begun.wait()
            raise KeyboardInterrupt
        return real(futures, **options)

    monkeypatch.setitem(carry_out.__globals__, "wait", wait_and_press)
    with pytest.raises(errors.Interrupted, match="kill on gpu1 under way") as caught:
        fleet((kill, look), count=1)
    assert caught.value.exit_code == 12
    assert fleet.doors["gpu1"].asked[-1][0] == "lease_release"
    assert fleet.doors["gpu1"].closed
    (outcome,) = fleet.told
    assert outcome.state == "FAILED"
    assert "read again" in outcome.detail


def test_run_ids_sort_by_age():
    early = new_run_id(datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
    late = new_run_id(datetime(2026, 1, 2, 3, 4, 6, tzinfo=UTC))
    assert early.startswith("20260102-030405-")
    assert len(early) == 20
    assert early < late
