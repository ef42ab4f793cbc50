"""Rules over more than one option, as two tables: options without effect, and combinations that are refused.

Owns the predicates and their messages. Never applies them (`checks`, `load`).
A rule reads the configuration as given: `in_flight_groups = 0` and `on_stale = ""` are not resolved yet.
"""

from __future__ import annotations

import json

from rollover.config import (
    Config,
    TaskSourceConfig,
    algorithm_rules,
    filter_rules,
    replay_rules,
    reward_rules,
    stream_rules,
    train_rules,
)
from rollover.config.engine import ENGINES
from rollover.config.fields import did_you_mean, leaves
from rollover.config.rollout import ORDERS
from rollover.config.rule import Inert, Refused
from rollover.config.tasks import SOURCES


def _fields(table: str, *, without: str) -> tuple[str, ...]:
    return tuple(name for name, _ in leaves() if name.startswith(f"{table}.") and name != f"{table}.{without}")


def _may_end(config: Config) -> bool:
    """Whether a source may have an order and an end, which generators do not have."""
    return any(source.kind != "reasoning_gym" for source in config.tasks.sources)


def _all_sources_set(config: Config, field: str) -> bool:
    return bool(config.tasks.sources) and all(getattr(source, field) for source in config.tasks.sources)


def _nothing_gets_stale(config: Config) -> bool:
    """Every step trains all that is in flight, by the newest weights, so no token is older than its step."""
    rollout = config.rollout
    newest = config.train.publish_every == 1 and not config.tasks.producer
    return newest and rollout.nothing_rolls_over and rollout.most_held == rollout.groups_per_step


def _unknown_order(config: Config) -> bool:
    return config.rollout.order not in ORDERS and ":" not in config.rollout.order


_OF_INTERRUPTION = (
    "supplement", "token_budget", "complete_fraction", "complete_by", "max_continuations", "order", "kv_on_resume",
)  # fmt: skip
_GENERATION = (
    "in_flight_groups", "interrupt", "overlap", "max_staleness", "on_stale", "stop_repetition_tokens",
    *_OF_INTERRUPTION,
)  # fmt: skip
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")

