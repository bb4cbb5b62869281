"""A drafter that learned one completion by heart must draft it in real decoding.

Training accuracy is not asked: a leak in the mask, an offset in the taps or in the slots would
leave it high, and acceptance low.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.trainer import tiny
from trainer.model.anchors import blocks, draw, visible
from trainer.model.drafter import Drafter, DrafterConfig
from trainer.model.loss import block_loss, default_gamma, weigh_by_decay
from trainer.model.mask_token import choose_mask_token
from trainer.model.target import Target
from trainer.speculate import Generation, generate, generate_plain
from trainer.update.gradients import FlatGradients
from trainer.update.optimizer import AdamW, cosine_rate

pytestmark = pytest.mark.torch

QUESTION = "Write a short story about a lighthouse keeper who finds a strange bottle."


@dataclass(frozen=True)
class Setting:
    """How long, and how hard."""

    block_size: int
    anchors: int
    steps: int
    new_tokens: int
    zeroed_tokens: int
    """Fewer: without features nearly every token costs a run of the target."""


# About 0.36 s a step on one core: the head has 49,152 rows.
QUICK = Setting(block_size=8, anchors=24, steps=120, new_tokens=168, zeroed_tokens=64)
FULL = Setting(block_size=16, anchors=16, steps=250, new_tokens=200, zeroed_tokens=200)


@dataclass(frozen=True)
class Overfitted:
    setting: Setting
    truth: tuple[int, ...]
    with_features: Generation
    without: Generation


@pytest.fixture(scope="module")
def overfitted(smollm_dir, long):
    setting = FULL if long else QUICK
    target = Target.load(smollm_dir, dtype=torch.float32)
    prompt = target.tokenizer().apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=False
    )
    truth = generate_plain(target, prompt, max_new_tokens=setting.new_tokens)
    drafter = train(target, prompt, truth, setting)
    return Overfitted(
        setting,
        truth,
        generate(target, drafter, prompt, max_new_tokens=setting.new_tokens),
        generate(target, drafter, prompt, max_new_tokens=setting.zeroed_tokens, zero_features=True),
    )


def train(target, prompt, truth, setting):
    ids_T = torch.tensor([*prompt, *truth])
    count = len(ids_T)
    trainable_T = np.arange(count) >= len(prompt)
    document_T = np.zeros(count, np.int32)
    position_T = torch.arange(count)
    features_TF = target.features(ids_T, torch.tensor([0, count]))
    shape = target.shape
    drafter = Drafter(
        DrafterConfig(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            layers=2,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            vocabulary=shape.vocabulary,
            tap_ids=target.tap_ids,
            target_layers=shape.layers,
            mask_token_id=choose_mask_token(target, occurs=lambda i: i in set(ids_T.tolist())),
            block_size=setting.block_size,
            rope_theta=shape.rope_theta,
            eps=shape.eps,
        )
    )
    drafter.initialise_(seed=0)
    gradients = FlatGradients(drafter.parameters(), tiny.Alone())
    optimizer = AdamW(gradients)
    weigh = weigh_by_decay(setting.block_size, default_gamma(setting.block_size))
    for step in range(setting.steps):
        anchors_N = torch.from_numpy(
            draw(trainable_T, document_T, count=setting.anchors, seed=0, epoch=0, number=step)
        )
        laid = blocks(
            anchors_N,
            ids_T,
            torch.from_numpy(trainable_T),
            torch.from_numpy(document_T),
            position_T,
            block_size=setting.block_size,
            mask_token_id=drafter.config.mask_token_id,
        )
        gradients.zero_()
        hidden_QH = drafter(
            target.embedding_VH[laid.ids_Q],
            features_TF,
            position_T,
            laid.positions_Q,
            visible(anchors_N, torch.from_numpy(document_T), block_size=setting.block_size),
        )
        loss = block_loss(hidden_QH, target.head_VH, laid.labels_NB, laid.supervised_NB, weigh)
        loss.numerator.backward()
        gradients.add_(loss.numerator, loss.denominator)
        gradients.sum_()
        gradients.clip_(1.0, step=step)
        optimizer.step_(
            cosine_rate(step, steps=setting.steps, peak=1.5e-3, warmup=setting.steps // 20)
        )
    return drafter


def test_the_completion_is_long_and_varied(overfitted):
    assert len(overfitted.truth) >= 160
    assert len(set(overfitted.truth)) >= 64


def test_real_decoding_accepts_nearly_whole_blocks(overfitted):
    assert overfitted.with_features.mean_length >= 0.9 * overfitted.setting.block_size


def test_without_context_features_less_than_half_is_accepted(overfitted):
    assert overfitted.without.lengths
    assert overfitted.without.mean_length < 0.9 * overfitted.setting.block_size / 2
    assert overfitted.without.mean_length < overfitted.with_features.mean_length / 2


def test_both_outputs_are_the_targets_own(overfitted):
    assert overfitted.with_features.tokens == overfitted.truth
    assert overfitted.without.tokens == overfitted.truth[: overfitted.setting.zeroed_tokens]
