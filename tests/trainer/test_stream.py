"""Micro-batches as the drafter takes them where it shares a GPU with its target; and the figure."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import gsm8k_curve
from trainer.build.run import Stream

pytestmark = pytest.mark.torch
ROOT = Path(__file__).parents[2]


def test_the_target_runs_ahead_by_one_and_no_more():
    read = []

    def target(made):
        read.append(made)
        return -made

    stream = Stream(iter([1, 2, 3]), target)
    assert next(stream) == -1
    assert read == [1]
    stream.look_ahead()
    stream.look_ahead()
    assert read == [1, 2]
    assert [next(stream), next(stream)] == [-2, -3]
    stream.look_ahead()
    with pytest.raises(StopIteration):
        next(stream)


def test_where_the_target_has_a_stage_of_its_own_nothing_is_read_here():
    stream = Stream(iter(["ready"]), None)
    stream.look_ahead()
    assert next(stream) == "ready"
    with pytest.raises(StopIteration):
        next(stream)


def test_the_committed_figure_is_drawn_from_the_committed_figures(tmp_path):
    drawn = tmp_path / "gsm8k.svg"
    assert gsm8k_curve.main([str(ROOT / "bench/results/gsm8k.json"), str(drawn)]) == 0
    assert drawn.read_text() == (ROOT / "docs/gsm8k.svg").read_text()
