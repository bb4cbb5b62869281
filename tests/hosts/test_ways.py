"""Ways to a host as people have them in ~/.ssh/config: taken as ssh takes them, or refused."""

from __future__ import annotations

import base64
import getpass
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from tasks import errors
from tests.hosts.asked import HEALTH, is_absent
from tests.hosts.ground import until


def keygen(*words):
    subprocess.run(["ssh-keygen", "-q", *map(str, words)], check=True, timeout=20)


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """`agent(key...)`: an ssh-agent of this test alone, which holds these keys."""
    made = tmp_path / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(made)], stdout=subprocess.DEVNULL)
    until(made.exists, what="the agent")
    monkeypatch.setenv("SSH_AUTH_SOCK", str(made))

    def add(*keys):
        subprocess.run(["ssh-add", "-q", *map(str, keys)], check=True, timeout=20)

    add.folder = tmp_path
    yield add
    process.terminate()
    process.wait(10)


@pytest.fixture
def way(lab, tmp_path):
    """`way(machine, text)`: the machine as nothing but an alias `there` of an ssh configuration."""

    def make(machine, text="", key=lab.key, **changes):
        config = tmp_path / "config"
        usual = (
            f"Host there\n  HostName 127.0.0.1\n  Port {machine.port}\nHost *\n"
            f"  User {getpass.getuser()}\n  IdentityFile {key}\n  IdentitiesOnly yes\n"
            f"  IdentityAgent none\n"
            f"  UserKnownHostsFile {lab.known_hosts}\n  GlobalKnownHostsFile /dev/null\n"
        )
        config.write_text(f"{text}\n{usual}")
        gone = dict.fromkeys(("port", "user", "identity_file", "known_hosts"))
        return machine.host(**{**gone, "address": "there", "ssh_config": str(config), **changes})

    return make


def answers(door, host):
    return is_absent(door(host).ask(*HEALTH, deadline=20))


def refused(door, host, kind):
    with pytest.raises(kind) as caught:
        door(host, sleep=lambda _: None).ask(*HEALTH, deadline=20)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_include_and_match_mean_what_they_mean_to_ssh(machine, door, way, tmp_path):
    (tmp_path / "more").write_text("Match originalhost there exec true\n  HostName localhost\n")
    text = (
        f"Include {tmp_path}/m*re\nMatch exec false\n  Port 1\n"
        f"Host there\n  HostKeyAlias 127.0.0.1\n  UserKnownHostsFile {tmp_path}/alias\n"
    )
    (tmp_path / "alias").write_text(f"127.0.0.1 {machine.host_key}\n")
    assert answers(door, way(machine, text))


def test_a_host_key_alias_is_looked_up_instead_of_the_address(machine, door, way, tmp_path):
    (tmp_path / "known").write_text(f"the-gpu {machine.host_key}\n")
    text = f"Host there\n  HostKeyAlias the-gpu\n  UserKnownHostsFile {tmp_path}/known\n"
    assert answers(door, way(machine, text))


def test_two_jump_hosts_with_users_of_their_own(lab, machine, door, way):
    if os.geteuid() != 0:
        pytest.skip("not run: an sshd for several users needs root")
    # Their shells are nologin: to jump, none is needed. sshd reads the keys as root, because the
    # lab's folder is closed to them.
    lines = (
        f"AuthorizedKeysCommand /bin/cat {lab.key}.pub",
        "AuthorizedKeysCommandUser root",
        "AuthorizedKeysFile none",
    )
    one, two = (lab.start(name, sshd=lines) for name in ("hop-one", "hop-two"))
    text = (
        f"Host there\n  ProxyJump nobody@one,two\nHost one\n  HostName 127.0.0.1\n"
        f"  Port {one.port}\nHost two\n  HostName 127.0.0.1\n  Port {two.port}\n  User daemon\n"
    )
    assert answers(door, way(machine, text))
    assert "Accepted publickey for nobody" in one.log()
    assert "Accepted publickey for daemon" in two.log()


