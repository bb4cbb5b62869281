"""One verb under way: the real bootstrap and program over pipes, frames read as a desk would."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time

from tasks.link.program import AGENT, BOOT, program

PATIENCE_S = 20
"""Longer than anything here takes on a loaded machine; no test waits it out when all is well."""


def wait_for(what, seconds=PATIENCE_S, every=0.01):
    """Poll until `what()` is true, and return it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = what()
        if found:
            return found
        time.sleep(every)
    raise AssertionError(f"not within {seconds} s: {what}")


class RefusalError(Exception):
    def __init__(self, payload):
        self.code, self.text, self.data = payload["code"], payload["text"], payload["data"]
        super().__init__(f"{self.code}: {self.text}")


class BugError(Exception):
    pass


class Call:
    """One verb under way."""

    def __init__(self, request, *, home, prefix=(), text=None, agent=AGENT):
        self.nonce = request["nonce"].encode() if request else b""
        self.frames, self.noise, self._held = [], b"", b""
        self.status, self.stderr = None, b""
        variables = {
            "HOME": str(home),
            "PATH": os.environ["PATH"],
            "USER": os.environ.get("USER", "root"),
            "FAB_TEST_SESSION": os.environ.get("FAB_TEST_SESSION", ""),
        }
        self.process = subprocess.Popen(
            [*prefix, "sh", "-c", BOOT.format(python=sys.executable)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=variables,
            bufsize=0,
        )
        if text is None:
            body = json.dumps(request).encode()
            source = program(request["verb"], agent)
            text = b"%d\n%s%d\n%s" % (len(source), source, len(body), body)
        self.write(text)

    def write(self, data):
        view = memoryview(data)
        while view:
            view = view[self.process.stdin.write(view) :]

    def hang_up(self):
        self.process.stdin.close()

    def next(self, seconds=PATIENCE_S):
        """The next (kind, payload), or None at the end."""
        end = time.monotonic() + seconds
        while True:
            start = self._held.find(b"\x02" + self.nonce)
            line_end = self._held.find(b"\n", start) if start >= 0 else -1
            if line_end >= 0:
                kind, length = self._held[start + 34 : line_end].split()
                stop = line_end + 1 + int(length)
                if len(self._held) >= stop + 2:
                    payload = json.loads(self._held[line_end + 1 : stop])
                    assert self._held[stop : stop + 2] == b"\x03\n"
                    self.noise += self._held[:start]
                    self._held = self._held[stop + 2 :]
                    frame = (kind.decode(), payload)
                    self.frames.append(frame)
                    return frame
            out = self.process.stdout
            ready, _, _ = select.select([out], [], [], max(0, end - time.monotonic()))
            assert ready, f"no frame within {seconds} s"
            part = os.read(out.fileno(), 1 << 16)
            if not part:
                self.noise += self._held
                return None
            self._held += part

    def result(self, blobs=None):
        """The last frame's payload; raises RefusalError or BugError for what is no result."""
        last = None
        while (frame := self.next()) is not None:
            last = frame
            if frame[0] == "N":
                for sha256 in frame[1]["blobs"]:
                    self.write(blobs[sha256])
        self.end()
        if last is None or last[0] not in "RET":
            raise BugError(f"no result; exit {self.status}; {self.stderr!r}")
        kind, payload = last
        if kind == "E":
            raise RefusalError(payload)
        if kind == "T":
            raise BugError(payload["traceback"])
        assert self.status == 0
        assert self.noise == b""
        assert self.stderr == b""
        return payload

    def end(self):
        if self.status is not None:
            return
        self.process.stdin.close()
        self.stderr = self.process.stderr.read()
        self.process.stdout.close()
        self.process.stderr.close()
        self.status = self.process.wait(PATIENCE_S)
