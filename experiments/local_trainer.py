"""Builds a trainer, or a batch, from single tables of a configuration: for experiments, scripts and tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rollover.algorithms.credit import Credit
from rollover.algorithms.filters import RolloutFilter
from rollover.algorithms.shaping import Shaping
from rollover.config import (
    AlgorithmConfig,
    Config,
    CriticConfig,
    DistillConfig,
    LoraConfig,
    TrainConfig,
    WorkflowConfig,
)
from rollover.models.load import LoadedModel
from rollover.models.threads import Team
from rollover.staleness import EVERY_VERSION
from rollover.trainer.backend import BackendSetup
from rollover.trainer.batch import Batch, make_batch
from rollover.trainer.local_backend import LocalBackend
from rollover.trainer.trainer import Trainer
from rollover.types import Group


def local_trainer(  # noqa: PLR0913 - keyword-only; the parts of the trainer
    loaded: LoadedModel,
    train: TrainConfig,
    algorithm: AlgorithmConfig,
    *,
    dtype: torch.dtype,
    max_new_tokens: int,
    max_staleness: int = 0,
    lora: LoraConfig | None = None,
    merges_lora: bool = False,
    team: Team | None = None,
    distill: DistillConfig | None = None,
    teacher: LoadedModel | None = None,
    reference: Mapping[str, torch.Tensor] | None = None,
    critic: CriticConfig | None = None,
    critic_model: LoadedModel | None = None,
    tells_tokens: bool = False,
) -> Trainer:
    """A trainer on the local backend. What no rule of [algorithm] forbids may be combined.

    `merges_lora`: the engine takes no adapters. The models: see `LocalBackend`.
    """
    plain, team = Config(), team or Team()
    model = {"dtype": str(dtype).removeprefix("torch."), "lora": lora or LoraConfig()}
    config = plain.model_copy(
        update={
            "model": plain.model.model_copy(update=model),
            "rollout": plain.rollout.model_copy(
                update={
                    "max_new_tokens": max_new_tokens,
                    "max_staleness": max_staleness,
                    "overlap": max_staleness > 0,  # else no token gets so old
                }
            ),
            "engine": plain.engine.model_copy(update={"kind": "remote" if merges_lora else "embedded"}),
            "track": plain.track.model_copy(update={"token_stats": tells_tokens}),
            "train": train,
            "algorithm": algorithm,
            "distill": distill or plain.distill,
            "critic": critic or plain.critic,
        }
    )
    setup = BackendSetup(config, loaded, team)
    backend = LocalBackend(setup, teacher=teacher, reference=reference, critic_model=critic_model)
    return Trainer(backend, config, team)


def build_batch(
    groups: list[Group],
    algorithm: AlgorithmConfig,
    oldest_version: int = EVERY_VERSION,
    masks: Sequence[RolloutFilter] = (),
    *,
    workflow: WorkflowConfig | None = None,
    shaping: Shaping | None = None,
    **of_step: Any,
) -> Batch:
    """One batch. `of_step`: the other arguments of `make_batch`."""
    credit = Credit(algorithm, workflow or WorkflowConfig(), shaping=shaping)
    return make_batch(groups, credit, masks, oldest_version, **of_step)
