"""Plans without hosts: doors that answer as told, and what was told of them."""

from __future__ import annotations

import threading

from tasks import errors
from tasks.fleet import carry_out
from tasks.inventory import Host
from tasks.operations import By, Run

RUN = Run(id="20260101-000000-abcd", by=By(who="me", host="desk", why="fab test"))


def hosts(count=3):
    return [Host(name=f"gpu{number}", address="x") for number in range(1, count + 1)]


class Door:
    """A link to a made-up host: answers as told, and writes down what it is asked."""

    def __init__(self, host, answers):
        self.host, self._answers, self.asked = host, answers, []
        self.notes, self.closed, self._stopped = [], 0, threading.Event()

    def notify(self, text):
        self.notes.append(text)

    def ask(self, verb, arguments, *, lease=None, **_):  # noqa: ARG002 - as a link has it
        if self._stopped.is_set():
            raise errors.Interrupted(self.host.name, f"{verb} was under way")
        self.asked.append((verb, lease))
        answer = self._answers.get(verb, {})
        if isinstance(answer, Exception):
            raise answer
        return answer

    def wait_for_stop(self):
        assert self._stopped.wait(10)
        raise errors.Interrupted(self.host.name, "kill was under way")

    def stop(self):
        self._stopped.set()

    def resume(self):
        self._stopped.clear()

    def close(self):
        self.closed += 1


class Fleet:
    """Carries out plans, and keeps the doors and what was told."""

    def __init__(self):
        self.doors, self.told = {}, []

    def __call__(self, plan, count=3, run=RUN, answers=None, **options):
        def links(host):
            self.doors[host.name] = Door(host, answers or {})
            return self.doors[host.name]

        return carry_out(
            plan, hosts(count), run, links=links, on_outcome=self.told.append, **options
        )
