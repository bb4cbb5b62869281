"""Speculative decoding changes nothing but the speed, and counts what it accepts."""

from __future__ import annotations

import pytest
import torch

from trainer.model.drafter import Drafter, DrafterConfig
from trainer.model.target import Target
from trainer.speculate import generate, generate_plain, generate_with, replay, walk

PROMPT = [5, 9, 33, 12]
LENGTH = 60


@pytest.fixture(scope="module", params=["tiny_target_dir", "tiny_qwen_dir"])
def target(request):
    found = Target.load(request.getfixturevalue(request.param), tap_count=3, dtype=torch.float32)
    # So that a random model's completion is not ended by chance.
    found.eos_ids = frozenset()
    return found


def random_drafter(target, **changes):
    config = DrafterConfig(
        **{
            "hidden_size": 32,
            "intermediate_size": 48,
            "layers": 2,
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 8,
            "vocabulary": 64,
            "tap_ids": target.tap_ids,
            "target_layers": target.layers,
            "mask_token_id": 63,
            "block_size": 6,
            "rope_theta": 1e4,
        }
        | changes
    )
    drafter = Drafter(config)
    drafter.initialise_(seed=0, deviation=0.2)
    return drafter


class Stub:
    """Drafts the right tokens, but errs at a known slot of each block."""

    def __init__(self, truth, block_size, errors):
        self.truth, self.block_size, self.errors = truth, block_size, list(errors)
        self.fed = []

    def extend(self, features_SF):
        self.fed.append(len(features_SF))

    def propose(self, anchor):
        place = sum(self.fed) - len(PROMPT)
        assert int(anchor) == self.truth[place]
        following = self.truth[place + 1 : place + self.block_size]
        draft = torch.tensor(following + [0] * (self.block_size - 1 - len(following)))
        slot = self.errors.pop(0)
        if slot < self.block_size:
            draft[slot - 1] = (draft[slot - 1] + 1) % 64
        return draft


def test_plain_decoding_is_that_of_transformers(target):
    wanted = target.model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
        max_new_tokens=LENGTH,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens = generate_plain(target, PROMPT, max_new_tokens=LENGTH)
    assert list(tokens) == wanted[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("kind", [{}, {"sliding_layers": 1, "sliding_window": 7}])
@pytest.mark.parametrize("zero_features", [False, True])
def test_output_is_the_targets_own(target, kind, zero_features):
    drafter = random_drafter(target, **kind)
    found = generate(target, drafter, PROMPT, max_new_tokens=LENGTH, zero_features=zero_features)
    assert found.tokens == generate_plain(target, PROMPT, max_new_tokens=LENGTH)
    assert all(1 <= length <= 6 for length in found.lengths)


@pytest.mark.parametrize("slot", [1, 2, 5, 6])
def test_accepted_length_is_where_the_drafter_errs(target, slot):
    truth = list(generate_plain(target, PROMPT, max_new_tokens=LENGTH + 10))
    stub = Stub(truth, 6, [slot] * LENGTH)
    found = generate_with(target, stub, PROMPT, max_new_tokens=LENGTH)
    assert list(found.tokens) == truth[:LENGTH]
    assert set(found.lengths) == {min(slot, 6)}
    # The first features are the prompt's, then those of what was accepted.
    assert stub.fed == [len(PROMPT), *found.lengths][: found.blocks]


def test_lengths_that_vary_are_counted_one_by_one(target):
    truth = list(generate_plain(target, PROMPT, max_new_tokens=40))
    errors = [3, 6, 1, 2, 6, 5]
    found = generate_with(target, Stub(truth, 6, errors), PROMPT, max_new_tokens=24)
    assert list(found.tokens) == truth[:24]
    assert found.lengths == (3, 6, 1, 2, 6, 5)
    assert found.mean_length == pytest.approx(23 / 6)


def test_the_cut_last_block_is_not_counted(target):
    truth = list(generate_plain(target, PROMPT, max_new_tokens=40))
    found = generate_with(target, Stub(truth, 6, [6] * 9), PROMPT, max_new_tokens=15)
    # One token, two whole blocks of six, and two tokens of a third.
    assert found.tokens == tuple(truth[:15])
    assert found.lengths == (6, 6)
    assert found.blocks == 3


def test_an_end_token_ends_it_and_cuts_its_block(target):
    truth = list(generate_plain(target, PROMPT, max_new_tokens=40))
    end = truth[9]
    first = truth.index(end)
    target.eos_ids = frozenset({end})
    try:
        found = generate_with(target, Stub(truth, 6, [6] * 9), PROMPT, max_new_tokens=40)
        assert found.tokens == generate_plain(target, PROMPT, max_new_tokens=40)
    finally:
        target.eos_ids = frozenset()
    assert found.tokens == tuple(truth[: first + 1])
    assert found.lengths == (6,) * (first // 6)


def test_one_token_needs_no_block(target):
    found = generate(target, random_drafter(target), PROMPT, max_new_tokens=1)
    assert found.tokens == generate_plain(target, PROMPT, max_new_tokens=1)
    assert (found.lengths, found.blocks, found.mean_length) == ((), 0, 0.0)


@pytest.mark.parametrize("kind", [{}, {"sliding_layers": 1, "sliding_window": 7}])
@pytest.mark.parametrize("zero_features", [False, True])
def test_replay_finds_the_lengths_of_real_decoding(target, kind, zero_features):
    drafter = random_drafter(target, **kind)
    for start in (3, 20, 41):
        prompt = [start, start + 1, 12]
        wanted = generate(target, drafter, prompt, max_new_tokens=47, zero_features=zero_features)
        got = replay(
            target, drafter, prompt, wanted.tokens, zero_features=zero_features, at_once=10
        )
        assert got == wanted


@pytest.mark.parametrize("length", [1, 2, 7, 14, 15, 16, 40])
@pytest.mark.parametrize("slots", [[6], [1], [3, 6, 1, 2, 6, 5], [2, 6]])
def test_walk_counts_as_real_decoding_does(target, length, slots):
    truth = list(generate_plain(target, PROMPT, max_new_tokens=60))
    errors = (slots * 60)[:60]  # of the block behind each token

    class ByPlace(Stub):
        def propose(self, anchor):
            self.errors = [errors[sum(self.fed) - len(PROMPT)]]
            return super().propose(anchor)

    wanted = generate_with(target, ByPlace(truth, 6, []), PROMPT, max_new_tokens=length)
    right = [min(errors[at] - 1, 5, length - 1 - at) for at in range(length - 1)]
    assert walk(tuple(truth[:length]), right) == wanted