INERT: tuple[Inert, ...] = (
    *algorithm_rules.INERT,
    *reward_rules.INERT,
    *filter_rules.INERT,
    *replay_rules.INERT,
    *train_rules.INERT,
    Inert(
        (
            *(f"rollout.{name}" for name in _GENERATION if name != "max_staleness"),
            "rollout.groups_per_step",
            "rollout.group_size",
            "rollout.greedy_baseline",
            "tasks.before_produce",
            "train.streaming_min_groups",
            "reroll.max_groups",
            "run.replay_rollouts",
            "watchdog.max_stalls",  # the others are of the engine, of evaluations and of the trainer
        ),
        ("tasks.producer",),
        lambda c: bool(c.tasks.producer),
        "with tasks.producer, which makes the groups by itself",
        "Remove one of the two",
    ),
    Inert(
        (
            *(f"rollout.{name}" for name in _GENERATION + _SAMPLING),
            "train.streaming_min_groups",
            "eval.num_tasks",
            "track.rollouts",
            *_fields("watchdog", without="train_timeout_s"),
        ),
        ("run.replay_rollouts",),
        lambda c: bool(c.run.replay_rollouts),
        "with run.replay_rollouts: nothing is generated or scored, recorded rollouts are trained as they are",
    ),
    Inert(
        ("rollout.in_flight_groups",),
        ("rollout.max_staleness", "rollout.on_stale", "rollout.supplement"),
        lambda c: c.rollout.in_flight_groups == "auto" and c.rollout.most_in_flight <= c.rollout.groups_per_step,
        "as there is nothing to choose: rollout.max_staleness allows no more than rollout.groups_per_step groups",
        "Raise rollout.max_staleness",
    ),
    Inert(
        ("rollout.interrupt",),
        ("rollout.in_flight_groups", "rollout.groups_per_step"),
        lambda c: c.rollout.one_step_in_flight and not c.rollout.overlap,
        "with as many groups in flight as a step trains (rollout.in_flight_groups = rollout.groups_per_step): when"
        " enough groups are ready, none is left to interrupt",
        "Raise rollout.in_flight_groups",
    ),
    Inert(
        ("rollout.max_staleness", "rollout.on_stale"),
        ("rollout.interrupt", "rollout.in_flight_groups", "rollout.groups_per_step", "train.publish_every"),
        _nothing_gets_stale,
        'with rollout.interrupt = "never" and rollout.in_flight_groups = rollout.groups_per_step: nothing gets stale',
        "Raise rollout.in_flight_groups",
    ),
    Inert(
        tuple(f"rollout.{name}" for name in _OF_INTERRUPTION),
        ("rollout.interrupt",),
        lambda c: c.rollout.interrupt == "never" and not c.rollout.overlap,
        'with rollout.interrupt = "never": a step waits for all that is in flight, no rollout is parked and resumed',
        'Set rollout.interrupt = "when_enough"',
    ),
    Inert(
        ("rollout.token_budget", "rollout.max_continuations"),
        ("rollout.overlap",),
        lambda c: c.rollout.overlap,
        "with rollout.overlap: rollouts are not interrupted for a step",
    ),
    Inert(
        ("rollout.token_budget",),
        ("rollout.interrupt",),
        lambda c: c.rollout.interrupt == "when_enough",
        'with rollout.interrupt = "when_enough": rollouts run until there is enough for a step',
        'Set rollout.interrupt = "token_budget"',
    ),
    Inert(
        ("plan.long_share",),
        ("plan.lengths",),
        lambda c: c.plan.lengths != "bimodal",
        'unless plan.lengths = "bimodal"',
    ),
    Inert(
        ("rewards.repetition_penalty",),
        ("rollout.stop_repetition_tokens",),
        lambda c: c.rollout.stop_repetition_tokens == 0,
        "with rollout.stop_repetition_tokens = 0: no rollout is stopped for repeating itself",
        "Set rollout.stop_repetition_tokens",
    ),
    Inert(
        ("watchdog.max_stalls", "watchdog.grace_s"),
        ("watchdog.rollout_timeout_s",),
        lambda c: c.watchdog.rollout_timeout_s == 0,
        "with watchdog.rollout_timeout_s = 0: no rollout is watched",
        "Set watchdog.rollout_timeout_s",
    ),
    Inert(
        ("train.min_lr_ratio",),
        ("train.schedule",),
        lambda c: c.train.schedule == "constant",
        'with train.schedule = "constant"',
    ),
    Inert(
        _fields("model.lora", without="rank"),
        ("model.lora.rank",),
        lambda c: c.model.lora.rank == 0,
        "with model.lora.rank = 0 (adapters are off)",
        "Set model.lora.rank",
    ),
    Inert(
        ("model.revision",),
        ("model.path",),
        lambda c: c.model.path == "smollm2-135m" or "://" in c.model.path or c.model.path.startswith(("/", ".", "~")),
        "unless model.path is a hub id",
    ),
    Inert(
        _fields("eval", without="num_tasks"),
        ("eval.num_tasks",),
        lambda c: c.eval.num_tasks == 0,
        "with eval.num_tasks = 0 (no evaluation)",
        "Set eval.num_tasks",
    ),
    Inert(
        ("eval.top_p", "eval.samples_per_task"),
        ("eval.temperature",),
        lambda c: c.eval.temperature == 0,
        "with eval.temperature = 0: greedy answers to a task are all the same",
    ),
    Inert(
        ("tasks.epochs",),
        ("tasks.sources",),
        lambda c: bool(c.tasks.sources) and not _may_end(c),
        'without a source of kind "dataset": generators are always endless',
    ),
    Inert(
        ("tasks.shuffle",),
        ("tasks.sources",),
        lambda c: bool(c.tasks.sources) and not _may_end(c),
        'without a source of kind "dataset": generators have no order to shuffle',
    ),
    Inert(
        ("tasks.answer_rule",),
        ("tasks.sources",),
        lambda c: _all_sources_set(c, "answer_rule"),
        "as every source sets its own answer_rule",
    ),
    Inert(
        ("rewards.function",),
        ("tasks.sources",),
        lambda c: _all_sources_set(c, "reward"),
        "as every source sets its own reward",
    ),
)


