"""Memory of the trainer per model parameter: weights, gradients, moments, copies. Pure.

For `rollover plan`; must agree with the trainer (optimizer.py, kept_weights.py, critic.py). Excluded: activations,
adapters (model.lora), a teacher model, and the engine.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rollover.config import Config
from rollover.config.cluster import num_ranks
from rollover.config.critic import POLICY

_MOMENTS = {"adamw": 8, "adamw_8bit": 2, "muon": 4, "sgd": 4}  # of the layers' matrices (docs/trainer.md)
_MASTER, _GRADIENT = 4, 4  # float32


@dataclass(frozen=True)
class MemoryPart:
    """`size`: bytes per parameter, consisting of `made_of`; `of_policy`: whether it has as many parameters as the
    policy."""

    what: str
    size: int
    made_of: str
    of_policy: bool = True


@dataclass(frozen=True)
class Memory:
    """`spread_over`: ranks that share it evenly. `total_gb`, `each_gb`: of the parts with the policy's size, together
    and per rank; 0 without plan.parameters_b."""

    parts: list[MemoryPart]
    spread_over: int
    total_gb: float
    each_gb: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the line of the report; [] if the trainer is not ours."""
        if not self.parts:
            return []
        parts = "; ".join(f"{part.what} {part.size} bytes a parameter ({part.made_of})" for part in self.parts)
        where = f", spread over {self.spread_over} ranks" if self.spread_over > 1 else ""
        total = f": {self.total_gb:,.1f} GB{where}" if self.total_gb else where
        each = f", {self.each_gb:,.1f} GB each" if self.total_gb and self.spread_over > 1 else ""
        return [f"Trainer      holds {parts}{total}{each}, and activations"]


def trainer_memory(config: Config) -> Memory:
    """Return the trainer's memory; without parts for a service or a custom backend."""
    parts = _parts(config) if config.backend.type in ("local", "ranks") else []
    ranks = max(1, num_ranks(config))
    total = config.plan.parameters_b * sum(part.size for part in parts if part.of_policy)
    return Memory(parts, ranks, total, total / ranks)


def _parts(config: Config) -> list[MemoryPart]:
    algorithm, critic = config.algorithm, config.critic
    dtype = _dtype(config)
    computed = 2 if dtype == "bfloat16" else 4
    if config.model.lora.rank:  # the base model is also the reference, and earlier versions are adapters
        parts = [MemoryPart("policy", computed, f"weights in {dtype}, which are not trained")]
    else:
        parts = [_trained("policy", config, _moments(config), config.train.optimizer)]
        if algorithm.needs_reference:
            mixed = algorithm.reference_refresh_steps > 0 and algorithm.reference_mixup < 1
            kept = "mixed in float32" if mixed else f"a copy in {dtype}"
            parts.append(MemoryPart("reference", 4 if mixed else computed, kept))
        if algorithm.proximal_policy == "snapshot":
            num = config.rollout.max_staleness + 1
            parts.append(MemoryPart("earlier versions", num * computed, f"{num} copies in {dtype}"))
    if algorithm.needs_critic and critic.model:
        of_policy = critic.model == POLICY
        parts.append(_trained("critic" if of_policy else "critic (of its own)", config, 8, "adamw", of_policy))
    return parts


def _dtype(config: Config) -> str:
    # A run resolves "auto" at its start; every current GPU gives bfloat16.
    return "bfloat16" if config.model.dtype == "auto" else config.model.dtype


def _trained(what: str, config: Config, moments: int, optimizer: str, of_policy: bool = True) -> MemoryPart:
    """Return the memory of a fully trained model: master weights, and a bfloat16 copy unless ranks gather it."""
    copy = 2 if _dtype(config) == "bfloat16" and not num_ranks(config) else 0
    made = [f"weights {_MASTER} + {copy}" if copy else f"weights {_MASTER}", f"gradients {_GRADIENT}"]
    made += [f"{optimizer} {moments}"] if moments else []
    return MemoryPart(what, _MASTER + copy + _GRADIENT + moments, ", ".join(made), of_policy)


def _moments(config: Config) -> int:
    none = config.train.optimizer == "sgd" and config.train.momentum == 0
    return 0 if none else _MOMENTS[config.train.optimizer]
