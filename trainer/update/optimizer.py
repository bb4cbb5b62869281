"""AdamW over flat buffers, and how the learning rate moves.

Shapes: G elements of all parameters.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from trainer.update.gradients import views_like

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainer.update.gradients import FlatGradients


def cosine_rate(step: int, *, steps: int, peak: float, warmup: int, floor: float = 0.0) -> float:
    """Learning rate of a step: a straight warm-up, then a half cosine down to `floor` x `peak`.

    Args:
        step: from 0; the first one already moves.
        steps: of the whole run; beyond them the rate stays at the floor.
        peak: reached at step `warmup`.
        warmup: in steps; 0 begins at the peak.
        floor: share of the peak at the end, 0 to 1.
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return peak * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * done)))


class AdamW:
    """torch's fused AdamW on two flat pieces instead of on each parameter.

    Weights and moments are kept in at least float32. Where the drafter's own parameters are
    that wide they become views of the masters, so that nothing is stored or copied twice.
    Weight decay is decoupled from the gradient and touches matrices alone, not norms.
    """

    def __init__(
        self,
        gradients: FlatGradients,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self._parameters = gradients.parameters
        self._shares_memory = self._parameters[0].dtype == gradients.flat_G.dtype
        self.masters_G = torch.empty_like(gradients.flat_G)
        self._views = views_like(self.masters_G, self._parameters)
        for parameter, view in zip(self._parameters, self._views, strict=True):
            view.copy_(parameter.detach())
            if self._shares_memory:
                parameter.data = view
        self._moments_G = {
            name: torch.zeros_like(gradients.flat_G) for name in ("exp_avg", "exp_avg_sq")
        }
        cut = gradients.matrices
        groups = []
        self._flat: list[nn.Parameter] = []
        states = []
        for piece, decay in ((slice(None, cut), weight_decay), (slice(cut, None), 0.0)):
            weights = nn.Parameter(self.masters_G[piece])
            weights.grad = gradients.flat_G[piece]
            if weights.numel():
                self._flat.append(weights)
                groups.append({"params": [weights], "weight_decay": decay})
                states.append({name: held[piece] for name, held in self._moments_G.items()})
        self._engine = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=True)
        for weights, state in zip(self._flat, states, strict=True):
            step = torch.zeros((), dtype=torch.float32, device=weights.device)
            self._engine.state[weights] = {"step": step, **state}

    def step_(self, rate: float) -> None:
        """Move all parameters along the gradients, which are summed and clipped by now."""
        for group in self._engine.param_groups:
            group["lr"] = rate
        self._engine.step()
        if not self._shares_memory:
            self._publish()

    def live_state(self) -> dict[str, Tensor]:
        """The whole state as the tensors that the next step changes; nothing is copied."""
        step = self._engine.state[self._flat[0]]["step"]
        return {"masters": self.masters_G, **self._moments_G, "steps": step}

    def state_dict(self) -> dict[str, Tensor]:
        """The whole state as plain tensors: copies, so that training may go on meanwhile."""
        return {name: tensor.clone() for name, tensor in self.live_state().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take a state back; the drafter's parameters then equal its masters.

        Raises:
            ValueError: it is of another drafter.
        """
        count = self.masters_G.numel()
        for name in ("masters", "exp_avg", "exp_avg_sq"):
            if state[name].numel() != count:
                raise ValueError(
                    f"optimizer state: {name} has {state[name].numel():,} elements, "
                    f"the drafter {count:,}; resume with the flags of the first start"
                )
        with torch.no_grad():
            self.masters_G.copy_(state["masters"])
            for name, moments_G in self._moments_G.items():
                moments_G.copy_(state[name])
            for weights in self._flat:
                self._engine.state[weights]["step"].copy_(state["steps"])
        if not self._shares_memory:
            self._publish()

    def _publish(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_([*self._parameters], self._views)
