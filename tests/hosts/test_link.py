"""Getting to a host: every way in which that can fail, told apart."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import threading
import time

import pytest

from tasks import errors
from tests.hosts.asked import HEALTH, is_absent
from tests.hosts.ground import until
from tests.hosts.relay import Relay


def test_one_connection_serves_all_questions(machine, door):
    before = machine.log().count("Accepted publickey")
    link = door(machine.host())
    for _ in range(3):
        assert is_absent(link.ask(*HEALTH, deadline=20))
    assert machine.log().count("Accepted publickey") == before + 1


def test_an_unknown_host_key_is_refused_with_its_fingerprint(machine, door, tmp_path, notes):
    host = machine.host(known_hosts=str(tmp_path / "none"))
    with pytest.raises(errors.HostKeyWrong) as caught:
        door(host).ask(*HEALTH, deadline=20)
    text = str(caught.value)
    assert "is unknown and shows ssh-ed25519 SHA256:" in text
    assert f"host_key: {machine.host_key}" in text
    assert f"ssh -p {machine.port}" in text
    assert notes == []


def test_a_changed_host_key_is_refused_with_the_line_that_forgets_it(lab, machine, door, tmp_path):
    other = lab.start("other-key", known=False)
    known = tmp_path / "known_hosts"
    known.write_text(f"[127.0.0.1]:{machine.port} {other.host_key}\n")
    with pytest.raises(errors.HostKeyWrong) as caught:
        door(machine.host(known_hosts=str(known))).ask(*HEALTH, deadline=20)
    assert f"ssh-keygen -R '[127.0.0.1]:{machine.port}'" in str(caught.value)
    assert caught.value.exit_code == 3
    assert "Accepted" not in other.log()


def test_a_pin_alone_decides(lab, machine, door, tmp_path):
    nobody = str(tmp_path / "none")
    right = machine.host(host_key=machine.host_key, known_hosts=nobody)
    assert is_absent(door(right).ask(*HEALTH, deadline=20))
    other = lab.start("pinned-other", known=False)
    with pytest.raises(errors.HostKeyWrong, match=r"hosts\.yaml pins"):
        door(machine.host(host_key=other.host_key)).ask(*HEALTH, deadline=20)


def test_a_revoked_key_is_refused_although_it_is_known(machine, door, tmp_path):
    known = tmp_path / "known_hosts"
    name = f"[127.0.0.1]:{machine.port}"
    known.write_text(f"{name} {machine.host_key}\n@revoked {name} {machine.host_key}\n")
    with pytest.raises(errors.HostKeyWrong, match="@revoked"):
        door(machine.host(known_hosts=str(known))).ask(*HEALTH, deadline=20)


def test_hashed_names_in_known_hosts_are_understood(machine, door, tmp_path):
    known = tmp_path / "known_hosts"
    known.write_text(f"[127.0.0.1]:{machine.port} {machine.host_key}\n")
    words = ["ssh-keygen", "-q", "-H", "-f", str(known)]
    subprocess.run(words, check=True, timeout=20, capture_output=True)
    assert known.read_text().startswith("|1|")
    assert is_absent(door(machine.host(known_hosts=str(known))).ask(*HEALTH, deadline=20))


def test_a_refused_login_is_told_at_once_and_not_tried_again(lab, machine, door, notes):
    stranger = lab.new_key("stranger")
    with pytest.raises(errors.LoginRefused, match="stranger") as caught:
        door(machine.host(identity_file=str(stranger))).ask(*HEALTH, deadline=20)
    assert caught.value.exit_code == 3
    assert notes == []


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """An ssh-agent of this test alone."""
    socket_path = tmp_path / "agent"
    process = subprocess.Popen(
        ["ssh-agent", "-D", "-a", str(socket_path)], stdout=subprocess.DEVNULL
    )
    until(socket_path.exists, what="the agent")
    monkeypatch.setenv("SSH_AUTH_SOCK", str(socket_path))
    yield
    process.terminate()
    process.wait(10)


def test_an_agent_unlocks_what_has_a_passphrase(lab, machine, door, tmp_path, agent):
    del agent
    locked = tmp_path / "locked"
    shutil.copy(lab.key, locked)
    shutil.copy(f"{lab.key}.pub", f"{locked}.pub")
    subprocess.run(["ssh-add", "-q", str(locked)], check=True, timeout=20)
    words = ["ssh-keygen", "-q", "-p", "-N", "secret", "-f", str(locked)]
    subprocess.run(words, check=True, timeout=20, capture_output=True)
    (tmp_path / "config").write_text("")
    host = machine.host(identity_file=str(locked), ssh_config=str(tmp_path / "config"))
    assert is_absent(door(host).ask(*HEALTH, deadline=20))


def test_a_locked_key_says_ssh_add(lab, machine, door):
    locked = lab.new_key("locked")
    words = ["ssh-keygen", "-q", "-p", "-N", "secret", "-f", str(locked)]
    subprocess.run(words, check=True, timeout=20, capture_output=True)
    with pytest.raises(errors.LoginRefused, match=r"has a passphrase.*ssh-add"):
        door(machine.host(identity_file=str(locked))).ask(*HEALTH, deadline=20)


def test_a_closed_port_is_tried_again_and_says_what_starts_the_host(machine, door, notes):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(errors.Unreachable, match=r"nothing listens.*start the lab") as caught:
        door(machine.host(port=port)).ask(*HEALTH, deadline=20)
    assert caught.value.exit_code == 3
    assert len(notes) == 3
    assert notes[0].startswith("gpu1: connect attempt 2 in ")


def test_a_host_that_comes_back_is_found_by_the_next_attempt(machine, door, notes):
    with Relay(machine.port) as gone:
        port = gone.port
    with contextlib.ExitStack() as stack:
        link = door(
            machine.host(port=port, host_key=machine.host_key),
            sleep=lambda _: stack.enter_context(Relay(machine.port, at=port)),
        )
        assert is_absent(link.ask(*HEALTH, deadline=20))
        assert len(notes) == 1
        link.close()


def test_a_listener_that_says_nothing_is_given_up(machine, door, monkeypatch):
    monkeypatch.setattr("tasks.link.asking.CONNECT_SECONDS", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        began = time.monotonic()
        with pytest.raises(errors.Unreachable, match="did not speak SSH"):
            door(machine.host(port=mute.getsockname()[1])).ask(*HEALTH, deadline=20)
        assert time.monotonic() - began < 6


def test_what_is_no_ssh_server_is_named(machine, door, monkeypatch):
    monkeypatch.setattr("tasks.link.asking.CONNECT_SECONDS", 1.0)

    def answer(server):
        with contextlib.suppress(OSError):
            while True:
                client, _ = server.accept()
                with client:
                    client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        with pytest.raises(errors.Unreachable):
            door(machine.host(port=server.getsockname()[1])).ask(*HEALTH, deadline=20)
        server.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_a_missing_ssh_config_says_what_makes_it(machine, door):
    host = machine.host(ssh_config="/nowhere/ssh_config", if_down="./scripts/demo --keep starts it")
    with pytest.raises(errors.Unreachable, match=r"nowhere.*demo --keep starts it"):
        door(host).ask(*HEALTH, deadline=20)


def test_an_alias_of_the_ssh_configuration_is_enough(lab, machine, door, tmp_path):
    config = tmp_path / "config"
    config.write_text(
        f"Include {tmp_path}/more\nHost *\n  UserKnownHostsFile {lab.known_hosts}\n"
        "  IdentityAgent none\n"
    )
    (tmp_path / "more").write_text(
        f"Host trainer\n  HostName 127.0.0.1\n  Port {machine.port}\n"
        f"  IdentityFile {lab.key}\n  IdentitiesOnly yes\n"
    )
    host = machine.host(
        address="trainer", port=None, identity_file=None, known_hosts=None, ssh_config=str(config)
    )
    assert is_absent(door(host).ask(*HEALTH, deadline=20))


@pytest.fixture
def jump(lab, machine, tmp_path):
    """`jump(lines)`: a way to the machine through another host, and that host."""
    bastion = next((m for m in lab.machines if m.name == "bastion"), None)
    bastion = bastion or lab.start("bastion")

    def make(known=None):
        config = tmp_path / "config"
        config.write_text(
            f"Host inner\n  HostName 127.0.0.1\n  Port {machine.port}\n  ProxyJump outer\n"
            f"Host outer\n  HostName 127.0.0.1\n  Port {bastion.port}\n"
            f"Host *\n  IdentityFile {lab.key}\n  IdentitiesOnly yes\n  IdentityAgent none\n"
            f"  UserKnownHostsFile {known or lab.known_hosts}\n  GlobalKnownHostsFile /dev/null\n"
        )
        return machine.host(
            address="inner", port=None, identity_file=None, known_hosts=None, ssh_config=str(config)
        )

    make.bastion = bastion
    return make


def test_a_jump_host_is_gone_through(jump, door):
    before = jump.bastion.log().count("Accepted publickey")
    assert is_absent(door(jump()).ask(*HEALTH, deadline=20))
    assert jump.bastion.log().count("Accepted publickey") == before + 1


def test_a_jump_hosts_key_is_checked_too(jump, machine, door, tmp_path):
    known = tmp_path / "only-inner"
    known.write_text(f"[127.0.0.1]:{machine.port} {machine.host_key}\n")
    with pytest.raises(errors.HostKeyWrong, match=f":{jump.bastion.port} is unknown"):
        door(jump(known)).ask(*HEALTH, deadline=20)


def test_a_proxy_command_is_used_and_its_words_are_told(lab, machine, door, tmp_path):
    proxy = tmp_path / "proxy.py"
    proxy.write_text(
        "import socket,sys,threading,os\n"
        "s=socket.create_connection((sys.argv[1],int(sys.argv[2])))\n"
        "def up():\n"
        "    while (d:=os.read(0,65536)): s.sendall(d)\n"
        "    os._exit(0)\n"
        "threading.Thread(target=up,daemon=True).start()\n"
        "while (d:=s.recv(65536)): os.write(1,d)\n"
    )
    config = tmp_path / "config"

    def host(command):
        config.write_text(
            f"Host inner\n  HostName 127.0.0.1\n  Port {machine.port}\n  ProxyCommand {command}\n"
            f"  IdentityFile {lab.key}\n  IdentityAgent none\n"
        )
        return machine.host(address="inner", port=None, ssh_config=str(config))

    link = door(host(f"{sys.executable} {proxy} %h %p"))
    assert is_absent(link.ask(*HEALTH, deadline=20))
    link.close()
    with pytest.raises(errors.Unreachable, match="proxy says: no way"):
        door(host("sh -c 'echo no way >&2'"), sleep=lambda _: None).ask(*HEALTH, deadline=20)
