"""Options that may change when a run is resumed (all but FIXED), and while it runs (IN_RUN).

Owns the table, and the comparison of two configurations. run/resume.py checks that the rollouts of a checkpoint can
continue under the new values, and the stream of tasks checks that it is the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, NamedTuple

from pydantic import ValidationError

from rollover.config.renames import upgraded
from rollover.config.schema import Config, default_of, expected, field_at, leaves
from rollover.config.suggest import unknown_key
from rollover.config.table import ConfigError, put
from rollover.live_objects import is_live, is_same_but_for_code


@dataclass(frozen=True)
class Fixed:
    """`keys` (with * for any part) that a resumed run may not change, because of `why`.

    `while_held`: only as long as the checkpoint holds rollouts.
    """

    keys: tuple[str, ...]
    why: str
    while_held: bool = False


FIXED = (
    Fixed(("run.seed",), "tasks, and the tokens of a rollout, are drawn by it"),
    Fixed(
        ("run.train_on_recorded", "tasks.producer", "sft.path", "sft.rollouts"),
        "what is held and what comes next would be of different runs",
    ),
    Fixed(
        tuple(f"sft.{name}" for name in ("eval_fraction", "min_reward", "per_task", "turns", "max_tokens")),
        "examples would be repeated, skipped, or held out after being trained",
    ),
    Fixed(
        ("tasks.eval_fraction", "tasks.shuffle", "tasks.drop_last"),
        "tasks would be repeated, skipped, or held out after being trained",
    ),
    Fixed(
        tuple(
            f"tasks.sources.*.{name}"
            for name in ("kind", "name", "params*", "streaming", "prompt_column", "image_column", "order_column")
        ),
        "tasks would be repeated or skipped",
    ),
    Fixed(("algorithm.reference_path",), "the checkpoint holds the weights of that reference"),
    Fixed(("backend.type", "backend.base_model"), "the checkpoint holds weights as that backend wrote them"),
    Fixed(
        tuple(
            f"model.lora.{name}" for name in ("rank", "alpha", "target_modules*", "exclude_modules*", "rslora", "dora")
        ),
        "the weights in the checkpoint are of those adapters",
    ),
    Fixed(("train.optimizer",), "the checkpoint holds what that optimizer keeps for each weight"),
    Fixed(("critic.model",), "the checkpoint holds a critic of that kind, with its optimizer"),
    Fixed(
        ("rollout.group_size", "rollout.greedy_baseline"),
        "the checkpoint holds groups of that size",
        while_held=True,
    ),
    Fixed(
        ("model.processor_kwargs*",),
        "the checkpoint holds prompts with images in those sizes",
        while_held=True,
    ),
    Fixed(
        ("rollout.temperature",),
        "the checkpoint holds rollouts that were begun at it, and a rollout has one temperature",
        while_held=True,
    ),
    Fixed(
        ("rollout.logits.regex", "rollout.logits.json_schema"),
        "the checkpoint holds answers that were begun with it, or without",
        while_held=True,
    ),
    Fixed(
        (
            "rollout.environment",
            "workflow.environment",
            "workflow.tool_format",
            "workflow.max_tool_tokens",
            "workflow.verifiers",
        ),  # fmt: skip
        "the checkpoint holds rollouts that were begun in it, and would continue in another",
        while_held=True,
    ),
)
# Backends whose checkpoints are one another's: weights and optimizer, in one piece or in several.
_SAME_STATE = {"local", "ranks"}
# What a step makes of its groups: with other values it would end with other weights. (Sums in another order are not.)
_TRAINING = (
    "algorithm.*", "critic.*", "distill.*", "train.*", "model.*", "filters.*", "replay.*", "rollout.max_new_tokens",
    "rollout.max_staleness", "rollout.on_stale", "rewards.overlong_*", "rewards.repetition_penalty",
    "rewards.clip_range*", "rewards.running_norm",
)  # fmt: skip
_NOT_TRAINING = (
    "train.profile_steps*", "train.publish_every", "train.micro_batch_tokens", "train.skip_zero_advantage",
    "train.gradient_checkpointing", "train.streaming_min_groups", "model.path", "model.lora.path", "model.device",
    "filters.give_up_after_steps",
)  # fmt: skip
OF_THE_START = ("run.dir", "checkpoint.resume_from")  # not of the run


class Change(NamedTuple):
    """`old` or `new` is None where a row of a list, or an entry of a table of the user's own, is not there."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.old)} -> {_shown(self.new)}"