def test_an_authority_vouches_for_a_host(lab, door, way, tmp_path):
    keygen("-t", "ed25519", "-N", "", "-f", tmp_path / "ca")
    keygen("-t", "ed25519", "-N", "", "-f", tmp_path / "other-ca")
    keygen("-t", "ecdsa", "-N", "", "-f", tmp_path / "key")
    keygen("-s", tmp_path / "ca", "-I", "x", "-h", "-n", "127.0.0.1,gpu", tmp_path / "key.pub")
    there = lab.start(
        "certified",
        known=False,
        sshd=(f"HostKey {tmp_path}/key", f"HostCertificate {tmp_path}/key-cert.pub"),
    )

    def knowing(name, ca="ca", lines=""):
        authority = (tmp_path / f"{ca}.pub").read_text()
        (tmp_path / "known").write_text(f"@cert-authority {name} {authority}")
        return way(there, f"Host there\n{lines}  UserKnownHostsFile {tmp_path}/known\n")

    assert answers(door, knowing(f"[127.0.0.1]:{there.port}"))
    assert answers(door, knowing("127.0.0.*"))
    assert answers(door, knowing("gpu", lines="  HostKeyAlias gpu\n"))
    said = refused(door, knowing("127.*", ca="other-ca"), errors.HostKeyWrong)
    assert "signed by another authority" in said
    said = refused(door, knowing("*", lines="  HostKeyAlias cpu\n"), errors.HostKeyWrong)
    assert "its certificate is for 127.0.0.1, gpu" in said
    assert "is unknown" in refused(door, knowing("10.0.0.1"), errors.HostKeyWrong)


def test_an_authority_that_only_knows_users_or_old_times_does_not_vouch(lab, door, way, tmp_path):
    keygen("-t", "ed25519", "-N", "", "-f", tmp_path / "ca")
    (tmp_path / "known").write_text(f"@cert-authority * {(tmp_path / 'ca.pub').read_text()}")
    text = f"Host there\n  UserKnownHostsFile {tmp_path}/known\n"
    for name, words, why in (
        ("late", ("-h", "-n", "127.0.0.1", "-V", "20200101:20200102"), "has expired"),
        ("plain", (), "it shows no certificate"),
    ):
        keygen("-t", "ed25519", "-N", "", "-f", tmp_path / name)
        lines = (f"HostKey {tmp_path}/{name}",)
        if words:
            keygen("-s", tmp_path / "ca", "-I", "x", *words, tmp_path / f"{name}.pub")
            lines = (*lines, f"HostCertificate {tmp_path}/{name}-cert.pub")
        there = lab.start(f"certified-{name}", known=False, sshd=lines)
        assert why in refused(door, way(there, text), errors.HostKeyWrong)


@pytest.fixture(scope="module")
def trusting(lab, tmp_path_factory):
    """A host that lets in whom an authority vouches for; its folder has the authority's key."""
    at = tmp_path_factory.mktemp("users")
    keygen("-t", "ed25519", "-N", "", "-f", at / "ca")
    there = lab.start(
        "trusting", sshd=(f"TrustedUserCAKeys {at}/ca.pub", "AuthorizedKeysFile none")
    )
    there.ca = at / "ca"
    return there


@pytest.mark.parametrize("place", ["beside the key", "CertificateFile", "agent", "agent and file"])
def test_a_certificate_of_the_user_lets_in(trusting, door, way, agent, place):
    key = agent.folder / "mine"
    keygen("-t", "ed25519", "-N", "", "-f", key)
    lines = f"Host there\n  IdentityFile {key}\n  IdentityAgent $SSH_AUTH_SOCK\n"
    assert "offered" in refused(door, way(trusting, lines), errors.LoginRefused)
    keygen("-s", trusting.ca, "-I", "me", "-n", getpass.getuser(), f"{key}.pub")
    if place == "CertificateFile":
        (agent.folder / "mine-cert.pub").rename(agent.folder / "a b.pub")
        lines += f'  CertificateFile "{agent.folder}/a b.pub"\n'
    elif place == "agent":
        agent(key)  # takes the certificate along
        key.unlink()
        lines += "  IdentitiesOnly no\n"
    elif place == "agent and file":
        (agent.folder / "mine-cert.pub").rename(agent.folder / "x.pub")
        agent(key)
        lines += f"  CertificateFile {agent.folder}/x.pub\n"
    assert answers(door, way(trusting, lines))


def test_an_agent_with_too_many_keys_is_told_and_the_named_one_gets_in(
    lab, door, way, tmp_path, agent
):
    strict = lab.start("strict", sshd=("MaxAuthTries 3",))
    for number in range(5):
        keygen("-t", "ed25519", "-N", "", "-f", tmp_path / f"k{number}")
        agent(tmp_path / f"k{number}")
    text = "Host there\n  IdentityAgent $SSH_AUTH_SOCK\n  IdentitiesOnly no\n"
    agent(lab.key)
    said = refused(door, way(strict, text, key="none"), errors.LoginRefused)
    assert "the server hung up after these keys" in said
    assert "`identity_file` in hosts.yaml" in said
    assert answers(door, way(strict, text))
    assert answers(door, way(strict, text, identity_file=str(lab.key)))


