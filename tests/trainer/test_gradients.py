"""One buffer for all gradients, against torch's own ways."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import nn

from tests.trainer import tiny
from trainer.errors import NonFiniteError
from trainer.update.gradients import DENOMINATOR, NON_FINITE, NUMERATOR, STOP, FlatGradients


def small_model(dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)).to(dtype)


def backward(model, value):
    model(torch.full((5, 4), value, dtype=model[0].weight.dtype)).square().sum().backward()


def test_backward_adds_into_the_buffer():
    model, reference = small_model(), small_model()
    gradients = FlatGradients(model.parameters(), tiny.Alone())
    for value in (1.0, 3.0):
        backward(model, value)
        backward(reference, value)
    gradients.check_views()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    assert gradients.flat_G.abs().sum() > 0
    gradients.zero_()
    assert all((each.grad == 0).all() for each in model.parameters())


def test_matrices_come_first():
    model = small_model()
    gradients = FlatGradients(model.parameters(), tiny.Alone())
    assert gradients.matrices == 4 * 6 + 6 * 3
    backward(model, 1.0)
    matrices = torch.cat([model[0].weight.grad.flatten(), model[2].weight.grad.flatten()])
    assert torch.equal(gradients.flat_G[: gradients.matrices], matrices)


@pytest.mark.parametrize("lose", ["zero_grad", "assign"])
def test_a_lost_view_is_found(lose):
    model = small_model()
    gradients = FlatGradients(model.parameters(), tiny.Alone())
    if lose == "zero_grad":
        model.zero_grad()
    else:
        model[0].weight.grad = torch.zeros_like(model[0].weight)
    with pytest.raises(AssertionError, match="no longer lies in the flat buffer"):
        gradients.sum_()


def test_sum_is_one_collective_over_gradients_and_extras():
    class Twin:
        calls = 0

        def sum_(self, tensor):
            self.calls += 1
            tensor.mul_(2)

    model, world = small_model(), Twin()
    gradients = FlatGradients(model.parameters(), world)
    backward(model, 1.0)
    before = gradients.flat_G.clone()
    gradients.add_(torch.tensor(6.0), torch.tensor(3.0))
    gradients.extra_E[STOP] = 1
    gradients.sum_()
    assert world.calls == 1
    assert torch.equal(gradients.flat_G, before * 2)
    assert gradients.extra_E.tolist() == [12, 6, 2, 0]


@pytest.mark.parametrize("limit", [1.0, 1e9])
def test_clip_matches_torch(limit):
    model, reference = small_model(), small_model()
    gradients = FlatGradients(model.parameters(), tiny.Alone())
    for each in (model, reference):
        backward(each, 9.0)
    norm = gradients.clip_(limit, step=7)
    wanted = nn.utils.clip_grad_norm_(reference.parameters(), limit)
    assert norm == pytest.approx(wanted.item())
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_clip_divides_by_the_denominator_first():
    model, reference = small_model(), small_model()
    gradients = FlatGradients(model.parameters(), tiny.Alone())
    backward(model, 9.0)
    gradients.add_(torch.tensor(1.0), torch.tensor(40.0))
    (reference(torch.full((5, 4), 9.0)).square().sum() / 40).backward()
    norm = gradients.clip_(0.5, step=7)
    wanted = nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
    assert norm == pytest.approx(wanted.item())
    torch.testing.assert_close(model[0].weight.grad, reference[0].weight.grad)


def test_clip_of_nothing_is_nothing():
    gradients = FlatGradients(small_model().parameters(), tiny.Alone())
    assert gradients.clip_(1.0, step=1) == 0
    assert (gradients.flat_G == 0).all()


def test_a_gradient_that_is_not_finite_names_the_step():
    model = small_model()
    gradients = FlatGradients(model.parameters(), tiny.Alone())
    model[0].weight.grad[0, 0] = math.inf
    with pytest.raises(NonFiniteError, match=re.escape("step 1,240: gradient norm is inf")) as hit:
        gradients.clip_(1.0, step=1240)
    assert hit.value.exit_code == 3


def test_a_loss_that_is_not_finite_is_flagged():
    gradients = FlatGradients(small_model().parameters(), tiny.Alone())
    gradients.add_(torch.tensor(1.0), torch.tensor(1.0))
    assert gradients.extra_E[NON_FINITE] == 0
    gradients.add_(torch.tensor(math.nan), torch.tensor(2.0))
    assert gradients.extra_E[NON_FINITE] == 1
    assert gradients.extra_E[DENOMINATOR] == 3
    assert gradients.extra_E[NUMERATOR].isnan()
    with pytest.raises(NonFiniteError, match="step 3: loss is nan"):
        gradients.clip_(1.0, step=3)


def test_gradients_of_bfloat16_parameters_are_kept_in_float32():
    model = small_model(torch.bfloat16)
    gradients = FlatGradients(model.parameters(), tiny.Alone())
    for _ in range(300):
        backward(model, 0.01)
    gradients.check_views()
    assert gradients.flat_G.dtype == torch.float32
    once = small_model(torch.bfloat16)
    backward(once, 0.01)
    # In bfloat16 the sum would stop growing at 256 times its terms.
    torch.testing.assert_close(
        model[2].bias.grad, once[2].bias.grad.float() * 300, rtol=1e-3, atol=0
    )
