"""A trainer of a tiny model whose first steps do not amplify rounding, for tests that compare the weights of two."""

from __future__ import annotations

from typing import Any

import torch

import tiny
from local_trainer import local_trainer
from rollover.config import AlgorithmConfig, TrainConfig
from rollover.trainer.trainer import Trainer


def trainer(algorithm: dict[str, Any], **train: Any) -> Trainer:
    values = {"learning_rate": 1e-2, "num_steps": 10, "micro_batch_tokens": 40, "adam_eps": 1e-3, **train}
    return local_trainer(
        tiny.loaded(),
        TrainConfig.model_validate(values),
        AlgorithmConfig.model_validate(algorithm),
        dtype=torch.float32,
        max_new_tokens=16,
    )


def weights(t: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in tiny.local(t).model.parameters()])