def source_rules(sources: list[TaskSourceConfig]) -> list[Inert]:
    """One rule for each source: the fields of other kinds have no effect."""
    rules = []
    for i, source in enumerate(sources):
        others = tuple(name for kind in SOURCES.values() for name in kind.keys if name not in source.about.keys)
        key = f"tasks.sources.{i}"
        options = tuple(f"{key}.{name}" for name in others)
        rules.append(Inert(options, (f"{key}.kind",), lambda _: True, f'in a source of kind "{source.kind}"'))
    return rules


def _no_source(config: Config) -> str | None:
    """What is wrong with the first source that is none; None if all are."""
    one_of = "one of " + ", ".join(map(json.dumps, SOURCES)) + ", or a function (module:function or path.py:function)"
    for i, source in enumerate(config.tasks.sources):
        key = f"tasks.sources.{i}"
        if not source.kind:
            return f"{key}.kind is missing: expected {one_of}"
        if source.kind not in SOURCES and ":" not in source.kind:
            return f'{key}.kind = "{source.kind}": expected {one_of}{did_you_mean(source.kind, tuple(SOURCES))}'
        if missing := source.missing:
            return f'{key}.{missing} is missing: a source of kind "{source.kind}" needs it'
    return None


NO_SOURCES = Refused(
    ("tasks.sources",),
    lambda c: not c.tasks.sources,
    lambda c: (
        "tasks.sources is empty: there is nothing to train on. Add a [[tasks.sources]] table, for instance with"
        ' kind = "reasoning_gym" and name = "chain_sum"'
    ),
)

