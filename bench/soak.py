"""Cycles of deploy, restart and kill on one host, with a stub trainer: times, and what is left.

    python -m bench.soak [--cycles 200]

One real sshd on this machine, real connections, no delay on the path. The first and the last tenth
of the cycles are shown beside each other: neither times nor counts may grow.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from tests.hosts.ground import able
from tests.hosts.lab import Lab
from tests.hosts.soak import Soak

STUB = Path(__file__).resolve().parent.parent / "tests" / "stub" / "trainer"


def main(words: list[str]) -> None:
    """Run the cycles and print the table, then one line of JSON."""
    parser = argparse.ArgumentParser(prog="bench.soak", description=__doc__)
    parser.add_argument("--cycles", type=int, default=200)
    cycles = max(4, parser.parse_args(words).cycles)
    with tempfile.TemporaryDirectory() as folder:
        quiet = shutil.ignore_patterns("__pycache__")
        trainer = shutil.copytree(STUB, Path(folder) / "trainer", ignore=quiet)
        lab = Lab(Path(folder))
        try:
            mode = "pidns" if able("pidns") else "shared"
            soak = Soak(lab.start("gpu1", mode=mode), trainer)
            for _ in range(3):
                soak.cycle()
            few = soak.counts()
            for _ in range(cycles - 3):
                soak.cycle()
            many = soak.counts()
        finally:
            lab.close()
    tell(soak.seconds, few, many)


def tell(seconds: dict[str, list[float]], few: dict[str, int], many: dict[str, int]) -> None:
    """Print what was measured."""
    tenth = max(1, len(seconds["deploy"]) // 10)
    print(f"{'seconds':24} {'median':>8} {'first tenth':>12} {'last tenth':>12} {'most':>8}")
    found = {}
    for name, all_of_them in seconds.items():
        row = {
            "median": statistics.median(all_of_them),
            "first_tenth": statistics.median(all_of_them[:tenth]),
            "last_tenth": statistics.median(all_of_them[-tenth:]),
            "most": max(all_of_them),
        }
        found[name] = {key: round(value, 3) for key, value in row.items()}
        print(
            f"{name:24} {row['median']:8.2f} {row['first_tenth']:12.2f}"
            f" {row['last_tenth']:12.2f} {row['most']:8.2f}"
        )
    print(f"\n{'left':24} {'after 3':>8} {'after ' + str(len(seconds['deploy'])):>12}")
    for name, count in many.items():
        print(f"{name:24} {few[name]:8} {count:12}")
    print(
        json.dumps(
            {
                "bench": "soak",
                "cycles": len(seconds["deploy"]),
                "seconds": found,
                "after_3": few,
                "left": many,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
