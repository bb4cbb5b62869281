from __future__ import annotations

import fcntl
import json
import os
import secrets

import pytest

from tests.agent.call import RefusalError, wait_for


def test_a_lease_is_held_by_one_and_given_back(bare):
    first = bare.lease()
    assert first["changed"]
    assert first["token"] == bare.token
    again = bare.ask("lease_acquire", seconds=7200, why="tests", token=bare.token)
    assert again["changed"] is False
    with pytest.raises(
        RefusalError, match=r"lease-held: by tester on desk \(tests\) since .*; --wait-lease waits"
    ) as caught:
        bare.ask("lease_acquire", seconds=5, why="others", token=secrets.token_hex(16))
    assert caught.value.code == "lease-held"
    assert "it is your own: if that desk is gone, `fab lease --rel" in str(caught.value)
    assert caught.value.data["who"] == "tester"
    assert "token" not in caught.value.data
    assert "token" not in bare.ask("lease_show")["lease"]
    assert bare.ask("lease_release", token=bare.token)["changed"]
    assert bare.ask("lease_release", token=bare.token)["changed"] is False
    assert bare.ask("lease_show")["lease"] is None
    assert bare.temporary() == []


def test_a_token_may_come_with_the_request(bare):
    bare.token = secrets.token_hex(16)
    assert bare.ask("lease_acquire", seconds=60, why="x")["token"] == bare.token
    bare.token = None
    with pytest.raises(RefusalError):
        bare.ask("lease_acquire", seconds=60, why="x")


def test_a_lease_is_renewed_while_a_verb_of_its_holder_has_the_lock(bare):
    bare.lease()
    with (bare.root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        again = bare.ask("lease_acquire", seconds=9000, token=bare.token)
        assert (again["changed"], again["left_s"]) == (False, 9000)
        assert bare.ask("lease_show")["lease"]["left_s"] > 8990
        with pytest.raises(RefusalError) as caught:
            bare.ask("lease_acquire", seconds=5, token=secrets.token_hex(16))
        assert caught.value.code == "lease-held"


def test_others_cannot_give_a_lease_back(bare):
    bare.lease()
    with pytest.raises(RefusalError) as caught:
        bare.ask("lease_release", token=secrets.token_hex(16))
    assert caught.value.code == "lease-held"


def test_a_lease_that_is_lost_is_not_taken_again_by_renewing(bare):
    bare.lease()
    renew = {"seconds": 60, "token": bare.token, "renew": True}
    assert bare.ask("lease_acquire", **renew)["changed"] is False
    bare.ask("lease_free")
    with pytest.raises(RefusalError, match="ours is gone: it ran out, or somebody freed it"):
        bare.ask("lease_acquire", **renew)
    assert bare.ask("lease_show")["lease"] is None


def test_a_lease_is_freed_by_its_person_or_with_the_holder_s_name(bare):
    bare.lease()
    by = {"who": "anna", "host": "her-desk", "why": "fab lease --release"}
    told = r"by tester on desk .*; `fab lease --release --of tester` ends it all the same"
    for of in (None, "anna"):
        with pytest.raises(RefusalError, match=told):
            bare.ask("lease_free", of=of, by=by)
    freed = bare.ask("lease_free", of="tester", by=by)
    assert (freed["changed"], freed["lease"]["who"]) == (True, "tester")
    assert "token" not in freed["lease"]
    assert bare.ask("lease_free", of="tester", by=by) == {"changed": False, "lease": None}
    line = json.loads((bare.root / "history.jsonl").read_text())
    assert (line["verb"], line["who"], line["of"]["who"]) == ("lease_free", "anna", "tester")
    bare.lease()
    assert bare.ask("lease_free")["changed"]  # of the same person on the same desk


@pytest.mark.parametrize(
    "spoil",
    [
        {"until_boottime": 0},
        {"boot_id": "an-earlier-boot"},
        {"until_boottime": None},
        None,
    ],
)
def test_one_that_ran_out_is_replaced(bare, spoil):
    bare.lease()
    path = bare.root / "lease" / "lease.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **spoil}) if spoil else "junk")
    assert bare.ask("lease_show")["lease"] is None
    with pytest.raises(RefusalError, match="ours is gone: it ran out, or somebody freed it"):
        bare.sync()
    bare.token = None
    assert bare.ask("lease_acquire", seconds=60)["changed"]
    assert bare.temporary() == []


@pytest.mark.parametrize("verb", ["sync", "launch", "kill"])
def test_changing_verbs_need_the_present_token(machine, verb):
    machine.deploy()
    machine.change("# changed\n")
    act = getattr(machine, verb)
    for token in (None, secrets.token_hex(16)):
        machine.token = token
        with pytest.raises(RefusalError) as caught:
            act()
        assert caught.value.code == "lease-held"


def test_a_long_verb_renews_its_lease(machine):
    machine.deploy()
    machine.ask("lease_release", token=machine.token)
    machine.ask("lease_acquire", seconds=3, token=machine.token)
    path = machine.root / "lease" / "lease.json"
    run_id = machine.launch("--hang-before-first-step")["run_id"]
    until = json.loads(path.read_text())["until_boottime"]
    call = machine.start("await_progress", run_id=run_id)
    wait_for(lambda: json.loads(path.read_text())["until_boottime"] > until)
    call.hang_up()
    assert call.process.wait(5) == 3


def test_many_who_want_it_at_once_get_one_lease(bare):
    calls = [bare.start("lease_acquire", seconds=60, token=secrets.token_hex(16)) for _ in range(8)]
    codes = []
    for call in calls:
        try:
            codes.append(call.result()["changed"])
        except RefusalError as refusal:
            codes.append(refusal.code)
    assert sorted(codes, key=str) == [True, *["lease-held"] * 7]


def test_a_changing_verb_waits_for_the_lock_until_its_deadline(machine):
    machine.deploy()
    machine.change("# changed\n")
    digest, entries, blobs = machine.manifest()
    with (machine.root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RefusalError) as caught:
            machine.ask("sync", manifest=entries, digest=digest, deadline=0.4)
        assert caught.value.code == "deadline"
        call = machine.start("sync", manifest=entries, digest=digest)
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert call.result(blobs)["changed"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"machine_id": "another", "host": "gpu1"}, "root is shared with gpu1; give each host its"),
        ({"uid": 12345}, "root belongs to uid 12345, and this is uid"),
    ],
)
def test_a_root_of_others_is_refused_by_every_verb(machine, change, words):
    digest = machine.deploy()
    path = machine.root / "machine.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    acts = [
        machine.lease,
        machine.sync,
        machine.launch,
        machine.kill,
        machine.health,
        lambda: machine.ask("probe"),
        lambda: machine.ask("verify", digest=digest),
        lambda: machine.ask("logs"),
    ]
    for act in acts:
        with pytest.raises(RefusalError, match=words) as caught:
            act()
        assert caught.value.code == "not-ours"


def test_a_folder_with_other_things_is_no_root(bare):
    bare.root.mkdir()
    (bare.root / "thesis.tex").write_text("")
    with pytest.raises(RefusalError, match=r"holds 'thesis.tex' and no machine.json") as caught:
        bare.lease()
    assert caught.value.code == "not-ours"
    assert os.listdir(bare.root) == ["thesis.tex"]  # noqa: PTH208
