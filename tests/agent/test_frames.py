from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import sys
import time

import pytest

from tasks.agent.desk import Refused
from tasks.agent.root import Root, expand
from tasks.link.program import AGENT, program
from tests.agent import call as calls
from tests.agent.call import BugError, Call, RefusalError, wait_for
from tests.agent.machine import canonical


def test_probe_tells_what_the_host_is(machine):
    found = machine.ask("probe", python=sys.executable, output=str(machine.output), port=45_871)
    assert found["uid"] == os.getuid()
    assert found["python"]["path"] == sys.executable
    assert [disk["what"] for disk in found["disks"]] == ["root", "output"]
    assert all(disk["writable"] and disk["free"] > 0 for disk in found["disks"])
    assert found["port"] == {"number": 45_871, "free": True}
    assert found["run"] == {"id": None, "state": "absent"}
    assert found["release"] is None
    assert found["lease"] is None
    assert not machine.root.exists()
    assert list(machine.home.iterdir()) == []


def test_probe_names_a_python_that_is_none(machine):
    found = machine.ask("probe", python="/no/python")
    assert found["python"] is None
    assert found["warnings"] == [
        "/no/python: cannot be started: No such file or directory; set `python` in hosts.yaml"
    ]


@pytest.mark.parametrize("verb", ["rm", "__import__", "", None, 7])
def test_unknown_verbs_are_bad_requests(machine, verb):
    with pytest.raises(RefusalError, match=r"verb: is .*; this agent has probe"):
        _raw(machine, {"verb": verb, "arguments": {}}).result()


def test_a_bug_comes_back_with_its_traceback_and_source_lines(machine, tmp_path):
    agent = shutil.copytree(AGENT, tmp_path / "agent")
    with (agent / "runs.py").open("a") as file:
        file.write("\n\ndef health(desk, arguments):\n    return 1 / len([])  # planted\n")
    with pytest.raises(BugError, match=r"(?s)agent/runs.py.*1 / len\(\[\]\)  # planted.*ZeroDiv"):
        _raw(machine, {"verb": "health"}, agent=agent).result()


def test_a_verb_that_is_stuck_is_ended_after_its_deadline(machine, tmp_path):
    agent = shutil.copytree(AGENT, tmp_path / "agent")
    with (agent / "runs.py").open("a") as file:
        file.write("\n\ndef health(desk, arguments):\n    time.sleep(60)\n")
    text = (agent / "desk.py").read_text()
    assert "OVERDUE_S = 5.0" in text
    (agent / "desk.py").write_text(text.replace("OVERDUE_S = 5.0", "OVERDUE_S = 0.3"))
    call = _raw(machine, {"verb": "health", "deadline": 0.3}, agent=agent)
    with pytest.raises(RefusalError, match=r"stuck 0.3 s after its deadline of 0.3 s") as caught:
        call.result()
    assert (caught.value.code, call.status) == ("deadline", 1)


@pytest.mark.parametrize("said", [b"", b"9999\nhalf a program", b"program and half a request"])
def test_a_program_or_request_that_never_comes_whole_is_not_waited_for(machine, monkeypatch, said):
    assert "alarm(90)" in calls.BOOT
    monkeypatch.setattr(calls, "BOOT", calls.BOOT.replace("alarm(90)", "alarm(1)"))
    if said.startswith(b"program"):
        source = program("health", AGENT)
        said = b"%d\n%s500\n{" % (len(source), source)
    one = Call(None, home=machine.home, text=said)
    machine.calls.append(one)
    assert one.process.wait(20) == -signal.SIGALRM


def test_an_upload_that_stops_is_given_up_and_the_lock_is_free(bare, tmp_path):
    bare.lease()
    bare.agent = shutil.copytree(AGENT, tmp_path / "agent")
    text = (bare.agent / "desk.py").read_text()
    assert "STALLED_S = 20.0" in text
    (bare.agent / "desk.py").write_text(text.replace("STALLED_S = 20.0", "STALLED_S = 0.5"))
    digest, entries, _ = bare.manifest()
    with pytest.raises(RefusalError, match=r"nothing came from the desk for 0.5 s") as caught:
        bare.ask("sync", manifest=entries, digest=digest, blobs={e["sha256"]: b"" for e in entries})
    assert caught.value.code == "deadline"
    assert bare.sync()["changed"]
    assert bare.temporary() == []


