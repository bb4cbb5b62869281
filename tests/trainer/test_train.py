"""The loop as a whole, on a tiny target, in this process."""

import time

import pytest
import torch

from tests.trainer import made
from tests.trainer.runs import measures, same, state, status
from trainer import config as configs
from trainer import train
from trainer.build.run import Run
from trainer.errors import InputError, NonFiniteError
from trainer.model.target import Target
from trainer.pipeline import StageError
from trainer.record import checkpoint
from trainer.record.status import Status
from trainer.stop import Stop


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return made.save_to_disk(tmp_path_factory.mktemp("data") / "set", [made.table(made.rows(24))])


@pytest.fixture
def go(tiny_target_dir, data, tmp_path):
    """Train in this process; answers the log and the output folder."""

    def train_now(out="out", *, stop=None, **more):
        words = made.flags(tiny_target_dir, more.pop("data_dir", data), tmp_path / out, **more)
        (tmp_path / out).mkdir(exist_ok=True)
        said = []
        status = Status(tmp_path / out)
        train.run(configs.read(words), stop or Stop(), status, said.append)
        return said, tmp_path / out

    return train_now


def test_a_run_learns_and_leaves_what_it_promised(go):
    said, out = go(epochs=12, save_interval=40)
    kept = measures(out)
    total = len(kept)
    assert [each["step"] for each in kept] == list(range(1, total + 1))
    assert kept[-1]["epoch"] == 11
    mean = [sum(each["loss"] for each in part) / 10 for part in (kept[:10], kept[-10:])]
    assert mean[1] < mean[0] - 0.5
    assert max(each["rate"] for each in kept) == pytest.approx(1e-2)
    assert all(0 <= each["wait"] <= 1 and each["norm"] > 0 for each in kept)
    held = status(out)
    assert (held["phase"], held["step"], held["steps"]) == ("finished", total, total)
    assert held["checkpoint"] == str(out / f"step-{total:08}")
    assert {path.name for path in out.glob("step-*")} >= {"step-00000040", f"step-{total:08}"}
    assert sum(line.startswith("step ") for line in said) == total
    assert said[-1] == f"finished  at step {total:,}"


def test_the_overlapped_schedule_equals_the_serial_one(go):
    _, overlapped = go("overlapped", accumulation=2)
    _, deep = go("deep", accumulation=2, depth=9)
    _, serial = go("serial", accumulation=2, overlap=False)
    assert same(state(overlapped), state(serial))
    assert same(state(deep), state(serial))
    assert [each["loss"] for each in measures(overlapped)] == [
        each["loss"] for each in measures(serial)
    ]


def test_the_target_makes_no_graph(go, monkeypatch):
    seen = []
    features = Target.features

    def spied(self, ids_T, starts_D1):
        seen.append(torch.is_grad_enabled())
        return features(self, ids_T, starts_D1)

    monkeypatch.setattr(Target, "features", spied)
    go(steps=3)
    assert set(seen) == {False}
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("overlap", [True, False])
def test_an_error_in_the_target_ends_the_run_and_is_named(go, monkeypatch, overlap):
    def broken(*_):
        raise RuntimeError("CUDA error: planted")

    monkeypatch.setattr(Target, "features", broken)
    began = time.monotonic()
    with pytest.raises(StageError, match="target: CUDA error: planted"):
        go(overlap=overlap)
    assert time.monotonic() - began < 10  # loading included


@pytest.mark.parametrize("what", ["loss", "gradient norm"])
def test_what_is_not_finite_ends_the_run_before_weights_are_spoiled(
    go, monkeypatch, tmp_path, what
):
    runs, learn = [], Run.learn

    def poisoned(self, micro):
        learn(self, micro)
        runs.append((self, self.optimizer.masters_G.clone()))
        if micro.position.step == 3 and what == "loss":
            self.gradients.add_(torch.tensor(float("inf")), torch.tensor(1.0))
        elif micro.position.step == 3:
            self.gradients.flat_G[7] = float("nan")

    monkeypatch.setattr(Run, "learn", poisoned)
    with pytest.raises(NonFiniteError, match=f"step 4: {what} is") as caught:
        go(save_interval=2)
    assert caught.value.exit_code == 3
    assert str(caught.value).endswith(
        f"resume from the last checkpoint, {tmp_path / 'out/step-00000002'}, with a lower --lr"
    )
    last, before = runs[-1]
    assert torch.equal(last.optimizer.masters_G, before)
    assert last.optimizer.masters_G.isfinite().all()


def test_float64_and_dpace_and_sliding_layers_run(go):
    said, out = go(dtype="float64", loss="dpace", sliding_window=8, steps=3)
    assert state(out)["masters"].dtype == torch.float64
    assert len(measures(out)) == 3
    assert said[-1] == "finished  at step 3"


def test_an_id_that_the_target_lacks_is_named_with_its_row(go, tmp_path):
    folder = made.save_to_disk(
        tmp_path / "wide", [made.table([*made.rows(3), ([5, 64, 6], [1, 1, 1])])]
    )
    with pytest.raises(InputError, match=r"row 3: id 64 at position 1; the target has ids 0 to 63"):
        go(data_dir=folder)


def test_an_id_is_found_in_its_batch_where_data_are_not_read_before(go, tmp_path):
    folder = made.save_to_disk(
        tmp_path / "wide", [made.table([*made.rows(3), ([5, 64, 6], [1, 1, 1])])]
    )
    with pytest.raises(StageError, match=r"assemble: .*: row 3: id 64 at position 1") as caught:
        go(data_dir=folder, data_check="lazy")
    assert caught.value.exit_code == 2


def test_a_recurrent_target_is_padded_and_refuses_to_be_packed(go, tmp_path):
    from tests.trainer import tiny

    folder, _ = tiny.save_qwen35(tmp_path / "model")
    more = {"target_model": folder, "target_layer_ids": "1,3", "steps": 2, "draft_head_dim": 16}
    go("auto", **more)
    assert checkpoint.newest(tmp_path / "auto", say=print).facts["data"]["layout"] == "padded"
    with pytest.raises(
        InputError, match="--layout: is packed, but the target has layers of linear"
    ):
        go("packed", layout="packed", **more)


def test_what_was_dropped_and_cut_is_said(go, tmp_path):
    rows = [*made.rows(6), ([1] * 70, [0] * 60 + [1] * 10), ([1] * 70, [1] * 70), ([1, 2], [0, 0])]
    folder = made.save_to_disk(tmp_path / "mixed", [made.table(rows)])
    made.write_stream(folder / "stale.arrow", made.table(rows))
    said, _ = go("cut", data_dir=folder, overlong="truncate", steps=1)
    told = [line for line in said if line.startswith("data ")]
    tokens = sum(len(ids) for ids, _ in rows[:6]) + 128
    assert told[0] == (
        f"data      8 rows, {tokens} tokens, 1 dropped (without two trained tokens in a row),"
        " 2 truncated"
    )
    assert told[1].startswith(f"data      {folder}: stale.arrow is not listed in state.json")


def test_data_that_fills_no_step_is_told(go):
    with pytest.raises(InputError, match="fills less than the 999 micro-batches of one step"):
        go(accumulation=999)


def test_a_command_with_bad_input_exits_2_with_one_line(tiny_target_dir, tmp_path):
    code, _, err = made.run(["train", *made.flags(tiny_target_dir, tmp_path, tmp_path / "out")])
    assert code == 2
    assert err == (
        f"--data-dir: {tmp_path} holds no state.json, and no .arrow, .feather, .ipc or .parquet"
        " file\n"
    )
