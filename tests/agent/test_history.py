from __future__ import annotations

import json
from types import SimpleNamespace

from tasks.agent import history
from tasks.agent.root import Root


def test_only_the_newest_lines_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(history, "KEPT", 10)
    monkeypatch.setattr(history, "SLACK", 5)
    desk, root = SimpleNamespace(by={"who": "tester"}), Root(str(tmp_path))
    longest = 0
    for number in range(40):
        history.record(desk, root, "kill", number=number)
        lines = (tmp_path / "history.jsonl").read_text().splitlines()
        longest = max(longest, len(lines))
        assert json.loads(lines[-1])["number"] == number
    assert longest == 15
    assert [path.name for path in tmp_path.iterdir()] == ["history.jsonl"]
