"""Applies the rules to a configuration that was made in Python: all that was set is one layer.

Owns which options have no effect, and what is refused, wherever a Config or an AlgorithmConfig is made. `load` does the
same for files, and says which of them set what.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from rollover.config import AlgorithmConfig, Config
from rollover.config.fields import default_of, given, value_of
from rollover.config.rule import Inert, Refused
from rollover.config.rules import INERT, REFUSED, source_rules


def inert_rules(config: Config) -> tuple[Inert, ...]:
    """All rules about options without effect."""
    return (*source_rules(config.tasks.sources), *INERT)


def without_effect(rule: Inert, config: Config, given: Collection[str]) -> list[str]:
    """The options of `rule`, of those `given`, that have no effect in `config`."""
    if not rule.when(config):
        return []
    options = [key for key in rule.options if key in given]
    return [key for key in options if value_of(config, key) not in (rule.neutral or neutral_values(config, key))]


def neutral_values(config: Config, key: str) -> tuple[Any, ...]:
    """Values of `key` that mean the same as leaving it out: setting one of them is never an option without effect."""
    if key == "rollout.in_flight_groups":
        return (0, config.rollout.groups_per_step)
    if key == "rollout.on_stale":
        return ("", "finish_first")
    return (default_of(key),)


def refuse(config: Config) -> None:
    """ValueError that names every combination in `config` that is refused, and every option set without effect."""
    _refuse(config, REFUSED, inert_rules(config))


def refuse_algorithm(algorithm: AlgorithmConfig) -> None:
    """The same for [algorithm] alone, whatever the rest of the configuration is."""

    def alone(*keys: str) -> bool:
        return all(key.startswith("algorithm.") for key in keys)

    refused = [rule for rule in REFUSED if alone(*rule.keys)]
    inert = [rule for rule in INERT if alone(*rule.options, *rule.because)]
    _refuse(Config.model_construct(algorithm=algorithm), refused, inert)


def _refuse(config: Config, refused: Sequence[Refused], inert: Sequence[Inert]) -> None:
    keys = set(given(config))
    messages: dict[str, str] = {}
    for rule in inert:
        for key in without_effect(rule, config, keys):
            messages.setdefault(key, rule.message(key))
    problems = [*messages.values(), *(rule.message(config) for rule in refused if rule.when(config))]
    if problems:
        raise ValueError("\n".join(problems))
