from __future__ import annotations

import time

import pytest

from tasks.agent import logfile
from tests.agent.call import RefusalError


def test_a_log_is_read_on_by_offset_without_losing_or_repeating_a_line(machine):
    machine.deploy()
    run_id = machine.launch("--steps", 30)["run_id"]
    lines, offset, ended = [], 0, False
    while not ended:
        part = machine.ask("logs", run_id=run_id, offset=offset, follow_s=5)
        assert part["text"] == "" or part["text"].endswith("\n")
        lines += part["text"].splitlines()
        offset, ended = part["offset"], part["ended"]
    assert [int(line.split("/")[0].split()[1]) for line in lines] == list(range(1, 31))
    tail = machine.ask("logs", run_id=run_id, lines=3)
    assert tail["text"].splitlines() == lines[-3:]
    assert machine.ask("logs", run_id=run_id, lines=0)["text"] == ""
    metrics = machine.ask("logs", file="metrics.jsonl", offset=0)
    assert metrics["text"].count("\n") == 30
    some = machine.ask("logs", run_id=run_id, offset=0, max_bytes=4096)
    assert (some["more"], some["ended"]) == (False, True)


def test_following_answers_as_soon_as_there_is_text(machine):
    machine.deploy()
    run_id = machine.launch("--load-seconds", 0.5)["run_id"]
    began = time.monotonic()
    part = machine.ask("logs", run_id=run_id, offset=0, follow_s=12)
    assert part["text"]
    assert time.monotonic() - began < 10
    machine.kill()
    part = machine.ask("logs", run_id=run_id, offset=part["offset"], follow_s=12)
    assert part["ended"]


@pytest.mark.parametrize("file", ["spec.json", "../spec.json", "", "/etc/passwd", 5])
def test_only_logs_are_given(machine, file):
    machine.deploy()
    machine.launch("--steps", 1)
    with pytest.raises(RefusalError) as caught:
        machine.ask("logs", file=file)
    assert caught.value.code == "bad-request"


def test_no_run_no_log(machine):
    machine.deploy()
    with pytest.raises(RefusalError, match=r"no run .* on this host"):
        machine.ask("logs")


def read_all(path, most, offset=0):
    parts = []
    while True:
        part = logfile.read_from(str(path), offset, most, last=True)
        parts.append(part.text)
        offset = part.offset
        if not part.more:
            return parts


def test_parts_end_at_lines_and_long_lines_come_in_pieces(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\n" + b"x" * 50 + b"\nlast without end")
    parts = read_all(path, 20)
    assert b"".join(parts) == path.read_bytes()
    assert parts[0] == b"one\ntwo\n"
    unfinished = logfile.read_from(str(path), 59, 100, last=False)
    assert (unfinished.text, unfinished.offset) == (b"", 59)
    assert logfile.read_from(str(tmp_path / "none"), 5, 100, last=True) == logfile.NOTHING


def test_a_capped_log_keeps_head_and_tail_at_their_offsets(tmp_path):
    path = tmp_path / "log"
    line = b"%06d " + b"y" * 92 + b"\n"
    path.write_bytes(b"".join(line % number for number in range(30_000)))
    with path.open("r+b", buffering=0) as file:
        cap = logfile.Cap(file.fileno(), 1 << 20)
        assert cap.apply()
        assert not cap.apply()
    assert path.stat().st_size == 3_000_000
    assert path.stat().st_blocks * 512 < 700_000
    text = b"".join(read_all(path, 1 << 20))
    assert text.startswith(b"000000 ")
    assert text.endswith(line % 29_999)
    assert b"log capped at 1 MiB" in text
    assert b"\0" not in text
    later = logfile.read_from(str(path), 1_000_000, 1 << 20, last=False)
    first = int(later.text[:6])
    assert later.dropped == first * 100 - 1_000_000
    assert logfile.tail_offset(str(path), 2) == 2_999_800


def test_where_holes_cannot_be_made_the_log_is_emptied(tmp_path, monkeypatch):
    path = tmp_path / "log"
    path.write_bytes(b"z" * 99 + b"\n")
    path.write_bytes(path.read_bytes() * 20_000)
    monkeypatch.setattr(logfile, "_punch", lambda *_: False)
    with path.open("r+b", buffering=0) as file:
        assert logfile.Cap(file.fileno(), 1 << 20).apply()
    part = logfile.read_from(str(path), 2_000_000, 4096, last=False)
    assert part.text.startswith(b"[log capped at 1 MiB")


def test_a_few_zero_bytes_are_text(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"a\0\0b\nc\n")
    assert logfile.read_from(str(path), 0, 4096, last=False).text == b"a\0\0b\nc\n"
