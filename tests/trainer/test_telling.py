"""What a person sees while it trains: a line that is redrawn, and curves."""

import io
import sys

import pytest

from tests.trainer import made
from tests.trainer.runs import measures
from trainer import config as configs
from trainer import train
from trainer.__main__ import Screen
from trainer.errors import InputError
from trainer.record import events
from trainer.record.status import Status
from trainer.stop import Stop


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_has_a_line_that_is_redrawn(monkeypatch):
    monkeypatch.setenv("COLUMNS", "12")
    now = iter([0.0, 0.0, 0.1, 0.9, 0.9])
    out = Terminal()
    screen = Screen(out, clock=lambda: next(now))
    screen.show("step 1 of a long line")
    screen.show("too soon")
    screen.show("step 2")
    screen.say("saved")
    assert out.getvalue() == "step 1 of a\r\x1b[Kstep 2\r\x1b[Ksaved\n"


def test_a_file_has_whole_lines_alone():
    out = io.StringIO()
    screen = Screen(out)
    screen.show("step 1")
    screen.say("saved")
    screen.clear()
    assert out.getvalue() == "saved\n"


@pytest.fixture
def go(tiny_target_dir, tmp_path):
    data = made.save_to_disk(tmp_path / "data", [made.table(made.rows(14))])

    def train_now(**more):
        (tmp_path / "out").mkdir(exist_ok=True)
        words = made.flags(tiny_target_dir, data, tmp_path / "out", **more)
        said, shown = [], []
        status = Status(tmp_path / "out")
        train.run(configs.read(words), Stop(), status, said.append, shown.append)
        return said, shown, tmp_path / "out"

    return train_now


def test_every_step_is_shown_or_said(go):
    said, shown, out = go(log_interval=3, epochs=1)
    steps = [line.split("/")[0].split()[1] for line in said if line.startswith("step ")]
    total = len(measures(out))
    assert steps == [str(step) for step in range(1, total + 1) if step % 3 == 0 or step == total]
    assert len(shown) == total - len(steps)
    assert all("eta" in line for line in shown)


def test_measures_tell_what_each_stage_did_and_memory(go):
    _, _, out = go(epochs=1)
    for each in measures(out):
        shares = {name for name in each if name.startswith(("busy_", "wait_"))}
        assert shares == {"busy_assemble", "busy_target", "wait_assemble", "wait_target"}
        assert all(0 <= each[name] <= 1 for name in shares)
        assert 0.01 < each["memory_gb"] < 100


def test_tensorboard_reads_the_curves_back_also_after_a_resume(go):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    more = {"tensorboard": True, "epochs": 3, "eval_rows": 3, "eval_interval": 2}
    go(steps=3, **more)
    _, _, out = go(steps=6, **more)
    held = EventAccumulator(str(out / "tensorboard")).Reload()
    kept = measures(out)
    curves = {"train/loss": "loss", "train/accepted": "accepted", "memory/gb": "memory_gb"}
    for curve, name in curves.items():
        points = held.Scalars(curve)
        assert [point.step for point in points] == [1, 2, 3, 4, 5, 6]
        wanted = [each[name] for each in kept]
        assert [point.value for point in points] == pytest.approx(wanted, rel=1e-3, abs=1e-3)
    tried = {each["step"]: each["eval_accepted"] for each in kept if "eval_accepted" in each}
    assert {point.step: point.value for point in held.Scalars("eval/accepted")} == pytest.approx(
        tried
    )
    assert sorted(tried) == [2, 3, 4, 6]


def test_without_the_package_it_is_told_at_once(go, monkeypatch):
    monkeypatch.setattr(events.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InputError, match="--tensorboard: the package tensorboard is missing here"):
        go(tensorboard=True)


def test_tensorboard_is_imported_by_those_who_ask_for_it_alone(go):
    before = "tensorboard" in sys.modules
    go(steps=1)
    assert ("tensorboard" in sys.modules) is before
