"""The trainer without the desk: nothing that deploys is there, and it trains."""

import re
import subprocess
import sys

import pytest
import yaml

from tests.trainer import made

BLOCKED = """
import importlib, pkgutil, sys

class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"fabric", "invoke", "paramiko", "tenacity", "tasks"}:
            raise ModuleNotFoundError(f"{name}: is not installed here", name=name)

sys.meta_path.insert(0, Nowhere())
import trainer
for each in pkgutil.walk_packages(trainer.__path__, "trainer."):
    if not each.name.endswith("__main__"):
        importlib.import_module(each.name)
from trainer.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.torch
def test_it_trains_where_nothing_of_the_desk_is_installed(tiny_target_dir, tmp_path):
    data = made.save_to_disk(tmp_path / "data", [made.table(made.rows(14))])
    words = made.flags(tiny_target_dir, data, tmp_path / "out", steps=2)
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, "train", *map(str, words)],
        cwd=made.ROOT, env=made.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "finished  at step 2" in done.stdout


def test_the_workflow_runs_scripts_on_every_python_that_is_promised():
    text = (made.ROOT / ".github/workflows/test.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    pythons = {name: job["strategy"]["matrix"]["python"] for name, job in jobs.items()}
    assert pythons == {
        "everything": ["3.11", "3.12", "3.13"],
        "trainer": ["3.10", "3.11", "3.12", "3.13"],
    }
    for job in jobs.values():
        runs = [step["run"] for step in job["steps"] if "run" in step]
        assert len(runs) == 1
        script = made.ROOT / re.split(r"\s", runs[0])[0]
        assert script.stat().st_mode & 0o111
