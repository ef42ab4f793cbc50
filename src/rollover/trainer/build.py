"""The trainer of a run, as the configuration says."""

from __future__ import annotations

from rollover.config import Config
from rollover.models.devices import dtype_of, pick_device
from rollover.models.load import LoadedModel
from rollover.models.team import Team
from rollover.trainer.trainer import Trainer


def build_trainer(config: Config, loaded: LoadedModel) -> Trainer:
    """It goes on with the model that is loaded, in float32."""
    return Trainer(
        loaded,
        config.train,
        config.algorithm,
        dtype=dtype_of(config),
        max_new_tokens=config.rollout.max_new_tokens,
        max_staleness=max(config.staleness_bound, config.replay.max_staleness if config.replay.size else 0),
        lora=config.model.lora,
        team=Team.of(config.run, pick_device(config.model.device)),
    )
