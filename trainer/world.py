"""Ranks: one process a pair, what they share, and the launcher that starts them.

Alone in knowing torch.distributed. Ranks meet twice: once when all have loaded (`meet`), then in
one collective a step (`sum_`).
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined] # torch lists them nowhere
    PrefixStore,
    TCPStore,
)
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters, registry

from trainer.errors import InputError, TrainerError
from trainer.stop import SIGNALS, Stop, Stopped

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from torch import Tensor

# Longer than the first rank needs to write a checkpoint while the others wait in the next step.
_PATIENCE = timedelta(minutes=60)
# The desk kills what outlives the grace; torch's launcher must have ended its ranks before that.
_MARGIN_S = 5.0
# What a rank exits with when another one failed: seen by the launcher alone, which looks for the
# cause. The rank that crashed may well be the last to be gone.
_LOST = 75


class World:
    """This process among the pairs of a run.

    Args:
        rank: which pair this is, from 0.
        size: how many there are.
        device: where the drafter trains.
        target_device: where the target runs; another GPU if the pair has two.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        device: torch.device | None = None,
        target_device: torch.device | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self.device = device or torch.device("cpu")
        self.target_device = target_device or self.device
        self._launcher = os.getppid()

    @property
    def first(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.rank == 0

    @property
    def abandoned(self) -> bool:
        """Whether the launcher is gone, so that nobody could end this rank any more."""
        return self.size > 1 and os.getppid() != self._launcher

    def meet(self, stop: Stop) -> None:
        """Wait until every rank has loaded; from here on a stop is agreed upon in a step.

        Raises:
            Stopped: a stop was asked for before all had loaded. Then no rank starts.
        """
        stop.hold()
        if self.size == 1:
            return
        store = _store()
        store.set(f"loaded/{self.rank}", "1")
        everyone = [f"loaded/{rank}" for rank in range(self.size)]
        while not store.check(everyone):
            # A rank that left never loads; its launcher told this one to stop as well.
            if store.check(["left"]) or self.abandoned:
                raise Stopped
            time.sleep(0.02)
        # Only now: making the group waits inside C++, where no signal could end the loading.
        on_cuda = self.device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_cuda else "gloo",
            store=PrefixStore("group", store),
            rank=self.rank,
            world_size=self.size,
            timeout=_PATIENCE,
            device_id=self.device if on_cuda else None,
        )

    def sum_(self, tensor: Tensor) -> None:
        """Add up a tensor over all ranks, in place. A collective: every rank calls it.

        Raises:
            TrainerError: another rank is gone.
        """
        if self.size == 1:
            return
        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:
            lost = TrainerError(f"lost the other ranks: {str(error).splitlines()[0]}")
            lost.exit_code = _LOST
            raise lost from error

    def close(self) -> None:
        """Leave the group, without waiting for anybody."""
        if dist.is_initialized():
            dist.destroy_process_group()


ALONE = World()


