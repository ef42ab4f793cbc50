"""The whole configuration: its tables, all their rules, and the tree of its dotted keys.

Owns the mapping between `rollout.group_size` and the pydantic field behind it. Never reads a file.
"""

import json
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from pydantic import Field, ValidationInfo, model_validator
from pydantic.fields import FieldInfo

from rollover.config import (
    algorithm,
    backend,
    cluster,
    critic,
    distill,
    evaluation,
    rewards,
    rollout,
    run,
    selection,
    sft,
    tasks,
    train,
    workflow,
)
from rollover.config.algorithm import AlgorithmConfig
from rollover.config.backend import BackendConfig
from rollover.config.cluster import ClusterConfig
from rollover.config.critic import CriticConfig
from rollover.config.distill import DistillConfig
from rollover.config.evaluation import EvalConfig
from rollover.config.rewards import RewardsConfig
from rollover.config.rollout import RolloutConfig
from rollover.config.run import CheckpointConfig, PlanConfig, RunConfig, TrackConfig, WatchdogConfig
from rollover.config.selection import FiltersConfig, ReplayConfig, RerollConfig
from rollover.config.sft import SftConfig
from rollover.config.table import UNSETTLED, Inert, Refused, Rule, Table, given, on_fields, refuse, row_of, table_of
from rollover.config.tasks import TasksConfig, source_rules
from rollover.config.train import EngineConfig, ModelConfig, TrainConfig
from rollover.config.workflow import WorkflowConfig


