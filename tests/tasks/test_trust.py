from __future__ import annotations

import base64
import hashlib
import hmac
import socket

import paramiko
import pytest

from tasks.errors import HostKeyWrong
from tasks.link.route import Hop
from tasks.link.trust import Trust, fingerprint, known


def new_key():
    return paramiko.ECDSAKey.generate(bits=256)


ONE, TWO = new_key(), new_key()


def words(key):
    return f"{key.get_name()} {key.get_base64()}"


def hop(tmp_path, text="", **changes):
    file = tmp_path / "known_hosts"
    file.write_text(text)
    facts = {
        "name": "gpu1",
        "hostname": "gpu1.example",
        "port": 2200,
        "user": "me",
        "identities": (),
        "only_identities": True,
        "agent": False,
        "known_hosts": (str(file), str(tmp_path / "not-there")),
        "alias": None,
        "pin": None,
        "family": socket.AF_UNSPEC,
        "proxy": None,
    }
    return Hop(**{**facts, **changes})


def hashed(name):
    salt = b"0123456789abcdefghij"
    digest = hmac.new(salt, name.encode(), hashlib.sha1).digest()
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("[gpu1.example]:2200", True),
        ("[GPU1.example]:2200", True),
        ("other,[gpu1.example]:2200", True),
        ("[*.example]:2200", True),
        ("[gpu?.example]:*", True),
        ("*,![gpu1.example]:2200", False),
        ("gpu1.example", False),
        ("[gpu1.example]:22", False),
        ("g", False),
        (hashed("[gpu1.example]:2200"), True),
        (hashed("gpu1.example"), False),
        ("|1|broken", False),
        ("|1|%%%|%%%", False),
    ],
)
def test_names_in_known_hosts_match_as_for_openssh(tmp_path, names, found):
    there = hop(tmp_path, f"# a comment\n\n{names} {words(ONE)} a comment\n")
    lines = list(known([there.looked_up], there.known_hosts))
    assert [line.key for line in lines] == ([ONE] if found else [])


@pytest.mark.parametrize(
    "line", ["x", "[gpu1.example]:2200 ssh-ed25519", "[gpu1.example]:2200 ssh-new AAAA", "\xff\x00"]
)
def test_lines_that_are_no_key_are_passed_over(tmp_path, line):
    there = hop(tmp_path, f"{line}\n[gpu1.example]:2200 {words(ONE)}\n")
    assert Trust("gpu1", there).keys == [ONE]


def ask(trust, key):
    trust.missing_host_key(paramiko.SSHClient(), "[gpu1.example]:2200", key)


def test_an_unknown_key_is_refused_with_all_that_is_needed_to_trust_it(tmp_path):
    with pytest.raises(HostKeyWrong) as caught:
        ask(Trust("gpu1", hop(tmp_path)), ONE)
    text = str(caught.value)
    assert fingerprint(ONE) in text
    assert f"host_key: {words(ONE)}" in text
    assert "ssh -p 2200 me@gpu1.example" in text


def test_a_key_known_for_the_usual_port_will_do_and_another_will_not(tmp_path):
    trust = Trust("gpu1", hop(tmp_path, f"gpu1.example {words(ONE)}\n"))
    ask(trust, ONE)
    with pytest.raises(HostKeyWrong):
        ask(trust, TWO)


def test_a_changed_key_is_told_with_the_line_that_forgets_the_old(tmp_path):
    trust = Trust("gpu1", hop(tmp_path, f"[gpu1.example]:2200 {words(ONE)}\n"))
    text = str(trust.changed(TWO, ONE))
    assert f"ssh-keygen -R '[gpu1.example]:2200' -f {tmp_path}/known_hosts" in text
    assert fingerprint(TWO) in text


def test_a_pin_makes_known_hosts_meaningless(tmp_path):
    trust = Trust("gpu1", hop(tmp_path, f"* {words(TWO)}\n", pin=words(ONE)))
    assert trust.keys == [ONE]
    assert "hosts.yaml pins" in str(trust.changed(TWO, ONE))


def test_an_alias_is_looked_up_without_the_port(tmp_path):
    trust = Trust("gpu1", hop(tmp_path, f"the-gpu {words(ONE)}\n", alias="the-gpu"))
    assert trust.keys == [ONE]


def test_a_revoked_key_is_refused(tmp_path):
    trust = Trust("gpu1", hop(tmp_path, f"@revoked * {words(ONE)}\n"))
    assert trust.keys == []
    with pytest.raises(HostKeyWrong, match="@revoked"):
        trust.refuse_revoked(ONE)
    trust.refuse_revoked(TWO)


def test_the_server_is_asked_for_a_kind_of_key_that_we_know(tmp_path):
    offered = ("ssh-ed25519", "rsa-sha2-256", "ecdsa-sha2-nistp256")
    trust = Trust("gpu1", hop(tmp_path, f"[gpu1.example]:2200 {words(ONE)}\n"))
    assert trust.preferred(offered)[0] == "ecdsa-sha2-nistp256"
    rsa = paramiko.RSAKey.generate(bits=2048)
    trust = Trust("gpu1", hop(tmp_path, f"[gpu1.example]:2200 {words(rsa)}\n"))
    assert trust.preferred(offered)[0] == "rsa-sha2-256"


def test_fingerprints_are_written_as_ssh_keygen_does(tmp_path):
    import subprocess

    (tmp_path / "key.pub").write_text(words(ONE))
    command = ["ssh-keygen", "-lf", str(tmp_path / "key.pub")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    assert fingerprint(ONE).split()[1] in said
