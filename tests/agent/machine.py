"""A host without SSH: the real bootstrap and the real program, over pipes."""

from __future__ import annotations

import hashlib
import json
import operator
import os
import secrets
import shutil
import signal
import sys
import time
from pathlib import Path

from tasks.link.program import AGENT
from tests.agent.call import Call, wait_for

STUB = Path(__file__).resolve().parent.parent / "stub" / "trainer"


def canonical(spec):
    return hashlib.sha256(
        json.dumps(spec, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


class Machine:
    """A root on this machine, its desk, and the stub as a release."""

    def __init__(self, folder: Path, *, prefix=(), template=None):
        self.folder, self.prefix, self.template, self.calls = folder, prefix, template, []
        self.home = folder / "home"
        self.root = folder / "home" / "fab"
        self.output = folder / "home" / "checkpoints"
        self.source = folder / "source"
        self.token = None
        self.agent = AGENT
        self.home.mkdir(exist_ok=True)
        if not self.source.exists():
            (self.source / "trainer").mkdir(parents=True)
            for file in sorted(STUB.glob("*.py")):
                (self.source / "trainer" / file.name).write_bytes(file.read_bytes())

    # What the desk would do.

    def manifest(self):
        """(digest, entries, blobs) of the source as it is now."""
        entries, blobs = [], {}
        for path in self.source.rglob("*.py"):
            content = path.read_bytes()
            sha256 = hashlib.sha256(content).hexdigest()
            blobs[sha256] = content
            name = path.relative_to(self.source).as_posix()
            entries.append({"path": name, "mode": "0444", "sha256": sha256, "size": len(content)})
        entries.sort(key=lambda entry: entry["path"])
        return self.digest(entries), entries, blobs

    @staticmethod
    def digest(entries):
        lines = "".join(f"{e['mode']} {e['sha256']} {e['path']}\n" for e in entries)
        return hashlib.sha256(lines.encode()).hexdigest()

    def change(self, text):
        with (self.source / "trainer" / "loop.py").open("a") as file:
            file.write(text)

    def start(self, verb, *, deadline=15, by=None, **arguments):
        request = {
            "verb": verb,
            "arguments": {"root": str(self.root), **arguments},
            "nonce": secrets.token_hex(16),
            "deadline": deadline,
            "lease": self.token,
            "by": by or {"who": "tester", "host": "desk", "why": "a test"},
        }
        call = Call(request, home=self.home, prefix=self.prefix, agent=self.agent)
        self.calls.append(call)
        return call

    def ask(self, verb, *, deadline=15, blobs=None, **arguments):
        return self.start(verb, deadline=deadline, **arguments).result(blobs)

    def lease(self):
        self.token = secrets.token_hex(16)
        return self.ask("lease_acquire", seconds=7200, why="tests", token=self.token)

    def sync(self, **more):
        digest, entries, blobs = self.manifest()
        return self.ask("sync", manifest=entries, digest=digest, blobs=blobs, **more)

    def deploy(self):
        """Lease and sync, or a copy of a root where that was done; the digest."""
        if self.template is None:
            self.lease()
            return self.sync()["digest"]
        shutil.copytree(self.template.root, self.root, symlinks=True)
        self.token = self.template.token
        return self.manifest()[0]

    def spec(self, *flags, **more):
        words = [sys.executable, "-m", "trainer", "train", "--output-dir", str(self.output)]
        return {
            "argv": [*words, *map(str, flags)],
            "env": {},
            "secret_names": [],
            "grace_s": 20,
            "max_log_mb": 1,
            "output_dir": str(self.output),
            "devices": [],
            **more,
        }

    def run_id(self):
        return time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + secrets.token_hex(2)

    def launch(self, *flags, run_id=None, spec=None, digest=None, secret=None, **more):
        spec, current = spec or self.spec(*flags), more.pop("current", False)
        return self.ask(
            "launch",
            run_id=run_id or self.run_id(),
            digest=None if current else digest or self.manifest()[0],
            spec=spec,
            spec_digest=canonical(spec),
            secrets=secret or {},
            **more,
        )

    def train(self, *flags, **more):
        """Lease, sync, launch, first step; launch's answer."""
        self.deploy()
        launched = self.launch(*flags, **more)
        self.ask("await_progress", run_id=launched["run_id"])
        return launched

    def kill(self, **more):
        return self.ask("kill", deadline=40, **{"grace_s": None, "keep": None, **more})

    def health(self, run_id=None):
        return self.ask("health", run_id=run_id)

    # What the test sees for itself.

    def run_folder(self, run_id) -> Path:
        return self.root / "runs" / run_id

    def record(self, run_id, name="process.json"):
        return json.loads((self.run_folder(run_id) / name).read_text())

    def members(self):
        """Living processes under this folder, by environment or recorded session."""
        sessions = set()
        for path in self.root.glob("runs/*/process.json"):
            try:
                sessions.add(json.loads(path.read_text())["session"])
            except (ValueError, KeyError, TypeError, RecursionError):
                continue
        found = set()
        for name in map(operator.attrgetter("name"), Path("/proc").iterdir()):
            if name.isdigit():
                stat = read_stat(int(name))
                if stat is None or stat["state"] == "Z":
                    continue
                tagged = str(self.root).encode() in read_file(f"/proc/{name}/environ")
                if tagged or stat["session"] in sessions:
                    found.add(int(name))
        return found

    def snapshot(self):
        """Every path, type, content and time under what idempotent verbs leave alone."""
        found = {}
        for part in ("releases", "blobs", "runs", "current"):
            top = self.root / part
            found_here = [top, *top.rglob("*")] if top.exists() else []
            for path in (each for each in found_here if not each.name.startswith(".")):
                stat = path.lstat()
                content = path.readlink() if path.is_symlink() else None
                if path.name not in ("status.json", "metrics.jsonl", "train.log"):
                    # A run under way writes these three, and renames a hidden one in its folder.
                    time_ns = 0 if (path / "spec.json").exists() else stat.st_mtime_ns
                    found[str(path)] = (stat.st_mode, stat.st_ino, time_ns, content)
        return found

    def temporary(self):
        return [path for path in self.root.rglob(".tmp-*") if path.exists()]

    def close(self):
        for call in self.calls:
            if call.process.poll() is None:
                call.process.kill()
            call.end()
        for pid in self.members():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        wait_for(lambda: not self.members())


def read_file(path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def read_stat(pid):
    text = read_file(f"/proc/{pid}/stat")
    if not text:
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    return {
        "state": fields[0].decode(),
        "parent": int(fields[1]),
        "session": int(fields[3]),
        "start": int(fields[19]),
    }


def lives(pid):
    stat = read_stat(pid)
    return stat is not None and stat["state"] not in "ZX"
