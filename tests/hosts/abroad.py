"""A host behind a long wire: two networks that exist for one test, and what happens to the path."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from tests.hosts.ground import until
from tests.hosts.lab import _die_with_parent
from tests.hosts.wire import DEVICE, enter

NEAR, FAR = "10.77.0.1", "10.77.0.2"
"""Addresses of the two ends. No other network has them, and neither end has a way out."""


class Abroad:
    """The desk's end and the host's end, with `round_trip_ms` and a loss each way between them."""

    def __init__(self, lab, name: str, *, round_trip_ms: float, loss: float) -> None:
        self._lab = lab
        self.machine = lab.start(name, mode="pidns", network=True)
        self._near = subprocess.Popen(
            ["unshare", "--net", "sleep", "infinity"],
            preexec_fn=_die_with_parent,  # noqa: PLW1509  # as in lab.py
        )
        self.space = f"/proc/{self._near.pid}/ns/net"
        until(self._apart, what="a network of its own")
        far = self.machine.first()
        program = Path(__file__).with_name("wire.py")
        words = [sys.executable, str(program), str(far), str(round_trip_ms), str(loss)]
        self._wire = subprocess.Popen(
            ["nsenter", f"--net={self.space}", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=_die_with_parent,  # noqa: PLW1509  # as in lab.py
        )
        assert self._wire.stdout.readline() == b"ready\n"
        for space, address in ((self.space, NEAR), (f"/proc/{far}/ns/net", FAR)):
            for line in (
                ["link", "set", "lo", "up"],
                ["addr", "add", f"{address}/30", "dev", DEVICE],
                ["link", "set", DEVICE, "up"],
            ):
                subprocess.run(["nsenter", f"--net={space}", "ip", *line], check=True, timeout=20)

    def _apart(self) -> bool:
        return Path(self.space).readlink() != Path("/proc/self/ns/net").readlink()

    def host(self, **changes):
        """Give the host as the desk of the near end knows it."""
        key = self.machine.host_key
        return self.machine.host(address=FAR, host_key=key, **changes)

    def link(self, *, up: bool) -> None:
        """Plug the cable in, or pull it out: nobody is told."""
        os.write(self._wire.stdin.fileno(), b"u" if up else b"d")

    def at_the_desk(self, work):
        """Start `work()` in a thread at the near end; threads and programs it starts are there too.

        Returns:
            a function that waits for it, and gives its result or raises what it raised.
        """
        ended = {}

        def there():
            try:
                enter(self.space)
                ended["result"] = work()
            except BaseException as error:  # noqa: BLE001  # it is raised again, where it is awaited
                ended["error"] = error

        thread = threading.Thread(target=there)
        thread.start()

        def wait():
            thread.join()
            if "error" in ended:
                raise ended["error"]
            return ended["result"]

        return wait

    def close(self) -> None:
        """Take everything down; networks and devices go with their last process."""
        for process in (self._wire, self._near):
            process.kill()
            process.wait()
        self._wire.stdin.close()
        self._wire.stdout.close()
        self.machine.close()
        self._lab.machines.remove(self.machine)
