"""The way back when a new run fails: when it is gone, and what is told; with made-up hosts."""

# ruff: noqa: ARG001 - stand-ins have the signature of the real thing

from __future__ import annotations

import dataclasses

import pytest

from tasks import errors, report
from tasks.operations.words import changes
from tasks.outcome import Effect
from tests.tasks.doors import RUN

STEP = errors.NoFirstStep("gpu1", "run new: crashed", facts={"run_id": "new"})
PARTED = errors.ConnectionLost("gpu1", "await_progress: gone")


@changes
def stop(host, run, link):
    link.notes.append(("stop", run.back and run.back.instead_of))
    return Effect(changed=run.back is None, detail="")


@changes
def put_back(host, run, link):
    link.notes.append(("put", run.id != RUN.id, run.release, run.lease is not None))
    return Effect(changed=True, detail="", facts={"run_id": "old", "release": "ab" * 32})


def look(host, run, link):
    return Effect(changed=False, detail="looked")


def step(host, run, link):
    if run.back is None:
        raise STEP
    return Effect(changed=False, detail="step 7")


def failing(error):
    def fail(host, run, link):
        raise error

    return fail


BACK = (stop, put_back, step)


def told(outcomes):
    return [(o.operation, o.state, o.back) for o in outcomes]


def test_a_run_without_a_first_step_makes_way_for_the_old_one_under_the_same_lease(fleet):
    outcomes = fleet((stop, step, look), count=1, fallback=BACK)
    assert told(outcomes) == [
        ("stop", "changed", False),
        ("step", "FAILED", False),
        ("stop", "unchanged", True),
        ("put_back", "changed", True),
        ("step", "ok", True),
        ("look", "skipped", False),
    ]
    door = fleet.doors["gpu1"]
    assert door.notes == [("stop", None), ("stop", "new"), ("put", True, None, True)]
    assert [verb for verb, _ in door.asked] == ["lease_acquire", "lease_release"]
    assert report.exit_code(outcomes) == 6
    assert report.failure(outcomes, ["gpu1"]) == (
        "gpu1: step failed; not done: look; rolled back: run old of release abababababab trains"
    )


def test_only_hosts_that_failed_go_back_and_the_others_go_on(fleet):
    def fragile(host, run, link):
        return step(host, run, link) if host.name == "gpu2" else look(host, run, link)

    outcomes = fleet((stop, fragile, look), fallback=BACK)
    assert {o.host for o in outcomes if o.back} == {"gpu2"}
    assert [o.host for o in outcomes if o.operation == "look" and o.state == "ok"] == [
        "gpu1",
        "gpu3",
    ]
    assert report.exit_code(outcomes) == 6
    assert report.failure(outcomes, ["gpu1", "gpu2", "gpu3"]) == (
        "3 hosts: 1 rolled back (gpu2), 2 changed"
    )


def test_an_old_run_that_does_not_come_back_is_exit_10_whatever_kept_it_away(fleet):
    refused = errors.RemoteRefusal("gpu1", "nothing to go back to")
    for broken in (
        (failing(refused),),
        (stop, put_back, failing(STEP)),
        (stop, failing(STEP), put_back),
    ):
        outcomes = fleet((stop, step, look), count=1, fallback=broken)
        assert report.exit_code(outcomes) == 10
        assert report.failure(outcomes, ["gpu1"]).endswith(
            "not rolled back: see `fab status --host gpu1`"
        )
        assert fleet.doors["gpu1"].asked[-1][0] == "lease_release"
        assert sum(o.state == "FAILED" for o in outcomes) == 2


def test_a_result_that_is_lost_on_the_way_back_is_read_again(fleet):
    health = {"state": "training", "run_id": "old"}
    outcomes = fleet(
        (stop, step), count=1, fallback=(stop, failing(PARTED)), answers={"health": health}
    )
    assert outcomes[-1].detail.endswith("read again: run old is training")
    assert report.exit_code(outcomes) == 8


def test_a_launch_that_fails_goes_back_only_when_something_was_stopped(fleet):
    refused = failing(errors.RemoteRefusal("gpu1", "devices are held"))
    assert report.exit_code(fleet((stop, refused), count=1, fallback=BACK)) == 6
    assert report.exit_code(fleet((look, refused), count=1, fallback=BACK)) == 7


@pytest.mark.parametrize("error", [PARTED, errors.LeaseHeld("gpu1", "ours is gone")])
def test_where_it_is_not_known_what_runs_nothing_is_put_back(fleet, error):
    outcomes = fleet((stop, failing(error)), count=1, fallback=BACK)
    assert not [o for o in outcomes if o.back]
    assert report.exit_code(outcomes) == error.exit_code


def test_without_a_fallback_a_broken_run_stays_and_the_way_back_is_named(fleet):
    outcomes = fleet((stop, step), count=1)
    assert report.exit_code(outcomes) == 10
    assert report.failure(outcomes, ["gpu1"]) == (
        "gpu1: step failed; `fab rollback --host gpu1` puts back what trained before"
    )


def test_a_dry_run_never_goes_back(fleet):
    dry = dataclasses.replace(RUN, dry=True)
    assert not [o for o in fleet((stop, step), count=1, run=dry, fallback=BACK) if o.back]
