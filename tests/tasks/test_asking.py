"""What is repeated, how long, and what a person is told; on a clock of its own."""

# ruff: noqa: ARG002, ARG005 - stand-ins have the signature of the real thing

from __future__ import annotations

import pytest

from tasks import errors
from tasks.inventory import Host
from tasks.link import Link, asking

HOST = Host(name="gpu1", address="gpu1", if_down="wake it")
ASK = ("health", {"root": "~/fab"})


class Time:
    """A clock that only sleeping and failing move on."""

    def __init__(self):
        self.now = 100.0
        self.slept = []

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


class Scripted:
    """Stands for connections and conversations: each takes the next item of its script."""

    def __init__(self, time, calls=(), answers=()):
        self.time, self.calls, self.answers = time, list(calls), list(answers)
        self.questions, self.opened, self.closed = [], 0, 0

    def call(self, host, hops, if_down, *, left, **_):
        assert left() > 0
        took, wrong = self.calls.pop(0) if self.calls else (0.1, None)
        self.time.now += took
        if wrong:
            raise wrong
        self.opened += 1
        return Open(self)

    def exchange(self, question, transport, *, until, **_):
        self.questions.append((question.request, until))
        return Conversation(self)


class Open:
    alive, transport = True, None

    def __init__(self, script):
        self._script = script

    def close(self):
        self._script.closed += 1
        self.alive = False


class Conversation:
    noise = ""

    def __init__(self, script):
        self._script = script

    def run(self, blobs, on_progress):
        took, answer = self._script.answers.pop(0) if self._script.answers else (0.1, {"ok": 1})
        self._script.time.now += took
        if isinstance(answer, Exception):
            raise answer
        return answer


def down(what="nothing listens"):
    return errors.Unreachable("gpu1", what, "wake it")


def lost(what="health: it ended before the answer"):
    return errors.ConnectionLost("gpu1", what)


@pytest.fixture
def link(monkeypatch):
    """`link(calls=, answers=)`: a link whose connections and answers follow a script."""
    notes = []

    def make(**script):
        time = Time()
        made = Scripted(time, **script)
        monkeypatch.setattr(asking, "call", made.call)
        monkeypatch.setattr(asking, "Exchange", made.exchange)
        monkeypatch.setattr(asking, "route", lambda host: ())
        link = Link(HOST, notify=notes.append, clock=time.clock, sleep=time.sleep)
        link.script, link.time, link.notes = made, time, notes
        return link

    return make


def test_a_connection_is_tried_again_within_its_deadline_and_told(link):
    door = link(calls=[(0.1, down()), (0.1, down("name unknown")), (0.1, None)])
    assert door.ask(*ASK, deadline=60) == {"ok": 1}
    assert door.notes[0] == (
        f"gpu1: connect attempt 2 in {door.time.slept[0]:.1f} s: not reachable: nothing listens"
    )
    assert "attempt 3" in door.notes[1]
    assert "name unknown" in door.notes[1]


def test_who_tells_it_in_other_words_hears_of_no_attempts(link):
    door = link(calls=[(0.1, down())] * 4)
    door.quiet = True
    with pytest.raises(errors.Unreachable):
        door.ask(*ASK, deadline=60)
    assert door.notes == []


def test_a_host_that_stays_down_is_given_up_after_four_attempts(link):
    door = link(calls=[(0.1, down())] * 9)
    with pytest.raises(errors.Unreachable, match="wake it"):
        door.ask(*ASK, deadline=60)
    assert len(door.notes) == 3
    assert door.script.opened == 0


def test_a_silent_host_is_given_up_at_the_connect_deadline(link):
    door = link(calls=[(10.1, down("does not answer"))] * 9)
    with pytest.raises(errors.Unreachable):
        door.ask(*ASK, deadline=60)
    assert door.notes == []
    assert door.time.now == pytest.approx(110.1)


@pytest.mark.parametrize("kind", [errors.LoginRefused, errors.HostKeyWrong, errors.ConfigError])
def test_what_another_attempt_cannot_mend_is_not_tried_again(link, kind):
    door = link(calls=[(0.1, kind("gpu1", "no"))])
    with pytest.raises(kind):
        door.ask(*ASK, deadline=60)
    assert door.notes == []


def test_a_lost_question_is_put_again_over_a_new_connection(link):
    door = link(answers=[(1, lost()), (1, {"ok": 2})])
    assert door.ask(*ASK, deadline=60) == {"ok": 2}
    assert (door.script.opened, door.script.closed) == (2, 1)
    assert door.notes[0].startswith("gpu1: health asked again attempt 2 in ")


def test_each_asking_has_its_own_nonce_and_what_is_left_of_the_deadline(link):
    door = link(answers=[(15, lost()), (1, {})])
    door.ask(*ASK, deadline=60)
    (first, until), (second, same) = door.script.questions
    assert first["nonce"] != second["nonce"]
    assert until == same == 160.0
    assert first["deadline"] == pytest.approx(60 - 0.1 - asking.AHEAD_SECONDS)
    assert second["deadline"] < first["deadline"] - 15


def test_a_question_is_lost_for_good_after_three_attempts(link):
    door = link(answers=[(1, lost())] * 9)
    with pytest.raises(errors.ConnectionLost):
        door.ask(*ASK, deadline=60)
    assert len(door.script.questions) == 3


def test_a_long_wait_may_be_cut_more_often(link):
    door = link(answers=[(100, lost())] * 9)
    assert door.ask(*ASK, deadline=3600) == {"ok": 1}
    assert len(door.script.questions) == 10


def test_a_question_is_not_put_again_after_its_deadline(link):
    door = link(answers=[(15, lost())] * 9)
    with pytest.raises(errors.ConnectionLost):
        door.ask(*ASK, deadline=15)
    assert len(door.script.questions) == 1


def test_a_host_lost_and_then_down_is_lost(link):
    calls = [(0.1, None), *[(0.1, down())] * 20]
    door = link(calls=calls, answers=[(1, lost())])
    with pytest.raises(errors.ConnectionLost, match="since then not reachable: nothing listens"):
        door.ask(*ASK, deadline=60)


@pytest.mark.parametrize(
    "kind",
    [
        errors.RemoteKilled,
        errors.RemoteTimeout,
        errors.UnreadableReply,
        errors.RemoteFailure,
        errors.RemoteRefusal,
        errors.LeaseHeld,
        errors.VerificationFailed,
    ],
)
def test_every_other_ending_is_told_at_once_and_the_connection_kept(link, kind):
    door = link(answers=[(1, kind("gpu1", "so"))])
    with pytest.raises(kind):
        door.ask(*ASK, deadline=60)
    assert door.notes == []
    assert door.ask(*ASK, deadline=60) == {"ok": 1}
    assert door.script.opened == 1


def test_a_connection_found_dead_between_questions_is_made_anew(link):
    door = link()
    door.ask(*ASK, deadline=60)
    door._call.alive = False
    door.ask(*ASK, deadline=60)
    assert door.script.opened == 2


def test_after_stop_nothing_is_asked_until_resume(link):
    door = link()
    door.stop()
    with pytest.raises(errors.Interrupted):
        door.ask(*ASK, deadline=60)
    door.resume()
    assert door.ask(*ASK, deadline=60) == {"ok": 1}


def test_stop_ends_the_waiting_for_a_host(link):
    door = link(calls=[(0.1, down())] * 9)
    door.time.sleep = lambda seconds: door.stop()
    door._sleep = door.time.sleep
    with pytest.raises((errors.Interrupted, errors.Unreachable)):
        door.ask(*ASK, deadline=60)
    assert len(door.notes) == 1