class Config(Table):
    """The whole configuration: one TOML table per field."""

    run: RunConfig = Field(default_factory=RunConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    tasks: TasksConfig = Field(default_factory=TasksConfig)
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    workflow: WorkflowConfig = Field(default_factory=WorkflowConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    sft: SftConfig = Field(default_factory=SftConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)
    distill: DistillConfig = Field(default_factory=DistillConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    backend: BackendConfig = Field(default_factory=BackendConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
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
        """Raise ValueError for what load_config refuses, options without effect among it.

        Options in `model_fields_set` count as set, so a `model_dump()` sets everything.
        """
        if info.context is not UNSETTLED:
            refuse(self, rules_of(self), set(given(self)))
        return self

    @property
    def staleness_bound(self) -> int:
        """The largest staleness that a token in the loss can have, replayed ones aside."""
        if self.tasks.producer:
            return self.rollout.max_staleness
        return self.rollout.staleness_bound(self.train.publish_every)

    @property
    def staleness_bound_with_replay(self) -> int:
        """The largest staleness that a token in the loss can have, replayed ones included."""
        return max(self.staleness_bound, self.replay.max_staleness if self.replay.size else 0)

    @property
    def tells_tokens(self) -> bool:
        """Whether per-token statistics of training are recorded."""
        return self.records_rollouts and self.track.token_stats

    @property
    def records_rollouts(self) -> bool:
        """Whether trained rollouts are recorded: those read from records, and examples, are not."""
        return self.track.rollouts and not self.run.train_on_recorded and not self.algorithm.supervised

    @property
    def equal_scores_teach_nothing(self) -> bool:
        """Whether a group of equal scores has no advantage that is not 0."""
        return self.algorithm.advantage_traits.compares_siblings and not self.distill.teacher

    @property
    def min_valid_rewards(self) -> int:
        """Valid rewards without which a group is dropped; 0 where rewards have no part in the training."""
        return 0 if self.distill.replaces else self.rewards.min_valid


# The tree of keys


def leaves(table: type[Table] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every field that holds a value, by its dotted name; a list of tables counts as one value."""
    for name, info in table.model_fields.items():
        inner = table_of(info.annotation)
        if inner is None:
            yield prefix + name, info
        else:
            yield from leaves(inner, f"{prefix}{name}.")


def tables(table: type[Table] = Config, prefix: str = "") -> Iterator[tuple[str, type[Table]]]:
    """Every table by its dotted name, without the rows of a list of tables."""
    for name, info in table.model_fields.items():
        if inner := table_of(info.annotation):
            yield prefix + name, inner
            yield from tables(inner, f"{prefix}{name}.")


def field_at(key: str) -> FieldInfo | None:
    """Return the field behind a dotted key (`tasks.sources.0.kind` too); None if there is none, or it is a table."""
    table: type[Table] | None = Config
    info: FieldInfo | None = None
    parts = key.split(".")
    while parts:
        name = parts.pop(0)
        info = table.model_fields.get(name) if table else None
        if info is None:
            return None
        table = table_of(info.annotation)
        if parts and (row := row_of(info.annotation)) and parts[0].isdigit():
            parts.pop(0)
            if not parts:
                return None
            table = row
    return None if table else info


def names(indices: tuple[int, ...] = ()) -> list[str]:
    """All dotted keys; the fields of a list of tables once for each of `indices`."""
    out = []
    for name, info in leaves():
        out.append(name)
        row = row_of(info.annotation)
        if row:
            out += [f"{name}.{i}.{field}" for i in indices for field, _ in leaves(row)]
    return out


def default_of(key: str) -> Any:
    """Return the default behind a dotted key; pydantic's Undefined if it must be given."""
    info = field_at(key)
    assert info is not None, key
    return info.get_default(call_default_factory=True)


# Rules

RULES: tuple[Rule, ...] = (
    *(rule for name, table in tables() for rule in on_fields(table, name)),
    *algorithm.RULES,
    *critic.RULES,
    *distill.RULES,
    *selection.RULES,
    *train.RULES,
    *backend.RULES,
    *cluster.RULES,
    *tasks.RULES,
    *rewards.RULES,
    *evaluation.RULES,
    *run.RULES,
    *rollout.RULES,
    *workflow.RULES,
    *sft.rules(AlgorithmConfig, selection.DROPPING),
)
INERT = tuple(rule for rule in RULES if isinstance(rule, Inert))
REFUSED = tuple(rule for rule in RULES if isinstance(rule, Refused))


def rules_of(config: Config) -> tuple[Rule, ...]:
    """All rules, those of each single source of tasks among them."""
    return (*source_rules(config.tasks.sources), *RULES)


# What an option takes, in words

_NOUNS = {int: "an integer", float: "a number", bool: "true or false", str: "a string", dict: "a table"}
_PLURALS = {int: "integers", float: "numbers", str: "strings"}
_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


def choices_of(annotation: Any) -> list[str]:
    """Return the strings a Literal (or a union of Literals) allows; empty for anything else."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if get_origin(annotation) in (typing.Union, types.UnionType):
        return [choice for part in get_args(annotation) for choice in choices_of(part)]
    return []


def takes_text(annotation: Any) -> bool:
    """Whether a value of this annotation is always a string."""
    if get_origin(annotation) in (typing.Union, types.UnionType):
        return all(takes_text(part) for part in get_args(annotation))
    return annotation is str or get_origin(annotation) is Literal


def expected(info: FieldInfo) -> str:
    """Return the values that a field takes, in words: `an integer, at least 1`."""
    choices = choices_of(info.annotation)
    if choices:
        words = "one of " + ", ".join(json.dumps(c) for c in choices)
        if takes_text(info.annotation):
            return words
        # A union of a number and a word that stands for one.
        noun = "a number" if float in get_args(info.annotation) else "an integer, at least 0"
        return f"{noun}, or {words.removeprefix('one of ')}"
    if get_origin(info.annotation) is list:
        inner = get_args(info.annotation)[0]
        of = ", ".join(json.dumps(choice) for choice in choices_of(inner)) or _PLURALS.get(inner, "tables")
        return f"a list of {of}"
    if get_origin(info.annotation) is dict and (named := table_of(get_args(info.annotation)[1])):
        return f"a table for each name, with {', '.join(named.model_fields)}"
    noun = _NOUNS[get_origin(info.annotation) or info.annotation]  # type: ignore[index]
    bounds = [
        f"{word} {limit:g}"
        for constraint in info.metadata
        for name, word in _BOUNDS.items()
        if (limit := getattr(constraint, name, None)) is not None
    ]
    return ", ".join([noun, *bounds])
