"""hosts.yaml in 500 wrong and odd forms: values, or one line with a place and a way out."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import pytest
import yaml

from tasks.errors import ConfigError
from tasks.inventory import launch_spec, parse, spec_digest
from tests.tasks.test_inventory import GOOD

SEEDED = (
    GOOD
    + """
  gpu11:
    host_key: ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIK0wmN/Cr3JXqmLW7u+g9pTh+wyqDHpSQEIQczXkVx9q
    host_keys: accept-new
    known_hosts: some/file
    agent_python: /usr/bin/python3
    secrets: {TOKEN: {env: TOKEN}, KEY: {file: ~/.key}}
    enabled: true
"""
)
PIECES = (
    *("&a ", "*a", "<<: *a", "!!int ", "!!binary ", "!!timestamp x", "!!bool x", "!!float x"),
    *("!!set ", "!!omap ", "!!python/name:os.system", "? ", ": ", "- ", "---\n", "...\n", "%TAG"),
    *("\t", "\0", "\x1b[2J", "\u202e", "\ufeff", "\x85", "|", ">", "'", '"', "{", "}", "[", "]"),
    *("#", "@", "`", "~", "=", "<<", ",", "2026-13-45", "12:99:99", "0o9", "0x", "1e999", ".nan"),
    *("9" * 5000, "true", "null", "-oProxyCommand=x", "../..", "/", "a" * 5000, "[" * 300),
)
VALUES = (
    *(None, True, 0, -1, 10**30, 1.5, float("nan"), float("inf"), "", " ", "\0", "\x1b[31m"),
    *("-", "~", "..", "/", "a\nb", "\ud800", [], [[]], [None], {}, {"a": None}, {1: 2}, {"": ""}),
    *(b"bytes", {"env": 1}, {"file": "\0"}, ["x"] * 3, {"-x": 1}, {None: 1}),
)


def text_mutant(chance):
    text = SEEDED
    for _ in range(chance.randint(1, 4)):
        at, to = sorted(chance.randrange(len(text) + 1) for _ in range(2))
        to = min(to, at + chance.choice((0, 1, 3, 40)))
        lines = text.splitlines(keepends=True)
        text = chance.choice(
            (
                lambda text=text, at=at, to=to: text[:at] + chance.choice(PIECES) + text[to:],
                lambda text=text, at=at, to=to: text[:at] + text[to:],
                lambda text=text, at=at: text[:at],
                lambda text=text, at=at, to=to: text[:to] + text[at:to] + text[to:],
                lambda lines=lines: "".join(chance.sample(lines, len(lines))),
                lambda lines=lines: "".join(line for line in lines if chance.random() < 0.8),
            )
        )()
    return text


def places(value, path=()):
    """Give the path of every value below `value`."""
    found = [path] if path else []
    if isinstance(value, dict | list):
        keys = value if isinstance(value, dict) else range(len(value))
        for key in keys:
            found += places(value[key], (*path, key))
    return found


def value_mutant(chance):
    top = copy.deepcopy(yaml.safe_load(SEEDED))
    for _ in range(chance.randint(1, 2)):
        *way, last = chance.choice(places(top))
        around = top
        for key in way:
            around = around[key]
        if isinstance(around, dict) and chance.random() < 0.3:
            around[chance.choice(("x", "\x1b", "", 1, None, True, "all", "-x", "A B"))] = (
                around.pop(last)
            )
        else:
            around[last] = copy.deepcopy(chance.choice(VALUES))
    return yaml.safe_dump(top, sort_keys=False, allow_unicode=False)


def read(text):
    """Give (the inventory, None) or (None, the error)."""
    try:
        return parse(text, source="hosts.yaml", folder=Path("/project")), None
    except ConfigError as error:
        return None, error


def check(error):
    """A line that can be read, that begins with a place and ends with a way out."""
    said = str(error)
    assert said.isprintable(), said
    assert said.startswith("hosts.yaml"), said
    assert error.hint, said
    assert len(said) < 1000, said


@pytest.mark.parametrize("kind", [text_mutant, value_mutant])
def test_no_form_of_hosts_yaml_is_a_traceback(kind):
    refused = 0
    for seed in range(250):
        inventory, error = read(kind(random.Random(f"{kind.__name__} {seed}")))
        if error:
            check(error)
            refused += 1
        for host in inventory.hosts if inventory else ():
            assert len(spec_digest(launch_spec(host))) == 64
    assert 100 < refused < 250


@pytest.mark.parametrize("piece", PIECES)
def test_every_odd_piece_as_a_value_of_its_own(piece):
    for text in (f"hosts: {piece}", f"hosts: {{a: {piece}}}", piece, f"run:\n  env: {piece}\n"):
        if error := read(text)[1]:
            check(error)
