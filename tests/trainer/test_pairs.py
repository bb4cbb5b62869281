"""Several pairs under torch's launcher: the same training, one end."""

import signal
import time

import pytest

from tests.trainer import made
from tests.trainer.runs import measures, phase, same, state, status, steps_seen
from trainer import config as configs
from trainer import train, world
from trainer.errors import InputError, TrainerError
from trainer.record.status import Status
from trainer.stop import Stop

FAULTS = f"{made.ROOT}/tests/trainer/faults:{made.ROOT}"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return made.save_to_disk(tmp_path_factory.mktemp("data") / "set", [made.table(made.rows(14))])


@pytest.fixture
def flags(tiny_target_dir, data, tmp_path):
    def words(out, **more):
        return made.flags(tiny_target_dir, data, tmp_path / out, **{"dp_pairs": 2} | more)

    return words


@pytest.fixture
def alone(flags, tmp_path):
    """Train one pair in this process."""

    def train_now(out, **more):
        (tmp_path / out).mkdir(exist_ok=True)
        said = []
        chosen = configs.read(flags(out, dp_pairs=1, **more))
        train.run(chosen, Stop(), Status(tmp_path / out), said.append)
        return said

    return train_now


def faulty(fault, **more):
    return {"PYTHONPATH": FAULTS, "FAULT": fault} | more


def close(one, other, *, within):
    largest = max(one.abs().max().item(), other.abs().max().item())
    return largest > 0 and (one - other).abs().max().item() <= within * largest


def test_two_pairs_are_one_pair_with_the_union_batch(flags, alone, tmp_path):
    more = {"dtype": "float64", "warmup_ratio": 0.0}
    code, _, err = made.run(flags("two", steps=1, **more))
    assert code == 0, err
    alone("one", steps=1, accumulation=2, **more)
    two, one = measures(tmp_path / "two")[0], measures(tmp_path / "one")[0]
    for name in ("loss", "norm", "accepted"):
        assert two[name] == pytest.approx(one[name], rel=1e-12)
    # After one step the first moment is the gradient, but for a factor.
    gradients = [state(tmp_path / out)["exp_avg"] for out in ("two", "one")]
    assert close(*gradients, within=1e-12)
    # And one pair takes up what two left.
    assert "training  from step 1 to 3" in alone("two", steps=3, accumulation=2, **more)
    alone("one", steps=3, accumulation=2, **more)
    masters = [state(tmp_path / out)["masters"] for out in ("two", "one")]
    assert close(*masters, within=1e-9)


def test_a_stop_of_the_launcher_alone_ends_all_ranks_and_resumes_to_the_same_bits(
    flags, tmp_path, rounds
):
    more = {"epochs": 60, "log_interval": 10**6}
    out = tmp_path / "often"
    # At full counts longer than torch's own launcher would wait.
    slow = rounds(3, 45)
    fault = faulty(f"slow-save:{slow}", TRAINER_GRACE_SECONDS="120")
    with made.started(flags("often", **more), **fault) as process:
        made.until(lambda: len(steps_seen(out)) > 20, what="step 20")
        process.send_signal(signal.SIGTERM)
        made.until(lambda: phase(out) == "saving", what="saving")
        process.send_signal(signal.SIGTERM)
        code, said, err = made.finish(process, within=slow + 60)
    assert code == 0, err
    assert "Traceback" not in err
    assert said.count("stopped  at step") == 1
    held = status(out)
    assert (held["phase"], held["step"] < held["steps"]) == ("stopped", True)
    assert held["checkpoint"].endswith(f"step-{held['step']:08}")

    for each in ("often", "whole"):
        code, _, err = made.run(flags(each, **more))
        assert code == 0, err
    assert same(state(tmp_path / "whole"), state(out))
    assert steps_seen(out) == list(range(1, held["steps"] + 1))


def test_a_stop_while_the_ranks_load_ends_all_cleanly(flags, tmp_path):
    with made.started(flags("out")) as process:
        made.until(lambda: phase(tmp_path / "out") == "loading", what="loading")
        process.send_signal(signal.SIGTERM)
        code, _, err = made.finish(process)
    assert code == 0, err
    assert phase(tmp_path / "out") == "stopped"
    assert "Traceback" not in err


def test_a_stop_before_there_are_ranks_ends_cleanly(flags, tmp_path):
    with made.started(flags("out")) as process:
        made.until(lambda: phase(tmp_path / "out"), what="starting")
        process.send_signal(signal.SIGTERM)
        code, _, err = made.finish(process)
    assert code == 0, err
    assert phase(tmp_path / "out") == "stopped"


