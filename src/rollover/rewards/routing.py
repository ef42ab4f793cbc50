"""Chooses the reward of a task: that of its source, of the run, by its data_source, or the default of its source kind.

Turns configuration into specs (rewards/built_in.py, rewards/registry.py). Loads no function.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollover.config import RewardsConfig, TaskSourceConfig
from rollover.config.rewards import RewardFunctionConfig
from rollover.rewards.built_in import (
    BUILT_IN,
    composite_spec,
    make_spec,
    parse_spec,
    spec_by_data_source,
    unknown_message,
    with_rule,
)
from rollover.types import Task


@dataclass(frozen=True)
class RewardChoice:
    """Reward of a source's tasks: `spec`. With `by_data_source`, tasks with a data_source get theirs from `table`
    (rewards.by_data_source) or verl's."""

    spec: str
    by_data_source: bool = False
    rule: str = "last_number"
    table: dict[str, str] = field(default_factory=dict)

    def spec_for(self, task: Task) -> str:
        """Return the spec of a task. ValueError if its data_source has no reward, or an unknown one."""
        name = task.columns.get("data_source") if self.by_data_source else None
        if name is None:
            return self.spec
        if not isinstance(name, str):
            raise ValueError(
                f"task {task.task_id}: its data_source, which chooses its reward, is {name!r:.60} and no text: make the"
                " column one of texts, or name one reward for all rows in rewards.function"
            )
        return _checked(spec_by_data_source(name, self.table), "rewards.by_data_source", self.rule)


def choose_reward(
    source: TaskSourceConfig, rewards: RewardsConfig, answer_rule: str = "last_number", *, held_out: bool = False
) -> RewardChoice:
    """Choose the reward of a source's tasks: the source's, else that of [rewards], else by data_source, else the
    built-in of its kind. `held_out`: rewards.eval_function precedes these.

    The spec of a built-in contains the answer rule: the source's, else `answer_rule` (tasks.answer_rule). ValueError
    for a name that is neither a built-in nor module:function nor path.py:function.
    """
    rule = source.answer_rule or answer_rule
    built_in = source.about.reward
    if held_out and rewards.eval_function:
        key, spec = "rewards.eval_function", rewards.eval_function
    elif source.reward:
        key, spec = "tasks.sources.reward", source.reward
    elif rewards.functions:
        rows = [_row(row, f"rewards.functions.{i}.function", rule) for i, row in enumerate(rewards.functions)]
        return RewardChoice(composite_spec(rows))
    else:
        key, spec = "rewards.function", rewards.function
    if spec.partition("/")[0] == "reasoning_gym" != built_in:
        raise ValueError(
            f"{key}: 'reasoning_gym' cannot score the dataset {source.path or source.kind!r}; use exact_match or your"
            " own function"
        )
    if spec:
        return RewardChoice(_checked(spec, key, rule))
    for written in rewards.by_data_source.values():
        _checked(written, "rewards.by_data_source", rule)
    by_data_source = built_in == "exact_match"
    table = dict(rewards.by_data_source) if by_data_source else {}
    return RewardChoice(_checked(built_in, key, rule), by_data_source, rule, table)


def _row(row: RewardFunctionConfig, key: str, rule: str) -> dict[str, Any]:
    found = parse_spec(row.function)
    if found is None:
        spec, params = _checked(row.function, key, rule), dict(row.params)
    else:
        spec, params = make_spec(found[0], {**found[1], **row.params}, rule), {}
    entry: dict[str, Any] = {"function": spec}
    usual = {"weight": 1.0, "name": "", "shaping": False}
    entry |= {name: value for name, other in usual.items() if (value := getattr(row, name)) != other}
    return entry | ({"params": params} if params else {})


def _checked(spec: str, key: str, rule: str) -> str:
    """Return the full spec. ValueError for an unknown one."""
    if parse_spec(spec) is None and (":" not in spec or spec.partition("/")[0] in BUILT_IN):
        raise ValueError(unknown_message(spec, key))
    return with_rule(spec, rule)
