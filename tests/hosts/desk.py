"""A desk of a test: a checkout of ours whose trainer is the stub, and the real `fab` in it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from tests.hosts.machine import settings

ROOT = Path(__file__).resolve().parents[2]
FAB = Path(sys.executable).with_name("fab")


class Desk:
    """A checkout whose trainer is the stub, and `fab` in it."""

    def __init__(self, folder, stub, machine):
        self.folder, self.machine = folder, machine
        for name in ("fabfile.py", "fabric.yaml"):
            shutil.copy(ROOT / name, folder)
        quiet = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "tasks", folder / "tasks", ignore=quiet)
        if stub != folder / "trainer":
            shutil.copytree(stub, folder / "trainer")
        self.hosts = {machine.name: self.host()}
        self.write()

    def host(self, **changes):
        its = self.machine.host()
        names = ("address", "port", "user", "identity_file", "ssh_config", "known_hosts", "python")
        return {
            **{name: getattr(its, name) for name in names},
            "if_down": "start the lab",
            **changes,
        }

    def write(self, env=(), features=(), **trainer):
        run = {
            "trainer": dict(settings(**trainer).trainer),
            "grace_seconds": 10,
            "first_step_seconds": 20,
            "env": dict(env),
            "features": list(features),
        }
        groups = {"default": [self.machine.name]}
        text = yaml.safe_dump({"run": run, "groups": groups, "hosts": self.hosts}, sort_keys=False)
        (self.folder / "hosts.yaml").write_text(text)

    def command(self, *words):
        return {
            "args": [FAB, *words],
            "cwd": self.folder,
            "env": {**os.environ, "CI": "true", "USER": "tester"},
            "stdin": subprocess.DEVNULL,
            "text": True,
        }

    def fab(self, *words, exits=0, **changes):
        """Run it to its end, and give its lines; a wrong exit code shows everything it said."""
        given = {**self.command(*words), **changes}
        done = subprocess.run(**given, capture_output=True, timeout=90, check=False)
        said = f"{' '.join(words)}: exit {done.returncode}\n{done.stdout}{done.stderr}"
        assert done.returncode == exits, said
        self.err = done.stderr
        return done.stdout.splitlines()

    def objects(self, *words, exits=0):
        return [json.loads(line) for line in self.fab(*words, "--json", exits=exits)]

    def trainers(self):
        """Give the pids of trainers on the host, seen from outside."""
        return [p.pid for p in self.machine.processes() if "trainer train" in p.words]

    def files(self):
        """Give what must not change when nothing changes: names, times and contents."""
        root = self.machine.home / "fab"
        runs = sorted(path.name for path in root.glob("runs/*"))
        kept = [root / "current", *root.glob("releases/**/*"), *root.glob("blobs/**/*")]
        return runs, {str(p): (p.lstat().st_mtime_ns, p.lstat().st_ino) for p in kept if p.exists()}


def states(lines):
    """The operation and the state of each outcome."""
    return [tuple(line.split()[1:3]) for line in lines if line.startswith("gpu1  ")]


def plain(text):
    """What a run's own numbers are does not matter."""
    text = re.sub(r"\d{8}-\d{6}-[0-9a-f]{4}", "RUN", text)
    text = re.sub(r"\b[0-9a-f]{12}\b", "RELEASE", text)
    text = re.sub(r"(pid|step|loss|after) [\d.,]*\d", r"\1 N", text)
    return re.sub(r"[\d,]+ bytes", "N bytes", text)
