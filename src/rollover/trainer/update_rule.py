"""The update rules that `train.optimizer` names, over float32 masters: torch's own, and bitsandbytes' 8-bit AdamW.

    masters ──▶ matrices of the layers: AdamW, 8-bit AdamW, Muon or SGD
            └─▶ the rest: AdamW, and SGD with SGD

Owns the moments. Schedule, clipping and the masters themselves are the Optimizer's (optimizer.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from rollover.config import TrainConfig

# What the rules keep for a weight: each a tensor, which a checkpoint has as `<slot>/<name of the weight>`.
_SLOTS = ("exp_avg", "exp_avg_sq", "momentum_buffer", "state1", "state2", "absmax1", "absmax2")


class UpdateRule:
    """One rule for each weight of `masters` (by name), as `options.optimizer` says.

    `tables`: names of the weights that are no matrices of a layer though they have two dimensions (`table_names`).
    Weight decay is for what has two dimensions or more. ValueError where a package is missing.
    """

    def __init__(self, masters: Mapping[str, torch.Tensor], options: TrainConfig, tables: Collection[str] = ()) -> None:
        self.kind, self._names = options.optimizer, {id(m): name for name, m in masters.items()}
        chosen = {name for name, m in masters.items() if _suits(self.kind, m, name in tables)}
        matrices = [m for name, m in masters.items() if name in chosen]
        others = [m for name, m in masters.items() if name not in chosen]
        self._rules: list[torch.optim.Optimizer] = []
        if matrices:
            self._rules.append(_MADE[self.kind](matrices, options))
        if others:
            self._rules.append(_adamw(others, options))

    def step(self, rate: float) -> None:
        """Update the masters by their gradients; those without one stay as they are."""
        for rule in self._rules:
            for group in rule.param_groups:
                group["lr"] = rate
            rule.step()

    def forget_gradients(self) -> None:
        for rule in self._rules:
            rule.zero_grad(set_to_none=True)

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """(tensors `<slot>/<name>`, updates that a weight has had, by name, where its rule counts them)."""
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
        """Replace all of it by what `state` gave, under names with `prefix`; a weight that has nothing there begins
        anew."""
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
            if "absmax1" in found:  # in 8 bits: what each of the 256 values stands for
                names = {"qmap1": "dynamic", "qmap2": "udynamic"}
                found |= {slot: rule.name2qmap[of].to(master.device) for slot, of in names.items()}  # pyright: ignore
        elif name in steps:
            found["step"] = torch.tensor(steps[name], dtype=torch.float32, device=master.device)
        rule.state[master] = found


def _suits(kind: str, master: torch.Tensor, is_table: bool) -> bool:
    """Whether the rule of this name is for the weight. Muon makes a matrix orthogonal: one row has no such form."""
    if kind == "muon":
        return master.ndim == 2 and min(master.shape) > 1 and not is_table
    if kind == "adamw_8bit":
        return master.ndim >= 2 and not is_table
    return True


def table_names(module: torch.nn.Module) -> set[str]:
    """Names of the trained parameters of embeddings and of the output layer: tables with a row for each token, of
    which a step changes few. Muon and 8-bit moments are not for them (Jordan 2024; Dettmers et al. 2022, section 2.3).
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
    """Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861). Weights of less than
    4096 numbers have moments of 32 bits."""
    try:
        from bitsandbytes.optim.adamw import AdamW8bit  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(
            'train.optimizer = "adamw_8bit" needs the package bitsandbytes: pip install "bitsandbytes>=0.50"'
        ) from error
    return AdamW8bit(_by_decay(masters, options), **_adam_options(options))


def _muon(masters: list[torch.Tensor], options: TrainConfig) -> torch.optim.Optimizer:
    """Jordan 2024, "Muon: An optimizer for hidden layers in neural networks", each update scaled by
    0.2 sqrt(max(rows, columns)): to the size of AdamW's, so that its learning rates hold (Liu et al. 2025,
    arXiv 2502.16982, section 2.2)."""
    return torch.optim.Muon(
        masters,
        lr=options.learning_rate,
        weight_decay=options.weight_decay,
        momentum=options.momentum,
        adjust_lr_fn="match_rms_adamw",
    )


def _sgd(masters: list[torch.Tensor], options: TrainConfig) -> torch.optim.Optimizer:
    """Weight decay is added to the gradient, as torch does it."""
    return torch.optim.SGD(_by_decay(masters, options), lr=options.learning_rate, momentum=options.momentum)


_MADE = {"adamw": _adamw, "adamw_8bit": _adamw_8bit, "muon": _muon, "sgd": _sgd}
