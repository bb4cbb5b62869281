"""Hosts of all kinds: login shells and their noise, accounts with limits."""

from __future__ import annotations

import shutil

import pytest

from tasks import errors, operations
from tasks.fleet import carry_out
from tasks.link import Link
from tests.hosts.asked import HEALTH, is_absent
from tests.hosts.ground import needs


def test_a_host_that_allows_one_session_is_enough(lab, door):
    narrow = lab.start("narrow", sshd=("MaxSessions 1",))
    link = door(narrow.host())
    for _ in range(8):
        assert is_absent(link.ask(*HEALTH, deadline=20))


RC = {
    "bash": (".bashrc", "echo noise; echo '\x1b[31mred' >&2; PS1=x\n"),
    "dash": (".profile", "echo noise\n"),
    "fish": (".config/fish/config.fish", "echo noise; echo more >&2\n"),
    "tcsh": (".tcshrc", "echo noise\n"),
}


@pytest.mark.parametrize("name", RC)
def test_any_login_shell_and_any_noise_will_do(lab, door, name):
    shell = shutil.which(name)
    if shell is None:
        pytest.skip(f"not run: no {name} here")
    needs("pidns")
    there = lab.start(f"shell-{name}", mode="pidns", shell=shell)
    file, text = RC[name]
    (there.home / file).parent.mkdir(parents=True, exist_ok=True)
    (there.home / file).write_text(text)
    assert is_absent(door(there.host()).ask(*HEALTH, deadline=20))
    with pytest.raises(errors.RemoteFailure, match="set `agent_python`"):
        door(there.host(agent_python="nopython9")).ask(*HEALTH, deadline=20)


def test_an_account_without_a_shell_is_told_in_its_own_words(lab, door):
    needs("pidns")
    nologin = shutil.which("nologin", path="/usr/sbin:/sbin")
    there = lab.start("nologin", mode="pidns", shell=nologin)
    with pytest.raises(errors.RemoteFailure, match=r"exit 1 before our program ran.*not available"):
        door(there.host()).ask(*HEALTH, deadline=20)


def test_many_connections_at_once_to_one_server_all_come_through(lab, new_run, notes):
    # The usual MaxStartups drops some of them before they said anything; those are tried again.
    crowd = lab.start("crowd", sshd=("MaxStartups 4:50:8",))
    hosts = [crowd.host(name=f"gpu{number}", root=f"~/fab{number}") for number in range(24)]
    outcomes = carry_out(
        (operations.probe,),
        hosts,
        new_run(),
        links=lambda host: Link(host, notify=notes.append),
        on_outcome=lambda _: None,
    )
    assert [outcome.state for outcome in outcomes] == ["ok"] * 24
