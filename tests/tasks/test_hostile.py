"""Answers of a host that lies: no traceback, no file, no word that is not escaped."""

from __future__ import annotations

import io
import json
import random

import pytest

from tasks import cli, errors, operations, report
from tasks.inventory import Host, RunSettings
from tasks.link import frames, replies
from tasks.operations import Back, By, Run

RUN = Run(id="20261130-185839-ab12", by=By(who="a", host="b", why="c"))
HOST = Host(name="gpu1", address="x", run=RunSettings(trainer={"output-dir": "~/out"}))
EVIL = "\x1b]0;pwned\x07\x1b[2J\r\ngpu1  launch  changed  all is well\u202e"
VALUES = (
    *(None, True, False, 0, -1, 3, 1.5, 10**400, float("nan"), float("inf"), "", "x", EVIL),
    *([], [EVIL], [1, None], {}, {"a": EVIL}, [{"check": EVIL, "state": "ok"}], [[]]),
)
NAMES = (
    *("changed", "kept", "pid", "step", "steps", "loss", "seconds", "run_id", "release", "state"),
    *("checkpoint", "aside", "warnings", "features", "gpus", "python", "run", "detail", "exit"),
    *("last_lines", "age_s", "accepted", "tokens_per_s", "status", "lease", "text", "dropped"),
    *("more", "ended", "offset", "file", "checks", "clock", "sent_files", "sent_bytes", "digest"),
    *("fallback", "secret_names", "code", "data", "traceback", "phase", "current"),
)
INSIDE = ("id", "state", "version", "who", "why", "host", "left_s", "code", "signal", "utc", "loss")


class Liar:
    """A link to a host that answers as it likes, past the frames and their escaping."""

    noise = EVIL

    def __init__(self, chance):
        self.chance = chance

    def notify(self, text):
        pass

    progress = notify

    def ask(self, verb, arguments, *, on_progress=None, **_):
        del arguments
        if on_progress:
            on_progress(self.lie())
        return replies.checked("gpu1", verb, self.lie())

    def value(self, name):
        """Give mostly what may stand there: a lie that is refused at once shows little."""
        one = self.chance
        fitting = [value for value in VALUES if replies.fits(name, value)]
        return one.choice(fitting if one.random() < 0.98 else VALUES)

    def lie(self):
        one = self.chance
        said = {name: self.value(name) for name in one.sample(NAMES, one.randint(5, len(NAMES)))}
        for name in ("python", "run", "lease", "exit", "status", "clock", "fallback"):
            if one.random() < 0.5:
                said[name] = {key: self.value(key) for key in one.sample(INSIDE, 8)}
        return frames.harmless(said)


def takes(*said):
    lines = said[-1]
    assert all("\x1b" not in line for line in lines)
    return False


LOOKS = [
    *(operations.probe, operations.verify, operations.verify_features, operations.health),
    *(operations.status, operations.lease, operations.await_progress, operations.launch),
    *(operations.kill, operations.put_back, operations.Doctor()),
    operations.ReadLogs(emit=takes),
]


@pytest.mark.parametrize("operation", LOOKS, ids=lambda each: each.__name__)
def test_whatever_a_host_answers_becomes_an_effect_or_an_error_of_ours(operation):
    run = Run(**{**{name: getattr(RUN, name) for name in ("id", "by")}, "back": Back(to="abcdef")})
    effects = 0
    for seed in range(150):
        link = Liar(random.Random(f"{operation.__name__} {seed}"))
        try:
            effect = operation(HOST, run, link)
        except errors.DeployError as error:
            said, facts = str(error), error.facts
        else:
            said, facts = effect.detail, effect.facts
            effects += 1
        rows = [{"state": "no answer", **facts, "host": "gpu1"}]
        shown = [
            *(said, report.status_table(rows, report.Paper()), report.last_words(rows[0]) or ""),
            report.run_words(rows[0]),
        ]
        if isinstance(facts.get("checks"), list):
            shown.append(report.check_table("gpu1", facts["checks"], report.Paper()))
        for text in shown:
            assert not set(text) & set("\x1b\x07\r\u202e"), seed
        json.dumps(facts)
    assert effects or operation in {operations.health, operations.put_back}


def test_a_lie_cannot_forge_a_line_of_another_host_or_operation():
    out, err = io.StringIO(), io.StringIO()
    face = cli.Face(out, err, {}, as_json=False)
    outcome = report.outcome_line
    from tasks.outcome import Outcome

    error = errors.RemoteFailure("gpu1", frames.harmless({"x": EVIL})["x"])
    one = Outcome(host="gpu1", operation="probe", state="FAILED", detail=str(error), error=error)
    text = outcome(one, face.paper, hosts=4, operations=5)
    first, *others = text.splitlines()
    assert first.startswith("gpu1  probe  FAILED")
    assert all(line.startswith("      ") for line in others)
