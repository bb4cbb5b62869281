"""From prompts to a dataset: what is written, what is refused, and the committed demo dataset."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from trainer import prepare
from trainer.errors import InputError
from trainer.model.target import Target
from trainer.prepare import dataset, decoding
from trainer.prepare.completions import Answers, Row, Sampling, complete, generated, in_template
from trainer.prepare.prompts import read_prompts

pytestmark = pytest.mark.torch
DEMO = Path(__file__).parents[2] / "data/demo"


def quiet(_line):
    """Says nothing."""


def prepared(*words, say=quiet):
    return prepare.main([str(word) for word in words], say)


def table(folder):
    with pa.OSFile(str(folder / dataset.ARROW)) as file:
        return pa.ipc.open_stream(file).read_all()


@pytest.fixture(scope="module")
def target(tiny_target_dir):
    return Target.load(tiny_target_dir, tap_count=2, dtype=torch.float32)


def one_by_one(target, prompt, count):
    """The slow reference: no cache, no batch, no padding."""
    ids = list(prompt)
    while len(ids) < len(prompt) + count:
        logits = target.model(input_ids=torch.tensor([ids])).logits
        ids.append(int(logits[0, -1].argmax()))
        if ids[-1] in target.eos_ids:
            break
    return ids[len(prompt) :]


def test_completions_are_greedy_whatever_they_are_batched_with(target):
    prompts = [[5, 6, 7], [9], [8, 4, 3, 3, 11, 12, 40], [30, 31], [9, 9]]
    rows = complete(target, prompts, max_new_tokens=12, batch_size=3, say=quiet)
    assert [row.prompt for row in rows] == prompts
    for row in rows:
        assert row.completion == one_by_one(target, row.prompt, 12)


def test_a_completion_ends_with_its_first_end_token():
    assert decoding.up_to_end([4, 2, 2, 2], frozenset({2})) == [4, 2]
    assert decoding.up_to_end([4, 5], frozenset({2})) == [4, 5]


def test_rows_that_end_early_leave_and_the_others_go_on_alike(target, monkeypatch):
    monkeypatch.setattr(decoding, "_TIDY", 2)
    monkeypatch.setattr(decoding, "_STRIDE", 3)
    prompts = [[token] * (1 + token % 5) for token in range(3, 40)]
    monkeypatch.setattr(target, "eos_ids", frozenset(range(2, 9)))  # else random models go on
    found = decoding.decode(target, prompts, [0.0] * len(prompts), max_new_tokens=30, seed=0)
    assert len({len(each) for each in found}) > 3
    assert found == generated(target, prompts, 0.0, 30, 0)


def test_samples_follow_the_targets_own_probabilities(target):
    prompt, heat, count = [5, 9, 33], 0.7, 4000
    found = decoding.decode(target, [prompt] * count, [heat] * count, max_new_tokens=1, seed=3)
    scores = target.model(input_ids=torch.tensor([prompt])).logits[0, -1]
    wanted = (scores / heat).softmax(-1)
    got = torch.bincount(torch.tensor(found)[:, 0], minlength=len(wanted)) / count
    assert (got - wanted).abs().max() < 4 * (0.25 / count) ** 0.5


def test_each_prompt_gets_its_greedy_answer_and_its_samples(target):
    prompts, sampling = [[5, 6, 7], [9]], Sampling(samples=2, temperature=1.5, seed=1)
    rule = {"max_new_tokens": 12, "batch_size": 4, "say": quiet, "sampling": sampling}
    rows = complete(target, prompts, **rule)
    assert [row.prompt for row in rows] == [[5, 6, 7]] * 3 + [[9]] * 3
    for row in (rows[0], rows[3]):
        assert row.completion == one_by_one(target, row.prompt, 12)
    assert len({tuple(row.completion) for row in rows[:3]}) == 3
    assert complete(target, prompts, **rule) == rows


def test_answers_are_kept_as_they_come(target, tmp_path):
    prompts = [[5, 6, 7], [9], [8, 4], [30, 31, 3, 3]]
    rule = {"max_new_tokens": 8, "batch_size": 1, "say": quiet}
    wanted = complete(target, prompts, **rule)
    file = tmp_path / "answers"
    first = Answers(file, "this")
    first.add([3, 0], [wanted[3].completion, wanted[0].completion])
    with file.open("a") as cut:
        cut.write("[1,[4")
    again = Answers(file, "this")
    assert sorted(again.found) == [0, 3]
    assert complete(target, prompts, kept=again, **rule) == wanted
    assert sorted(Answers(file, "this").found) == [0, 1, 2, 3]
    assert Answers(file, "other").found == {}


def test_progress_is_said_every_few_seconds(target):
    clock = iter(range(0, 1000, 3))
    lines = []
    complete(
        target,
        [[5]] * 4,
        max_new_tokens=2,
        batch_size=1,
        say=lines.append,
        clock=lambda: next(clock),
    )
    assert [line.split("  ")[0] for line in lines] == ["answered 2/4", "answered 4/4"]


def test_what_does_not_fit_the_target_is_refused(target):
    with pytest.raises(InputError, match="that is 513 tokens; the target has 512 positions"):
        complete(target, [[5]], max_new_tokens=512, batch_size=1, say=quiet)


def test_the_layout_is_that_of_save_to_disk(tmp_path):
    rows = [Row(prompt=[1, 2], completion=[3]), Row(prompt=[4], completion=[5, 6])]
    dataset.write_dataset(tmp_path / "out", rows, {"command": "made"})
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted(
        ["out", dataset.ARROW, dataset.INFO, dataset.STATE, dataset.PROVENANCE]
    )
    read = table(tmp_path / "out")
    assert read.schema.types == [pa.list_(pa.int32()), pa.list_(pa.int8())]
    assert read.to_pydict() == {
        "input_ids": [[1, 2, 3], [4, 5, 6]],
        "loss_mask": [[0, 0, 1], [0, 1, 1]],
    }
    state = json.loads((tmp_path / "out/state.json").read_text())
    assert state["_data_files"] == [{"filename": dataset.ARROW}]
    # Readers take a stream for whole only when its end mark is there.
    assert (tmp_path / "out" / dataset.ARROW).read_bytes().endswith(b"\xff\xff\xff\xff\0\0\0\0")


def test_many_rows_keep_their_order(tmp_path):
    rows = [Row(prompt=[number], completion=[7]) for number in range(2100)]
    dataset.write_dataset(tmp_path / "out", rows, {})
    read = table(tmp_path / "out")
    assert [ids[0] for ids in read["input_ids"].to_pylist()] == list(range(2100))
    assert read["input_ids"].num_chunks == 3


def test_a_dataset_is_never_overwritten(tmp_path):
    rows = [Row(prompt=[1], completion=[2])]
    dataset.write_dataset(tmp_path, rows, {})
    with pytest.raises(InputError, match="holds a dataset already"):
        dataset.write_dataset(tmp_path, rows, {})


def test_an_interrupted_one_is_not_in_the_way(tmp_path):
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / dataset.ARROW).write_bytes(b"half")
    dataset.write_dataset(tmp_path / "out", [Row(prompt=[1], completion=[2])], {})
    assert not (tmp_path / ".out.partial").exists()


def test_a_line_ends_where_json_lines_end(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one\u2028two\u0085three"}\r\n{"prompt": "four"}\n')
    assert [each[0]["content"] for each in read_prompts(path)] == [
        "one\u2028two\u0085three",
        "four",
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "holds no prompt"),
        ('{"prompt": "hi"}\nnonsense', ":2: is no JSON"),
        ('{"text": "hi"}', ":1: holds neither prompt nor messages"),
        ('["hi"]', ":1: holds neither"),
        ('{"prompt": ""}', ":1: a message is"),
        ('{"messages": [{"role": "user"}]}', ":1: a message is"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path, text, told):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=told):
        read_prompts(path)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "--target-model"),
        (["--target-model", "t"], "--prompts: is missing"),
        (["--target-model", "t", "--prompts", "p"], "give both"),
        (["--target-model", "t", "--batch-size", "-1"], "--batch-size: is -1"),
        (["--target-model", "t", "--prompts", "/none", "--out", "o"], "--prompts /none"),
        (["--target-model", "t", "--promts", "p"], "did you mean --prompts"),
    ],
)  # fmt: skip
def test_wrong_words_are_told_before_anything_is_loaded(words, told):
    with pytest.raises(InputError, match=told):
        prepared(*words)


def test_a_target_without_a_template_is_refused():
    class Tokenizer:
        chat_template = None

    with pytest.raises(InputError, match="no chat template"):
        in_template(Tokenizer(), [])


def test_the_demo_dataset_is_what_its_provenance_says():
    facts = json.loads((DEMO / dataset.PROVENANCE).read_text())
    rows = table(DEMO).to_pylist()
    assert len(rows) == facts["rows"] == len(read_prompts(DEMO / "prompts.jsonl"))
    assert sum(sum(row["loss_mask"]) for row in rows) == facts["completion_tokens"]
    assert sum(path.stat().st_size for path in DEMO.iterdir()) < 500_000
    # A batch of the demo must hold every row.
    assert max(len(row["input_ids"]) for row in rows) <= 512


def test_the_demo_dataset_is_made_again_alike(smollm_dir, tmp_path):
    wanted = {0: 12, 1: 12, 57: 12}
    lines = (DEMO / "prompts.jsonl").read_text().splitlines()
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines[row] for row in wanted))
    said = []
    code = prepared(
        "--target-model", smollm_dir, "--prompts", tmp_path / "prompts.jsonl",
        "--out", tmp_path / "out", "--max-new-tokens", 12, "--device", "cpu", say=said.append,
    )  # fmt: skip
    assert code == 0
    assert "3 rows" in said[-1]
    committed = table(DEMO).to_pylist()
    for made, row in zip(table(tmp_path / "out").to_pylist(), wanted, strict=True):
        ids = made["input_ids"]
        assert ids == committed[row]["input_ids"][: len(ids)]
        assert sum(made["loss_mask"]) == wanted[row]
    facts = json.loads((tmp_path / "out" / dataset.PROVENANCE).read_text())
    assert facts["cut_off"] == 3
    assert facts["template"] == json.loads((DEMO / dataset.PROVENANCE).read_text())["template"]


def test_help_is_there_for_every_flag():
    parser = argparse.ArgumentParser()
    prepare.add_arguments(parser)
    assert all(action.help for action in parser._actions)
