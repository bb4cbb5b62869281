"""Secrets on a host: where they are, where they are not, and how a changed one is noticed."""

from __future__ import annotations

import pytest

from tests.agent.call import RefusalError
from tests.agent.machine import canonical

ONE, TWO = "hush-hush-one", "hush-hush-two"


def pair(machine, spec):
    return [machine.manifest()[0], canonical(spec)]


def test_another_value_of_a_secret_is_another_run(machine):
    spec = machine.spec(secret_names=["T"])
    run_id = machine.train(spec=spec, secret={"T": ONE})["run_id"]
    again = machine.launch(spec=spec, secret={"T": ONE}, accept_pair=True)
    assert (again["changed"], again["run_id"]) == (False, run_id)
    with pytest.raises(RefusalError, match="is training in this root"):
        machine.launch(spec=spec, secret={"T": TWO}, accept_pair=True)
    keep = {"run_id": machine.run_id(), "pair": pair(machine, spec)}
    assert machine.kill(keep={**keep, "secrets": {"T": ONE}})["kept"] == run_id
    for other in ({"T": TWO}, {}, {"T": ONE, "U": TWO}, {"T": 3}):
        assert machine.kill(keep={**keep, "secrets": other}, dry=True)["changed"], other
    assert machine.kill(keep={**keep, "secrets": {"T": TWO}})["changed"]


def test_what_comes_back_takes_its_own_secrets_of_those_that_were_sent(machine):
    spec = machine.spec(secret_names=["T"])
    machine.train(spec=spec, secret={"T": ONE})
    stopped = machine.kill()["step"]
    flags = ("--crash-at", stopped + 2, "--nan-at", stopped + 1)
    failed = machine.launch(*flags)["run_id"]
    with pytest.raises(RefusalError):
        machine.ask("await_progress", run_id=failed)
    words = {"run_id": machine.run_id(), "back": {"instead_of": failed}}
    with pytest.raises(RefusalError, match=r"secret T: that run had it.*hosts\.yaml"):
        machine.ask("put_back", **words)
    with pytest.raises(RefusalError, match="'T' is no text") as caught:
        machine.ask("put_back", **words, secrets={"T": f"{ONE}\0", "U": TWO})
    assert ONE not in str(caught.value)
    came = machine.ask("put_back", **words, secrets={"T": ONE, "U": TWO})
    assert set(machine.record(came["run_id"], "spec.json")["secrets"]) == {"T"}


def test_a_host_tells_before_a_launch_which_secrets_what_it_would_put_back_needs(machine):
    new = machine.run_id()
    assert machine.ask("probe", new_run=new)["fallback"] is None
    machine.train(spec=machine.spec(secret_names=["T"]), secret={"T": ONE})
    assert machine.ask("probe", new_run=new)["fallback"]["secret_names"] == ["T"]
    assert machine.ask("probe")["fallback"] is None


def test_an_odd_secret_is_refused_without_being_shown(machine):
    machine.deploy()
    spec = machine.spec(secret_names=["T"])
    for value in (f"{ONE}\0", [ONE], None):
        with pytest.raises(RefusalError, match="secrets: 'T' is no text") as caught:
            machine.launch(spec=spec, secret={"T": value})
        assert ONE not in str(caught.value)
