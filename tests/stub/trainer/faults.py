"""Children that are hard to get rid of."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time

LIFETIME_S = 120
"""No child outlives a forgotten test by more than this."""


def _linger() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    time.sleep(LIFETIME_S)
    os._exit(0)


def burn(seconds: float) -> None:
    """Keep every CPU busy for so long."""
    children = []
    for _ in range(os.cpu_count() or 1 if seconds else 0):
        child = os.fork()
        if child == 0:
            _spin(seconds)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def _spin(seconds: float) -> None:
    parent, end = os.getppid(), time.monotonic() + seconds
    while time.monotonic() < end and os.getppid() == parent:
        sum(range(20_000))
    os._exit(0)


def start_children(wanted: argparse.Namespace) -> None:
    """Fork the children that were asked for; returns in the parent alone."""
    for _ in range((os.cpu_count() or 1) - 1 if wanted.burn else 0):
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            _spin(LIFETIME_S)
    for _ in range(wanted.children):
        if os.fork() == 0:
            _linger()
    if wanted.new_session_child and os.fork() == 0:
        os.setsid()
        _linger()
    if wanted.orphan_child:
        middle = os.fork()
        if middle == 0:
            if os.fork() == 0:
                _linger()
            os._exit(0)
        os.waitpid(middle, 0)
    if wanted.bare_child:
        middle = os.fork()
        if middle == 0:
            os.setsid()
            if os.fork() == 0:
                program = f"import time; time.sleep({LIFETIME_S})"
                os.execve(sys.executable, [sys.executable, "-S", "-c", program], {})
            os._exit(0)
        os.waitpid(middle, 0)
