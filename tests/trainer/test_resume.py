"""2k steps = k steps + stop + resume + the rest, to the bit, wherever the stop lands."""

import random
import signal

import pytest

from tests.trainer import made
from tests.trainer.runs import phase, same, state, status, steps_seen
from trainer import config as configs
from trainer import train
from trainer.build.run import Run
from trainer.errors import InputError
from trainer.record.status import Status
from trainer.stop import Stop, Stopped


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return made.save_to_disk(tmp_path_factory.mktemp("data") / "set", [made.table(made.rows(14))])


@pytest.fixture
def flags(tiny_target_dir, data, tmp_path):
    return lambda out, **more: made.flags(tiny_target_dir, data, tmp_path / out, **more)


class StopAt(Stop):
    """Is asked to end in the middle of the n-th step from now."""

    def __init__(self, steps):
        self.left = steps
        super().__init__()

    @property
    def asked(self):
        return self.left <= 0

    @asked.setter
    def asked(self, value):
        pass


@pytest.fixture
def go(flags, tmp_path, monkeypatch):
    """Train in this process; stop in the n-th step from here."""

    def train_now(out, *, stop_in=10**9, **more):
        (tmp_path / out).mkdir(exist_ok=True)
        stop = StopAt(stop_in)
        learn = Run.learn

        def counted(self, micro):
            stop.left -= 1
            learn(self, micro)

        said = []
        with monkeypatch.context() as patched:
            patched.setattr(Run, "learn", counted)
            train.run(configs.read(flags(out, **more)), stop, Status(tmp_path / out), said.append)
        return said, state(tmp_path / out)

    return train_now


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_stop_in_any_step_resumes_to_the_same_bits(go, tmp_path, layout):
    _, whole = go("whole", epochs=3, layout=layout)
    total = status(tmp_path / "whole")["step"]
    for k in range(1, total):
        said, _ = go(f"at-{k}", epochs=3, layout=layout, stop_in=k)
        assert said[-1] == f"stopped  at step {k}"
        held = status(tmp_path / f"at-{k}")
        assert (held["phase"], held["checkpoint"][-8:]) == ("stopped", f"{k:08}")
        said, resumed = go(f"at-{k}", epochs=3, layout=layout)
        assert same(whole, resumed), f"stopped in step {k} of {total}"
        # Nothing is trained on twice, and nothing left out.
        assert steps_seen(tmp_path / f"at-{k}") == list(range(1, total + 1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stops_one_after_the_other_resume_too(go, tmp_path, dtype):
    more = {"epochs": 3, "accumulation": 2, "dtype": dtype}
    _, whole = go("whole", **more)
    total = status(tmp_path / "whole")["step"]
    for _ in range(total):
        _, resumed = go("often", stop_in=1, **more)
    assert status(tmp_path / "often")["phase"] == "finished"
    assert same(whole, resumed)


def test_a_finished_run_started_again_changes_nothing(go, tmp_path):
    _, whole = go("out")
    said, again = go("out")
    assert said[-1].startswith("finished  at step")
    assert same(whole, again)
    assert status(tmp_path / "out")["checkpoint"]


def test_a_damaged_checkpoint_is_passed_over(go, tmp_path):
    _, whole = go("out", save_interval=4, keep=0)
    newest = max((tmp_path / "out").glob("step-*"))
    (newest / "optimizer.safetensors").write_bytes(b"gone")
    said, again = go("out", save_interval=4, keep=0)
    assert any(f"{newest.name}: optimizer.safetensors is damaged" in line for line in said)
    assert any("resumed   from" in line for line in said)
    assert same(whole, again)


def test_another_shape_or_other_data_is_refused(go, data):
    go("out", steps=2)
    with pytest.raises(
        InputError, match=r"with drafter block_size 4, this run has 3; give another"
    ):
        go("out", block_size=3)
    with pytest.raises(InputError, match="with drafter layers 2, this run has 3"):
        go("out", draft_layers=3)
    with pytest.raises(InputError, match="with data seed 0, this run has 1"):
        go("out", seed=1)
    with pytest.raises(InputError, match="with data token_budget 64, this run has 128"):
        go("out", token_budget=128)
    made.write_stream(data / "data-00000-of-00001.arrow", made.table(made.rows(14, seed=9)))
    try:
        with pytest.raises(InputError, match="with data fingerprint"):
            go("out")
    finally:
        made.write_stream(data / "data-00000-of-00001.arrow", made.table(made.rows(14)))


def test_a_run_stays_in_the_layout_it_began_with(go):
    # Runs from before there were two layouts do not say theirs; they were padded.
    go("out", steps=1, layout="padded")
    said, _ = go("out", steps=2)
    assert "layout    padded, as the run began" in said
    assert said[-1] == "finished  at step 2"
    with pytest.raises(InputError, match="with data layout padded, this run has packed; give"):
        go("out", steps=3, layout="packed")
    go("other", steps=1)
    with pytest.raises(InputError, match="with data layout packed, this run has padded; give"):
        go("other", steps=2, layout="padded")


def test_what_may_change_may_change(go):
    go("out", steps=2)
    said, _ = go("out", steps=4, lr=1e-3, save_interval=1, max_anchors=3)
    assert said[-1] == "finished  at step 4"


def test_a_signal_ends_the_loading_at_once_and_only_once():
    stop = Stop()
    with pytest.raises(Stopped):
        stop._note(signal.SIGTERM, None)
    stop._note(signal.SIGTERM, None)
    with pytest.raises(Stopped):
        stop.check()
    with pytest.raises(Stopped):
        stop.hold()


def test_real_signals_at_arbitrary_moments_resume_to_the_same_bits(flags, go, tmp_path):
    more = {"epochs": 80, "log_interval": 10**6}
    out = tmp_path / "often"
    moments, seen = random.Random(3), 0
    for _ in range(2):
        # Flags alone, as on the original's command line.
        with made.started(flags("often", **more)) as process:
            wanted = seen + moments.randrange(1, 120)
            made.until(lambda: len(steps_seen(out)) >= wanted, what=f"step {wanted}")  # noqa: B023
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)
            code, said, err = made.finish(process)
        assert (code, err) == (0, ""), err
        assert "stopped  at step" in said
        assert status(out)["phase"] == "stopped"
        seen = status(out)["step"]
    _, often = go("often", **more)
    _, whole = go("whole", **more)
    assert seen < status(out)["steps"]
    assert same(whole, often)
    assert steps_seen(out) == list(range(1, status(out)["steps"] + 1))


@pytest.mark.parametrize("when", ["starting", "loading"])
def test_a_signal_while_it_loads_ends_it_cleanly(flags, tmp_path, when):
    out = tmp_path / "out"
    with made.started(["train", *flags("out")]) as process:
        made.until(lambda: phase(out) == when, what=when)
        process.send_signal(signal.SIGTERM)
        code, said, err = made.finish(process)
    assert (code, err) == (0, ""), err
    assert said.endswith("stopped   before the first step\n")
    assert phase(out) == "stopped"
    assert not list(out.glob("step-*"))
