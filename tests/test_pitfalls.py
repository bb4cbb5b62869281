"""docs/pitfalls.md says which test shows what; this reads it, and looks whether that is so."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/pitfalls.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (P\d+) \| (.+?) \| (.+?) \| (.+?) \| (.+) \|$", re.MULTILINE)
ROWS = ROW.findall(PAGE)


@functools.cache
def names_in(file):
    """Give the names of the tests in a file below tests/, () when there is no such file."""
    path = ROOT / f"tests/{file}.py"
    tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_page_has_all_its_rows_in_order_and_each_line_of_the_tables_is_one():
    numbers = [int(row[0][1:]) for row in ROWS]
    assert numbers == sorted(set(numbers))
    assert (len(numbers), numbers[0], numbers[-1]) == (77, 1, 95)
    assert sum(line.startswith("| P") for line in PAGE.splitlines()) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_what_a_row_says_is_shown(row):
    _, _, here, _, shown = row
    assert here in {"impossible", "detected", "handled"}
    named = re.findall(r"`([\w/]+)::(\w+)`", shown)
    for file, name in named:
        assert name in names_in(file), f"tests/{file}.py has no {name}"
    if not named:
        assert re.fullmatch(r"not testable here: .{20,}", shown)


def test_nothing_here_asks_for_sudo():
    texts = [*ROOT.glob("tasks/**/*.py"), *ROOT.glob("trainer/**/*.py"), ROOT / "fabfile.py"]
    assert len(texts) > 50
    assert [path for path in texts if re.search(r"\bsudo\b", path.read_text("utf-8"))] == []