def hardware_key(path, kind=b"sk-ssh-ed25519@openssh.com"):
    """Write what ssh-keygen -t ed25519-sk writes, with a key that no device has."""

    def text(value):
        return len(value).to_bytes(4, "big") + value

    public = text(kind) + text(b"k" * 32) + text(b"ssh:")
    private = b"\0\0\0\1" * 2 + public + b"\1" + text(b"handle") + text(b"") + text(b"comment")
    private += bytes(range(1, 1 + -len(private) % 8))
    body = b"openssh-key-v1\0" + text(b"none") * 2 + text(b"") + b"\0\0\0\1"
    encoded = base64.encodebytes(body + text(public) + text(private)).decode()
    begin, end = (f"-----{word} OPENSSH PRIVATE KEY-----" for word in ("BEGIN", "END"))
    path.write_text(f"{begin}\n{encoded}{end}\n")
    path.chmod(0o600)
    path.with_name(f"{path.name}.pub").write_text(
        f"{kind.decode()} {base64.b64encode(public).decode()} me\n"
    )


@pytest.mark.parametrize("public", [True, False])
def test_a_hardware_key_is_refused_by_name(machine, door, tmp_path, public):
    hardware_key(tmp_path / "sk")
    if not public:
        (tmp_path / "sk.pub").unlink()
    said = refused(door, machine.host(identity_file=str(tmp_path / "sk")), errors.LoginRefused)
    assert f"{tmp_path}/sk holds a hardware key" in said


def test_an_encrypted_key_without_its_public_half_is_told_too(lab, machine, door, tmp_path):
    shutil.copy(lab.key, tmp_path / "locked")
    keygen("-p", "-P", "", "-N", "secret", "-f", tmp_path / "locked")
    said = refused(door, machine.host(identity_file=str(tmp_path / "locked")), errors.LoginRefused)
    assert "has a passphrase" in said
    assert "ssh-add" in said


def test_ipv6_and_an_odd_port(lab, door, way):
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("not run: no IPv6 here")
    six = lab.start("six", known=False, sshd=("ListenAddress ::1",))
    known = lab.folder / "six-known"
    known.write_text(f"[::1]:{six.port} {six.host_key}\n")
    assert answers(door, six.host(address="::1", known_hosts=str(known)))
    text = f"Host there\n  HostName ::1\n  UserKnownHostsFile {known}\n"
    assert answers(door, way(six, text))
    jump = f"Host inner\n  HostName ::1\n  Port {six.port}\n  ProxyJump [0::1]:{six.port}\n"
    both = f"{jump}Host *\n  UserKnownHostsFile {known}\n"
    assert answers(door, way(six, both, address="inner"))


def test_known_hosts_may_be_several_files_and_have_spaces_in_their_names(
    machine, door, way, tmp_path
):
    spaced = tmp_path / "my known hosts"
    spaced.write_text(f"[127.0.0.1]:{machine.port} {machine.host_key}\n")
    first = f"Host there\n  UserKnownHostsFile {tmp_path}/none"
    assert answers(door, way(machine, f'{first} "{spaced}"\n'))
    assert answers(door, way(machine, f'Host there\n  UserKnownHostsFile "{spaced}"\n'))


def test_a_login_that_runs_its_own_program_is_told(lab, door):
    own = lab.start("own-program", sshd=('ForceCommand echo "Welcome to the menu"',))
    said = refused(door, own.host(), errors.UnreadableReply)
    assert "it said: Welcome to the menu" in said
    assert "ForceCommand" in said
    fails = lab.start("own-failure", sshd=('ForceCommand sh -c "echo no PTY >&2; exit 1"',))
    said = refused(door, fails.host(), errors.RemoteFailure)
    assert "exit 1 before our program ran; it said: no PTY" in said
    assert "ForceCommand" in said


def test_a_server_that_wants_a_password_is_told_how_a_key_gets_there(lab, door):
    old = lab.start("old", sshd=("PubkeyAuthentication no", "PasswordAuthentication yes"))
    said = refused(door, old.host(), errors.LoginRefused)
    assert "the server only allows password" in said
    assert "ssh-copy-id" in said


def test_no_sftp_is_no_loss_and_few_starts_at_once_are_enough(lab, door):
    poor = lab.start(
        "poor", sshd=("Subsystem sftp /bin/false", "MaxStartups 2:50:3", "Banner none")
    )
    links = [door(poor.host(name=f"gpu{number}")) for number in range(3)]
    for link in links:
        assert is_absent(link.ask(*HEALTH, deadline=20))
