from __future__ import annotations

import pytest

from tasks import errors
from tasks.link.ending import Ending

USUAL = {
    "status": 0,
    "signal": "",
    "alive": True,
    "output_ended": True,
    "closed": True,
    "answered": False,
    "words": "",
}


@pytest.mark.parametrize(
    ("facts", "kind", "said"),
    [
        ({"status": -1, "signal": "KILL"}, errors.RemoteKilled, "by SIGKILL"),
        ({"status": -1, "signal": "TERM", "answered": True}, errors.RemoteKilled, "by SIGTERM"),
        ({"status": 137}, errors.RemoteKilled, "by signal 9"),
        ({"status": -1}, errors.RemoteKilled, "left no exit status"),
        ({"status": -1, "alive": False}, errors.ConnectionLost, "before the answer"),
        (
            {"status": -1, "alive": False, "output_ended": False},
            errors.ConnectionLost,
            "before the answer",
        ),
        ({"status": -1, "output_ended": False}, errors.RemoteFailure, "would not run our program"),
        ({"status": -1, "closed": False}, errors.UnreadableReply, "closed its output"),
        ({"status": 127}, errors.RemoteFailure, "python3 does not start (exit 127)"),
        ({"status": 126}, errors.RemoteFailure, "set `agent_python`"),
        ({"status": 1, "words": "python3: Command not found."}, errors.RemoteFailure, "not start"),
        ({"status": 1, "words": "no shell for you"}, errors.RemoteFailure, "no shell for you"),
        ({"status": 3, "answered": True}, errors.UnreadableReply, "exit 3 and gave no result"),
        ({}, errors.UnreadableReply, "exit 0 and gave no result"),
        ({"words": "hello"}, errors.UnreadableReply, "it said: hello"),
    ],
)
def test_each_ending_without_an_answer_is_a_situation_of_its_own(facts, kind, said):
    error = Ending(**{**USUAL, **facts}).error("gpu1", "kill", "python3")
    assert type(error) is kind
    assert said in str(error)
    assert str(error).startswith(f"gpu1: {kind.kind}: kill: ")
