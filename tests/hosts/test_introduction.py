"""Meeting a host for the first time: what is shown, what is written down, and when it is not."""

from __future__ import annotations

import subprocess

import pytest

from tasks import errors, link
from tests.hosts.asked import HEALTH, is_absent


def introduce(host):
    """Meet a host that no jump host stands before."""
    (met,) = link.introduce(host)
    return met


def keygen(*words):
    done = subprocess.run(
        ["ssh-keygen", *map(str, words)], check=False, timeout=20, capture_output=True, text=True
    )
    return done.stdout


def test_the_fingerprint_is_the_hosts_own_and_looking_changes_nothing(machine, tmp_path):
    known = tmp_path / "new/known_hosts"
    before = machine.log().count("Accepted")
    met = introduce(machine.host(known_hosts=str(known)))
    own = keygen("-lf", machine.folder / "host_key.pub").split()[1]
    assert met.fingerprint == f"ssh-ed25519 {own}"
    assert met.known == ""
    assert met.looked_up == f"[127.0.0.1]:{machine.port}"
    assert not known.exists()
    assert machine.log().count("Accepted") == before
    assert met.remember() == str(known)
    assert known.stat().st_mode & 0o077 == 0 or known.parent.stat().st_mode & 0o077 == 0
    assert introduce(machine.host(known_hosts=str(known))).known == "known_hosts"
    assert introduce(machine.host(host_key=machine.host_key)).known == "hosts.yaml"
    # ssh itself finds the line.
    assert machine.host_key in keygen("-F", met.looked_up, "-f", known)


def test_a_name_is_hashed_where_ssh_would_hash_it(machine, door, tmp_path):
    known = tmp_path / "known_hosts"
    known.write_text("other ssh-ed25519 AAAA")  # no line feed: ours must not stick to it
    config = tmp_path / "config"
    config.write_text("HashKnownHosts yes\nIdentityAgent none\nGlobalKnownHostsFile /dev/null\n")
    host = machine.host(known_hosts=str(known), ssh_config=str(config))
    introduce(host).remember()
    assert len(known.read_text().splitlines()) == 2
    assert "127.0.0.1" not in known.read_text()
    assert machine.host_key in keygen("-F", f"[127.0.0.1]:{machine.port}", "-f", known)
    assert is_absent(door(host).ask(*HEALTH, deadline=20))


def test_a_changed_or_stolen_key_is_refused(lab, machine, tmp_path):
    other = lab.new_key("another-host").with_suffix(".pub").read_text()
    known = tmp_path / "known_hosts"
    known.write_text(f"[127.0.0.1]:{machine.port} {other}")
    with pytest.raises(errors.HostKeyWrong, match="ssh-keygen -R"):
        introduce(machine.host(known_hosts=str(known)))
    with pytest.raises(errors.HostKeyWrong, match=r"hosts\.yaml pins"):
        introduce(machine.host(host_key=" ".join(other.split()[:2])))
    known.write_text(f"@revoked * {machine.host_key}\n")
    with pytest.raises(errors.HostKeyWrong, match="@revoked"):
        introduce(machine.host(known_hosts=str(known)))


def test_accept_new_writes_an_unknown_key_down_and_takes_no_other(
    lab, machine, door, tmp_path, notes
):
    known = tmp_path / "known_hosts"
    host = machine.host(known_hosts=str(known), accept_new=True)
    for _ in range(2):
        assert is_absent(door(host).ask(*HEALTH, deadline=20))
    assert len(known.read_text().splitlines()) == 1
    (note,) = notes
    assert "SHA256:" in note
    assert str(known) in note
    other = lab.new_key("yet-another").with_suffix(".pub").read_text()
    known.write_text(f"[127.0.0.1]:{machine.port} {other}")
    with pytest.raises(errors.HostKeyWrong, match="ssh-keygen -R"):
        door(host).ask(*HEALTH, deadline=20)
    known.write_text(f"@revoked * {machine.host_key}\n")
    with pytest.raises(errors.HostKeyWrong):
        door(host).ask(*HEALTH, deadline=20)


def test_where_nothing_can_be_written_down_the_key_is_refused(machine, tmp_path):
    (tmp_path / "file").write_text("")
    nowhere = machine.host(known_hosts=str(tmp_path / "file/known_hosts"))
    with pytest.raises(errors.HostKeyWrong, match="cannot be written"):
        introduce(nowhere).remember()
    with pytest.raises(errors.HostKeyWrong, match="no known_hosts file"):
        introduce(machine.host(known_hosts="/dev/null")).remember()


def test_an_unknown_jump_host_is_met_first(lab, machine, tmp_path):
    bastion = next((m for m in lab.machines if m.name == "porch"), None)
    bastion = bastion or lab.start("porch", known=False)
    known = tmp_path / "known"
    config = tmp_path / "config"
    config.write_text(
        f"Host inner\n  HostName 127.0.0.1\n  Port {machine.port}\n  ProxyJump outer\n"
        f"Host outer\n  HostName 127.0.0.1\n  Port {bastion.port}\n"
        f"Host *\n  IdentityFile {lab.key}\n  IdentityAgent none\n"
        f"  UserKnownHostsFile {known}\n  GlobalKnownHostsFile /dev/null\n"
    )
    host = machine.host(
        address="inner", port=None, identity_file=None, known_hosts=None, ssh_config=str(config)
    )
    met = link.introduce(host)
    jump = next(met)
    assert (jump.last, jump.known) == (False, "")
    assert jump.looked_up == f"[127.0.0.1]:{bastion.port}"
    with pytest.raises(errors.HostKeyWrong, match=f":{bastion.port} is unknown"):
        next(met)
    jump.remember()
    jump, inner = link.introduce(host)
    assert jump.known == "known_hosts"
    assert (inner.last, inner.looked_up) == (True, f"[127.0.0.1]:{machine.port}")
    inner.remember()
    assert [each.known for each in link.introduce(host)] == ["known_hosts"] * 2