REFUSED: tuple[Refused, ...] = (
    *algorithm_rules.REFUSED,
    *reward_rules.REFUSED,
    *filter_rules.REFUSED,
    *replay_rules.REFUSED,
    *train_rules.REFUSED,
    *stream_rules.REFUSED,
    Refused(
        ("engine.kind",),
        lambda c: c.engine.kind not in ENGINES and ":" not in c.engine.kind,
        lambda c: (
            f'engine.kind = "{c.engine.kind}" is none of {", ".join(ENGINES)}, and no function (module:function or'
            f" path.py:function){did_you_mean(c.engine.kind, ENGINES)}"
        ),
    ),
    Refused(
        ("tasks.sources",),
        lambda c: _no_source(c) is not None,
        lambda c: _no_source(c) or "",
    ),
    Refused(
        ("rollout.interrupt", "rollout.max_staleness"),
        lambda c: (
            not (c.rollout.nothing_rolls_over or c.rollout.overlap)
            and c.rollout.max_staleness == 0
            and c.rollout.on_stale != "mask"
        ),
        lambda c: (
            f'rollout.interrupt = "{c.rollout.interrupt}" with rollout.max_staleness = 0: an interrupted rollout is'
            ' always stale when it is trained. Set rollout.max_staleness to 1 or more, rollout.on_stale = "mask" (its'
            ' earlier tokens leave the loss), or rollout.interrupt = "never"'
        ),
    ),
    Refused(
        ("rollout.overlap", "rollout.interrupt"),
        lambda c: c.rollout.overlap and c.rollout.interrupt in ("when_enough", "token_budget"),
        lambda c: (
            f'rollout.overlap with rollout.interrupt = "{c.rollout.interrupt}": generation goes on when there is enough'
            ' for a step. Set rollout.interrupt = "on_weight_update" (rollouts go on under new weights) or "never"'
            " (they end under those they began with)"
        ),
    ),
    Refused(
        ("rollout.overlap", "rollout.on_stale"),
        lambda c: c.rollout.overlap and c.rollout.on_stale == "drop",
        lambda c: (
            'rollout.overlap with rollout.on_stale = "drop": generation waits rather than that anything gets too old.'
            ' Set rollout.on_stale = "finish_first"'
        ),
    ),
    Refused(
        ("rollout.overlap", "rollout.interrupt"),
        lambda c: c.rollout.interrupt == "on_weight_update" and not c.rollout.overlap,
        lambda c: (
            'rollout.interrupt = "on_weight_update" without rollout.overlap: nothing is generated while weights are'
            " updated. Set rollout.overlap = true"
        ),
    ),
    Refused(
        ("train.publish_every", "rollout.max_staleness"),
        lambda c: c.train.publish_every > c.rollout.max_staleness + 1,
        lambda c: (
            f"train.publish_every = {c.train.publish_every} with rollout.max_staleness = {c.rollout.max_staleness}:"
            " the engine's weights alone would be older than that. Set rollout.max_staleness ="
            f" {c.train.publish_every - 1} or more"
        ),
    ),
    Refused(
        ("rollout.interrupt", "rollout.token_budget"),
        lambda c: c.rollout.interrupt == "token_budget" and not 0 < c.rollout.token_budget < c.rollout.max_new_tokens,
        lambda c: (
            f'rollout.token_budget = {c.rollout.token_budget} with rollout.interrupt = "token_budget": it must be'
            f" above 0 and below rollout.max_new_tokens = {c.rollout.max_new_tokens}. Set it"
        ),
    ),
    Refused(
        ("rollout.order",),
        _unknown_order,
        lambda c: (
            f'rollout.order = "{c.rollout.order}" is none of {", ".join(ORDERS)}, and no function (module:function or'
            f" path.py:function){did_you_mean(c.rollout.order, ORDERS)}"
        ),
    ),
    Refused(
        ("rollout.stop_repetition_tokens",),
        lambda c: 0 < c.rollout.stop_repetition_tokens < 16,
        lambda c: (
            f"rollout.stop_repetition_tokens = {c.rollout.stop_repetition_tokens}: so few tokens repeat themselves in"
            " sound answers too. Set it to 16 or more (64, say), or to 0 (off)"
        ),
    ),
    Refused(
        ("rollout.in_flight_groups", "rollout.groups_per_step"),
        lambda c: c.rollout.most_in_flight < c.rollout.groups_per_step,
        lambda c: (
            f"rollout.in_flight_groups = {c.rollout.in_flight_groups} is below rollout.groups_per_step ="
            f" {c.rollout.groups_per_step}: a step would never have enough groups. Raise it, or set it to 0 (equal)"
        ),
    ),
    Refused(
        ("rollout.in_flight_groups", "rollout.max_staleness", "rollout.groups_per_step", "rollout.on_stale"),
        lambda c: c.rollout.finish_first and c.rollout.most_held > c.rollout.most_in_bound,
        lambda c: (
            f"rollout.in_flight_groups = {c.rollout.in_flight_groups}"
            + (
                " and as many ready ones beside them as a step trains (rollout.supplement),"
                if c.rollout.supplement
                else ""
            )
            + " is above (1 + rollout.max_staleness) *"
            f" rollout.groups_per_step = {c.rollout.most_in_bound}: with"
            ' rollout.on_stale = "finish_first" the bound could not be held. Lower it, raise rollout.max_staleness, or'
            ' set rollout.on_stale = "drop" to lose groups that get too old'
        ),
    ),
    Refused(
        ("rollout.temperature",),
        lambda c: c.rollout.temperature == 0,
        lambda c: (
            "rollout.temperature = 0: greedy rollouts of a task are all the same and are never trained. Set it above 0"
            " (eval.temperature = 0 makes the evaluation greedy)"
        ),
    ),
    Refused(
        ("train.minibatches_per_step", "rollout.groups_per_step"),
        lambda c: c.rollout.groups_per_step % c.train.minibatches_per_step != 0,
        lambda c: (
            f"train.minibatches_per_step = {c.train.minibatches_per_step} does not divide rollout.groups_per_step ="
            f" {c.rollout.groups_per_step}: groups are split evenly. Change one of them"
        ),
    ),
)