def test_a_rank_that_crashes_ends_all_with_its_traceback_and_code(flags):
    code, _, err = made.run(flags("out", epochs=50), **faulty("raise:1:3"))
    assert code == 1
    assert "RuntimeError: planted in one rank" in err
    assert "rank 1: exited with 1; the other ranks were ended" in err


@pytest.mark.long
def test_a_rank_that_is_killed_ends_all(flags):
    code, _, err = made.run(flags("out", epochs=50), **faulty("kill:1:3"))
    assert code == 128 + signal.SIGKILL
    assert "rank 1: was killed by SIGKILL; the other ranks were ended" in err


@pytest.mark.long
def test_ranks_whose_launcher_is_killed_write_a_checkpoint_and_end(flags, tmp_path):
    out = tmp_path / "out"
    with made.started(flags("out", epochs=5000)) as process:
        made.until(lambda: len(steps_seen(out)) > 3, what="some steps")
        process.kill()
        made.until(lambda: phase(out) == "stopped", what="the stop")
        _, said, _ = made.finish(process)
    assert "stopped  at step" in said


def test_a_gradient_that_is_not_finite_on_one_rank_stops_all(flags, tmp_path):
    code, _, err = made.run(flags("out", save_interval=2), **faulty("nan:1:3"))
    assert code == 3
    assert "step 3: gradient norm is nan on every rank" in err
    assert [path.name for path in (tmp_path / "out").glob("step-*")] == ["step-00000002"]
    assert all(each.isfinite().all() for each in state(tmp_path / "out").values())


def test_the_grace_bounds_the_wait(flags, tmp_path):
    fault = faulty("slow-save:60", TRAINER_GRACE_SECONDS="6")
    with made.started(flags("out", epochs=500), **fault) as process:
        made.until(lambda: steps_seen(tmp_path / "out"), what="the first step")
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        code, _, err = made.finish(process)
    assert time.monotonic() - began < 6
    assert code == 1
    assert "ranks: did not end within the grace after SIGTERM" in err


def test_a_stop_that_comes_while_the_ranks_start_reaches_them(monkeypatch):
    told = []
    monkeypatch.setattr(world.LocalElasticAgent, "_start_workers", lambda *_: {0: 71, 1: 72})
    monkeypatch.setattr(world.os, "kill", lambda *words: told.append(words))
    monkeypatch.delenv("TRAINER_GRACE_SECONDS", raising=False)
    agent = world._Agent.__new__(world._Agent)
    agent.pass_on()
    assert told == []
    assert agent._start_workers(None) == {0: 71, 1: 72}
    assert told == [(71, signal.SIGTERM), (72, signal.SIGTERM)]


@pytest.mark.parametrize(
    ("failures", "code", "words"),
    [
        ({0: 75, 1: 2}, 2, None),
        ({0: -15, 1: 3}, 3, None),
        ({0: 75, 1: -9}, 137, "rank 1: was killed by SIGKILL"),
        ({0: -15, 1: 1}, 1, "rank 1: exited with 1"),
        ({0: 75, 1: 1}, 1, "rank 1: exited with 1"),
        ({0: 75, 1: -15}, 1, "rank"),
        ({0: 75, 1: 7}, 7, "rank 1: exited with 7"),
    ],
)
def test_the_code_of_a_run_is_that_of_the_rank_that_failed(failures, code, words):
    if words is None:
        assert world._code(failures) == code
        return
    with pytest.raises(TrainerError, match=words) as caught:
        world._code(failures)
    assert caught.value.exit_code == code


def test_other_ranks_than_pairs_are_refused(monkeypatch):
    for name, value in (("TORCHELASTIC_RUN_ID", "r"), ("RANK", "0"), ("WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="--dp-pairs: is 2, but 3 ranks were started; give 3"):
        world.join(2, "cpu")


def test_gpus_are_shared_out(monkeypatch):
    monkeypatch.setattr(world.torch.cuda, "device_count", lambda: 5)
    assert world.gpus_a_pair(2, "auto") == 2
    assert world.gpus_a_pair(2, "cpu") == 0
    with pytest.raises(InputError, match="--dp-pairs: is 8; this machine shows 5 GPUs, give 5"):
        world.gpus_a_pair(8, "cuda")
    monkeypatch.setattr(world.torch.cuda, "device_count", lambda: 0)
    assert world.gpus_a_pair(2, "auto") == 0
    with pytest.raises(InputError, match="torch sees no GPU here"):
        world.gpus_a_pair(1, "cuda")
