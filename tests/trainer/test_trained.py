"""A trained drafter is measured and exported from its checkpoint."""

import itertools
import json
import re

import pytest
import torch

from tests.trainer import made
from trainer import config as configs
from trainer import train
from trainer.__main__ import main
from trainer.model.target import Target
from trainer.record.status import Status
from trainer.speculate import generate_plain
from trainer.stop import Stop

PROMPTS = 32
NEW = 20


@pytest.fixture(scope="module")
def trained(tiny_target_dir, tmp_path_factory):
    """A drafter that learned what its target says to 32 prompts, and these prompts."""
    folder = tmp_path_factory.mktemp("trained")
    target = Target.load(tiny_target_dir, taps=(1,), device="cpu", dtype=torch.float32)
    rows = []
    for first, second in itertools.product(range(3, 60), (5, 8)):
        prompt = [first, second, 9]
        answer = generate_plain(target, prompt, max_new_tokens=NEW)
        if 63 not in answer:  # it stands for the mask
            rows.append(([*prompt, *answer], [0] * 3 + [1] * len(answer)))
        if len(rows) == PROMPTS:
            break
    data = made.save_to_disk(folder / "set", [made.table(rows)])
    (folder / "out").mkdir()
    words = made.flags(
        tiny_target_dir, data, folder / "out", epochs=40, token_budget=128, max_anchors=40
    )
    train.run(configs.read(words), Stop(), Status(folder / "out"), lambda _: None)
    return folder


@pytest.fixture
def evaluate(trained, tiny_target_dir, capsys):
    def run(*words):
        known = ["--target-model", tiny_target_dir, "--checkpoint", trained / "out"]
        known += ["--device", "cpu", "--max-new-tokens", NEW]
        code = main(["evaluate", *map(str, known), *map(str, words)])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return run


def test_decoding_says_what_the_target_says_and_replaying_finds_its_lengths(trained, evaluate):
    code, table, _ = evaluate("--data-dir", trained / "set", "--limit", PROMPTS)
    assert code == 0
    told = json.loads(table[-1])
    assert (told["prompts"], told["same_as_plain"], told["block_size"]) == (32, 32, 4)
    assert re.search("/step-0+[1-9][0-9]*$", told["checkpoint"])
    assert told["accepted"] > 1.4
    assert told["speedup"] > 0
    assert told["first"] == pytest.approx(1 - told["lengths"][0] / sum(told["lengths"]), abs=1e-4)
    # A line for each prompt, and the histogram: 4 lines below its own head.
    assert len(table) == 1 + PROMPTS + 2 + 4 + 1
    assert table[-6].split() == ["gave", "blocks", "at", "least"]
    assert table[-5].split()[:3] == ["1", str(told["lengths"][0]), "100.0%"]

    code, table, _ = evaluate("--data-dir", trained / "set", "--limit", PROMPTS, "--quick")
    quick = json.loads(table[-1])
    assert code == 0
    for name in ("accepted", "lengths", "first", "tokens", "prompts"):
        assert quick[name] == told[name]
    assert "speedup" not in quick

    _, table, _ = evaluate("--data-dir", trained / "set", "--quick", "--zero-features")
    assert json.loads(table[-1])["accepted"] < told["accepted"]


def test_held_out_rows_are_those_that_training_keeps(trained, evaluate):
    code, table, _ = evaluate("--data-dir", trained / "set", "--held-out", 5, "--quick")
    assert code == 0
    assert json.loads(table[-1])["prompts"] == 5


def test_prompts_of_a_file_are_decoded(evaluate, tmp_path, monkeypatch):
    from trainer.build import evaluating

    lines = [json.dumps({"prompt": f"question {number}"}) for number in range(3)]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(Target, "tokenizer", lambda _: None)
    monkeypatch.setattr(evaluating, "in_template", lambda *_: [5, 9, 33])
    code, table, _ = evaluate("--prompts", tmp_path / "p.jsonl", "--limit", 2)
    told = json.loads(table[-1])
    assert (code, told["prompts"], told["same_as_plain"]) == (0, 2, 2)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "--prompts, --data-dir: give one of them"),
        (["--prompts", "p", "--quick"], "--quick, --held-out: are for the completions of a"),
        (["--data-dir", "d", "--limit", "0"], "--limit: is 0; give at least 1"),
    ],
)
def test_wrong_flags_are_told(evaluate, words, line):
    code, _, err = evaluate(*words)
    assert code == 2
    assert err.startswith(line)


def test_an_exported_drafter_is_evaluated_as_its_checkpoint(
    trained, evaluate, tiny_target_dir, tmp_path
):
    words = ["--checkpoint", trained / "out", "--dtype", "float32"]
    speculators = ["--layout", "speculators", "--target-model", tiny_target_dir]
    assert main(["export", *map(str, [*words, "--out", tmp_path / "z"])]) == 0
    assert main(["export", *map(str, [*words, *speculators, "--out", tmp_path / "s"])]) == 0
    quick = ["--data-dir", trained / "set", "--quick"]
    wanted = json.loads(evaluate(*quick)[1][-1])
    for name in ("z", "s"):
        found = json.loads(evaluate(*quick, "--checkpoint", tmp_path / name)[1][-1])
        assert found["lengths"] == wanted["lengths"]
        assert found["checkpoint"] == str(tmp_path / name)


def test_training_goes_on_from_an_exported_drafter_in_its_shape(
    trained, tiny_target_dir, tmp_path, capsys
):
    words = ["export", "--checkpoint", trained / "out", "--dtype", "float32"]
    assert main([*map(str, words), "--out", str(tmp_path / "z")]) == 0

    def go(out, **more):
        (tmp_path / out).mkdir()
        words = made.flags(
            tiny_target_dir, trained / "set", tmp_path / out, steps=1, lr=1e-9, token_budget=128,
            init_drafter=tmp_path / "z", **more,
        )  # fmt: skip
        return main(["train", *words])

    assert go("more") == 0
    kept = json.loads((tmp_path / "more/metrics.jsonl").read_text().splitlines()[0])
    last = json.loads((trained / "out/metrics.jsonl").read_text().splitlines()[-1])
    assert kept["loss"] == pytest.approx(last["loss"], rel=0.35)
    capsys.readouterr()
    assert go("other", block_size=8) == 2
    assert capsys.readouterr().err == (
        f"--block-size: is 8, and the drafter in {tmp_path}/z has 4; leave the flag out\n"
    )


def test_export_writes_a_served_folder_once(trained, tmp_path, capsys):
    words = ["export", "--checkpoint", str(trained / "out"), "--out", str(tmp_path / "served")]
    assert main(words) == 0
    assert {path.name for path in (tmp_path / "served").iterdir()} == {
        "config.json", "model.safetensors",
    }  # fmt: skip
    assert main(words) == 2
    assert "served: exists already" in capsys.readouterr().err
    assert main([*words[:-1], str(tmp_path / "s"), "--layout", "speculators"]) == 2
    assert capsys.readouterr().err.startswith("--target-model: is missing; --layout speculators")


def test_what_is_no_checkpoint_is_told(tmp_path, capsys):
    assert main(["export", "--checkpoint", str(tmp_path), "--out", "x"]) == 2
    assert capsys.readouterr().err == f"--checkpoint: {tmp_path} holds no checkpoint\n"
