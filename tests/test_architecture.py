"""The house stands, and each of its rules is shown to fail on a breach planted in a copied tree."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests import imports
from tests.house import LONGEST, breaches

ROOT = Path(__file__).resolve().parent.parent


def test_the_house_stands():
    assert breaches(ROOT) == []


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """The tree as it is, to plant breaches in."""
    root = tmp_path_factory.mktemp("house")
    for room in imports.ROOMS:
        if (ROOT / room).is_dir():
            shutil.copytree(ROOT / room, root / room, ignore=shutil.ignore_patterns("__pycache__"))
        elif (ROOT / room).exists():
            shutil.copy(ROOT / room, root / room)
    return root


PLANTED = [
    # Arrows that go up, across, or to the other house.
    ("tasks/errors.py", "from tasks import link", "tasks.errors > tasks.link"),
    ("tasks/link.py", "from .operations import kill", "tasks.link > tasks.operations"),
    ("tasks/outcome.py", "import tasks.inventory", "tasks.outcome > tasks.inventory"),
    ("tasks/fleet.py", "from tasks import cli", "tasks.fleet > tasks.cli"),
    ("tasks/operations.py", "from trainer import config", "imports trainer.config"),
    ("fabfile.py", "from trainer import config", "imports trainer.config"),
    ("trainer/train.py", "import tasks.errors", "imports tasks.errors"),
    ("trainer/data/arrow.py", "from trainer.model import target", "trainer.data.arrow > trainer"),
    ("trainer/config.py", "from trainer import build", "trainer.config > trainer.build"),
    ("trainer/export.py", "from . import features", "trainer.export > trainer.features"),
    ("trainer/build.py", "def f():\n    from trainer import train", "trainer.build > trainer.tr"),
    ("tasks/link.py", "from tasks.agent import verbs", "tasks.link > tasks.agent"),
    ("tasks/anteroom.py", "", "tasks.anteroom: is no room of the table"),
    # The agent.
    ("tasks/agent/runs.py", "from tasks import errors", "tasks.agent.runs > tasks.errors"),
    ("tasks/agent/runs.py", "import yaml", "imports yaml, and knows the standard library only"),
    ("tasks/agent/runs.py", "def f():\n    from . import verbs", "below the top level"),
    ("tasks/agent/runs.py", "match 1:\n    case 1: pass", "is no Python 3.8"),
    # Doors.
    ("tasks/fleet.py", "import paramiko", "imports paramiko"),
    ("tasks/fleet.py", "from paramiko.ssh_exception import SSHException", "imports paramiko"),
    ("tasks/fleet.py", "from tenacity import retry", "imports tenacity"),
    ("tasks/fleet.py", "from fabric import Connection", "imports fabric.Connection"),
    ("tasks/lifecycle.py", "from fabric import Connection", "imports Connection of fabric"),
    ("tasks/lifecycle.py", "import fabric\nfabric.Connection('h')", "uses fabric.Connection"),
    ("tasks/cli.py", "from invoke import task", "imports task of invoke"),
    ("tasks/cli.py", "from invoke.collection import Collection", "imports Collection of invoke"),
    ("tasks/link.py", "from fabric.executor import Executor", "imports Executor of fabric"),
    ("tasks/cli.py", "import yaml", "imports yaml"),
    ("tasks/cli.py", "import torch", "imports torch"),
    ("tasks/link.py", "import threading", "imports threading"),
    ("tasks/link.py", "from concurrent import futures", "imports concurrent.futures"),
    ("trainer/data/batching.py", "import pyarrow.ipc", "imports pyarrow.ipc"),
    ("trainer/model/drafter.py", "from transformers import AutoModel", "imports transformers"),
    ("trainer/train.py", "from torch import distributed", "imports torch.distributed"),
    ("trainer/train.py", "import torch\ntorch.distributed.barrier()", "uses torch.distributed"),
    ("trainer/train.py", "from threading import Thread", "imports threading.Thread"),
    ("trainer/train.py", "import fabric", "imports fabric"),
    ("trainer/pipeline.py", "import torch", "imports torch, and knows none"),
    ("trainer/config.py", "import numpy", "imports numpy, and knows the standard library only"),
    # Speech and exits.
    ("tasks/fleet.py", "print('hello')", "calls print"),
    ("trainer/train.py", "import sys\nsys.exit(3)", "calls sys.exit"),
    ("trainer/train.py", "raise SystemExit", "raises SystemExit"),
    ("tasks/report.py", "import sys\nsys.stderr.write('x')", "calls sys.stderr.write"),
    # Circles, lengths and names.
    ("trainer/data/one.py", "from trainer.data import two", "cycle: trainer.data.one >"),
    ("tasks/errors.py", "#\n" * LONGEST, f"; {LONGEST} is the most"),
    ("trainer/data/utils.py", "", "utils says nothing"),
    ("tasks/agent/file_helpers.py", "", "file_helpers says nothing"),
    ("trainer/common/rows.py", "", "common says nothing"),
]  # fmt: skip


@pytest.mark.parametrize(("where", "planted", "told"), PLANTED)
def test_a_planted_breach_is_told(copied, where, planted, told):
    target = copied / where
    before = target.read_text(encoding="utf-8") if target.exists() else None
    folder = next(each for each in [target.parent, *target.parents] if each.exists())
    target.parent.mkdir(parents=True, exist_ok=True)
    if "data/one.py" in where:
        (copied / "trainer/data/two.py").write_text("from trainer.data import one\n")
    known = set(breaches(copied))
    try:
        target.write_text(f"{before or ''}\n{planted}\n", encoding="utf-8")
        new = [line for line in breaches(copied) if line not in known]
    finally:
        (copied / "trainer/data/two.py").unlink(missing_ok=True)
        if before is None:
            target.unlink()
        else:
            target.write_text(before, encoding="utf-8")
        if folder != target.parent:
            shutil.rmtree(next(each for each in target.parents if each.parent == folder))
    assert any(told in line for line in new), new
