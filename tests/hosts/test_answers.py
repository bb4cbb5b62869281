"""What a host says: answers, expected failures, and what is neither."""

from __future__ import annotations

import threading

import pytest

from tasks import errors
from tasks.link import exchange
from tests.hosts.asked import HEALTH, NONCE, SLOW, frame


def test_the_deadline_ends_both_sides_and_says_so(machine, say):
    alive = frame("P", '{"alive": true}')
    source = "import sys,select\nwhile not select.select([0],[],[],.2)[0] or sys.stdin.read():\n "
    source += alive.replace("\n", "\n ") + "\n"
    with pytest.raises(errors.RemoteTimeout, match="the host stopped its side"):
        say(machine.host(), source, seconds=1.0)


def test_a_deadline_that_the_host_ignores_says_that_too(machine, say, monkeypatch):
    monkeypatch.setattr(exchange, "ENDING_SECONDS", 0.3)
    with pytest.raises(errors.RemoteTimeout, match="whether the host stopped is not known"):
        say(machine.host(), SLOW, seconds=1.0)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("", "exit 0 and gave no result"),
        ("print('hello')", "it said: hello"),
        (frame("R", "{}", nonce="aa" * 16), "exit 0 and gave no result"),
        (frame("R", "[]"), "no JSON object"),
        (frame("R", '{"a":'), "not JSON"),
        (frame("R", "[" * 100_000), "not JSON"),
        (f"import os;os.write(1,b'\\x02{NONCE} R 99999999\\n')", "99,999,999 bytes"),
        (f"import os;os.write(1,b'\\x02{NONCE} X 2\\n')", "unknown kind"),
        (f"import os;os.write(1,b'\\x02{NONCE} R 2\\n{{}}zz')", "without its end"),
        (f"import os;os.write(1,b'\\x02{NONCE} nonsense here\\n')", "no head"),
        (frame("N", '{"blobs": ["00"]}'), "files that were not offered"),
        ("import os,time;[os.close(n) for n in (0, 1, 2)];time.sleep(60)", "closed its output"),
    ],
)
def test_an_answer_that_is_none_is_unreadable(machine, say, source, said, monkeypatch):
    monkeypatch.setattr(exchange, "ENDING_SECONDS", 0.5)
    with pytest.raises(errors.UnreadableReply) as caught:
        say(machine.host(), source)
    assert said in str(caught.value)
    assert caught.value.exit_code == 8


def test_texts_of_a_host_cannot_steer_the_terminal(machine, say):
    with pytest.raises(errors.UnreadableReply) as caught:
        say(machine.host(), r"print('\x1b[2J\x1b]0;owned\x07 \u202egnp.exe')")
    assert r"\x1b[2J\x1b]0;owned\x07" in str(caught.value)
    assert str(caught.value).isprintable()
    reply = say(machine.host(), frame("R", '{"a": ["\\u001b[31m\\nred", {"k\\u0007": 1}]}'))
    assert reply == {"a": ["\\x1b[31m\nred", {"k\\x07": 1}]}
    with pytest.raises(errors.RemoteRefusal) as caught:
        say(machine.host(), frame("E", '{"code": "refused", "text": "\\u001b[31mno\\nyes"}'))
    assert str(caught.value).isprintable()


def test_noise_around_the_frames_is_no_answer_and_does_not_hide_one(machine, say):
    source = "import sys;print('motd\\x02'*5000);print('warn'*99999,file=sys.stderr)\n"
    reply = say(machine.host(), source + frame("R", '{"ok": 1}') + "print('bye')")
    assert reply == {"ok": 1}


def test_a_bug_there_keeps_its_traceback(machine, say):
    with pytest.raises(errors.RemoteFailure, match=r"a bug.*ValueError: x") as caught:
        say(machine.host(), frame("T", '{"traceback": "Traceback\\n  line\\nValueError: x\\n"}'))
    assert "  line" in caught.value.facts["traceback"]


@pytest.mark.parametrize(("code", "kind"), exchange.CLASSES.items())
def test_each_expected_failure_has_its_class(machine, say, code, kind):
    text = f'{{"code": "{code}", "text": "~/fab: is so; do that", "data": {{"n": 1}}}}'
    with pytest.raises(kind, match=r"gpu1: .*~/fab: is so; do that") as caught:
        say(machine.host(), frame("E", text))
    assert type(caught.value) is kind
    assert caught.value.facts == {"n": 1}


def test_a_missing_interpreter_names_the_setting(machine, door):
    with pytest.raises(errors.RemoteFailure, match=r"nopython9.*set `agent_python`"):
        door(machine.host(agent_python="nopython9")).ask(*HEALTH, deadline=20)


def test_a_forced_command_is_no_answer(lab, door):
    forced = lab.start("forced", sshd=("ForceCommand echo hello from the jump box",))
    with pytest.raises(errors.UnreadableReply, match="hello from the jump box"):
        door(forced.host()).ask(*HEALTH, deadline=20)


def test_an_account_that_may_run_nothing_is_told(lab, door, monkeypatch):
    monkeypatch.setattr(exchange, "BUSY_SECONDS", 0.3)
    closed = lab.start("no-sessions", sshd=("MaxSessions 0",))
    with pytest.raises(errors.LoginRefused, match="opens no session"):
        door(closed.host()).ask(*HEALTH, deadline=20)


def test_stop_ends_the_question_under_way(machine, say):
    stopped = threading.Event()
    timer = threading.Timer(0.5, stopped.set)
    timer.start()
    with pytest.raises(errors.Interrupted, match="sync was under way"):
        say(machine.host(), SLOW, stopped=stopped.is_set)
    timer.join()
