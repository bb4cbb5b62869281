from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess

import pytest

from tasks.agent import releases
from tasks.agent.desk import Refused
from tasks.link.program import AGENT
from tests.agent.call import RefusalError, wait_for


def test_a_first_sync_sends_all_and_a_second_nothing(bare):
    bare.lease()
    digest, entries, _ = bare.manifest()
    first = bare.sync()
    assert (first["changed"], first["sent_files"], first["reused"]) == (True, len(entries), 0)
    assert first["sent_bytes"] == sum(entry["size"] for entry in entries)
    release = bare.root / "releases" / digest
    for entry in entries:
        file = release / entry["path"]
        assert hashlib.sha256(file.read_bytes()).hexdigest() == entry["sha256"]
        assert f"{file.stat().st_mode & 0o7777:04o}" == entry["mode"]
    record = json.loads((release / "MANIFEST.json").read_text())
    assert (record["digest"], record["files"]) == (digest, entries)
    before = bare.snapshot()
    second = bare.sync()
    assert (second["changed"], second["sent_files"], second["sent_bytes"]) == (False, 0, 0)
    assert bare.snapshot() == before
    assert not (bare.root / "current").exists()
    assert bare.temporary() == []


def test_a_changed_file_travels_alone(machine):
    machine.deploy()
    machine.change("# changed\n")
    dry = machine.sync(dry=True)
    wet = machine.sync()
    for found in (dry, wet):
        assert (found["changed"], found["sent_files"], found["reused"]) == (True, 1, 4)
    assert dry["sent_bytes"] == wet["sent_bytes"]


def test_a_dry_sync_leaves_a_bare_host_bare(bare):
    assert bare.sync(dry=True)["changed"]
    assert not bare.root.exists()


def test_executable_files_keep_their_bit(machine):
    machine.deploy()
    digest, entries, blobs = machine.manifest()
    entries[0]["mode"] = "0555"
    digest = machine.digest(entries)
    machine.ask("sync", manifest=entries, digest=digest, blobs=blobs)
    file = machine.root / "releases" / digest / entries[0]["path"]
    assert file.stat().st_mode & 0o777 == 0o555


@pytest.mark.parametrize(
    "path",
    [
        "../x.py",
        "/etc/passwd",
        "trainer/../../x.py",
        "trainer//x.py",
        "trainer/./x.py",
        "trainer/",
        "",
        ".tmp-x",
        "trainer/.hidden",
        "trainer/x\n.py",
        "trainer/x\0.py",
        "MANIFEST.json",
        "trainer/__init__.py/x.py",
        "x" * 300,
        5,
        None,
    ],
)
def test_odd_paths_are_refused(machine, path):
    _, entries, _ = machine.manifest()
    entries[-1]["path"] = path
    entries.sort(key=lambda entry: str(entry["path"]))
    with pytest.raises(Refused) as caught:
        releases.parse(entries, machine.digest(entries))
    assert caught.value.code == "bad-request"


@pytest.mark.parametrize(
    "change",
    [{"mode": "0777"}, {"mode": "4555"}, {"size": -1}, {"size": 1 << 40}, {"sha256": "../" * 21}],
)
def test_odd_entries_are_refused(machine, change):
    _, entries, _ = machine.manifest()
    entries[0].update(change)
    with pytest.raises(Refused) as caught:
        releases.parse(entries, machine.digest(entries))
    assert caught.value.code == "bad-request"


def test_a_digest_must_be_that_of_the_manifest(machine):
    _, entries, _ = machine.manifest()
    for digest in ("0" * 64, "../../etc"):
        with pytest.raises(RefusalError, match=r"digest: is .*, and not that of the manifest"):
            machine.ask("sync", manifest=entries, digest=digest)
    with pytest.raises(RefusalError, match="names a path twice"):
        machine.ask("sync", manifest=entries[::-1], digest=machine.digest(entries[::-1]))


def test_contents_that_arrive_wrong_are_refused_and_leave_nothing(machine):
    machine.deploy()
    machine.change("# changed\n")
    digest, entries, blobs = machine.manifest()
    wrong = {sha256: bytes(len(content)) for sha256, content in blobs.items()}
    with pytest.raises(RefusalError, match=r"trainer/loop.py: arrived as"):
        machine.ask("sync", manifest=entries, digest=digest, blobs=wrong)
    assert not (machine.root / "releases" / digest).exists()
    assert machine.sync()["changed"]
    assert machine.temporary() == []


def test_a_sync_cut_in_the_middle_is_taken_up_again(bare):
    bare.lease()
    digest, entries, blobs = bare.manifest()
    call = bare.start("sync", manifest=entries, digest=digest)
    _, need = call.next()
    call.write(blobs[need["blobs"][0]] + blobs[need["blobs"][1]][:10])
    assert call.next()[0] == "P"  # the first has arrived
    wait_for(bare.temporary)  # and a part of the second
    call.process.kill()
    call.end()
    again = bare.sync()
    assert (again["sent_files"], again["reused"]) == (len(entries) - 1, 1)
    assert bare.temporary() == []


