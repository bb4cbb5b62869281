"""The chunked loss against the naive one, and the tables of both weightings."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.trainer import tiny
from trainer.model.loss import (
    block_loss,
    decay_weights,
    default_gamma,
    weigh_by_decay,
    weigh_by_pace,
)

WEIGHTINGS = {"decay": weigh_by_decay(5, 4.0), "pace": weigh_by_pace(0.5)}


def naive(hidden, head, labels, supervised, weigh):
    """All scores at once, gradient by autograd."""
    count, size = labels.shape
    scores = hidden.view(count, size, -1)[:, 1:] @ head.T
    ce = functional.cross_entropy(scores.flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
    ce = ce.view(count, size - 1)
    weights = weigh(ce.detach(), supervised[:, 1:])
    lengths = []
    for right, used in zip(
        (scores.argmax(-1) == labels[:, 1:]) & supervised[:, 1:], supervised, strict=True
    ):
        if used.any():
            lengths.append(1 + [*right.tolist(), False].index(False))
    return (weights * ce).sum(), weights.sum(), sum(lengths) / max(1, len(lengths)), len(lengths)


def sample(dtype=torch.float64, *, blocks=7, size=5):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(blocks * size, 6, generator=generator, dtype=dtype)
    head = torch.randn(11, 6, generator=generator, dtype=dtype)
    labels = torch.randint(0, 11, (blocks, size), generator=generator)
    best = (hidden @ head.T).argmax(-1).view(blocks, size)
    # Some blocks are right for a while, so that accepted lengths differ.
    labels = torch.where(torch.rand(blocks, size, generator=generator) < 0.6, best, labels)
    supervised = torch.rand(blocks, size, generator=generator) < 0.8
    supervised[:, 0] = False
    supervised[-1] = False
    return hidden, head, labels, supervised


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("rows", [1, 8, 9, 4096])
def test_chunks_equal_the_naive_loss(weighting, rows):
    hidden, head, labels, supervised = sample()
    slow, fast = (hidden.clone().requires_grad_() for _ in range(2))
    weigh = WEIGHTINGS[weighting]
    numerator, denominator, accepted, used = naive(slow, head, labels, supervised, weigh)
    loss = block_loss(fast, head, labels, supervised, weigh, rows=rows)
    torch.testing.assert_close(loss.numerator, numerator, rtol=1e-12, atol=0)
    torch.testing.assert_close(loss.denominator, denominator, rtol=1e-12, atol=0)
    assert loss.accepted.item() == pytest.approx(accepted)
    assert loss.blocks.item() == used
    (numerator * 3).backward()
    (loss.numerator * 3).backward()
    torch.testing.assert_close(fast.grad, slow.grad, rtol=1e-12, atol=1e-14)
    assert (fast.grad.view(7, 5, 6)[:, 0] == 0).all()
    assert not loss.denominator.requires_grad
    assert not loss.accepted.requires_grad


def test_gradient_is_that_of_finite_differences():
    hidden, head, labels, supervised = sample(blocks=3)
    weigh = weigh_by_decay(5, 4.0)
    assert torch.autograd.gradcheck(
        lambda x: block_loss(x, head, labels, supervised, weigh, rows=4).numerator,
        hidden.requires_grad_(),
    )


def test_low_precision_is_summed_in_float32():
    hidden, head, labels, supervised = sample(torch.bfloat16)
    weigh = weigh_by_decay(5, 4.0)
    loss = block_loss(hidden.requires_grad_(), head, labels, supervised, weigh)
    assert loss.numerator.dtype == loss.denominator.dtype == torch.float32
    loss.numerator.backward()
    assert hidden.grad.dtype == torch.bfloat16
    exact = naive(hidden.double(), head.double(), labels, supervised, weigh)[0]
    assert loss.numerator.item() == pytest.approx(exact.item(), rel=0.02)


def test_labels_without_loss_do_not_matter():
    hidden, head, labels, supervised = sample()
    results = []
    for fill in (0, 3, 10):
        x = hidden.clone().requires_grad_()
        changed = torch.where(supervised, labels, fill)
        loss = block_loss(x, head, changed, supervised, weigh_by_pace(), rows=8)
        loss.numerator.backward()
        results.append((loss.numerator, loss.denominator, loss.accepted, x.grad))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_nothing_supervised_is_zero_and_finite():
    hidden, head, labels, _ = sample()
    loss = block_loss(
        hidden.requires_grad_(), head, labels, torch.zeros(7, 5, dtype=bool), weigh_by_decay(5, 4)
    )
    loss.numerator.backward()
    assert [each.item() for each in loss] == [0, 0, 0, 0]
    assert (hidden.grad == 0).all()


def test_tokens_without_loss_change_neither_loss_nor_gradient():
    # Prompt tokens, unless they are anchors or context (features stay the same here).
    def run(change):
        case = tiny.Case(16, anchors=[6, 9])
        case.trainable_T = torch.arange(16) >= 6
        case.trainable_T[8] = False
        if change:
            case.ids_T[:6] = (case.ids_T[:6] + 1) % 60
            case.ids_T[8] = (case.ids_T[8] + 1) % 60
            case.ids_T[13:] = (case.ids_T[13:] + 1) % 60
        laid = case.lay_out()
        loss = block_loss(
            case.run().flatten(0, 1),
            case.head_VH,
            laid.labels_NB,
            laid.supervised_NB,
            weigh_by_decay(4, 4.0),
        )
        loss.numerator.backward()
        return loss.numerator, [each.grad for each in case.drafter.parameters()]

    (before, gradients), (after, changed) = run(change=False), run(change=True)
    assert torch.equal(before, after)
    assert all(torch.equal(a, b) for a, b in zip(gradients, changed, strict=True))


def test_decay_tables():
    sixteen = """1 .866878 .751477 .651439 .564718 .489542 .424373 .367879 .318907 .276453
        .239651 .207748 .180092 .156118 .135335"""
    eight = "1 .778801 .606531 .472367 .367879 .286505 .223130"
    for size, gamma, table in ((16, 7.0, sixteen), (8, 4.0, eight)):
        wanted = [0.0, *map(float, table.split())]
        assert decay_weights(size, gamma).tolist() == pytest.approx(wanted, abs=1e-6)
    sums = {size: decay_weights(size, default_gamma(size)).sum().item() for size in (16, 10, 8)}
    assert sums == pytest.approx({16: 6.630611, 10: 4.604759, 8: 3.735212}, abs=1e-6)
    assert default_gamma(4) == 1.75


def test_pace_table():
    q = torch.tensor([[0.9, 0.5, 0.8, 0.1, 0.7, 0.6, 0.2]], dtype=torch.float64)
    weights = weigh_by_pace(0.5)(-q.log(), torch.ones_like(q, dtype=torch.bool))
    wanted = [3.339946, 2.389946, 1.677446, 1.036196, 0.683508, 0.383724, 0.143897]
    assert weights[0].tolist() == pytest.approx(wanted, abs=1e-6)
    assert (weights * -q.log()).sum().item() == pytest.approx(5.440122, abs=1e-6)


def test_pace_is_neutral_where_nothing_is_supervised():
    q = torch.tensor([[0.9, 0.5, 0.8, 0.1]], dtype=torch.float64)
    kept = torch.tensor([[True, False, True, True]])
    without = weigh_by_pace(0.5)(-q[:, [0, 2, 3]].log(), torch.ones(1, 3, dtype=torch.bool))
    weights = weigh_by_pace(0.5)(-q.log(), kept)
    first, *others = without[0].tolist()
    assert weights[0].tolist() == pytest.approx([first, 0, *others])
    assert (weigh_by_pace(1.0)(-q.log(), torch.ones_like(kept))[0].diff() <= 0).all()
