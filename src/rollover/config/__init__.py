"""Configuration: pydantic models, one small file per table. Import-light: no torch, ray or vllm."""

from pydantic import Field, ValidationInfo, model_validator

from rollover.config.algorithm import AlgorithmConfig
from rollover.config.base import UNSETTLED, Table
from rollover.config.checkpoint import CheckpointConfig
from rollover.config.engine import EngineConfig
from rollover.config.evaluation import EvalConfig
from rollover.config.filters import FiltersConfig
from rollover.config.model import LoraConfig, ModelConfig
from rollover.config.plan import PlanConfig
from rollover.config.replay import ReplayConfig
from rollover.config.reroll import RerollConfig
from rollover.config.rewards import RewardsConfig
from rollover.config.rollout import RolloutConfig
from rollover.config.run import RunConfig
from rollover.config.tasks import TasksConfig, TaskSourceConfig
from rollover.config.track import TrackConfig
from rollover.config.train import TrainConfig
from rollover.config.watchdog import WatchdogConfig


class Config(Table):
    """The whole configuration: one TOML table per field."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    tasks: TasksConfig = Field(default_factory=TasksConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    rewards: RewardsConfig = Field(default_factory=RewardsConfig)
    filters: FiltersConfig = Field(default_factory=FiltersConfig)
    replay: ReplayConfig = Field(default_factory=ReplayConfig)
    reroll: RerollConfig = Field(default_factory=RerollConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    track: TrackConfig = Field(default_factory=TrackConfig)
    watchdog: WatchdogConfig = Field(default_factory=WatchdogConfig)
    plan: PlanConfig = Field(default_factory=PlanConfig)

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> "Config":
        """ValueError for what load_config refuses, options without effect among it: a configuration is legal wherever a
        Config is made, or nowhere. What was set is told by `model_fields_set`, so a `model_dump()` sets everything."""
        if info.context is not UNSETTLED:
            from rollover.config.checks import refuse  # here, as rules are about this class

            refuse(self)
        return self

    @property
    def staleness_bound(self) -> int:
        """The largest staleness that a token in the loss can have, replayed ones aside."""
        if self.tasks.producer:
            return self.rollout.max_staleness
        return self.rollout.staleness_bound(self.train.publish_every)


__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "Config",
    "EngineConfig",
    "EvalConfig",
    "FiltersConfig",
    "LoraConfig",
    "ModelConfig",
    "PlanConfig",
    "ReplayConfig",
    "RerollConfig",
    "RewardsConfig",
    "RolloutConfig",
    "RunConfig",
    "Table",
    "TaskSourceConfig",
    "TasksConfig",
    "TrackConfig",
    "TrainConfig",
    "WatchdogConfig",
]
