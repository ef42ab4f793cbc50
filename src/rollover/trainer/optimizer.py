"""float32 master weights under a compute dtype: update rules, learning-rate schedule, gradient clipping.

In float32 the parameters are their own masters. In bfloat16 the module computes with bf16 copies: a hook adds each bf16
gradient to its master's float32 gradient as soon as it is complete, so accumulation loses nothing and only one layer's
bf16 gradients exist at a time.

    masters ──▶ matrices of the layers: the rule of train.optimizer (AdamW, 8-bit AdamW of bitsandbytes, Muon or SGD)
            └─▶ the rest: AdamW, and SGD with SGD

`Optimizer` owns the masters and the count of optimizer steps, `UpdateRule` the moments.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from rollover.config import TrainConfig
from rollover.models.load import cast_parameters
from rollover.trainer.backend import shape_of

# State of a rule for a weight: tensors, stored in a checkpoint as `<slot>/<name of the weight>`.
_SLOTS = ("exp_avg", "exp_avg_sq", "momentum_buffer", "state1", "state2", "absmax1", "absmax2")


class UpdateRule:
    """One rule for each weight of `masters` (by name), as `options.optimizer` configures.

    `tables`: names of two-dimensional weights that are not matrices of a layer (`table_names`). Weight decay applies to
    weights of two dimensions or more. ValueError if a package is missing.
    """

    def __init__(self, masters: Mapping[str, torch.Tensor], options: TrainConfig, tables: Collection[str] = ()) -> None:
        self.kind, self._names = options.optimizer, {id(m): name for name, m in masters.items()}
        chosen = {name for name, m in masters.items() if _applies_to(self.kind, m, name in tables)}
        matrices = [m for name, m in masters.items() if name in chosen]
        others = [m for name, m in masters.items() if name not in chosen]
        self._rules: list[torch.optim.Optimizer] = []
        if matrices:
            self._rules.append(_RULES[self.kind](matrices, options))
        if others:
            self._rules.append(_adamw(others, options))

    def step(self, rate: float) -> None:
        """Update the masters by their gradients; masters without one stay as they are."""
        for rule in self._rules:
            for group in rule.param_groups:
                group["lr"] = rate
            rule.step()

    def forget_gradients(self) -> None:
        for rule in self._rules:
            rule.zero_grad(set_to_none=True)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """Return (tensors `<slot>/<name>`, number of updates by name, if the rule counts them)."""
        tensors: dict[str, torch.Tensor] = {}
        steps: dict[str, float] = {}
        for rule in self._rules:
            for master, kept in rule.state.items():
                name = self._names[id(master)]
                tensors |= {f"{slot}/{name}": kept[slot] for slot in _SLOTS if slot in kept}
                if "step" in kept:
                    steps[name] = float(kept["step"])
        return tensors, steps

    def load_state(self, tensors: Mapping[str, torch.Tensor], steps: Mapping[str, float], prefix: str = "") -> None:
        """Restore a `state`, under names with `prefix`; weights that it lacks start without moments."""
        for rule in self._rules:
            rule.state.clear()
            for group in rule.param_groups:
                for master in group["params"]:
                    self._load(rule, master, tensors, steps, prefix)

    def _load(
        self,
        rule: torch.optim.Optimizer,
        master: torch.Tensor,
        tensors: Mapping[str, torch.Tensor],
        steps: Mapping[str, float],
        prefix: str,
    ) -> None:
        name = self._names[id(master)]
        places = {slot: f"{prefix}{slot}/{name}" for slot in _SLOTS}
        found: dict[str, Any] = {
            slot: tensors[place].to(master.device).clone() for slot, place in places.items() if place in tensors
        }
        if not found:
            return
        if "state1" in found:
            found["step"] = int(steps[name])
            if "absmax1" in found:  # in 8 bits: the number that each of the 256 codes means
                names = {"qmap1": "dynamic", "qmap2": "udynamic"}
                found |= {slot: rule.name2qmap[of].to(master.device) for slot, of in names.items()}  # pyright: ignore
        elif name in steps:
            found["step"] = torch.tensor(steps[name], dtype=torch.float32, device=master.device)
        rule.state[master] = found


def _applies_to(kind: str, master: torch.Tensor, is_table: bool) -> bool:
    """Return whether the rule applies to the weight. Muon needs more than one row and column."""
    if kind == "muon":
        return master.ndim == 2 and min(master.shape) > 1 and not is_table
    if kind == "adamw_8bit":
        return master.ndim >= 2 and not is_table
    return True


def table_names(module: torch.nn.Module) -> set[str]:
    """Return the names of trained embeddings and output layers: a step changes few rows of such tables.

    Muon and 8-bit moments do not suit them (Jordan 2024; Dettmers et al. 2022, section 2.3).
    """
    owners: list[Any] = [m for m in module.modules() if isinstance(m, torch.nn.Embedding)]
    head = getattr(module, "get_output_embeddings", lambda: None)()
    tables = {id(p) for owner in [*owners, *([] if head is None else [head])] for p in owner.parameters()}
    return {name for name, parameter in module.named_parameters() if id(parameter) in tables}


def _by_decay(masters: Iterable[torch.Tensor], options: TrainConfig) -> list[dict[str, Any]]:
    masters = list(masters)
    groups = [
        {"params": [m for m in masters if m.ndim >= 2], "weight_decay": options.weight_decay},
        {"params": [m for m in masters if m.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _adam_options(options: TrainConfig) -> dict[str, Any]:
    return {
        "lr": options.learning_rate,
        "betas": (options.adam_beta1, options.adam_beta2),
        "eps": options.adam_eps,
    }


def _adamw(masters: list[torch.Tensor], options: TrainConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(_by_decay(masters, options), **_adam_options(options), fused=True)


def _adamw_8bit(masters: list[torch.Tensor], options: TrainConfig) -> torch.optim.Optimizer:
    """AdamW with 8-bit moments; weights of fewer than 4096 numbers have 32-bit moments.

    Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861).
    """
    try:
        from bitsandbytes.optim.adamw import AdamW8bit  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(
            'train.optimizer = "adamw_8bit" needs the package bitsandbytes: pip install "bitsandbytes>=0.50"'
        ) from error
    return AdamW8bit(_by_decay(masters, options), **_adam_options(options))


def _muon(masters: list[torch.Tensor], options: TrainConfig) -> torch.optim.Optimizer:
    """Muon with updates of AdamW's size, so that AdamW's learning rates apply.

    Jordan 2024, "Muon: An optimizer for hidden layers in neural networks"; each update is scaled by
    0.2 sqrt(max(rows, columns)) (Liu et al. 2025, arXiv 2502.16982, section 2.2).
    """
    return torch.optim.Muon(
        masters,
        lr=options.learning_rate,
        weight_decay=options.weight_decay,
        momentum=options.momentum,
        adjust_lr_fn="match_rms_adamw",
    )


def _sgd(masters: list[torch.Tensor], options: TrainConfig) -> torch.optim.Optimizer:
    """SGD with weight decay added to the gradient, as torch does it."""
    return torch.optim.SGD(_by_decay(masters, options), lr=options.learning_rate, momentum=options.momentum)


_RULES = {"adamw": _adamw, "adamw_8bit": _adamw_8bit, "muon": _muon, "sgd": _sgd}


def learning_rate(config: TrainConfig, step: int, total_steps: int) -> float:
    """Return the rate of optimizer step `step` (from 0).

    Linear warm-up, then constant, linear or cosine down to min_lr_ratio.
    """
    warmup = config.warmup_steps or math.ceil(config.warmup_ratio * total_steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    if config.schedule == "constant":
        return config.learning_rate
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    shape = 1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * shape)


def norm_of(gradients: list[torch.Tensor]) -> float:
    """Return the norm over all gradients."""
    return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0


def clip_gradients(gradients: list[torch.Tensor], norm: float, max_norm: float) -> None:
    """Scale `gradients`, of total norm `norm`, down to `max_norm` in place; 0: no clipping."""
    if max_norm and norm > max_norm:
        for gradient in gradients:
            gradient.mul_(max_norm / (norm + 1e-6))


class Optimizer:
    """Updates of the masters of all parameters that require a gradient. Tied parameters count once.

    Construct it with the module still in float32: the masters are taken from it before it is cast to `dtype`.
    ValueError if the update rule needs a package that is missing.
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
        masters = dict(zip(self.names, self.masters, strict=True))
        self.rule = UpdateRule(masters, config, table_names(module))

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
        """Return the float32 masters by name."""
        return {name: master.detach() for name, master in zip(self.names, self.masters, strict=True)}

    def gradients(self) -> list[torch.Tensor]:
        """Return the accumulated float32 gradients of the parameters that have one."""
        self._collect()
        return [m.grad for m in self.masters if m.grad is not None]

    def set_zero_gradients(self) -> None:
        """Set missing gradients to 0, so that the momentum continues; `step` ignores missing ones."""
        self._collect()
        for master in self.masters:
            if master.grad is None:
                master.grad = torch.zeros_like(master)

    def scale_gradients(self, factor: float) -> None:
        for gradient in self.gradients():
            gradient.mul_(factor)

    def forget_gradients(self) -> None:
        """Discard the accumulated gradient."""
        self.rule.forget_gradients()
        for parameter in self.parameters:
            parameter.grad = None

    def _collect(self) -> None:
        if not self.separate:
            # The masters are detached views of the parameters: copy the module's gradients.
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if parameter.grad is not None:
                    master.grad = parameter.grad

    def step(self, rate_scale: float = 1.0, *, norm: float | None = None) -> dict[str, float]:
        """Clip, step at `rate_scale` times the scheduled rate, copy masters to the compute weights.

        A gradient or rate that is not finite skips the update. `norm`: norm of this gradient and others that are
        clipped and skipped together with it; None: there are none.
        """
        gradients = self.gradients()
        rate = rate_scale * learning_rate(self.config, self.step_count, self.total_steps)
        if norm is None:
            norm = norm_of(gradients)
        skipped = not (math.isfinite(norm) and math.isfinite(rate))
        if not skipped and gradients:
            clip_gradients(gradients, norm, self.config.max_grad_norm)
            self.rule.step(rate)
            if self.separate:
                self._copy_back()
        self.forget_gradients()
        self.step_count += 1
        return {"grad_norm": norm, "learning_rate": rate, "train/skipped_steps": float(skipped)}

    @torch.no_grad()
    def _copy_back(self) -> None:
        torch._foreach_copy_(self.parameters, self.masters)  # pyright: ignore[reportPrivateImportUsage]

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return (tensors by name, JSON values): masters, the rule's state, step counts."""
        tensors, steps = self.rule.state()
        masters = {f"master/{name}": weight for name, weight in self.weights().items()}
        return masters | tensors, {"step_count": self.step_count, "adam_steps": steps, "rule": self.rule.kind}

    def load_state(self, tensors: Mapping[str, torch.Tensor], meta: dict[str, Any], prefix: str = "") -> None:
        """Restore the `tensors` whose names begin with `prefix`.

        ValueError if the state is of another model or set of trained weights.
        """
        expected = {f"master/{n}": m.shape for n, m in zip(self.names, self.masters, strict=True)}
        stored = [name for name in tensors if name.startswith(f"{prefix}master/")]
        found = {name.removeprefix(prefix): shape_of(tensors, name) for name in stored}
        if expected != found:
            names = sorted(k for k in expected.keys() | found.keys() if expected.get(k) != found.get(k))
            raise ValueError(f"the checkpoint is of another model (model.path, model.lora): {names[0]} differs")
        if (kind := meta.get("rule", "adamw")) != self.rule.kind:
            raise ValueError(
                f"the checkpoint has what train.optimizer = {kind!r} keeps, and not {self.rule.kind!r}. Set it back"
            )
        with torch.no_grad():
            for name, master in zip(self.names, self.masters, strict=True):
                master.copy_(tensors[f"{prefix}master/{name}"])
        self.rule.load_state(tensors, meta["adam_steps"], prefix)
        if self.separate:
            self._copy_back()
        self.step_count = meta["step_count"]
