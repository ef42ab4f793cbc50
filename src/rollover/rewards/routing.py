"""Which reward a task gets: of its source, of the whole run, by its data_source, or the one of its kind of source.

Turns what the configuration says into specs (rewards/built_in.py, rewards/registry.py). Loads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollover.config import RewardsConfig, TaskSourceConfig
from rollover.config.rewards import RewardFunctionConfig
from rollover.rewards.built_in import BUILT_IN, by_data_source, parsed, several_of, spec_of, unknown, with_rule
from rollover.types import Task


@dataclass(frozen=True)
class Chosen:
    """`spec`: of every task; where `asks` holds, of those without a data_source, which by_data_source gives theirs."""

    spec: str
    asks: bool = False
    rule: str = "last_number"
    own: dict[str, str] = field(default_factory=dict)

    def of(self, task: Task) -> str:
        """The spec of a task. ValueError where its data_source has no reward, or one that does not exist."""
        name = task.columns.get("data_source") if self.asks else None
        if name is None:
            return self.spec
        if not isinstance(name, str):
            raise ValueError(
                f"task {task.task_id}: its data_source, which chooses its reward, is {name!r:.60} and no text: make the"
                " column one of texts, or name one reward for all rows in rewards.function"
            )
        return _checked(by_data_source(name, self.own), "rewards.by_data_source", self.rule)


def chosen_for(
    source: TaskSourceConfig, rewards: RewardsConfig, answer_rule: str = "last_number", *, held_out: bool = False
) -> Chosen:
    """The reward of a source's tasks: its own, else that of [rewards], else by data_source, else the built-in of its
    kind. `held_out`: rewards.eval_function precedes these.

    The spec of a built-in carries the answer rule: the source's own, else `answer_rule` (pass `tasks.answer_rule`).
    Raises ValueError for a name that is neither a built-in nor module:function nor path.py:function.
    """
    rule = source.answer_rule or answer_rule
    own = source.about.reward
    if held_out and rewards.eval_function:
        key, spec = "rewards.eval_function", rewards.eval_function
    elif source.reward:
        key, spec = "tasks.sources.reward", source.reward
    elif rewards.functions:
        rows = [_row(row, f"rewards.functions.{i}.function", rule) for i, row in enumerate(rewards.functions)]
        return Chosen(several_of(rows))
    else:
        key, spec = "rewards.function", rewards.function
    if spec.partition("/")[0] == "reasoning_gym" != own:
        raise ValueError(
            f"{key}: 'reasoning_gym' cannot score the dataset {source.path or source.kind!r}; use exact_match or your"
            " own function"
        )
    if spec:
        return Chosen(_checked(spec, key, rule))
    for written in rewards.by_data_source.values():
        _checked(written, "rewards.by_data_source", rule)
    asks = own == "exact_match"
    return Chosen(_checked(own, key, rule), asks, rule, dict(rewards.by_data_source) if asks else {})


def _row(row: RewardFunctionConfig, key: str, rule: str) -> dict[str, Any]:
    found = parsed(row.function)
    if found is None:
        spec, params = _checked(row.function, key, rule), dict(row.params)
    else:
        spec, params = spec_of(found[0], {**found[1], **row.params}, rule), {}
    entry: dict[str, Any] = {"function": spec}
    usual = {"weight": 1.0, "name": "", "shaping": False}
    entry |= {name: value for name, other in usual.items() if (value := getattr(row, name)) != other}
    return entry | ({"params": params} if params else {})


def _checked(spec: str, key: str, rule: str) -> str:
    """The spec in full. ValueError where it names nothing."""
    if parsed(spec) is None and (":" not in spec or spec.partition("/")[0] in BUILT_IN):
        raise ValueError(unknown(spec, key))
    return with_rule(spec, rule)
