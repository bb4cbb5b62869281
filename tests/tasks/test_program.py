from __future__ import annotations

import ast
import json
import subprocess
import sys
import zlib

import pytest

from tasks.link.program import BOOT, program, verbs


def sources(verb: str, **options) -> dict[str, str]:
    text = zlib.decompress(program(verb, **options)).decode()
    return ast.literal_eval(text.partition("\n")[0].removeprefix("SOURCES = "))


@pytest.fixture
def agent(tmp_path):
    folder = tmp_path / "agent"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "loader.py").write_text("print(sorted(SOURCES))\n")
    (folder / "verbs.py").write_text(
        "from .desk import Desk\nVERBS: dict = {'one': 'a.one', 'two': 'b.two'}\n"
    )
    (folder / "desk.py").write_text("")
    (folder / "a.py").write_text("import os\nfrom . import c, d\n")
    (folder / "b.py").write_text("from .c import x as y\n")
    (folder / "c.py").write_text("from .d import z\n")
    (folder / "d.py").write_text("")
    return folder


def test_only_what_a_verb_reaches_is_sent(agent):
    one = {"agent", "agent.verbs", "agent.desk", "agent.a", "agent.c", "agent.d"}
    assert sources("one", agent=agent).keys() == one
    assert sources("two", agent=agent).keys() == one - {"agent.a"} | {"agent.b"}
    assert verbs(agent) == {"one", "two"}


@pytest.mark.parametrize("verb", sorted(verbs()))
def test_every_verb_has_a_program_that_parses_and_answers(verb):
    text = zlib.decompress(program(verb))
    compile(text, verb, "exec")
    request = {"verb": verb, "arguments": {}, "nonce": "ab" * 16, "deadline": 5}
    said = json.dumps(request).encode()
    opening = b"%d\n%s%d\n%s" % (len(program(verb)), program(verb), len(said), said)
    words = [sys.executable, "-I", "-S", "-B", "-c", BOOT.partition("-c ")[2].strip("'")]
    answer = subprocess.run(words, input=opening, capture_output=True, timeout=20, check=False)
    assert b'"bad-request"' in answer.stdout, answer


def test_a_program_is_made_once():
    assert program("health") is program("health")
    assert len(program("health")) < 40_000


def test_the_exec_string_is_a_constant():
    assert BOOT.format(python="python3") == (
        "exec python3 -I -S -B -c "
        "'import sys,zlib,_signal;_signal.alarm(90);"
        "i=sys.stdin.buffer;exec(zlib.decompress(i.read(int(i.readline()))))'"
    )


def test_nothing_of_the_agent_is_imported_here():
    code = (
        "import sys, tasks.link.program as p; p.program('kill');"
        "print([m for m in sys.modules if m.startswith('tasks.agent')])"
    )
    words = [sys.executable, "-c", code]
    said = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
    assert said.stdout.strip() == "[]"
