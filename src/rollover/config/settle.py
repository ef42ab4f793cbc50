"""From merged layers to final values: which options have an effect, what is refused, and what is derived from others.

Owns the merged layers and the messages that say which of them set what. Never reads a file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from rollover.config.cluster import planned_devices
from rollover.config.correction import OF_RATIO, ratio_is_one
from rollover.config.schema import REFUSED, Config, default_of, field_at, rules_of
from rollover.config.table import UNSETTLED, ConfigError, Inert, Refused, put, row_of, value_of
from rollover.config.tasks import NO_SOURCES

Values = dict[str, Any]


@dataclass
class Layers:
    """The merged values by dotted key, and for each key the index of the layer that set it last."""

    labels: list[str] = field(default_factory=list)
    values: Values = field(default_factory=dict)
    index: dict[str, int] = field(default_factory=dict)

    def label(self, key: str) -> str:
        while key and key not in self.index:
            key = key.rpartition(".")[0]
        return self.labels[self.index[key]] if key else ""

    def put(self, key: str, value: Any, layer: int) -> None:
        for old in [k for k in self.index if k.startswith(f"{key}.")]:
            del self.index[old]
        self.values[key] = value
        self.index[key] = layer
        info = field_at(key)
        if info is not None and row_of(info.annotation) and isinstance(value, list):
            for i, row in enumerate(value):
                self.index.update({f"{key}.{i}.{name}": layer for name in row})


def settle(config: Config, layers: Layers) -> tuple[Config, list[str], list[str]]:
    """Reset options without effect; return (configuration, notices of the resets, errors).

    An option without effect is an error only when it comes from the same or a later layer than the setting that
    switches it off: recipes work alone and as overlays. A reset may switch off more, so this runs to a fixed point.
    """
    notices: list[str] = []
    problems: dict[str, str] = {}
    changed = True
    while changed:
        changed = False
        for rule in [rule for rule in rules_of(config) if isinstance(rule, Inert)]:
            for key in rule.without_effect(config, layers.index):
                cause = max(_layer_of(setting, layers) for setting in rule.because)
                if _layer_of(key, layers) >= cause:
                    problems.setdefault(key, f"{layers.label(key)}: {rule.message(key, config)}")
                    continue
                value = rule.neutral[0] if rule.neutral else default_of(key)
                notices.append(
                    f"{key} = {shown(value_of(config, key))} ({layers.label(key)}) was reset to"
                    f" {shown(value)} ({layers.labels[cause]}): it has no effect {rule.reason(config)}"
                )
                config = _replace(config, key, value)
                layers.index[key] = cause
                changed = True
    return config, notices, list(problems.values())


def refuse(config: Config, layers: Layers, problems: list[str], require_sources: bool) -> None:
    """ConfigError with these `problems` and every refused combination, if there is one."""
    refused: tuple[Refused, ...] = (NO_SOURCES, *REFUSED) if require_sources else REFUSED
    messages = [*problems, *(f"{_source(r.keys, layers)}{why}" for r in refused if (why := r.problem(config)))]
    if messages:
        raise ConfigError("\n".join(messages))


def _source(keys: tuple[str, ...], layers: Layers) -> str:
    """Return the topmost layer that set one of `keys`, as the head of a message: the place to look at first."""
    top = max(_layer_of(key, layers) for key in keys)
    return f"{layers.labels[top]}: " if top >= 0 else ""


def _layer_of(key: str, layers: Layers) -> int:
    return layers.index.get(key, -1)


def _replace(config: Config, key: str, value: Any) -> Config:
    """Return a copy of `config` with one value changed."""
    data = config.model_dump()
    put(data, key, value)
    return Config.model_validate(data, strict=True, context=UNSETTLED)


def derive(config: Config, layers: Layers) -> tuple[Config, dict[str, str]]:
    """Return final values for the options whose default depends on others, and what set each option."""
    origin = {key: layers.labels[index] for key, index in layers.index.items()}
    if config.algorithm.supervised:
        for key in ("rollout.groups_per_step", "rollout.in_flight_groups"):
            config = _replace(config, key, config.sft.batch_examples)
            origin[key] = "derived from sft.batch_examples"
    if config.rollout.in_flight_groups == 0:
        config = _replace(config, "rollout.in_flight_groups", config.rollout.groups_per_step)
        origin["rollout.in_flight_groups"] = "derived from rollout.groups_per_step"
    if config.rollout.on_stale == "":
        config = _replace(config, "rollout.on_stale", "finish_first")
    if config.algorithm.correction != config.algorithm.weight:
        config = _replace(config, "algorithm.correction", config.algorithm.weight)
        source = "loss" if config.algorithm.supervised else "proximal"
        origin["algorithm.correction"] = f"derived from algorithm.{source}"
    if not config.algorithm.kl_kind:
        config = _replace(config, "algorithm.kl_kind", config.algorithm.kl_estimator)
        origin["algorithm.kl_kind"] = "derived from algorithm.kl_in"
    if config.algorithm.advantage_traits.greedy and not config.rollout.greedy_baseline:
        config = _replace(config, "rollout.greedy_baseline", True)
        origin["rollout.greedy_baseline"] = "derived from algorithm.advantage"
    if config.workflow.verifiers and not config.tasks.sources:
        workflow = config.workflow
        params = {"params": workflow.verifiers_args.get("taskset", {}), "eval_params": workflow.verifiers_eval}
        source = {"kind": "verifiers", "name": workflow.verifiers, **params}
        config = _replace(config, "tasks.sources", [source])
        origin["tasks.sources"] = "derived from workflow.verifiers"
    for key, (number, source_key) in planned_devices(config).items():
        if key not in layers.index:
            config = _replace(config, key, number)
            origin[key] = f"derived from {source_key}"
    return config, origin


def notices_of_ratio(config: Config, layers: Layers) -> list[str]:
    """Return a notice of the options that are set and act on the current/proximal ratio, where that is always 1."""
    if not ratio_is_one(config):
        return []
    preset = f"preset {config.algorithm.preset}"
    named = {
        key: value_of(config, key)
        for key in OF_RATIO
        if key in layers.index and (layers.label(key) != preset or value_of(config, key) != default_of(key))
    }
    traits = config.algorithm.loss_traits
    weighed_whole = traits.by_row and config.algorithm.correction != "none"  # other losses are weighed token by token
    if not traits.by_ratio or weighed_whole or named.get("algorithm.loss") == default_of("algorithm.loss"):
        named.pop("algorithm.loss", None)
    if not named:
        return []
    listed = ", ".join(f"{key} = {shown(value)} ({layers.label(key)})" for key, value in named.items())
    return [
        f"no effect: {listed}. A step has one update (train.minibatches_per_step = train.epochs_per_step = 1), so the"
        " ratio of current to proximal policy is 1 at every token: nothing is clipped, and losses of that ratio are all"
        ' the same. To give them an effect, raise one of the two, or set algorithm.proximal = "behavior"'
    ]


def shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
