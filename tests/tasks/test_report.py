"""What people read, word for word."""

from __future__ import annotations

import json

import pytest

from tasks import errors, report
from tasks.outcome import Outcome

PLAIN = report.Paper()
TERMINAL = report.Paper(width=60, fold=True, colour=True)


def outcome(operation="kill", state="changed", detail="", error=None, host="gpu-1", **facts):
    return Outcome(
        host=host, operation=operation, state=state, detail=detail, error=error, facts=facts
    )


def line(each, paper=PLAIN):
    return report.outcome_line(each, paper, hosts=8, operations=15)


def test_an_outcome_is_one_line_in_columns():
    assert [
        line(outcome(detail="ended pid 4211 at step 1,240")),
        line(outcome("verify_features", "ok", "4 features")),
        line(outcome("await_progress", "skipped", host="gpu-10")),
    ] == [
        "gpu-1     kill             changed    ended pid 4211 at step 1,240",
        "gpu-1     verify-features  ok         4 features",
        "gpu-10    await-progress   skipped",
    ]
    assert report.outcome_line(
        outcome("sync", "would change", "release 0123456789ab"),
        PLAIN,
        hosts=5,
        operations=4,
        states=12,
    ) == ("gpu-1  sync  would change  release 0123456789ab")


def test_a_failure_tells_its_error_once_and_the_run_s_last_words():
    error = errors.NoFirstStep(
        "gpu-1",
        "crashed with exit 3",
        "see `fab logs`",
        facts={"last_lines": ["step 1  loss nan", "non-finite loss"]},
    )
    assert line(outcome("await_progress", "FAILED", error=error)) == (
        "gpu-1     await-progress   FAILED     no first step: crashed with exit 3; see `fab logs`\n"
        "    | step 1  loss nan\n"
        "    | non-finite loss"
    )


def test_text_of_a_host_cannot_steer_the_terminal():
    assert line(outcome(detail="\x1b[2Jgone\rbell\x07")).endswith("\\x1b[2Jgone\\x0dbell\\x07")


def test_a_terminal_folds_and_colours_where_a_file_keeps_the_line_whole():
    each = outcome("sync", "ok", "a detail that does not fit into the columns that are left")
    assert len(line(each).splitlines()) == 1
    assert line(each, TERMINAL) == (
        "gpu-1     sync             \x1b[32mok       \x1b[0m  a detail that does not\n"
        + " " * 38
        + "fit into the columns\n"
        + " " * 38
        + "that are left"
    )


@pytest.mark.parametrize(
    ("failures", "code"),
    [
        ([], 0),
        ([errors.VerificationFailed("a", "x")], 4),
        ([errors.Unreachable("a", "x"), errors.LoginRefused("b", "x")], 3),
        ([errors.Unreachable("a", "x"), errors.VerificationFailed("b", "x")], 9),
    ],
)
def test_exit_code_is_the_failure_s_own_or_9_for_different_ones(failures, code):
    outcomes = [outcome(state="FAILED", error=error, host=error.where) for error in failures]
    assert report.exit_code([outcome(), *outcomes]) == code


def test_the_last_line_of_one_host_tells_the_run_and_how_to_watch_it():
    done = [outcome(), outcome("await_progress", "ok", step=1, loss=10.8312, host="demo")]
    assert report.last_line(done, ["demo"], dry=False) == (
        "demo: training, step 1, loss 10.83; fab logs -f --host demo"
    )
    assert report.last_line([outcome()], ["gpu-1"], dry=False) is None
    assert report.last_line(done, ["demo"], dry=True) == "dry run: nothing was changed"


def test_the_last_line_of_many_hosts_counts_them_and_names_who_needs_care():
    outcomes = [
        outcome("sync", "changed", host="a"),
        outcome("kill", "unchanged", host="a"),
        outcome("sync", "unchanged", host="b"),
        outcome("sync", "FAILED", host="c", error=errors.Unreachable("c", "x")),
    ]
    assert report.summary(outcomes, ["a", "b", "c"]) == (
        "3 hosts: 1 FAILED (c), 1 changed, 1 unchanged"
    )


ROWS = [
    {
        "host": "demo",
        "state": "training",
        "run_id": "20261130-185839-ab12",
        "step": 12,
        "steps": 400,
        "loss": 10.8312,
        "accepted": 0.412,
        "tokens_per_s": 312.7,
        "age_s": 1.2,
        "release": "0123456789abcdef",
    },
    {
        "host": "gpu-2",
        "state": "crashed",
        "run_id": "20261130-170000-cd34",
        "step": 1240,
        "steps": 20000,
        "loss": 2.713,
        "accepted": 3.42,
        "tokens_per_s": 12400.0,
        "age_s": 11100,
        "release": "fedcba9876543210",
        "exit": {"code": 3, "signal": None},
        "detail": "ended 3 hours ago",
        "last_lines": ["step 1,240  loss nan", "gradient norm is nan on every rank"],
    },
    {"host": "gpu-3", "state": "absent", "run_id": None},
]


def test_the_table_of_a_host_fits_a_terminal():
    assert report.status_table(ROWS[:1], PLAIN).splitlines() == [
        "host  state     run                     step   loss  accept  tok/s  age  release",
        "demo  training  20261130-185839-ab12  12/400  10.83   0.412    313   1s  0123456",
    ]


def test_the_table_leaves_out_what_finds_no_room_and_never_the_state():
    assert report.status_table(ROWS, PLAIN).splitlines() == [
        "host   state     run                           step   loss  accept  tok/s   age",
        "demo   training  20261130-185839-ab12        12/400  10.83   0.412    313    1s",
        "gpu-2  crashed   20261130-170000-cd34  1,240/20,000   2.71    3.42  12.4k  3h05",
        "gpu-3  absent    -                                -      -       -      -     -",
    ]
    wide = report.status_table(ROWS, report.Paper(width=120)).splitlines()
    assert wide[0].split() == [
        "host",
        "state",
        "run",
        "step",
        "loss",
        "accept",
        "tok/s",
        "age",
        "release",
    ]
    assert wide[2].endswith("3h05  fedcba9")
    narrow = report.status_table(ROWS, report.Paper(width=20)).splitlines()
    assert narrow[0].split() == ["host", "state", "step", "age"]


def test_last_words_are_those_of_runs_that_died():
    assert report.last_words(ROWS[0]) is None
    assert report.last_words(ROWS[1]) == (
        "gpu-2: crashed, step 1,240/20,000, loss 2.71, exit 3; ended 3 hours ago\n"
        "    | step 1,240  loss nan\n"
        "    | gradient norm is nan on every rank\n"
        "    fab logs --host gpu-2 shows more"
    )


def test_a_plan_names_operations_as_people_type_them():
    assert report.plan_line(["probe", "verify_features"], ["a", "b"]) == (
        "plan: probe, verify-features; on a, b"
    )


def test_objects_are_plain_json():
    error = errors.LeaseHeld("a", "alice deploys", facts={"who": "alice"})
    each = outcome("sync", "FAILED", error=error, host="a")
    assert json.loads(json.dumps(report.outcome_object(each))) == {
        "host": "a",
        "operation": "sync",
        "state": "FAILED",
        "detail": "",
        "seconds": 0.0,
        "facts": {},
        "back": False,
        "error": {
            "class": "LeaseHeld",
            "exit_code": 5,
            "message": "a: lease held: alice deploys",
            "facts": {"who": "alice"},
        },
    }