def is_rank() -> bool:
    """Whether torch's launcher started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def leave() -> None:
    """Tell the ranks that wait in `meet` that this one will not come."""
    if is_rank():
        _store().set("left", "1")


def join(pairs: int, device: str) -> World:
    """This process's place in the world.

    Args:
        pairs: how many there are to be.
        device: cpu, cuda or auto.

    Raises:
        InputError: there are not that many GPUs, or another number of ranks was started.
    """
    size = int(os.environ["WORLD_SIZE"]) if is_rank() else 1
    if size != pairs:
        raise InputError(f"--dp-pairs: is {pairs}, but {size} ranks were started; give {size}")
    rank = int(os.environ["RANK"]) if is_rank() else 0
    per_pair = gpus_a_pair(pairs, device)
    if not per_pair:
        return World(rank, size)
    # A pair with two GPUs runs its target on one while its drafter trains on the other.
    first = (int(os.environ["LOCAL_RANK"]) if is_rank() else 0) * per_pair
    drafter = torch.device("cuda", first + min(1, per_pair - 1))
    torch.cuda.set_device(drafter)
    return World(rank, size, device=drafter, target_device=torch.device("cuda", first))


def gpus_a_pair(pairs: int, device: str) -> int:
    """How many GPUs each pair has; 0: they train on the CPU.

    Raises:
        InputError: fewer than one.
    """
    count = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cuda" and not count:
        raise InputError("--device: is cuda, and torch sees no GPU here; give cpu or auto")
    if 0 < count < pairs:
        raise InputError(f"--dp-pairs: is {pairs}; this machine shows {count} GPUs, give {count}")
    return count // pairs


def launch(pairs: int, argv: Sequence[str], stop: Stop) -> int:
    """Run `pairs` ranks of this command line under torch's elastic launcher, and wait for them.

    A stop that this process is asked for is passed on to the ranks, which finish the step they
    agree on, and then waited for as long as the first of them needs for its checkpoint: the
    launcher's own way would kill them after 30 s.

    Returns:
        The exit code of the run.

    Raises:
        TrainerError: a rank crashed or was killed; its exit code is the run's.
    """
    # Its other signals are ours; and a host may not resolve its own name, so all stays on loopback.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    rendezvous = registry.get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d", endpoint="127.0.0.1:0", run_id=uuid.uuid4().hex, min_nodes=1,
            max_nodes=1, local_addr="127.0.0.1", is_host=True,
        )
    )  # fmt: skip
    spec = WorkerSpec(
        role="pair", local_world_size=pairs, entrypoint=sys.executable,
        args=("-m", "trainer", "train", *argv), rdzv_handler=rendezvous, max_restarts=0,
        monitor_interval=0.1, local_addr="127.0.0.1",
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="trainer-ranks-") as logs:
        agent = _Agent(spec, DefaultLogsSpecs(log_dir=logs))
        stop.hold(agent.pass_on)
        try:
            result = agent.run()
        except SignalException as error:
            raise TrainerError(
                "ranks: did not end within the grace after SIGTERM, and were killed;"
                " raise grace_seconds"
            ) from error
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            rendezvous.shutdown()
    return _code({rank: failure.exitcode for rank, failure in result.failures.items()})


class _Agent(LocalElasticAgent):
    """torch's launcher, with a stop that waits."""

    pids: tuple[int, ...] = ()
    stopping = False

    def _start_workers(self, worker_group: Any) -> Any:
        # Ranks inherit the blocked signals and take them over when they can act on them, so
        # none dies of one in its first moments; and one that comes to us now finds `pids`.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            started = super()._start_workers(worker_group)
            self.pids = tuple(started.values())
            if self.stopping:  # since before there was a rank to tell
                self.pass_on()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return started

    def pass_on(self) -> None:
        self.stopping = True
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        grace = os.environ.get("TRAINER_GRACE_SECONDS")
        if grace is not None:
            signal.signal(signal.SIGALRM, self._give_up)
            signal.setitimer(signal.ITIMER_REAL, max(1.0, float(grace) - _MARGIN_S))

    def _give_up(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        raise SignalException("the grace is over", sigval=signal.SIGKILL)


def _store() -> TCPStore:
    # The launcher holds it, so it outlives every rank.
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(host, port, is_master=False, timeout=_PATIENCE)


def _code(failures: dict[int, int]) -> int:
    # A rank that failed takes the others down with it: those lose it, or the launcher ends them.
    # Any other code is the cause.
    if not failures:
        return 0
    told = {rank: code for rank, code in failures.items() if code in (2, 3)}
    if told:
        return min(told.values())  # and its message is on stderr already
    rank, code = min(failures.items(), key=lambda item: item[1] in (_LOST, -signal.SIGTERM))
    error = TrainerError(
        f"rank {rank}: "
        + (f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}")
        + "; the other ranks were ended"
    )
    error.exit_code = 128 - code if code < 0 else 1 if code == _LOST else code
    raise error
