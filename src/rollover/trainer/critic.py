"""The critic of PPO: a value head on the policy's last hidden states, or on those of a separate model ([critic]).

Shapes: M loss tokens, E hidden size, B samples, T longest answer. Owns head, model and their optimizers. A policy's
hidden states are constants to the head: no second model is needed, and the policy does not learn from the value loss.
trainer.py forms minibatches; token_advantages.py uses the values.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from rollover.algorithms.loss import value_loss
from rollover.config import CriticConfig, TrainConfig
from rollover.models.load import LoadedModel
from rollover.models.norms import compile_norms
from rollover.models.threads import Team
from rollover.models.vision import Vision
from rollover.trainer.backend import Stream
from rollover.trainer.optimizer import Optimizer, norm_of
from rollover.trainer.passes import PackedBatch, Passes, set_training
from rollover.types import Sample


class CriticModel:
    """A trained causal LM without its output layer. `loaded` is in float32; it is changed to compute in `dtype`."""

    def __init__(
        self, loaded: LoadedModel, train: TrainConfig, total_steps: int, dtype: torch.dtype, team: Team
    ) -> None:
        self.model = loaded.model
        vision = Vision.from_model(self.model, loaded.processor)
        self.passes = Passes(self.model, team, train.micro_batch_tokens, vision=vision)
        _drop_output_layer(self.model)
        self.optimizer = Optimizer(self.model, train, total_steps, dtype)
        compile_norms(self.model, dtype)
        self._checkpointing = train.gradient_checkpointing
        if self._checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def hidden(self, batch: PackedBatch) -> torch.Tensor:
        """Return hidden states [M, E], differentiable in the weights where gradients are on."""
        set_training(self.model, torch.is_grad_enabled() and self._checkpointing)
        return self.passes.hidden(batch)


class Critic:
    """V(prefix before a token), for every loss token. Starts at 0 everywhere.

    `hidden_size`: of the model whose hidden states it reads: `own`, or the policy's if that is None. `train`: defaults
    for [critic]. `total_steps`: optimizer steps of the run, for the schedule.
    """

    def __init__(
        self,
        hidden_size: int,
        config: CriticConfig,
        train: TrainConfig,
        total_steps: int,
        device: torch.device,
        own: CriticModel | None = None,
    ) -> None:
        self.config, self.own = config, own
        self.head = torch.nn.Linear(hidden_size, 1, device=device, dtype=torch.float32)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        of_head = _trained_as(train, config, config.head_learning_rate)
        self._optimizers = {"head": Optimizer(self.head, of_head, total_steps, torch.float32)}
        if own is not None:
            self._optimizers["model"] = own.optimizer
        self._seconds = 0.0  # of learning since the last step

    @classmethod
    def on_own_model(
        cls,
        loaded: LoadedModel,
        config: CriticConfig,
        train: TrainConfig,
        total_steps: int,
        dtype: torch.dtype,
        team: Team,
    ) -> Critic:
        """Make a critic with a separate model, which it owns from now on."""
        width = loaded.model.config.get_text_config().hidden_size
        device = next(loaded.model.parameters()).device
        own = CriticModel(loaded, _trained_as(train, config, config.learning_rate), total_steps, dtype, team)
        return cls(width, config, train, total_steps, device, own)

    @property
    def flops(self) -> float:
        """Model FLOPs of a separate model."""
        return 0.0 if self.own is None else self.own.passes.flops

    def values(self, hidden_ME: torch.Tensor) -> torch.Tensor:
        """Return values [M], differentiable in the head and in the weights of a separate model."""
        if self.own is None:
            hidden_ME = hidden_ME.detach()
        return self.head(_normalised(hidden_ME.float())).squeeze(-1)

    def evaluate(self, samples: list[Sample], policy: Passes) -> Stream:
        """Return the values before each loss token; no gradient. `policy`: its passes, without dropout."""
        own = self.own
        passes, hidden = (policy, policy.hidden) if own is None else (own.passes, own.hidden)
        return passes.evaluate(samples, lambda batch: self.values(hidden(batch)), spare_last=True)

    def learn(self, batch: PackedBatch, of_policy_ME: torch.Tensor, num_tokens: int) -> dict[str, torch.Tensor]:
        """Run `forward_backward` over a micro-batch with the streams "values" and "returns".

        `of_policy_ME`: the policy's hidden states.
        """
        started = time.perf_counter()
        hidden_ME = of_policy_ME if self.own is None else self.own.hidden(batch)
        old_values_M, returns_M = batch.in_loss("values"), batch.in_loss("returns")
        sums = self.forward_backward(hidden_ME, old_values_M, returns_M, num_tokens)
        if self.own is not None:
            self.own.passes.count_backward(batch, head=False)
        self._seconds += time.perf_counter() - started
        return sums

    def forward_backward(
        self, hidden_ME: torch.Tensor, old_values_M: torch.Tensor, returns_M: torch.Tensor, num_tokens: int
    ) -> dict[str, torch.Tensor]:
        """Add the gradient of the value loss, averaged over the minibatch's `num_tokens`."""
        values_M, clip = self.values(hidden_ME), self.config.value_clip
        loss_1M = value_loss(
            values_M[None],
            old_values_M[None],
            returns_M[None],
            torch.ones_like(returns_M[None], dtype=torch.bool),
            clip=clip or None,
        )
        (loss_1M.sum() / num_tokens).backward()
        with torch.no_grad():
            errors_M = returns_M - old_values_M
            held = loss_1M > 0.5 * (values_M - returns_M) ** 2
            return {
                "sum/critic_loss": loss_1M.sum(),
                "sum/critic_clipped": held.sum().float(),
                "sum/critic_error": errors_M.sum(),
                "sum/critic_error_squared": (errors_M**2).sum(),
                "sum/values": old_values_M.sum(),
                "sum/returns": returns_M.sum(),
                "sum/returns_squared": (returns_M**2).sum(),
            }

    def gradients(self) -> list[torch.Tensor]:
        """Return the accumulated gradients of head and model (none without a loss token)."""
        return [gradient for optimizer in self._optimizers.values() for gradient in optimizer.gradients()]

    def step(self) -> dict[str, float]:
        """Clip, step and return the metrics. A gradient that is not finite changes nothing."""
        started = time.perf_counter()
        norm = norm_of(self.gradients())
        update = [optimizer.step(norm=norm) for optimizer in self._optimizers.values()][-1]
        seconds, self._seconds = self._seconds + time.perf_counter() - started, 0.0
        return {
            "time/critic_s": seconds,
            "critic/grad_norm": norm,
            "critic/learning_rate": update["learning_rate"],
            "critic/skipped_steps": update["train/skipped_steps"],
        }

    def forget_gradients(self) -> None:
        """Discard the accumulated gradient."""
        for optimizer in self._optimizers.values():
            optimizer.forget_gradients()

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return (tensors, JSON values)."""
        tensors: dict[str, torch.Tensor] = {}
        rest: dict[str, Any] = {}
        for part, optimizer in self._optimizers.items():
            of_part, rest[part] = optimizer.state()
            tensors |= {f"critic/{part}/{name}": tensor for name, tensor in of_part.items()}
        return tensors, rest

    def load_state(self, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]) -> None:
        """Restore a `state`. ValueError if it is of another kind of critic."""
        if meta.keys() != self._optimizers.keys():
            raise ValueError(
                "the checkpoint has another kind of critic (a value head, or a model of its own), or was written by an"
                " earlier version. Set critic.model back, or start a new run"
            )
        for part, optimizer in self._optimizers.items():
            try:
                optimizer.load_state(tensors, meta[part], f"critic/{part}/")
            except ValueError as error:
                raise ValueError(f"the critic of the checkpoint is another one (critic.model): {error}") from error


def _trained_as(train: TrainConfig, config: CriticConfig, learning_rate: float) -> TrainConfig:
    """Return [train] overridden by [critic]: AdamW, with [train]'s betas and epsilon."""
    return train.model_copy(
        update={
            "optimizer": "adamw",
            "learning_rate": learning_rate,
            "schedule": config.schedule,
            "warmup_steps": config.warmup_steps,
            "warmup_ratio": 0.0,
            "min_lr_ratio": config.min_lr_ratio,
            "weight_decay": config.weight_decay,
            "max_grad_norm": config.max_grad_norm,
        }
    )


def _drop_output_layer(model: Any) -> None:
    """Free the weights of an untied output layer, which is never used."""
    layer = model.get_output_embeddings()
    if layer.weight is not model.get_input_embeddings().weight:
        layer.weight = torch.nn.Parameter(layer.weight.detach()[:0].clone(), requires_grad=False)
        if getattr(layer, "bias", None) is not None:
            layer.bias = None


def _normalised(hidden_ME: torch.Tensor) -> torch.Tensor:
    """Scale rows to unit mean square: hidden states of models differ by orders of magnitude."""
    return hidden_ME * torch.rsqrt(hidden_ME.square().mean(-1, keepdim=True) + 1e-6)
