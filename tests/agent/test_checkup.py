"""What a check-up makes of logins and systems that cannot be had here."""

from __future__ import annotations

import pytest

from tasks.agent import checkup, machine
from tasks.agent.desk import Refused


def row_of(ask, *arguments):
    rows = checkup.Rows()
    ask(rows, *arguments)
    (row,) = rows.found
    return row


@pytest.mark.parametrize(
    ("login", "state", "said"),
    [
        ({"systemd": False, "linger": None, "kills": None}, "ok", "no systemd"),
        ({"systemd": True, "linger": False, "kills": True}, "broken", "KillUserProcesses=yes"),
        ({"systemd": True, "linger": True, "kills": True}, "ok", "outlives"),
        ({"systemd": True, "linger": True, "kills": False}, "ok", "outlives"),
    ],
)
def test_a_login_that_takes_its_processes_along_is_told(monkeypatch, login, state, said):
    monkeypatch.setattr(machine, "linger", lambda: login)
    row = row_of(checkup._logout)
    assert row["state"] == state
    assert said in row["detail"]
    assert (row["mend"] == "loginctl enable-linger") == (state != "ok")


@pytest.mark.parametrize(
    ("text", "kills"),
    [
        ("[Login]\nKillUserProcesses=yes\n", True),
        ("KillUserProcesses = yes\nKillUserProcesses=no\n", False),
        ("#KillUserProcesses=yes\n", False),
        ("", False),
    ],
)
def test_the_last_setting_of_logind_counts(tmp_path, text, kills):
    (tmp_path / "logind.conf").write_text(text)
    assert machine._last_setting(str(tmp_path / "logind.conf"), "KillUserProcesses", False) == kills
    assert machine._last_setting(str(tmp_path / "none"), "KillUserProcesses", True)


def test_a_question_that_a_host_refuses_is_a_row_and_the_next_is_asked():
    rows = checkup.Rows()
    with rows.asking("disk"):
        raise PermissionError(13, "Permission denied", "/root")
    with rows.asking("root"):
        raise Refused("not-ours", "/x: root is shared with gpu1")
    rows.ok("clock", "agrees")
    assert [(row["check"], row["state"]) for row in rows.found] == [
        ("disk", "broken"),
        ("root", "broken"),
        ("clock", "ok"),
    ]
    assert rows.found[0]["detail"] == "/root: Permission denied"
    with pytest.raises(Refused), rows.asking("torch"):
        raise Refused("deadline", "no time is left")
