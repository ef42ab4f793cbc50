"""Converts arguments of TRL's GRPOTrainer to arguments of `rollover.Session`, by the rows of convert/trl/rows.py.

An argument without a counterpart is an error with the reason, before a model is loaded.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollover.config import ConfigError
from rollover.config.rewards import RESERVED
from rollover.plugins.convert.mapping import Options, convert
from rollover.plugins.convert.trl.rows import TRL
from rollover.plugins.convert.trl.values import step, updates
from rollover.plugins.trackers.external import ADAPTERS, is_installed
from rollover.plugins.trl.config import GRPOConfig
from rollover.plugins.trl.rewards import NanIsNone
from rollover.tasks.image_parts import IMAGE_COLUMNS

_SOME = "<python>"  # stands for rows passed as objects
REWARD_TIMEOUT_S = 600.0  # TRL has no limit


@dataclass
class RunArguments:
    """Arguments of a run. values: the configuration by dotted keys; for_evaluation: additional ones of `evaluate`.
    updates: of the optimizer per step."""

    values: dict[str, Any]
    tasks: Any
    eval_tasks: Any
    for_evaluation: dict[str, Any] = field(default_factory=dict)
    updates: int = 1
    num_steps: int = 0
    steps_of_epoch: float = 0.0
    reward_names: list[str] = field(default_factory=list)


def convert_arguments(
    args: GRPOConfig,
    *,
    model: str,
    reward_funcs: Sequence[Any],
    train_dataset: Any,
    eval_dataset: Any,
    peft_config: Any,
    refused: Mapping[str, Any],
) -> RunArguments:
    """Convert the arguments. ConfigError names every field or argument without a counterpart.

    refused: arguments whose rows have no counterpart.
    """
    tasks, eval_tasks = _rows(train_dataset, "train_dataset"), _rows(eval_dataset, "eval_dataset")
    if tasks is None:
        raise ConfigError("train_dataset is missing: give a datasets.Dataset, or a list of dicts with a prompt")
    rewards = _named([_reward(one) for one in reward_funcs])
    options: dict[str, Any] = args.given() | {
        "model": model, "train_dataset": _SOME, "prompts": _form_of_prompts(tasks), "reward_funcs": rewards,
        "output_dir": args.output_dir or "trainer_output",
    }  # fmt: skip
    if options.get("report_to") in ("all", ["all"]):  # as in transformers: the installed ones
        options["report_to"] = [name for name in ADAPTERS if is_installed(name)]
    options |= {} if eval_tasks is None else {"eval_dataset": _SOME}
    options |= {} if peft_config is None else {"peft_config": _lora(peft_config)}
    options |= {name: value for name, value in refused.items() if value not in (None, [])}
    of = Options(options, TRL.rows)
    steps_of_epoch = _steps_of_epoch(tasks, of)
    if args.max_steps <= 0:
        options["max_steps"] = math.ceil(args.num_train_epochs * steps_of_epoch) * updates(of)
        if not options["max_steps"]:
            raise ConfigError(_no_steps(tasks, of))
    values = _values(options)
    evaluated = {}
    if eval_tasks is not None:
        asked = options | {"eval_strategy": "steps", "eval_steps": options["max_steps"], "eval_on_start": False}
        evaluated = {key: value for key, value in _values(asked).items() if key.startswith("eval.")}
    values |= {"rewards.timeout_s": REWARD_TIMEOUT_S}
    if _shows_images(tasks):
        values["model.vision"] = "trained"  # as in TRL, where nothing is frozen
    names = [row["name"] for row in rewards]
    return RunArguments(
        values, tasks, eval_tasks, evaluated, updates(of), values["train.num_steps"], steps_of_epoch, names
    )


def _values(options: Mapping[str, Any]) -> dict[str, Any]:
    done = convert(TRL, options)
    if done.questions:
        named = "\n".join(f"  {name}: {reason}" for name, reason in done.questions.items())
        raise ConfigError(f"GRPOConfig and GRPOTrainer: this has no counterpart here; leave it out:\n{named}")
    if why := done.left_out.get("report_to"):
        warnings.warn(f"GRPOConfig(report_to={options['report_to']!r}): {why}", stacklevel=2)
    return {key: value for key, (value, _) in done.values.items() if key != "tasks.sources"}


# Data


def _rows(rows: Any, name: str) -> Any:
    """Check `rows` by the first one, and return them. ConfigError for unsupported ones."""
    if rows is None:
        return None
    if isinstance(rows, Mapping):
        raise ConfigError(f"{name} is a dict of {', '.join(rows)}: give one of them, or several in one data set")
    if iter(rows) is rows:
        raise ConfigError(f"{name} is a {type(rows).__name__}, which is read once: give a datasets.IterableDataset")
    first = next(iter(rows), None)
    if not isinstance(first, Mapping) or "prompt" not in first:
        raise ConfigError(f"{name} has no column prompt in its first row, which is {first!r:.200}")
    return rows


def _shows_images(rows: Any) -> bool:
    return any(column in next(iter(rows)) for column in IMAGE_COLUMNS)


def _form_of_prompts(rows: Any) -> str:
    """Return "text" or "messages". Texts with images become messages, as in TRL."""
    is_text = isinstance(next(iter(rows))["prompt"], str) and not _shows_images(rows)
    return "text" if is_text else "messages"


def _steps_of_epoch(rows: Any, of: Options) -> float:
    return len(rows) // step(of)[0] if hasattr(rows, "__len__") else 0


def _no_steps(rows: Any, of: Options) -> str:
    if not hasattr(rows, "__len__"):
        return "train_dataset does not tell its length: set max_steps"
    return (
        f"train_dataset has {len(rows)} rows, and a step takes {step(of)[0]}: lower per_device_train_batch_size, or set"
        " max_steps"
    )


# Rewards and adapters


def _reward(reward: Any) -> dict[str, Any]:
    """Return a row of [[rewards.functions]]. A text is a reward model's name."""
    if isinstance(reward, str | Path):
        return {"function": "reward_model", "name": Path(reward).name, "params": {"path": str(reward)}}
    if not isinstance(reward, Callable):
        raise ConfigError(f"reward_funcs has a {type(reward).__name__}: give a function, or a reward model's name")
    plain = getattr(reward, "func", reward)  # functools.partial
    return {"function": NanIsNone(reward), "name": getattr(plain, "__name__", type(plain).__name__).strip("<>")}


def _named(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Append numbers to repeated names. With several rewards, change names that are reserved in the records."""
    seen: Counter[str] = Counter()
    for row in rows:
        row["name"] += "_reward" if row["name"] in RESERVED and len(rows) > 1 else ""
        seen[row["name"]] += 1
        row["name"] += f"_{seen[row['name']]}" if seen[row["name"]] > 1 else ""
    return rows


def _lora(config: Any) -> dict[str, Any]:
    """Return the arguments of a peft.LoraConfig that differ from defaults."""
    if isinstance(config, Mapping):
        return dict(config)
    if type(config).__name__ != "LoraConfig":
        raise ConfigError(f"peft_config is a {type(config).__name__}: adapters are those of peft.LoraConfig")
    usual = type(config)().to_dict()
    given = config.to_dict()
    return {name: value for name, value in given.items() if value != usual.get(name) or name in ("r", "lora_alpha")}