@pytest.mark.parametrize(
    "change",
    [{"deadline": 0}, {"deadline": "9"}, {"lease": 5}, {"by": 7}, {"by": {"who": 1}}, {"verb": 1}],
)
def test_odd_requests_are_bad_requests(machine, change):
    with pytest.raises(RefusalError) as caught:
        _raw(machine, {"verb": "health", **change}).result()
    assert caught.value.code == "bad-request"


def _raw(machine, request, agent=AGENT):
    request = {
        "arguments": {"root": str(machine.root)},
        "nonce": secrets.token_hex(16),
        "deadline": 10,
        **request,
    }
    source = program("health", agent)
    body = json.dumps(request).encode()
    text = b"%d\n%s%d\n%s" % (len(source), source, len(body), body)
    call = Call(request, home=machine.home, text=text)
    machine.calls.append(call)
    return call


@pytest.mark.parametrize("body", [b"", b"12\n{", b"x\n", b"2\n[]", b'14\n{"nonce":"zz"}', b"-1\n"])
def test_a_request_without_a_nonce_gets_words_on_stderr(machine, body):
    source = program("health")
    call = Call(None, home=machine.home, text=b"%d\n%s%s" % (len(source), source, body))
    call.end()
    assert call.status == 2
    assert call.stderr == b"agent: the request was cut or is no request\n"


def test_a_heartbeat_comes_at_least_each_three_seconds(machine):
    machine.deploy()
    launched = machine.launch("--hang-before-first-step")
    call = machine.start("await_progress", run_id=launched["run_id"], deadline=30)
    wait_for(lambda: call.next()[1].get("phase") == "loading")
    began = time.monotonic()
    assert call.next() == ("P", {"alive": True})
    assert time.monotonic() - began < 3.5
    call.hang_up()
    assert call.process.wait(5) == 3


def test_the_deadline_ends_a_verb_with_a_word_of_its_own(machine):
    machine.train()
    machine.change("# changed\n")
    digest, entries, _ = machine.manifest()
    call = machine.start("sync", manifest=entries, digest=digest, deadline=0.5)
    with pytest.raises(RefusalError, match=r"not done after 0.5 s, and stopped") as caught:
        call.result(blobs={each["sha256"]: b"" for each in entries})
    assert caught.value.code == "deadline"


def test_a_desk_that_hangs_up_ends_a_long_verb_and_frees_its_lock(machine):
    machine.deploy()
    machine.change("# changed\n")
    digest, entries, _ = machine.manifest()
    call = machine.start("sync", manifest=entries, digest=digest, deadline=60)
    assert call.next()[0] == "N"
    call.hang_up()
    assert call.process.wait(5) == 3
    assert machine.sync()["changed"]
    assert machine.temporary() == []


def test_a_reader_that_is_gone_never_aborts_a_change(machine):
    machine.deploy()
    run_id = machine.run_id()
    spec = machine.spec()
    call = machine.start(
        "launch",
        run_id=run_id,
        digest=machine.manifest()[0],
        spec=spec,
        spec_digest=canonical(spec),
    )
    call.process.stdout.close()
    call.process.wait(10)
    assert machine.launch(run_id=run_id, spec=spec)["changed"] is False
    assert machine.ask("await_progress", run_id=run_id)["step"] >= 1


@pytest.mark.parametrize(
    "value", ["", "relative", "~other/fab", "/a/../b", "/x\n", "/x\0y", "~/../x", "/" + "x" * 3000]
)
def test_odd_paths_are_refused(value):
    with pytest.raises(Refused) as caught:
        expand(value, "root")
    assert caught.value.code == "bad-request"


@pytest.mark.parametrize("value", ["/", "~", 5, None, ["/x"], "relative"])
def test_odd_roots_are_refused(machine, value):
    with pytest.raises(RefusalError) as caught:
        machine.ask("health", root=value)
    assert caught.value.code == "bad-request"


@pytest.mark.parametrize(
    "value",
    ["", ".", "..", "../../x", "latest", "20260101-000000-abcd/..", "20260101-000000-abcd\n"],
)
def test_odd_run_ids_and_digests_never_become_paths(value):
    for make in (Root("/r").run, Root("/r").release):
        with pytest.raises(Refused) as caught:
            make(value)
        assert caught.value.code == "bad-request"


@pytest.mark.parametrize(
    "verb", ["health", "logs", "await_progress", "status", "verify", "features"]
)
def test_every_verb_checks_what_it_is_given(machine, verb):
    with pytest.raises(RefusalError) as caught:
        machine.ask(verb, run_id="../../x", digest="../../x", python="/bin/true")
    assert caught.value.code == "bad-request"
