"""Which processes belong to a run."""

from __future__ import annotations

import os
from typing import Dict, List, Optional, Set, Tuple

from . import processes, runs
from .machine import boot_id
from .processes import Identity, Stat


class Union:
    """Every process of a run: the keeper's tree, its session, and who carries the run's id.

    Each alone misses some: one that made its own session, one that overwrote its environment,
    one whose parents died after the keeper. Whoever was seen once stays known.
    """

    def __init__(self, run: runs.Run) -> None:
        self._run = run
        self.keeper, self.leader, self._session = run.identities()
        self._known: Dict[Tuple[int, int], Identity] = {}
        self._spared = self._ancestors()
        if self.leader is None:
            self.leader = self._eldest()

    @staticmethod
    def _ancestors() -> Set[int]:
        # Ourselves and the way up to PID 1: a person may deploy from a shell inside a run.
        stats = processes.everything()
        found, pid = {0, 1}, os.getpid()
        while pid in stats and pid not in found:
            found.add(pid)
            pid = stats[pid].parent
        return found

    def _eldest(self) -> Optional[Identity]:
        """The tagged process that the others come from, when process.json names nobody."""
        stats = processes.everything()
        tagged = set(self._run.tagged(stats)) - self._spared
        eldest = [pid for pid in tagged if stats[pid].parent not in tagged]
        return min((Identity(pid, stats[pid].start, boot_id()) for pid in eldest), default=None)

    def look(self) -> List[Identity]:
        """The living ones, without the keeper, which ends by itself after them."""
        stats = processes.everything()
        roots = [
            who.pid for who in (self.keeper, self.leader) if who and self._is_there(stats, who)
        ]
        roots += [who.pid for who in self._known.values() if self._is_there(stats, who)]
        found = set(processes.descendants(stats, roots)) | set(roots)
        # A session's number means this session only while one of its known members is there.
        if any(stats[pid].session == self._session for pid in roots):
            found |= {pid for pid, stat in stats.items() if stat.session == self._session}
        found |= set(self._run.tagged(stats))
        for pid in found - self._spared:
            who = Identity(pid, stats[pid].start, boot_id())
            if who != self.keeper:
                self._known[pid, who.start] = who
        self._known = {key: who for key, who in self._known.items() if self._is_there(stats, who)}
        return [who for who in self._known.values() if not stats[who.pid].gone]

    @staticmethod
    def _is_there(stats: Dict[int, Stat], who: Identity) -> bool:
        found = stats.get(who.pid)
        return found is not None and found.start == who.start and who.boot == boot_id()
