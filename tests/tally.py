"""Adds up what the runs of one ./scripts/test counted: python tests/tally.py FILE..."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def summary(tallies: list[dict[str, object]]) -> tuple[list[str], int]:
    """Lines to print, the last of them `N passed, N failed, N skipped`; and how many failed.

    Args:
        tallies: what conftest.py wrote, one a run.
    """
    count = {word: sum(int(str(each[word])) for each in tallies) for word in WORDS}
    reasons: dict[str, int] = {}
    for each in tallies:
        for reason, times in dict(each["not run"]).items():  # type: ignore[call-overload]
            reasons[reason] = reasons.get(reason, 0) + times
    lines = [f"not run: {times} for {reason}" for reason, times in sorted(reasons.items())]
    return [*lines, ", ".join(f"{count[word]} {word}" for word in WORDS)], count["failed"]


WORDS = ("passed", "failed", "skipped")


if __name__ == "__main__":
    files = [Path(each) for each in sys.argv[1:]]
    lines, failed = summary(
        [json.loads(each.read_text(encoding="utf-8")) for each in files if each.exists()]
    )
    sys.stdout.write("\n".join(lines) + "\n")
    # A run that ran nothing has shown nothing.
    sys.exit(1 if failed or lines[-1].startswith("0 passed") else 0)
