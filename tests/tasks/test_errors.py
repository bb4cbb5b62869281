from __future__ import annotations

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks import errors
from tasks.errors import DeployError, visible

ALL = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, DeployError) and kind not in {DeployError, errors.ResultLost}
]


@pytest.mark.parametrize("kind", ALL)
def test_a_message_says_where_what_and_what_next(kind):
    error = kind("gpu1", "port is 0", "give 1 to 65535", facts={"port": 0})
    assert str(error).startswith("gpu1: ")
    assert str(error).endswith("port is 0; give 1 to 65535")
    assert error.facts == {"port": 0}
    error.after = "read again: nothing runs"
    assert str(error).endswith("; read again: nothing runs")


def test_no_two_situations_have_the_same_words():
    words = [kind.kind for kind in ALL if kind.kind]
    assert len(words) == len(set(words))
    silent = {kind for kind in ALL if not kind.kind}
    assert silent == {errors.ConfigError, errors.MissingHostError}


def test_exit_codes_are_those_of_the_table():
    table = {
        2: {errors.ConfigError, errors.MissingHostError, errors.NotOurRoot},
        3: {errors.Unreachable, errors.LoginRefused, errors.HostKeyWrong},
        4: {errors.VerificationFailed},
        5: {errors.LeaseHeld},
        7: {errors.RemoteFailure, errors.RemoteRefusal, errors.Ailing},
        8: {
            errors.RemoteKilled,
            errors.ConnectionLost,
            errors.RemoteTimeout,
            errors.UnreadableReply,
        },
        10: {errors.NoFirstStep},
        11: {errors.Unhealthy},
        12: {errors.Interrupted},
    }
    assert {kind: kind.exit_code for kind in ALL if kind.exit_code != 6} == {
        kind: code for code, kinds in table.items() for kind in kinds
    }


@given(st.text())
def test_visible_text_cannot_steer_a_terminal(text):
    shown = visible(text)
    assert not [c for c in shown if ord(c) < 32 or 0x7F <= ord(c) < 0xA0]
    assert "\n" not in shown
    shown.encode()
    assert visible(shown) == shown


def test_visible_escapes_and_keeps():
    assert visible("a\x1b[31mb") == r"a\x1b[31mb"
    assert visible("a\u202eb\u2028\ud800") == r"a\u202eb\u2028\ud800"
    assert visible("Größe 3 µm 日本") == "Größe 3 µm 日本"
    assert visible("a\tb\nc\r", lines=True) == "a\tb\nc\\x0d"
