"""Stages overlap, keep their order, hold each other back, and end together."""

import itertools
import subprocess
import sys
import threading
import time

import pytest

from tests.trainer.made import until
from trainer.errors import InputError
from trainer.pipeline import Channel, Closed, Pipeline, StageError


def doubled(x):
    return 2 * x


def shown(x):
    return f"<{x}>"


STAGES = [("double", doubled), ("show", shown)]


@pytest.mark.parametrize("depth", [0, 1, 2, 50])
def test_items_come_in_order_whatever_the_depth(depth):
    with Pipeline(range(100), STAGES, depth=depth) as items:
        assert list(items) == [shown(doubled(x)) for x in range(100)]


def test_stages_run_at_once():
    both = threading.Barrier(2, timeout=20)

    def meet(x):
        if x in (1, "<0>"):
            both.wait()  # the first stage with item 1, while the second has item 0
        return x

    with Pipeline(range(2), [("a", meet), ("b", lambda x: meet(f"<{x}>"))], depth=1) as items:
        assert list(items) == ["<0>", "<1>"]


def noted(taken):
    for x in itertools.count():
        taken.append(x)
        yield x


def test_a_full_channel_holds_the_stages_back():
    taken = []
    with Pipeline(noted(taken), STAGES, depth=2) as items:
        stream = iter(items)
        next(stream)
        # One item read; two wait and one is in hand at each of the two stages.
        until(lambda: len(taken) == 7)
        next(stream)
        until(lambda: len(taken) == 8)
        assert len(taken) == 8


def raising(error, at):
    def work(x):
        if x == at:
            raise error
        return x

    return work


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("stage", ["first", "second", "source"])
def test_an_error_ends_the_run_soon_and_names_its_stage(depth, stage):
    def broken():
        yield from range(5)
        raise KeyError("lost")

    error = KeyError("lost")
    stages = [
        ("first", raising(error, 5 if stage == "first" else None)),
        ("second", raising(error, 5 if stage == "second" else None)),
    ]
    source = broken() if stage == "source" else itertools.count()
    began = time.monotonic()
    with (
        pytest.raises(StageError, match=r"^(first|second): .*lost") as caught,
        Pipeline(source, stages, depth=depth) as items,
    ):
        for _ in items:
            pass
    assert time.monotonic() - began < 2
    # What the source raises, the stage that reads it is named for.
    assert caught.value.stage == ("first" if stage == "source" else stage)
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.bug
    assert not running()


def test_what_a_person_can_mend_keeps_its_exit_code():
    with (
        pytest.raises(StageError) as caught,
        Pipeline([1], [("assemble", raising(InputError("row 3: is bad"), 1))], depth=1) as items,
    ):
        list(items)
    assert (str(caught.value), caught.value.exit_code) == ("assemble: row 3: is bad", 2)
    assert not caught.value.bug


def read_one(pipeline):
    with pipeline as items:
        for _ in items:
            raise ZeroDivisionError


def running():
    return [
        thread for thread in threading.enumerate() if thread.name in ("double", "show", "first")
    ]


@pytest.mark.parametrize("depth", [1, 3])
def test_a_reader_that_leaves_ends_every_thread(depth):
    with pytest.raises(ZeroDivisionError):
        read_one(Pipeline(itertools.count(), STAGES, depth=depth))
    assert not running()


@pytest.mark.torch  # not for torch: it waits for 2 s
def test_a_thread_that_hangs_does_not_hold_the_end():
    release = threading.Event()
    began = time.monotonic()
    with Pipeline(range(3), [("first", lambda x: release.wait(30) and x)], depth=1):
        until(running)
    assert time.monotonic() - began < 5
    release.set()
    until(lambda: not running())


@pytest.mark.torch
def test_a_process_that_ends_while_a_stage_is_inside_torch_keeps_its_exit_code():
    program = """
import sys, threading, time, torch
from trainer import pipeline

pipeline._LAST_WAIT_S, a, inside = 0.0, torch.randn(1000, 1000), threading.Event()

def busy(x):
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        a @ a
        inside.set()

with pipeline.Pipeline(range(3), [("target", busy)], depth=1):
    inside.wait()
sys.exit(3)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (3, "")


def test_waiting_is_measured_where_it_happens():
    def slow(x):
        time.sleep(0.02)  # the work itself
        return x

    with Pipeline(range(5), [("fast", doubled), ("slow", slow)], depth=1) as items:
        list(items)
    assert items.busy_s["slow"] >= 0.1
    assert items.reader_wait_s >= 0.09
    assert items.busy_s["fast"] < 0.05
    assert items.wait_s["fast"] > items.wait_s["slow"]


def test_a_closed_channel_wakes_both_sides():
    channel = Channel(1)
    channel.put(1)
    refused = []

    def put_more():
        with pytest.raises(Closed):
            channel.put(2)
        refused.append(True)

    waiting = threading.Thread(target=put_more)
    waiting.start()
    channel.close()
    waiting.join(10)
    assert refused
    with pytest.raises(Closed):
        channel.get()
