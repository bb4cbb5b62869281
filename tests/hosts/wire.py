"""A long wire between two network namespaces: delay, loss, and a link that goes down.

For kernels without netem. Each namespace has one TUN device; a packet read from one is written to
the other half a round trip later, or never. Real packets are delayed, so handshakes, windows and
retransmissions cost what they cost on a real path.

Run as a program by whoever starts the namespaces: `python wire.py FAR_PID RTT_MS LOSS`, inside the
near one. Its standard input takes one letter a command (d: link down, u: up); at its end it ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
DEVICE = "wire0"


def tun() -> int:
    """Make the device in the namespace that this thread is in."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    return device


def enter(space: str) -> None:
    """Move this thread to a network namespace."""
    with open(space, "rb") as file:  # noqa: PTH123  # a program of few imports
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {space}")


def main(far_pid: str, round_trip_ms: str, loss: str) -> None:
    near = tun()
    enter(f"/proc/{far_pid}/ns/net")
    far = tun()
    other = {near: far, far: near}
    half, lost = float(round_trip_ms) / 2000, float(loss)
    chance, up = random.Random(7), True
    on_the_way: deque[tuple[float, int, bytes]] = deque()  # in order: the delay is constant
    poll = select.epoll()
    for each in (near, far, 0):
        poll.register(each, select.EPOLLIN)
    print("ready", flush=True)  # noqa: T201
    while True:
        wait = max(0.0, on_the_way[0][0] - time.monotonic()) if on_the_way else -1
        for source, _ in poll.poll(wait):
            if source == 0:
                command = os.read(0, 1)
                if not command:
                    return
                up = command == b"u"
                continue
            for packet in packets(source):
                if up and chance.random() >= lost:
                    on_the_way.append((time.monotonic() + half, other[source], packet))
        while on_the_way and on_the_way[0][0] <= time.monotonic():
            _, target, packet = on_the_way.popleft()
            with suppress(OSError):  # its queue is full: the packet is lost
                os.write(target, packet)


def packets(device: int):
    """Give what has arrived, at most 64 so that the other direction gets its turn."""
    with suppress(BlockingIOError):
        for _ in range(64):
            yield os.read(device, 65536)


if __name__ == "__main__":
    main(*sys.argv[1:])
