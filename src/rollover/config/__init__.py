"""The configuration: pydantic models, read by `load.load_config`. Import-light: no torch, ray or vllm."""

from rollover.config.algorithm import AlgorithmConfig
from rollover.config.critic import CriticConfig
from rollover.config.distill import DistillConfig
from rollover.config.evaluation import EvalConfig, EvalSettingConfig
from rollover.config.rewards import RewardsConfig
from rollover.config.rollout import RolloutConfig
from rollover.config.run import CheckpointConfig, PlanConfig, RunConfig, TrackConfig, WatchdogConfig
from rollover.config.schema import Config
from rollover.config.selection import FiltersConfig, ReplayConfig, RerollConfig
from rollover.config.sft import SftConfig
from rollover.config.table import ConfigError, Table
from rollover.config.tasks import TasksConfig, TaskSourceConfig
from rollover.config.train import EngineConfig, LoraConfig, ModelConfig, TrainConfig
from rollover.config.workflow import RoleConfig, WorkflowConfig

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "CriticConfig",
    "DistillConfig",
    "EngineConfig",
    "EvalConfig",
    "EvalSettingConfig",
    "FiltersConfig",
    "LoraConfig",
    "ModelConfig",
    "PlanConfig",
    "ReplayConfig",
    "RerollConfig",
    "RewardsConfig",
    "RoleConfig",
    "RolloutConfig",
    "RunConfig",
    "Table",
    "SftConfig",
    "TaskSourceConfig",
    "TasksConfig",
    "TrackConfig",
    "TrainConfig",
    "WatchdogConfig",
    "WorkflowConfig",
]
