from __future__ import annotations

import getpass
import socket
from pathlib import Path

import pytest

from tasks.errors import ConfigError, Unreachable
from tasks.inventory import Host
from tasks.link.route import route


@pytest.fixture
def config(tmp_path):
    """`config(text)`: a host `gpu1` whose ssh configuration is `text`."""
    for name in ("id", "other"):
        (tmp_path / name).write_text("a key")

    def make(text="", **changes):
        file = tmp_path / "config"
        file.write_text(text.format(at=tmp_path))
        facts = {"name": "gpu1", "address": "gpu1", "ssh_config": str(file)}
        return Host(**{**facts, **changes})

    return make


def test_what_ssh_would_do_is_what_we_do(config, tmp_path):
    text = (
        "Host gpu1\n HostName 10.1.2.3\n Port 2200\n User me\n IdentityFile {at}/id\n"
        " IdentityFile {at}/not-there\n IdentitiesOnly yes\n UserKnownHostsFile {at}/a {at}/b\n"
        " GlobalKnownHostsFile none\n AddressFamily inet\n IdentityAgent none\n"
    )
    (hop,) = route(config(text))
    assert (hop.hostname, hop.port, hop.user) == ("10.1.2.3", 2200, "me")
    assert hop.identities == (f"{tmp_path}/id",)
    assert hop.only_identities
    assert not hop.agent
    assert hop.known_hosts == (f"{tmp_path}/a", f"{tmp_path}/b")
    assert hop.family == socket.AF_INET
    assert hop.looked_up == "[10.1.2.3]:2200"
    assert hop.proxy is None


def test_hosts_yaml_wins_over_the_ssh_configuration(config, tmp_path):
    text = "Host gpu1\n HostName 10.1.2.3\n Port 2200\n User me\n IdentityFile {at}/id\n"
    host = config(
        text,
        port=2300,
        user="you",
        identity_file=f"{tmp_path}/other",
        known_hosts=f"{tmp_path}/known",
        host_key="ssh-ed25519 AAAA",
    )
    (hop,) = route(host)
    assert (hop.port, hop.user, hop.pin) == (2300, "you", "ssh-ed25519 AAAA")
    assert hop.identities == (f"{tmp_path}/other",)
    assert hop.only_identities
    assert hop.known_hosts == (f"{tmp_path}/known",)


def test_a_plain_address_has_the_defaults_of_ssh(config):
    (hop,) = route(config("", address="192.0.2.1"))
    assert (hop.hostname, hop.port, hop.user) == ("192.0.2.1", 22, getpass.getuser())
    assert hop.looked_up == "192.0.2.1"
    assert hop.agent


def test_tokens_and_includes_and_aliases_are_understood(config, tmp_path):
    (tmp_path / "more").write_text("Host gpu1\n HostKeyAlias the-gpu\n")
    (tmp_path / f"key-10.1.2.3-{getpass.getuser()}").write_text("a key")
    text = (
        "Include {at}/more\nHost gpu1\n HostName 10.1.2.3\n IdentityFile {at}/key-%h-%r\n"
        " ProxyCommand nc %h %p\n"
    )
    (hop,) = route(config(text))
    assert hop.looked_up == "the-gpu"
    assert hop.identities == (f"{tmp_path}/key-10.1.2.3-{getpass.getuser()}",)
    assert hop.proxy == "nc 10.1.2.3 22"


def test_jump_hosts_come_first_with_their_own_configuration(config):
    text = (
        "Host gpu1\n HostName 10.1.2.3\n ProxyJump a@one:2201,two\n"
        "Host one\n HostName 10.0.0.1\n User nobody\nHost two\n HostName 10.0.0.2\n Port 2202\n"
    )
    one, two, last = route(config(text, host_key="ssh-ed25519 AAAA"))
    assert (one.hostname, one.port, one.user) == ("10.0.0.1", 2201, "a")
    assert (two.hostname, two.port) == ("10.0.0.2", 2202)
    assert (one.pin, two.pin, last.pin) == (None, None, "ssh-ed25519 AAAA")
    assert last.hostname == "10.1.2.3"


def test_a_jump_host_behind_a_jump_host_is_reached_through_it(config):
    text = "Host gpu1\n ProxyJump one\nHost one\n ProxyJump two\n"
    assert [hop.name for hop in route(config(text))] == ["two", "one", "gpu1"]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("ProxyJump gpu1", "loop via gpu1"),
        ("ProxyJump one\nHost one\n ProxyJump two\nHost two\n ProxyJump one", "in a circle"),
        ("KnownHostsCommand /bin/true", "knownhostscommand"),
        ("PKCS11Provider /lib/x.so", "pkcs11provider"),
        ("BindAddress 127.0.0.1", "bindaddress"),
        ("IdentityAgent /run/other", "identityagent"),
        ("NoSuchOption yes", "`ssh -G` says"),
    ],
)
def test_what_is_not_supported_is_refused_in_one_line(config, lines, said):
    with pytest.raises(ConfigError) as caught:
        route(config(f"Host gpu1\n {lines}\n"))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_configuration_that_is_not_there_says_what_makes_it(config):
    host = config(ssh_config="/nowhere/config", if_down="./scripts/demo --keep starts it")
    with pytest.raises(Unreachable, match=r"/nowhere/config.*\./scripts/demo --keep starts it"):
        route(host)


def test_a_key_that_is_not_there_is_named(config):
    with pytest.raises(ConfigError, match="no key file /nowhere/id"):
        route(config(identity_file="/nowhere/id"))


def test_without_an_ssh_the_address_and_the_usual_files_do(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/id_ed25519").write_text("a key")
    (hop,) = route(Host(name="gpu1", address="192.0.2.1", port=2200, user="me"))
    assert (hop.hostname, hop.port, hop.user) == ("192.0.2.1", 2200, "me")
    assert hop.identities == (str(tmp_path / ".ssh/id_ed25519"),)
    assert [Path(file).name for file in hop.known_hosts] == ["known_hosts"]
