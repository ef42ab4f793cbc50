"""float32 master weights under a compute dtype, AdamW over them, learning-rate schedule, gradient clipping.

In float32 the parameters are their own masters. In bfloat16 the module computes with bf16 copies: a hook adds each bf16
gradient to its master's float32 gradient as soon as it is complete, so accumulation loses nothing and only one layer's
bf16 gradients exist at a time. Owns masters, moments and the count of optimizer steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from rollover.config import TrainConfig
from rollover.models.load import cast_parameters
from rollover.trainer.stored_tensors import shape_of


def learning_rate(config: TrainConfig, step: int, total_steps: int) -> float:
    """Rate of optimizer step `step` (from 0): linear warm-up, then constant, linear or cosine down to min_lr_ratio."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    done = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    shape = 1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)


def clip_gradients(gradients: list[torch.Tensor], norm: float, max_norm: float) -> None:
    """Scale `gradients`, whose norm over all of them is `norm`, down to the norm `max_norm`, in place; 0: do not."""
    if max_norm and norm > max_norm:
        for gradient in gradients:
            gradient.mul_(max_norm / (norm + 1e-6))


class Optimizer:
    """AdamW over the masters of all parameters that require a gradient. Tied parameters count once.

    Call it with the module still in float32: the masters are taken from it before it is cast to `dtype`.
    """

    def __init__(self, module: torch.nn.Module, config: TrainConfig, total_steps: int, dtype: torch.dtype) -> None:
        self.config, self.total_steps, self.step_count = config, total_steps, 0
        trainable = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.names = list(trainable)
        self.separate = dtype != torch.float32
        if self.separate:
            self.masters = [p.detach().float().clone() for p in trainable.values()]
            cast_parameters(module, dtype)
        self.parameters: list[torch.Tensor] = [p for p in module.parameters() if p.requires_grad]
        assert len(self.parameters) == len(self.names)
        if not self.separate:
            self.masters = [p.detach() for p in self.parameters]
        for master in self.masters:
            master.requires_grad_(True)
        if self.separate:
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.register_post_accumulate_grad_hook(self._accumulate_into(master))
        matrices = [m for m in self.masters if m.ndim >= 2]
        others = [m for m in self.masters if m.ndim < 2]
        self.adamw = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=True,
        )

    @staticmethod
    def _accumulate_into(master: torch.Tensor) -> Any:
        def hook(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

        return hook

    def weights(self) -> dict[str, torch.Tensor]:
        """The float32 masters by name."""
        return {name: master.detach() for name, master in zip(self.names, self.masters, strict=True)}

    def gradients(self) -> list[torch.Tensor]:
        """The accumulated float32 gradients (of those parameters that got one)."""
        self._collect()
        return [m.grad for m in self.masters if m.grad is not None]

    def set_zero_gradients(self) -> None:
        """A gradient of 0 where there is none, with which the momentum goes on; without any `step` changes nothing."""
        self._collect()
        for master in self.masters:
            if master.grad is None:
                master.grad = torch.zeros_like(master)

    def scale_gradients(self, factor: float) -> None:
        for gradient in self.gradients():
            gradient.mul_(factor)

    def forget_gradients(self) -> None:
        """Forget the accumulated gradient."""
        self.adamw.zero_grad(set_to_none=True)
        for parameter in self.parameters:
            parameter.grad = None

    def _collect(self) -> None:
        if not self.separate:
            # Detached views of the parameters: hand them the module's gradients.
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if parameter.grad is not None:
                    master.grad = parameter.grad

    def step(self, rate_scale: float = 1.0, *, usable: bool = True) -> dict[str, float]:
        """Clip, step at `rate_scale` times the scheduled rate, copy masters to the compute weights.

        A gradient or rate that is not finite, or `usable` False, skips the update, and says so.
        """
        gradients = self.gradients()
        rate = rate_scale * learning_rate(self.config, self.step_count, self.total_steps)
        norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        skipped = not (usable and math.isfinite(norm) and math.isfinite(rate))
        if not skipped and gradients:
            clip_gradients(gradients, norm, self.config.max_grad_norm)
            for group in self.adamw.param_groups:
                group["lr"] = rate
            self.adamw.step()
            if self.separate:
                self._copy_back()
        self.forget_gradients()
        self.step_count += 1
        return {"grad_norm": norm, "learning_rate": rate, "train/skipped_steps": float(skipped)}

    @torch.no_grad()
    def _copy_back(self) -> None:
        torch._foreach_copy_(self.parameters, self.masters)  # pyright: ignore[reportPrivateImportUsage]

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """(tensors by name, JSON-able rest): masters, both moments, step counts."""
        tensors: dict[str, torch.Tensor] = {}
        steps: dict[str, float] = {}
        for (name, weight), master in zip(self.weights().items(), self.masters, strict=True):
            tensors[f"master/{name}"] = weight
            moments = self.adamw.state.get(master, {})
            if moments:
                tensors[f"exp_avg/{name}"] = moments["exp_avg"]
                tensors[f"exp_avg_sq/{name}"] = moments["exp_avg_sq"]
                steps[name] = float(moments["step"])
        return tensors, {"step_count": self.step_count, "adam_steps": steps}

    def load_state(self, tensors: Mapping[str, torch.Tensor], meta: dict[str, Any]) -> None:
        """ValueError where the state is of another model or set of trained weights."""
        expected = {f"master/{n}": m.shape for n, m in zip(self.names, self.masters, strict=True)}
        found = {name: shape_of(tensors, name) for name in tensors if name.startswith("master/")}
        if expected != found:
            names = sorted(k for k in expected.keys() | found.keys() if expected.get(k) != found.get(k))
            raise ValueError(f"the checkpoint is of another model (model.path, model.lora): {names[0]} differs")
        self.adamw.state.clear()
        with torch.no_grad():
            for name, master in zip(self.names, self.masters, strict=True):
                master.copy_(tensors[f"master/{name}"])
                if name in meta["adam_steps"]:
                    self.adamw.state[master] = {
                        "step": torch.tensor(meta["adam_steps"][name], dtype=torch.float32, device=master.device),
                        "exp_avg": tensors[f"exp_avg/{name}"].to(master.device).clone(),
                        "exp_avg_sq": tensors[f"exp_avg_sq/{name}"].to(master.device).clone(),
                    }
        if self.separate:
            self._copy_back()
        self.step_count = meta["step_count"]
