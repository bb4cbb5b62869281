"""Logs are read by run, file and byte; a lost connection is looked for, and not for ever."""

from __future__ import annotations

import itertools

import pytest

from tasks.errors import ConnectionLost, RemoteRefusal, Unreachable
from tasks.inventory import Host
from tasks.operations import ReadLogs, Run, lease, status
from tasks.operations.reading import PATIENCE_S

HOST = Host(name="gpu1", address="gpu1")
RUN = Run(id="20261130-185839-ab12")
LOG = "".join(f"step {number}\n" for number in range(1, 101))


class Log:
    """A link to a host with a log: hands out `at_most` bytes a time, and fails when told to."""

    def __init__(self, text=LOG, at_most=70, failures=(), ended=True):
        self.text, self.at_most, self.ended = text, at_most, ended
        self.failures = iter(failures)
        self.notes, self.asked = [], []

    def notify(self, note):
        self.notes.append(note)

    def ask(self, verb, arguments, *, deadline, by):
        assert (verb, by) == ("logs", RUN.by.words())
        assert deadline > arguments["follow_s"]
        self.asked.append(arguments)
        if failure := next(self.failures, None):
            raise failure
        lines = self.text.splitlines(keepends=True)
        offset = arguments["offset"]
        if offset is None:
            offset = len("".join(lines[: len(lines) - arguments["lines"]]))
        piece = ""
        for line in self.text[offset:].splitlines(keepends=True):
            if len(piece) + len(line) > self.at_most:
                break
            piece += line
        end = offset + len(piece)
        return {
            "run_id": RUN.id,
            "file": "train.log",
            "offset": end,
            "text": piece,
            "more": end < len(self.text),
            "ended": self.ended and end == len(self.text),
            "dropped": 0,
        }


def read(link, *, listening=None, **how):
    got, listens = [], listening or itertools.repeat(True)

    def emit(host, run_id, lines):
        assert (host, run_id) == ("gpu1", RUN.id)
        got.extend(lines)
        return next(listens)

    now = itertools.count(0, 10)
    operation = ReadLogs(emit=emit, clock=lambda: next(now), sleep=lambda _: None, **how)
    effect = operation(HOST, RUN, link)
    assert not effect.changed
    return got


def test_the_last_lines_come_in_pieces_and_each_once():
    link = Log()
    assert read(link, lines=30) == LOG.splitlines()[-30:]
    assert len(link.asked) > 3
    assert {each["follow_s"] for each in link.asked} == {0}


def test_lines_that_come_meanwhile_are_not_read_unless_followed():
    link = Log(at_most=10_000)
    answer = link.ask
    link.ask = lambda *args, **kwargs: {**answer(*args, **kwargs), "more": True}
    assert len(read(link, lines=5)) == 5
    assert len(link.asked) == 1


def test_following_begins_again_at_the_same_byte_after_the_connection_was_lost():
    lost = ConnectionLost("gpu1", "silent")
    link = Log(failures=[None, lost, None, lost, Unreachable("gpu1", "no route"), None])
    assert read(link, lines=100, follow=True) == LOG.splitlines()
    assert link.notes == [
        "gpu1: connection lost; looking for it again",
        "gpu1: connection lost; looking for it again",
    ]


def test_a_follower_gives_up_at_the_end_of_its_patience():
    lost = ConnectionLost("gpu1", "silent")
    link = Log(failures=[None, *[lost] * 1000])
    with pytest.raises(ConnectionLost):
        read(link, follow=True)
    assert len(link.asked) == PATIENCE_S // 10 + 3
    assert len(link.notes) == 1
    assert link.quiet


@pytest.mark.parametrize("follow", [False, True])
def test_a_host_that_was_never_there_is_an_error_at_once(follow):
    with pytest.raises(Unreachable):
        read(Log(failures=[Unreachable("gpu1", "no route")]), follow=follow)


def test_what_the_host_refuses_is_not_tried_again():
    with pytest.raises(RemoteRefusal):
        read(Log(failures=[None, RemoteRefusal("gpu1", "no such run")]), follow=True)


def test_reading_ends_when_nobody_listens():
    link = Log(ended=False)
    assert len(read(link, listening=iter([True, False]), lines=100, follow=True)) < 30


def test_what_the_log_s_cap_took_is_said_in_its_place():
    link = Log()
    answer = link.ask
    link.ask = lambda *args, **kwargs: {**answer(*args, **kwargs), "dropped": 1234}
    assert read(link, lines=2)[0] == "(1,234 bytes here were taken by the log's cap)"


class Answers:
    def __init__(self, reply):
        self.reply = reply

    def ask(self, *_, **__):
        return self.reply


def test_in_a_status_what_was_checked_wins_over_what_the_trainer_wrote():
    reply = {"state": "crashed", "step": 7, "status": {"step": 6, "loss": 2.5, "phase": "training"}}
    facts = status(HOST, RUN, Answers(reply)).facts
    assert (facts["state"], facts["step"], facts["loss"]) == ("crashed", 7, 2.5)


def test_a_lease_tells_who_holds_it_and_why():
    assert lease(HOST, RUN, Answers({"lease": None})).detail == "nobody holds it"
    held = {
        "who": "alice",
        "host": "her desk",
        "why": "fab deploy",
        "left_s": 59.6,
        "since": "noon",
    }
    assert lease(HOST, RUN, Answers({"lease": held})).detail == (
        "alice on her desk: `fab deploy`, since noon, for 60 s more"
    )
