"""`fab -H` means hosts of hosts.yaml, once for all of them; `fab --list` is ordered by use."""

from __future__ import annotations

import pytest
from fabric.config import Config
from fabric.main import Fab
from invoke.collection import Collection
from invoke.tasks import task

import fabfile
from tasks import executor


@pytest.fixture
def fab():
    """Runs a command line against two small tasks, and gives what they were called with."""
    called = []

    @task(auto_shortflags=False)
    def look(c, *, host="", json=False):
        called.append(("look", host, json, type(c).__name__))

    @task(auto_shortflags=False)
    def touch(c, *, host=""):
        called.append(("touch", host, c.config.run.dry))

    program = Fab(
        version="0",
        config_class=Config,
        executor_class=executor.Executor,
        namespace=Collection(look, touch),
    )

    def run(*words):
        program.run(["fab", *words], exit=False)
        return called

    return run


@pytest.mark.parametrize("words", [("-H", "gpu1,gpu2", "look"), ("look", "-H", "gpu1,gpu2")])
def test_hosts_reach_the_task_once_and_without_a_connection(fab, words):
    assert fab(*words) == [("look", "gpu1,gpu2", False, "Context")]


def test_hosts_hold_for_every_task_of_the_line(fab):
    assert fab("-H", "gpu1", "touch", "look", "--json") == [
        ("touch", "gpu1", False),
        ("look", "gpu1", True, "Context"),
    ]


def test_the_task_s_own_flag_and_fabric_s_dry_run_pass_through(fab):
    assert fab("-R", "touch", "--host", "gpu3") == [("touch", "gpu3", True)]


def test_two_different_answers_are_refused(fab, capsys):
    with pytest.raises(SystemExit) as ended:
        fab("-H", "gpu1", "look", "--host", "gpu2")
    assert ended.value.code == 2
    assert capsys.readouterr().err == ("fab: -H says gpu1 and --host says gpu2; give one of them\n")


def test_a_command_of_ones_own_is_refused_with_the_way_to_go(fab, capsys):
    with pytest.raises(SystemExit) as ended:
        fab("-H", "gpu1", "--", "pkill -f train")
    assert ended.value.code == 2
    assert "use `ssh HOST COMMAND`" in capsys.readouterr().err


def test_the_manual_has_every_task_and_each_first_line_fits():
    listed = [name for _, names in fabfile.PAGES for name in names]
    assert sorted(listed) == sorted(fabfile.ns.task_names)
    for name in listed:
        first = fabfile.ns[name].__doc__.partition("\n")[0]
        assert len(f"  verify-features  {first}") <= 80, first


def test_every_task_tells_each_of_its_flags_and_an_example():
    for name in fabfile.ns.task_names:
        its = fabfile.ns[name]
        *_, last = its.__doc__.strip().splitlines()
        assert last.strip().startswith("Example: fab "), name
        for each in its.get_arguments():
            assert each.help, f"{name} --{each.name}"
            assert "h" not in each.names, f"fab {name} -h is help"
