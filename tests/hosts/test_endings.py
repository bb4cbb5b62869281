"""A conversation that ends before its answer: killed, cut, frozen, stalled."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from tasks import errors
from tasks.link import exchange
from tests.hosts.asked import HEALTH, SLOW, is_absent
from tests.hosts.ground import until
from tests.hosts.relay import Relay


def test_a_killed_interpreter_is_told_as_killed_and_not_asked_again(machine, say):
    def kill_it():
        os.kill(until(machine.verbs)[0].pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_it)
    killer.start()
    with pytest.raises(errors.RemoteKilled, match="SIGKILL on the host") as caught:
        say(machine.host(), SLOW)
    killer.join()
    assert say.call.alive
    assert caught.value.exit_code == 8


def test_a_program_that_a_shell_reports_as_killed_is_told_as_killed(machine, say):
    with pytest.raises(errors.RemoteKilled, match="signal 9"):
        say(machine.host(), "import os;os._exit(137)")


def test_killed_sessions_are_told_as_a_lost_connection(machine, say):
    def end():
        until(machine.verbs)
        machine.kill_sessions()

    killer = threading.Thread(target=end)
    killer.start()
    with pytest.raises(errors.ConnectionLost, match="ended before the answer"):
        say(machine.host(), SLOW)
    killer.join()
    assert not say.call.alive


def test_a_cut_connection_is_told_apart_from_a_killed_program(machine, say):
    with Relay(machine.port) as relay:

        def cut():
            until(machine.verbs)
            relay.cut()

        cutter = threading.Thread(target=cut)
        cutter.start()
        host = machine.host(port=relay.port, host_key=machine.host_key)
        with pytest.raises(errors.ConnectionLost, match="ended before the answer"):
            say(host, SLOW)
        cutter.join()


def ask_while_cut(relay, link, *, before=lambda: None):
    """Ask while nothing comes back from the server any more, and cut when the question left."""
    at = relay.sent
    relay.mute = True

    def cut():
        until(lambda: relay.sent > at)
        before()
        relay.cut()
        relay.mute = False

    cutter = threading.Thread(target=cut)
    cutter.start()
    try:
        return link.ask(*HEALTH, deadline=15)
    finally:
        cutter.join()


def test_after_a_cut_the_question_is_put_again(machine, door, notes):
    with Relay(machine.port) as relay:
        link = door(machine.host(port=relay.port, host_key=machine.host_key))
        assert is_absent(link.ask(*HEALTH, deadline=20))
        assert is_absent(ask_while_cut(relay, link))
        assert relay.accepted == 2
        assert [note for note in notes if "health asked again attempt 2" in note]


def test_a_host_that_cannot_be_reached_again_is_told_as_lost(machine, door):
    with Relay(machine.port) as relay:
        link = door(machine.host(port=relay.port, host_key=machine.host_key))
        link.ask(*HEALTH, deadline=20)
        with pytest.raises(
            errors.ConnectionLost, match="since then not reachable: nothing listens"
        ):
            ask_while_cut(relay, link, before=relay.refuse)


def test_a_frozen_sshd_is_noticed_within_15_seconds(machine, say):
    def freeze():
        until(machine.verbs)
        machine.signal_sessions(signal.SIGSTOP)

    freezer = threading.Thread(target=freeze)
    freezer.start()
    began = time.monotonic()
    try:
        with pytest.raises(errors.ConnectionLost, match="nothing heard for 15 s"):
            say(machine.host(), "import time\nfor _ in range(600): print('x'); time.sleep(.1)\n")
    finally:
        freezer.join()
        machine.signal_sessions(signal.SIGCONT)
    assert 14 < time.monotonic() - began < 17


def test_a_sshd_frozen_between_questions_is_noticed_and_gone_round(machine, door, monkeypatch):
    monkeypatch.setattr(exchange, "CHANNEL_SECONDS", 1.0)
    link = door(machine.host())
    link.ask(*HEALTH, deadline=20)
    with machine.frozen():
        assert is_absent(link.ask(*HEALTH, deadline=20))


def test_a_stalled_path_is_noticed(machine, door, monkeypatch):
    monkeypatch.setattr(exchange, "SILENCE_SECONDS", 1.0)
    monkeypatch.setattr(exchange, "CHANNEL_SECONDS", 1.0)
    monkeypatch.setattr("tasks.link.asking.CONNECT_SECONDS", 1.0)
    with Relay(machine.port) as relay:
        link = door(machine.host(port=relay.port, host_key=machine.host_key))
        link.ask(*HEALTH, deadline=20)
        relay.stalled = True
        with pytest.raises(errors.ConnectionLost):
            link.ask(*HEALTH, deadline=3)
        relay.stalled = False
