"""A critic of transformers' own modules, torch's AdamW and loops over single answers: what ours is compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rollover.types import Sample

Rows = list[torch.Tensor]
Gae = Callable[[Rows, Rows, float, float], tuple[Rows, Rows]]
ValueLoss = Callable[[Rows, Rows, Rows, float], torch.Tensor]


def plain_gae(rewards: Rows, values: Rows, gamma: float, lam: float) -> tuple[Rows, Rows]:
    """(advantages, returns) of each answer, by the sums of their definition; not normalised."""
    advantages = []
    for r, v in zip(rewards, values, strict=True):
        after = torch.cat((v[1:], v.new_zeros(1)))
        deltas = r + gamma * after - v
        decay = (gamma * lam) ** torch.arange(len(v))
        advantages.append(torch.stack([(decay[: len(v) - t] * deltas[t:]).sum() for t in range(len(v))]))
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def plain_value_loss(values: Rows, old: Rows, returns: Rows, clip: float) -> torch.Tensor:
    """Mean over all tokens; `clip` 0: none."""
    v, o, r = (torch.cat(rows) for rows in (values, old, returns))
    errors = (v - r) ** 2
    if clip:
        errors = torch.max(errors, (torch.min(torch.max(v, o - clip), o + clip) - r) ** 2)
    return 0.5 * errors.mean()


class PlainCritic:
    """`model`: whose weights it begins with. The head begins at 0."""

    def __init__(
        self,
        model: Any,
        *,
        learning_rate: float,
        head_learning_rate: float,
        weight_decay: float,
        max_grad_norm: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        # A configuration of its own: the attention's implementation is written into it.
        self.model = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), attn_implementation="eager")
        self.model.load_state_dict(model.state_dict())
        self.model.eval()
        self.head = torch.nn.Linear(model.config.hidden_size, 1)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self.max_grad_norm = max_grad_norm
        groups = []
        for parameters, rate in (
            (self.model.model.parameters(), learning_rate),
            (self.head.parameters(), head_learning_rate),
        ):
            for p in parameters:
                decay = weight_decay if p.ndim >= 2 else 0.0
                groups.append({"params": [p], "lr": rate, "weight_decay": decay})
        self.adamw = torch.optim.AdamW(groups, betas=betas, eps=eps)

    def values(self, s: Sample) -> torch.Tensor:
        """[loss tokens], each of the tokens before it."""
        ids = torch.from_numpy(np.concatenate((s.prompt_ids, s.token_ids)).astype(np.int64))
        hidden = self.model.model(ids[None]).last_hidden_state[0]
        hidden = hidden[len(s.prompt_ids) - 1 + np.flatnonzero(s.mask)]
        return self.head(hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)).squeeze(-1)

    def train_step(
        self,
        minibatches: list[list[Sample]],
        gamma: float,
        lam: float,
        clip: float,
        gae: Gae = plain_gae,
        value_loss: ValueLoss = plain_value_loss,
        epochs: int = 1,
    ) -> list[float]:
        """The gradient norms, of the same minibatches in every epoch. The rewards per token are the samples'
        advantages."""
        samples = [s for part in minibatches for s in part]
        with torch.no_grad():
            old = {s.rollout_id: self.values(s) for s in samples}
            rewards = [torch.from_numpy(s.advantages[s.mask]) for s in samples]
            _, found = gae(rewards, list(old.values()), gamma, lam)
            returns = dict(zip(old, found, strict=True))
        norms = []
        for part in minibatches * epochs:
            values = [self.values(s) for s in part]
            of = [s.rollout_id for s in part]
            value_loss(values, [old[i] for i in of], [returns[i] for i in of], clip).backward()
            parameters = [p for group in self.adamw.param_groups for p in group["params"]]
            norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)))
            self.adamw.step()
            self.adamw.zero_grad()
        return norms

    def weights(self) -> dict[str, torch.Tensor]:
        """By the names of ours."""
        body = {f"model/{name}": p.detach() for name, p in self.model.named_parameters() if name != "lm_head.weight"}
        return body | {f"head/{name}": p.detach() for name, p in self.head.named_parameters()}
