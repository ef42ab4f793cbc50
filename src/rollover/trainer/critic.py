"""The critic of PPO, in its smallest form: a linear value head on the policy's own last hidden states.

Shapes: M loss tokens, E hidden size. Owns the head and its optimizer. The hidden states are constants to it, so it
costs no second model, and the policy does not learn from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rollover.algorithms.advantage import gae, whiten
from rollover.algorithms.loss import value_loss
from rollover.config import AlgorithmConfig
from rollover.trainer.backend import Stream
from rollover.trainer.optimizer import clip_gradients
from rollover.types import Sample


class Critic:
    """V(prefix before a token), for every loss token. Starts at 0 everywhere."""

    def __init__(self, hidden_size: int, config: AlgorithmConfig, device: torch.device) -> None:
        self.config = config
        self.head = torch.nn.Linear(hidden_size, 1, device=device, dtype=torch.float32)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self.adamw = torch.optim.AdamW(self.head.parameters(), lr=config.critic_learning_rate, weight_decay=0.0)

    def values(self, hidden_ME: torch.Tensor) -> torch.Tensor:
        """[M], differentiable in the head alone."""
        return self.head(_normalised(hidden_ME.detach().float())).squeeze(-1)

    def forward_backward(
        self, hidden_ME: torch.Tensor, old_values_M: torch.Tensor, returns_M: torch.Tensor, num_tokens: int
    ) -> dict[str, torch.Tensor]:
        """Gradient of the clipped value loss, averaged over the minibatch's `num_tokens`."""
        values_M = self.values(hidden_ME)
        loss_1M = value_loss(
            values_M[None],
            old_values_M[None],
            returns_M[None],
            torch.ones_like(returns_M[None], dtype=torch.bool),
            clip=self.config.value_clip,
        )
        (loss_1M.sum() / num_tokens).backward()
        with torch.no_grad():
            return {
                "sum/critic_loss": loss_1M.sum(),
                "sum/critic_error": ((old_values_M - returns_M) ** 2).sum(),
                "sum/returns": returns_M.sum(),
                "sum/returns_squared": (returns_M**2).sum(),
            }

    def gradients(self) -> list[torch.Tensor]:
        """The accumulated gradients of the head (none without a loss token)."""
        return [p.grad for p in self.head.parameters() if p.grad is not None]

    def gradient_norm(self) -> float:
        gradients = self.gradients()
        return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0

    def step(self, norm: float, max_norm: float, *, skip: bool) -> None:
        """Clip the gradient, whose norm is `norm`, to `max_norm` (0: do not) and step; `skip`: forget it instead."""
        if not skip:
            clip_gradients(self.gradients(), norm, max_norm)
            self.adamw.step()
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """Forget the accumulated gradient."""
        self.adamw.zero_grad(set_to_none=True)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """(tensors, JSON-able rest)."""
        tensors = {f"critic/{name}": p.detach() for name, p in self.head.named_parameters()}
        steps = 0.0
        for name, parameter in self.head.named_parameters():
            moments = self.adamw.state.get(parameter, {})
            if moments:
                tensors |= {f"critic/{kind}/{name}": moments[kind] for kind in ("exp_avg", "exp_avg_sq")}
                steps = float(moments["step"])
        return tensors, {"adam_steps": steps}

    def load_state(self, tensors: Mapping[str, torch.Tensor], meta: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, parameter in self.head.named_parameters():
                parameter.copy_(tensors[f"critic/{name}"])
                if meta["adam_steps"]:
                    self.adamw.state[parameter] = {
                        "step": torch.tensor(meta["adam_steps"], dtype=torch.float32),
                        **{
                            kind: tensors[f"critic/{kind}/{name}"].to(parameter.device).clone()
                            for kind in ("exp_avg", "exp_avg_sq")
                        },
                    }


def estimate(config: AlgorithmConfig, samples: list[Sample], values: Stream) -> tuple[list[Sample], Stream]:
    """(the samples with advantages in place of their rewards per token, returns).

    Advantages are normalised over all loss tokens of the batch, as PPO implementations do.
    """
    width = max(len(s.mask) for s in samples)
    rewards_BT, values_BT = np.zeros((2, len(samples), width), dtype=np.float32)
    mask_BT = np.zeros((len(samples), width), dtype=bool)
    for row, s in enumerate(samples):
        mask_BT[row, : len(s.mask)] = s.mask
        rewards_BT[row, : len(s.mask)] = s.advantages
        if s.mask.any():
            values_BT[row, np.flatnonzero(s.mask)] = values[s.rollout_id]
    advantages_BT, returns_BT = gae(
        torch.from_numpy(rewards_BT),
        torch.from_numpy(values_BT),
        torch.from_numpy(mask_BT),
        gamma=config.gamma,
        lam=config.gae_lambda,
    )
    advantages_BT = whiten(advantages_BT, torch.from_numpy(mask_BT))
    out, returns = [], {}
    for row, s in enumerate(samples):
        out.append(replace(s, advantages=advantages_BT[row, : len(s.mask)].numpy()))
        returns[s.rollout_id] = returns_BT[row].numpy()[: len(s.mask)][s.mask]
    return out, returns


def _normalised(hidden_ME: torch.Tensor) -> torch.Tensor:
    """Unit mean square a row: the scale of hidden states differs by orders of magnitude between models."""
    return hidden_ME * torch.rsqrt(hidden_ME.square().mean(-1, keepdim=True) + 1e-6)