def changes(old: Mapping[str, Any], new: Config) -> list[Change]:
    """Return the options of `new` that differ from `old`, a config.resolved.json; none if that is missing ({}).

    Options that `old` does not have yet are left out.
    """
    if not old:
        return []
    before, now = dict(_flat(upgraded(old))), dict(_flat(new.model_dump(mode="json")))
    rows = set(map(_row_of, before)) & set(map(_row_of, now))  # one that is in either alone is a change
    options = {name for name, _ in leaves()} | {k for k in {**now, **before} if field_at(k) and _row_of(k) in rows}
    keys = [
        k
        for k in {**now, **before}
        if k not in OF_THE_START and not (k in options and (k not in before or k not in now))
    ]
    if now["model.dtype"] == "auto":  # what was decided at the start of the run holds
        keys = [k for k in keys if k != "model.dtype"]
    if now["sft.epochs"] and before.get("sft.epochs") == now["sft.epochs"]:  # so does what the examples decided
        keys = [k for k in keys if k != "train.num_steps"]
    return [Change(k, before.get(k), now.get(k)) for k in keys if before.get(k) != now.get(k)]


def refuse(changed: Sequence[Change], *, held: bool | None = None) -> None:
    """ValueError for what may not change. `held`: whether the checkpoint holds rollouts; None: it is not known yet.

    The code of an object that a Python program handed over may be mended, as that of a file may, and moved to a file.
    """
    problems = []
    for change in changed:
        if is_live(change.old) and change.new in (None, "", _default(change.key)):
            problems.append(
                f"--resume without {change.key}: it was an object of a Python program ({change.old}), which the command"
                " line does not have. Go on in Python, with rollover.train(resume=RUN_DIR, ...) and the same object; or"
                f" name a function of a file: --{change.key} path.py:function"
            )
            continue
        if is_same_but_for_code(change.old, change.new):
            continue
        if change.key == "backend.type" and {change.old, change.new} <= _SAME_STATE:
            continue
        fix = f"Set {change.key} = {_shown(change.old, whole=True)}"
        if is_live(change.old):
            fix = f"Hand over {change.old} again in Python"
        for rule in FIXED:
            if any(fnmatch(change.key, key) for key in rule.keys) and (held or not rule.while_held):
                problems.append(
                    f"--resume with {change.key} = {_shown(change.new)}: it was {_shown(change.old)}, and {rule.why}."
                    f" {fix}, or start a new run in another run.dir"
                )
    if problems:
        raise ValueError("\n".join(problems))


def trains_otherwise(changed: Sequence[Change], config: Config, *, from_start: bool = False) -> list[Change]:
    """Those changes because of which a step, trained again on the same groups, would end with other weights.

    `from_start`: there is no checkpoint that the weights before it come from.
    """

    def has(key: str) -> bool:
        if key in ("model.path", "model.lora.path") and from_start:
            return True
        if key == "train.num_steps":  # the schedule's length
            fixed = config.train.schedule == config.critic.schedule == "constant"
            return not fixed or config.train.warmup_ratio > 0
        return not any(fnmatch(key, name) for name in _NOT_TRAINING) and any(fnmatch(key, name) for name in _TRAINING)

    return [change for change in changed if has(change.key)]


def _default(key: str) -> Any:
    return default_of(key) if field_at(key) is not None else None


def _row_of(key: str) -> str:
    """`tasks.sources.0` of `tasks.sources.0.kind`; "" of a key that is in no row of a list."""
    found = re.match(r".*\.\d+(?=\.)", key)
    return found[0] if found else ""


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every value that is not a table; rows of a list of tables by their index."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _flat(item, f"{prefix}.{name}" if prefix else name)
    elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        for i, item in enumerate(value):
            yield from _flat(item, f"{prefix}.{i}")
    else:
        yield prefix, value


def _shown(value: Any, *, whole: bool = False) -> str:
    """At most 80 characters of it; all where it is to be copied (`whole`)."""
    text = "(not set)" if value is None else json.dumps(value, ensure_ascii=False)
    return text if whole or len(text) <= 80 else f"{text[:77]}..."


# What may change between two steps of a run that goes on: values that are read when they are used. Everything else is
# built into something when the run begins.
IN_RUN = (
    "train.learning_rate", "train.min_lr_ratio", "train.max_grad_norm", "algorithm.entropy_coef", "eval.every_steps",
    "checkpoint.every_steps",
)  # fmt: skip


def check_in_run(config: Config, key: str, value: Any) -> None:
    """ConfigError unless `key` may have this value from the next step of the run on."""
    info = field_at(key)
    if info is None:
        raise ConfigError(unknown_key(key))
    if key not in IN_RUN:
        rule = next(
            (rule for rule in FIXED if any(fnmatch(key, name) for name in rule.keys) and not rule.while_held), None
        )
        how = f"it is fixed: {rule.why}" if rule else "leave the session, and set it when you resume (resume=...)"
        raise ConfigError(f"{key} cannot change during a run ({', '.join(IN_RUN)} can): {how}")
    data = config.model_dump()
    put(data, key, value)
    try:
        Config.model_validate(data, strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        what = f"{key} = {value!r}: expected {expected(info)}" if problem["loc"] else problem["msg"]
        raise ConfigError(what.removeprefix("Value error, ")) from None


def change_in_run(config: Config, key: str, value: Any) -> None:
    """Change a checked value in the one table that all who hold the configuration read it from."""
    table, _, name = key.rpartition(".")
    vars(getattr(config, table))[name] = value
