"""AdamW on flat pieces, against torch's on each parameter."""

from __future__ import annotations

import math

import pytest
import torch

from tests.trainer import tiny
from tests.trainer.test_gradients import backward, small_model
from trainer.update.gradients import FlatGradients
from trainer.update.optimizer import AdamW, cosine_rate


def trained(steps, *, dtype=torch.float32, weight_decay=0.1, state=None, start=0):
    model = small_model(dtype)
    gradients = FlatGradients(model.parameters(), tiny.Alone())
    optimizer = AdamW(gradients, weight_decay=weight_decay)
    if state is not None:
        optimizer.load_state_dict(state)
    for step in range(start, start + steps):
        gradients.zero_()
        backward(model, 1.0 + step % 3)
        optimizer.step_(1e-2 / (1 + step))
    gradients.check_views()
    return model, optimizer


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_agrees_with_torch(weight_decay):
    model, _ = trained(20, weight_decay=weight_decay)
    reference = small_model()
    groups = [
        {
            "params": [each for each in reference.parameters() if (each.ndim < 2) == norms],
            "weight_decay": 0.0 if norms else weight_decay,
        }
        for norms in (False, True)
    ]
    optimizer = torch.optim.AdamW(groups)
    for step in range(20):
        optimizer.zero_grad()
        backward(reference, 1.0 + step % 3)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        optimizer.step()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_resumes_to_the_bit():
    through, optimizer = trained(10)
    _, half = trained(4)
    resumed, other = trained(6, state=half.state_dict(), start=4)
    assert all(
        torch.equal(a, b) for a, b in zip(through.parameters(), resumed.parameters(), strict=True)
    )
    for name, value in optimizer.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])


def test_a_state_is_a_copy():
    model, optimizer = trained(2)
    state = optimizer.state_dict()
    before = {name: value.clone() for name, value in state.items()}
    backward(model, 1.0)
    optimizer.step_(1e-2)
    assert all(torch.equal(state[name], before[name]) for name in state)


def test_refuses_the_state_of_another_drafter():
    _, optimizer = trained(1)
    state = optimizer.state_dict()
    state["masters"] = state["masters"][:-1]
    with pytest.raises(ValueError, match="resume with the flags of the first start"):
        optimizer.load_state_dict(state)


def test_wide_parameters_are_the_masters_themselves():
    model, optimizer = trained(1)
    start = optimizer.masters_G.data_ptr()
    assert model[0].weight.data_ptr() == start


def test_narrow_parameters_move_by_steps_that_they_could_not_hold():
    model, optimizer = trained(0, dtype=torch.bfloat16)
    before = optimizer.masters_G.clone()
    backward(model, 1.0)
    optimizer.step_(1e-6)
    assert optimizer.masters_G.dtype == torch.float32
    assert not torch.equal(optimizer.masters_G, before)
    flat = torch.cat([model[0].weight.flatten(), model[2].weight.flatten()])
    assert torch.equal(flat, optimizer.masters_G[: 4 * 6 + 6 * 3].bfloat16())


def test_rate_warms_up_and_falls_as_a_cosine():
    def rate(step, floor=0.0):
        return cosine_rate(step, steps=110, peak=2.0, warmup=10, floor=floor)

    assert [rate(0), rate(4), rate(9), rate(10)] == pytest.approx([0.2, 1.0, 2.0, 2.0])
    assert rate(60) == pytest.approx(1.0)
    assert rate(85) == pytest.approx(1 + math.cos(math.pi * 0.75))
    assert rate(110) == pytest.approx(0)
    assert rate(500) == pytest.approx(0)
    assert rate(110, floor=0.1) == pytest.approx(0.2)
    assert cosine_rate(0, steps=5, peak=1.0, warmup=0) == 1.0
