"""A host that took our key and lies: `fab` tells so, and nothing of it gets beyond its lines."""

from __future__ import annotations

import pytest

from tasks import errors
from tasks.link import exchange
from tests.hosts.asked import HEALTH
from tests.hosts.desk import Desk

# Stands in for the interpreter there: it reads program and request as ours would, then lies.
LIAR = """#!/usr/bin/python3
import json, os, sys
read = sys.stdin.buffer
read.read(int(read.readline()))
request = json.loads(read.read(int(read.readline())))
nonce = request["nonce"]
def frame(kind, value, nonce=nonce):
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    os.write(1, b"\\x02" + nonce.encode() + b" " + kind + b" %d\\n" % len(body))
    os.write(1, body + b"\\x03\\n")
evil = "\\x1b]0;owned\\x07\\x1b[2J\\r\\ngpu1  launch  changed  all is well\\u202e"
"""
LIES = {
    "other shapes": "frame(b'R', {'changed': evil, 'run_id': {}, 'warnings': evil, 'step': evil})",
    "steering": "frame(b'R', {'state': evil, 'run_id': evil, 'detail': evil, 'warnings': [evil],"
    " 'text': evil, 'file': evil, 'offset': 0, 'more': False, 'ended': True, 'checks':"
    " [{'check': evil, 'state': 'ok', 'detail': evil}]})",
    "a refusal that steers": "frame(b'E', {'code': 'refused', 'text': evil, 'data': {evil: evil}})",
    "a bug that steers": "frame(b'T', {'traceback': evil})",
    "files that nobody offered": "frame(b'N', {'blobs': ['../../../etc/passwd', '/etc/shadow']})",
    "no JSON": "frame(b'R', b'{' * 100000)",
    "an endless frame": "os.write(1, b'\\x02' + nonce.encode() + b' R 999999999\\n')",
    "another nonce": "frame(b'R', {'state': 'training'}, '0' * 32)",
    "much noise": "[os.write(1, b'\\x1b[31m' * 200000) for _ in range(20)]; os.write(2, b'\\x1b')",
}


@pytest.fixture
def desk(tmp_path, stub, machine):
    return Desk(tmp_path, stub, machine)


def snapshot(folder):
    return {
        str(path): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


@pytest.mark.parametrize("lie", LIES)
def test_no_lie_of_a_host_steers_the_desk(desk, machine, lie):
    script = machine.home / "liar"
    script.write_text(LIAR + LIES[lie] + "\n")
    script.chmod(0o755)
    desk.hosts["gpu1"]["agent_python"] = str(script)
    desk.write()
    before = snapshot(desk.folder)
    for task in ("deploy", "status", "logs", "doctor"):
        command = {**desk.command(task)}
        lines, code = run(command)
        assert code in {0, 3, 7, 8, 9, 11}, (task, lines)
        assert "Traceback (most recent call last)" not in lines, lines
        assert not set(lines) & set("\x1b\x07\u202e\x02"), (task, lines)
        # Each line that begins as one of ours is one of ours; a log is the host's own words.
        own = [line for line in lines.splitlines() if line.startswith("gpu1  launch  changed")]
        assert task == "logs" or not own, lines
    assert snapshot(desk.folder) == before


def run(command):
    import subprocess

    done = subprocess.run(**command, capture_output=True, timeout=90, check=False)
    return done.stdout + done.stderr, done.returncode


def test_a_host_that_talks_without_end_is_given_up(machine, door, monkeypatch):
    monkeypatch.setattr(exchange, "SILENCE_SECONDS", 1.0)
    script = machine.home / "talker"
    script.write_text(LIAR + "while True: os.write(1, b'x' * 65536)\n")
    script.chmod(0o755)
    link = door(machine.host(agent_python=str(script)), sleep=lambda _: None)
    with pytest.raises(errors.ConnectionLost, match="nothing heard for 1 s"):
        link.ask(*HEALTH, deadline=20)
