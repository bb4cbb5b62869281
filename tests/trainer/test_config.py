"""The command line: the original's is accepted, and a wrong one is answered in one line."""

import dataclasses
import subprocess
import sys

import pytest

from tests.trainer import made
from trainer import config
from trainer.errors import InputError

ORIGINAL = """
    --target-model /dev/shm/Qwen3.6-27B --data-dir /workspace/tokenized_completions
    --output-dir /workspace/checkpoints --epochs 6 --lr 6e-4 --max-anchors 512 --token-budget 8192
    --block-size 16 --dp-pairs 2 --log-interval 10 --save-interval 5000
""".split()  # noqa: SIM905 - as a person types it
NEEDED = ["--target-model", "t", "--data-dir", "d", "--output-dir", "o"]


def read(*more):
    return config.read([*NEEDED, *more])


def test_the_original_command_line_is_accepted_unchanged():
    run = config.read(ORIGINAL)
    assert (run.target_model, run.data_dir) == (
        "/dev/shm/Qwen3.6-27B",
        "/workspace/tokenized_completions",
    )
    assert (run.epochs, run.lr, run.max_anchors, run.token_budget) == (6, 6e-4, 512, 8192)
    assert (run.block_size, run.dp_pairs, run.log_interval, run.save_interval) == (16, 2, 10, 5000)


def test_every_field_is_a_flag_with_a_help_text_in_one_group():
    names = [field.name for field in dataclasses.fields(config.TrainConfig)]
    grouped = [name for group in config.GROUPS.values() for name in group]
    assert sorted(grouped) == sorted(names)
    assert sorted(config._docstrings()) == sorted(names)


def test_a_run_is_a_value():
    with pytest.raises(dataclasses.FrozenInstanceError):
        read().lr = 1.0
    with pytest.raises(TypeError):
        config.TrainConfig("t", "d", "o")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--lr", "0"], "--lr: is 0; give more than 0"),
        (["--lr", "nan"], "--lr: is nan; give more than 0"),
        (["--lr", "fast"], "--lr: is 'fast'; give a number"),
        (["--epochs", "0"], "--epochs: is 0; give at least 1"),
        (["--epochs", "1.5"], "--epochs: is '1.5'; give a whole number"),
        (["--block-size", "1"], "--block-size: is 1; give at least 2"),
        (["--warmup-ratio", "1"], "--warmup-ratio: is 1; give from 0 up to, not including, 1"),
        (["--overlong", "cut"], "--overlong: is cut; give one of error, truncate, drop"),
        (["--target-layer-ids", "3,3"],
         "--target-layer-ids: is 3,3; give different numbers from 0, as 1,7,13"),
        (["--output-dir", ""], "--output-dir: is empty; give a path"),
        (["--epoch", "6"], "--epoch: unknown flag; did you mean --epochs?"),
        (["--zzz"], "--zzz: unknown flag; see python -m trainer train --help"),
        (["--lr"], "--lr: expected one argument"),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_told_in_one_line(words, line):
    with pytest.raises(InputError) as caught:
        read(*words)
    assert str(caught.value) == line


def test_a_missing_flag_is_named():
    with pytest.raises(InputError, match="required: --output-dir"):
        config.read(["--target-model", "t", "--data-dir", "d"])


def test_home_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert config.read(["--target-model", "~/t", *NEEDED[2:]]).target_model == "/home/me/t"


def test_flags_alone_mean_train_and_help_needs_no_torch():
    script = (
        "import sys; from trainer.__main__ import main; code = main(sys.argv[1:]);"
        "print('torch' in sys.modules, code)"
    )

    def told(*words):
        done = subprocess.run(
            [sys.executable, "-c", script, *words],
            cwd=made.ROOT, env=made.environment(), capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout.strip(), done.stderr.strip()

    assert told("--lr", "0", *NEEDED) == ("False 2", "--lr: is 0; give more than 0")
    assert told("trian") == ("False 2", "trian: unknown command; see python -m trainer --help")
    out, err = told("--help")
    assert out.endswith("False 0")
    assert not err
    assert all(
        f"  {word} " in out for word in ("train", "prepare", "evaluate", "export", "features")
    )


def test_the_help_of_train_tells_units_and_defaults(capsys):
    with pytest.raises(SystemExit) as left:
        config.read(["--help"])
    assert left.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Slots of one micro-batch, in tokens (default 8192)." in text
    assert "Learning rate after warm-up (default 0.0006)." in text


def test_check_reads_flags_alone_and_needs_no_torch():
    def check(*more):
        program = [sys.executable, "-X", "importtime", "-m", "trainer", "check"]
        done = subprocess.run(
            [*program, *NEEDED, *more], capture_output=True, text=True, check=False
        )
        assert "torch" not in done.stderr
        return done.returncode, done.stderr.splitlines()[-1]

    assert check()[0] == 0
    assert check("--epochz", "6") == (2, "--epochz: unknown flag; did you mean --epochs?")
    assert check("--lr", "inf") == (2, "--lr: is inf; give more than 0")
