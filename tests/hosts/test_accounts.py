"""A whole deploy on hosts as people have them: shells, tools and sshd settings of every kind."""

from __future__ import annotations

import shutil
import sys

import pytest

from tasks import errors
from tasks import release as releases
from tasks.fleet import carry_out
from tasks.link import Link
from tasks.operations import probe
from tasks.plans import DEPLOY
from tests.hosts.asked import HEALTH, is_absent
from tests.hosts.ground import needs
from tests.hosts.machine import settings
from tests.hosts.test_shells import RC

MOTD = "\n*** Maintenance on Friday ***\x1b[5m {0} \x02 \n"


@pytest.fixture
def start(lab):
    made = []

    def go(name, **more):
        needs("pidns")
        made.append(lab.start(name, mode="pidns", **more))
        return made[-1]

    yield go
    for each in made:
        each.close()
        lab.machines.remove(each)


@pytest.fixture
def deploy(notes, new_run, stub):
    def go(host):
        done = carry_out(
            DEPLOY,
            [host],
            new_run(release=releases.read_tree(stub)),
            links=lambda host: Link(host, notify=notes.append),
            on_outcome=lambda _: None,
        )
        return [str(each.error) for each in done if each.error]

    return go


def trainers(machine):
    return [p for p in machine.processes() if "trainer train" in p.words]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("bash", marks=pytest.mark.long),
        pytest.param("dash", marks=pytest.mark.long),
        pytest.param("fish", marks=pytest.mark.long),
        "tcsh",
    ],
)
def test_a_deploy_through_a_noisy_shell_a_banner_and_a_motd(start, deploy, name, tmp_path):
    shell = shutil.which(name)
    if shell is None:
        pytest.skip(f"not run: no {name} here")
    banner = tmp_path / "banner"
    banner.write_text(MOTD * 50)
    there = start(f"noisy-{name}", shell=shell, sshd=(f"Banner {banner}",))
    file, text = RC[name]
    (there.home / file).parent.mkdir(parents=True, exist_ok=True)
    motd = there.home / "motd"
    motd.write_text(MOTD * 200)
    (there.home / file).write_text(f"cat '{motd}'\n{text}")
    assert deploy(there.host()) == []
    (old,) = trainers(there)
    assert deploy(there.host(run=settings(chatter=1))) == []
    (new,) = trainers(there)
    assert new.pid != old.pid


def test_a_deploy_where_path_holds_no_tool_at_all(start, deploy, lab, tmp_path):
    """No ps, awk, pgrep, setsid, flock, nohup, tar, sha256sum: only the interpreter is needed."""
    empty = tmp_path / "empty"
    empty.mkdir()
    shell = lab.folder / "bare-shell"
    shell.write_text(f'#!/bin/sh\nPATH={empty}\nexport PATH\nexec /bin/sh "$@"\n')
    shell.chmod(0o755)
    there = start("bare", shell=str(shell))
    assert deploy(there.host(agent_python=sys.executable)) == []
    assert len(trainers(there)) == 1


def test_a_user_without_a_home_is_told_and_a_root_elsewhere_is_enough(start, deploy):
    there = start("homeless", sshd=("SetEnv HOME=/nonexistent",))
    (text,) = deploy(there.host())
    assert "/nonexistent" in text
    assert "put that right on the host, then repeat" in text
    run = settings(output_dir=f"{there.home}/out")
    assert deploy(there.host(root=f"{there.home}/fab", run=run)) == []
    assert len(trainers(there)) == 1


def test_a_deploy_over_one_session_at_a_time_and_no_sftp(start, deploy, door):
    there = start("narrowest", sshd=("MaxSessions 1", "LoginGraceTime 10"))
    assert "sftp" not in (there.folder / "sshd_config").read_text()
    assert deploy(there.host()) == []
    assert there.log().count("Accepted publickey") == 1
    assert not is_absent(door(there.host()).ask(*HEALTH, deadline=20))


def test_a_server_that_drops_new_connections_is_asked_again(lab, new_run, notes):
    crowd = lab.start("dropping", sshd=("MaxStartups 2:50:3",))
    hosts = [crowd.host(name=f"gpu{number}", root=f"~/fab{number}") for number in range(8)]
    outcomes = carry_out(
        (probe,),
        hosts,
        new_run(),
        links=lambda host: Link(host, notify=notes.append),
        on_outcome=lambda _: None,
    )
    assert [(outcome.state, str(outcome.error)) for outcome in outcomes] == [("ok", "None")] * 8


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("echo this account is for backups", "this account is for backups"),
        ("internal-sftp", ""),
        ("/bin/false", ""),
    ],
)
def test_an_account_with_a_command_of_its_own_is_refused_in_a_clear_line(
    start, door, command, words
):
    name = command.split()[0].strip("/").replace("/", "-")
    there = start(f"forced-{name}", sshd=(f"ForceCommand {command}",))
    with pytest.raises(errors.DeployError) as caught:
        door(there.host()).ask(*HEALTH, deadline=20)
    text = str(caught.value)
    assert words in text
    assert "ForceCommand" in text
    assert caught.value.exit_code in {3, 7, 8}
