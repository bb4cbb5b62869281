"""What is kept from training, and how a drafter is measured on it without changing anything."""

import json

import numpy as np
import pytest
import torch

from tests.trainer import made
from tests.trainer.runs import measures, same, state
from trainer import config as configs
from trainer import train
from trainer.build.trained import load
from trainer.build.trial import Ends, Sample, Trial
from trainer.data.arrow import TokenStore
from trainer.data.holdout import held_out, parts
from trainer.errors import InputError
from trainer.model.target import Target
from trainer.record.status import Status
from trainer.speculate import generate, generate_plain
from trainer.stop import Stop


def stored(rows):
    ids = np.concatenate([ids for ids, _ in rows]).astype(np.int32)
    mask = np.concatenate([mask for _, mask in rows]).astype(bool)
    return TokenStore.in_memory(ids, mask, np.cumsum([0, *(len(ids) for ids, _ in rows)]))


def answered(prompts, answers=1):
    """Rows: each prompt with some answers of its own."""
    return [
        ([*prompt, 7, 8, number % 9], [0] * len(prompt) + [1, 1, 1])
        for prompt in prompts
        for number in range(answers)
    ]


PROMPTS = [[number, number + 1, 3] for number in range(40)]


def prompts_of(store):
    return [tuple(parts(store, row)[0]) for row in range(len(store.lengths))]


def test_a_prompt_is_held_out_with_all_its_answers():
    kept, held = held_out(stored(answered(PROMPTS, 3)), 10)
    assert len(held.lengths) == 10
    assert len(kept.lengths) == 3 * 30
    assert not set(prompts_of(kept)) & set(prompts_of(held))


def test_which_prompts_depends_on_their_tokens_alone():
    _, held = held_out(stored(answered(PROMPTS, 3)), 10)
    _, turned = held_out(stored(answered(PROMPTS, 1)[::-1]), 10)
    assert set(prompts_of(held)) == set(prompts_of(turned))
    # Of more data others are taken too, but what is among the smallest hashes still stays out.
    more = PROMPTS + [[50, 51, number] for number in range(40)]
    _, larger = held_out(stored(answered(more)), 20)
    assert len(set(prompts_of(larger)) & set(prompts_of(held))) >= 5


def test_what_is_held_out_of_all_rows_is_never_trained_on_where_some_were_left_out_before():
    rows = answered(PROMPTS, 2)
    _, held = held_out(stored(rows), 10)
    kept, _ = held_out(stored(rows[5:50]), 10)
    assert not set(prompts_of(held)) & set(prompts_of(kept))


def test_something_must_be_left_to_train_on():
    with pytest.raises(InputError, match="--eval-rows: is 40; the data holds 40 different prompts"):
        held_out(stored(answered(PROMPTS)), 40)


def test_a_completion_ends_where_the_next_question_begins():
    store = stored([([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1])])
    assert parts(store, 0) == ([1, 2], [3, 4])


@pytest.fixture
def go(tiny_target_dir, tmp_path):
    data = made.save_to_disk(tmp_path / "data", [made.table(made.rows(30))])

    def train_now(out, **more):
        (tmp_path / out).mkdir(exist_ok=True)
        said = []
        words = made.flags(tiny_target_dir, data, tmp_path / out, **more)
        train.run(configs.read(words), Stop(), Status(tmp_path / out), said.append)
        return said, tmp_path / out

    return train_now


def test_a_trial_changes_nothing_of_the_training(go):
    said, tried = go("tried", eval_rows=6, eval_interval=3)
    _, untried = go("untried", eval_rows=6)
    assert same(state(tried), state(untried))
    lines = [line for line in said if line.startswith("eval  step")]
    kept = measures(tried)
    due = [each["step"] for each in kept if each["step"] % 3 == 0 or each is kept[-1]]
    assert [each["step"] for each in kept if "eval_accepted" in each] == due
    assert len(lines) == len(due)
    assert all(each["eval_samples"] == 6 for each in kept if "eval_accepted" in each)
    assert [each["loss"] for each in kept] == [each["loss"] for each in measures(untried)]


def test_a_run_keeps_what_it_held_out(go):
    said, _ = go("out", eval_rows=6, eval_interval=100, epochs=1)
    assert "eval      6 samples, every 100 steps" in said
    with pytest.raises(InputError, match="with data fingerprint"):
        go("out", epochs=1)


def test_a_trial_finds_what_decoding_finds(tiny_target_dir, go):
    _, out = go("out", epochs=6)
    _, drafter = load(out, print)
    target = Target.load(
        tiny_target_dir, taps=drafter.config.tap_ids, device="cpu", dtype=torch.float32
    )
    prompts = [[5, 9, 33], [7, 12, 2, 40], [31, 30]]
    samples = [
        Sample(prompt, list(generate_plain(target, prompt, max_new_tokens=40)))
        for prompt in prompts
    ]
    tried = Trial.of(samples, target).measure(drafter, Ends(target.embedding_VH, target.head_VH))
    real = [generate(target, drafter, prompt, max_new_tokens=40) for prompt in prompts]
    whole = [each.mean_length for each in real if each.lengths]
    assert tried.accepted == pytest.approx(sum(whole) / len(whole))
    lengths = [length for each in real for length in each.lengths]
    assert tried.lengths == tuple(lengths.count(length) for length in range(1, 5))
    assert torch.is_grad_enabled()


def test_prompts_of_a_file_are_answered_by_the_target(go, tmp_path, monkeypatch):
    from trainer.build import trial

    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "hello"}) + "\n")
    monkeypatch.setattr(Target, "tokenizer", lambda _: None)
    monkeypatch.setattr(trial, "in_template", lambda *_: [5, 9, 33])
    said, out = go("out", eval_prompts=tmp_path / "p.jsonl", eval_interval=2, steps=3)
    assert "eval      1 samples, every 2 steps" in said
    assert [each["step"] for each in measures(out) if "eval_accepted" in each] == [2, 3]


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"eval_interval": 5}, "--eval-interval: is 5; give --eval-rows or --eval-prompts with it"),
        ({"sliding_layers": 2}, "--sliding-layers: is 2; give --sliding-window with it"),
    ],
)
def test_flags_that_need_another_say_so(go, more, line):
    with pytest.raises(InputError, match=line):
        go("out", **more)