@pytest.mark.parametrize(
    "damage", ["content", "missing", "extra", "mode", "manifest", "link", "pyc"]
)
def test_a_damaged_release_is_found_and_made_anew(machine, damage):
    digest = machine.deploy()
    release = machine.root / "releases" / digest
    file = release / "trainer" / "loop.py"
    content = file.read_bytes()
    if damage == "content":
        file.chmod(0o644)
        file.write_bytes(content.replace(b"loss", b"lose"))
        file.chmod(0o444)
    elif damage == "missing":
        file.unlink()
    elif damage == "extra":
        (release / "trainer" / "old.py").write_text("")
    elif damage == "mode":
        file.chmod(0o644)
    elif damage == "manifest":
        (release / "MANIFEST.json").unlink()
    elif damage == "link":
        file.rename(machine.folder / "elsewhere.py")
        file.symlink_to(machine.folder / "elsewhere.py")
    elif damage == "pyc":
        (release / "trainer" / "__pycache__").mkdir()
        (release / "trainer" / "__pycache__" / "loop.pyc").write_text("")
    with pytest.raises(RefusalError) as caught:
        machine.ask("verify", digest=digest)
    assert caught.value.code == "verify"
    assert len(caught.value.data["differences"]) == 1
    found = machine.sync()
    assert (found["changed"], found["sent_files"]) == (True, 0)
    assert "was damaged" in found["warnings"][0]
    assert machine.ask("verify", digest=digest)["state"] == "deployed, not running"
    assert machine.sync()["changed"] is False


def test_a_damaged_blob_is_asked_for_again(machine):
    machine.deploy()
    kept = (machine.source / "trainer" / "faults.py").read_bytes()
    blob = machine.root / "blobs" / hashlib.sha256(kept).hexdigest()
    blob.chmod(0o600)
    blob.write_bytes(b"")
    machine.change("# changed\n")
    assert machine.sync()["sent_files"] == 2


def test_each_change_is_one_line_of_history_and_no_more(machine):
    machine.deploy()
    machine.change("# changed\n")
    machine.sync()
    run_id = machine.launch()["run_id"]
    machine.sync()
    machine.ask("await_progress", run_id=run_id)
    machine.kill()
    machine.kill()
    text = (machine.root / "history.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["verb"] for line in lines] == ["sync", "sync", "launch", "kill"]
    assert {line["who"] for line in lines} == {"tester"}
    assert [line["result"] for line in lines] == ["synced", "synced", "started", "finished"]


def test_what_a_dead_process_left_is_swept_and_what_a_living_one_writes_is_not(machine):
    run_id = machine.train()["run_id"]
    with subprocess.Popen(["true"]) as gone:
        pass
    folders = (machine.root, machine.run_folder(run_id))
    left = [folder / f".tmp-exit.json-{gone.pid}" for folder in folders]
    used = [folder / f".tmp-exit.json-{os.getpid()}" for folder in folders]
    left.append(machine.root / "runs" / f".tmp-20261130-185839-{os.getpid() % 10_000:04d}")
    for path in left + used:
        path.write_text("")
    machine.change("# changed\n")
    machine.sync()
    assert machine.temporary() == used


@pytest.mark.needs_namespaces
def test_a_full_disk_is_told_before_anything_is_sent(small_disk):
    small_disk.change("# changed\n")
    small_disk.fill()
    with pytest.raises(RefusalError, match=r"disk full, 0 MiB free and 16 MiB needed; free some"):
        small_disk.sync()


@pytest.mark.needs_namespaces
def test_a_disk_that_fills_up_meanwhile_leaves_no_part(small_disk):
    small_disk.change("# changed\n")
    digest, entries, blobs = small_disk.manifest()
    call = small_disk.start("sync", manifest=entries, digest=digest)
    _, need = call.next()
    small_disk.fill()
    call.write(b"".join(blobs[sha256] for sha256 in need["blobs"]))
    with pytest.raises(RefusalError, match="disk full"):
        call.result()
    assert small_disk.inside(f"find {small_disk.root} -name '.tmp-*'") == ""
    small_disk.empty()
    assert small_disk.sync()["changed"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("errno.EDQUOT", r"the quota of uid \d+ is used up; free some, then repeat"),
        ("errno.ENOSPC", r"disk full, [\d,]+ MiB free; free some, then repeat"),
    ],
)
def test_a_quota_is_told_as_one_and_leaves_no_part(machine, tmp_path, code, words):
    machine.deploy()
    machine.change("# changed\n")
    machine.agent = shutil.copytree(AGENT, tmp_path / "agent")
    before = machine.snapshot()
    with (machine.agent / "releases.py").open("a") as file:
        file.write(f"\n\ndef _copy(source, target):\n    raise OSError({code}, 'planted')\n")
    with pytest.raises(RefusalError, match=words):
        machine.sync()
    after = {path: facts for path, facts in machine.snapshot().items() if "blobs" not in path}
    assert after.keys() == {path for path in before if "blobs" not in path}
    assert machine.temporary() == []
