"""How values of Axolotl's options become values of ours: the functions that rows.py names."""

from __future__ import annotations

import math
from typing import Any

from rollover.plugins.convert import shown
from rollover.plugins.convert.mapping import Options, Row, Unanswered
from rollover.plugins.convert.trl.rows import TRL

# Fields of TRL's GRPOConfig under the names that Axolotl hands them on by.
TRL_FIELDS = {"base_model": "model"} | {f"trl.{name}": name for name in (
    "num_generations", "temperature", "repetition_penalty", "num_iterations", "loss_type",
    "importance_sampling_level", "beta", "use_bias_correction_kl", "sync_ref_model", "ref_model_sync_steps",
    "ref_model_mixup_alpha", "mask_truncated_completions", "off_policy_mask_threshold",
)}  # fmt: skip
# What the rows of these read besides.
_BESIDE = {
    "use_vllm": "trl.use_vllm",
    "per_device_train_batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "generation_batch_size": "trl.generation_batch_size",
}
_ROWS = {row.option: row for row in TRL.rows}
_OPTIMIZERS = {name: "adamw" for name in (
    "adamw_torch_fused", "adamw_torch", "adamw_hf", "adamw_apex_fused", "paged_adamw_32bit", "optimi_adamw",
    "flash_adamw",
)} | {name: "adamw_8bit" for name in ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")} | {"sgd": "sgd"}  # fmt: skip
_SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
# Naming a project for a tool switches it on.
_PROJECTS = {"wandb": "wandb_project", "mlflow": "mlflow_experiment_name", "trackio": "trackio_project_name"}
_NAMES = {"wandb": ("wandb_name", "wandb_run_id"), "mlflow": ("mlflow_run_name",), "trackio": ("trackio_run_name",)}


def trl_row(option: str, **changed: Any) -> Row:
    """The row of the field of TRL's that `option` is, with what is different at Axolotl."""
    row = _ROWS[TRL_FIELDS[option]]
    names = {field: name for name, field in TRL_FIELDS.items()}

    def to(value: Any, options: Options) -> dict[str, Any]:
        given = {field: options(name) for field, name in (names | _BESIDE).items()}
        theirs = Options({field: item for field, item in given.items() if item is not None}, TRL.rows)
        return dict(row.values(value, theirs))

    values = {"default": row.default, "example": row.example, "note": row.note} | changed
    return Row(option, row.keys, to, **values)


def is_asynchronous(options: Options) -> bool:
    """Whether Axolotl takes its own trainer (AsyncGRPOTrainer), and not TRL's or the sequence-parallel one."""
    parallel = int(options("context_parallel_size") or options("sequence_parallel_degree") or 1) > 1
    return not parallel and bool(options("trl.use_data_producer") or options("trl.async_prefetch"))


def _samples_an_update(options: Options) -> int:
    return int(options("micro_batch_size")) * int(options("gradient_accumulation_steps"))


def minibatches(options: Options) -> int:
    """Updates of one pass over what is generated at once."""
    at_once = options("trl.generation_batch_size")
    if at_once is None:
        return 1
    if at_once % _samples_an_update(options):
        raise Unanswered(
            f"{at_once} samples are generated at once, of which an update takes {_samples_an_update(options)}: here a"
            " step is updated on whole minibatches. Set --rollout.groups_per_step and --train.minibatches_per_step"
        )
    return at_once // _samples_an_update(options)


def updates(options: Options) -> int:
    """Updates of a training step of ours."""
    return minibatches(options) * int(options("trl.num_iterations") or 1)


def groups(value: Any, options: Options) -> dict[str, Any]:
    samples, size = minibatches(options) * _samples_an_update(options), int(options("trl.num_generations"))
    if samples % size:
        raise Unanswered(
            f"{samples} samples of one process are no whole groups of {size}: with N processes a step has"
            f" {samples} * N / {size} groups. Set --rollout.groups_per_step"
        )
    several = {"train.minibatches_per_step": minibatches(options)} if minibatches(options) > 1 else {}
    if several and int(options("trl.num_iterations") or 1) > 1:
        several["train.reshuffle"] = False
    return {"rollout.groups_per_step": samples // size} | several


def steps(value: Any, options: Options) -> dict[str, Any]:
    return {"train.num_steps": math.ceil(value / updates(options))} if value > 0 else {}


def epochs(value: Any, options: Options) -> dict[str, Any]:
    if options("max_steps"):
        return {}
    if value != int(value):
        raise Unanswered(f"{value} passes over the data: here they are whole. Set --tasks.epochs")
    return {"tasks.epochs": int(value)}


def every(key: str) -> Any:
    """Steps of ours, of a number of updates or a share of all of them."""

    def to(value: Any, options: Options) -> dict[str, Any]:
        if 0 < value < 1:
            if not options("max_steps"):
                return {}
            value = math.ceil(value * options("max_steps"))
        return {key: math.ceil(value / updates(options))}

    return to


def evaluates(options: Options) -> bool:
    return bool(options("test_datasets") or options("val_set_size"))


def held_out(value: Any, options: Options) -> dict[str, Any]:
    if not value:
        return {} if options("test_datasets") else {"tasks.eval_fraction": 0.0}
    if value >= 1:
        raise Unanswered(f"{value} rows are held out: here it is a share of them. Set --tasks.eval_fraction")
    return {"tasks.eval_fraction": value, "eval.num_tasks": 100_000}


def sources(value: Any, options: Options) -> dict[str, Any]:
    """The data sets as they are; what Axolotl makes of their rows is asked about."""
    questions: list[str] = []
    values: dict[str, Any] = {"tasks.sources": [_source(row, questions) for row in options("datasets") or []]}
    if tests := options("test_datasets"):
        values["tasks.sources"] += [_source(row, questions) | {"weight": 0.0} for row in tests]
        values["eval.num_tasks"] = 100_000
    if questions:
        raise Unanswered("; ".join(dict.fromkeys(questions)), values)
    return values


def _source(row: Any, questions: list[str]) -> dict[str, Any]:
    names = {"path": "path", "name": "subset", "split": "split"}
    made: dict[str, Any] = {"kind": "dataset"}
    for name, value in row.items():
        if value is None or name in ("ds_type", "trust_remote_code"):
            continue
        if name == "data_files" and len(value if isinstance(value, list) else [value]) == 1:
            made["path"] = value[0] if isinstance(value, list) else value
        elif name in names:
            made.setdefault(names[name], value)
        elif name == "type":
            questions.append(
                f"its rows go through {value}, a function or rule of Axolotl's: give a file of what comes out (columns"
                " prompt and answer) in its place"
            )
        else:
            questions.append(f"{name} of a data set is not known here")
    return made


def advantage(value: Any, options: Options) -> dict[str, Any]:
    scaled = options("trl.scale_rewards")
    if options("rl") == "gdpo" or options("trl.multi_objective_aggregation") == "normalize_then_sum":
        weights = {row["function"].rpartition(":")[2]: row["weight"] for row in _rows(options)}
        of = {"algorithm.advantage": "gdpo", "algorithm.advantage_std": "sample"}
        return of | ({"algorithm.reward_weights": weights} if weights else {})
    if not scaled:
        return {"algorithm.advantage": "dr_grpo"}
    return {"algorithm.advantage": "grpo", "algorithm.advantage_std": "sample"}


def rewards(value: Any, options: Options) -> dict[str, Any]:
    rows = _rows(options)
    if not rows:
        raise Unanswered("no reward is named: set --rewards.function")
    if len(rows) == 1 and rows[0]["weight"] == 1 and "params" not in rows[0]:
        return {"rewards.function": rows[0]["function"]}
    return {"rewards.functions": rows}


def _rows(options: Options) -> list[dict[str, Any]]:
    names = options("trl.reward_funcs") or []
    weights = options("trl.reward_weights") or [1.0] * len(names)
    if len(weights) != len(names):
        raise Unanswered(f"{len(names)} rewards have {len(weights)} weights")
    return [_reward(name) | {"weight": float(weight)} for name, weight in zip(names, weights, strict=True)]


def _reward(name: str) -> dict[str, Any]:
    """A function by its module, or a model of the hub or of a folder."""
    if "/" in name:
        return {"function": "reward_model", "params": {"path": name}}
    module, _, function = name.rpartition(".")
    if not module:
        raise Unanswered(f"{name} names no module: write module.{name}")
    return {"function": f"{module}:{function}"}


def clip(value: Any, options: Options) -> dict[str, Any]:
    low, high = options("trl.epsilon"), options("trl.epsilon_high")
    return {"algorithm.clip_low": low, "algorithm.clip_high": low if high is None else high}


def overlap(value: Any, options: Options) -> dict[str, Any]:
    """Generation ahead of training, and weights that are handed over every few updates: both make tokens older."""
    if not is_asynchronous(options):
        return {}
    waits = options("trl.use_vllm") and options("trl.async_prefetch")  # else weights are handed over with every batch
    interval = int(options("trl.vllm_sync_interval") or 1) if waits else 1
    publish = interval // math.gcd(interval, updates(options))
    values: dict[str, Any] = {"train.publish_every": publish} if publish > 1 else {}
    ahead = int(options("trl.prefetch_depth") or 1) if options("trl.async_prefetch") else 0
    if ahead + publish > 1:
        values["rollout.max_staleness"] = ahead + publish - 1
    if not ahead:
        return values
    values |= {"rollout.overlap": True, "rollout.interrupt": "never"}
    try:
        values["rollout.in_flight_groups"] = (1 + ahead) * groups(None, options)["rollout.groups_per_step"]
    except Unanswered:  # which is asked about there
        values["rollout.in_flight_groups"] = "auto"
    return values


def correction(value: Any, options: Options) -> dict[str, Any]:
    """Of TRL's trainer and of Axolotl's own, which has other defaults and a floor of 1 / cap."""
    ours = is_asynchronous(options)
    mode = options("trl.vllm_importance_sampling_mode") or ("token_truncate" if ours else "sequence_mask")
    cap = options("trl.vllm_importance_sampling_cap") or 3.0
    if not ours and cap != 3.0:
        raise Unanswered(
            "Axolotl hands it on with use_data_producer or async_prefetch alone, and 3.0 holds: set"
            " --algorithm.correction_cap"
        )
    if not options("trl.use_vllm") or options("trl.vllm_importance_sampling_correction") is False:
        wanting = overlap(None, options).get("rollout.max_staleness", 0) > 0 or _alters_sampling(options)
        return {"algorithm.correction": "none"} | ({"algorithm.allow_uncorrected": True} if wanting else {})
    values = {"algorithm.correction": mode, "algorithm.correction_cap": float(cap)}
    if ours and mode.endswith("truncate"):
        values["algorithm.correction_floor"] = round(1 / cap, 6)
    return values


def _alters_sampling(options: Options) -> bool:
    top_p, top_k, min_p = (options(f"trl.{name}") for name in ("top_p", "top_k", "min_p"))
    penalty = options("trl.repetition_penalty") or 1.0
    regex = bool(options("trl.vllm_guided_decoding_regex"))
    return (top_p or 1.0) < 1 or (top_k or 0) > 0 or (min_p or 0) > 0 or penalty != 1 or regex


def streaming(value: Any, options: Options) -> dict[str, Any]:
    """Its groups are scored, and their gradient is computed, as they come."""
    if not options("trl.streaming_partial_batch"):
        return {}
    least = int(options("trl.streaming_min_groups") or 1)
    try:
        whole = least >= groups(None, options)["rollout.groups_per_step"]
    except Unanswered:  # which is asked about there
        whole = False
    return {"rewards.streaming": True} | ({} if whole else {"train.streaming_min_groups": least})


def replay(value: Any, options: Options) -> dict[str, Any]:
    if not value:
        return {}
    bound = overlap(None, options).get("rollout.max_staleness", 0) + 4
    return {"replay.size": value, "replay.max_staleness": bound}


def reroll(value: Any, options: Options) -> dict[str, Any]:
    start = options("trl.reroll_start_fraction")
    if start >= 1:
        return {}
    values = {"reroll.start_fraction": start, "reroll.max_groups": options("trl.reroll_max_groups")}
    return values | {"reroll.failed_at_most": "equal_zero"}


def schedule(value: Any, options: Options) -> dict[str, Any]:
    if value not in _SCHEDULES:
        raise Unanswered(f"{value} is no schedule that there is here: {', '.join(sorted(set(_SCHEDULES.values())))}")
    return {"train.schedule": _SCHEDULES[value]}


def warmup(value: Any, options: Options) -> dict[str, Any]:
    """transformers' `constant` has no warm-up; Axolotl makes one update of it two."""
    if options("lr_scheduler") == "constant":
        return {}
    if options("warmup_steps") is not None:
        num = int(options("warmup_steps"))
        return {"train.warmup_steps": 2 if num == 1 else num}
    share = options("warmup_ratio")
    return {"train.warmup_ratio": 0.03 if share is None else share}


def optimizer(value: Any, options: Options) -> dict[str, Any]:
    if value not in _OPTIMIZERS:
        raise Unanswered(f"{value} is no optimizer that there is here: {', '.join(sorted(set(_OPTIMIZERS.values())))}")
    name = _OPTIMIZERS[value]
    return {"train.optimizer": name} | ({"train.momentum": 0.0} if name == "sgd" else {})


def has_adam(options: Options) -> bool:
    return options("optimizer") != "sgd"


def has_lora(options: Options) -> bool:
    return options("adapter") == "lora"


def adapter(value: Any, options: Options) -> dict[str, Any]:
    if value != "lora":
        raise Unanswered(f"{value}: weights of 4 or 8 bits, or other adapters, are not there; lora is")
    if not options("lora_r") or not options("lora_alpha"):
        raise Unanswered("lora without lora_r and lora_alpha: set both")
    values = {"model.lora.rank": options("lora_r"), "model.lora.alpha": float(options("lora_alpha"))}
    return values | targets(None, options)


def targets(value: Any, options: Options) -> dict[str, Any]:
    named = options("lora_target_modules") or []
    if options("lora_target_linear") or named == "all-linear":
        return {"model.lora.target_modules": ["all-linear"]}
    if not named:
        raise Unanswered("no lora_target_modules: peft's choice depends on the model. Set --model.lora.target_modules")
    return {"model.lora.target_modules": [named] if isinstance(named, str) else named}


def dtype(value: Any, options: Options) -> dict[str, Any]:
    if value:
        return {"model.dtype": "bfloat16"}
    if options("fp16"):
        raise Unanswered("there is no float16: bfloat16 and float32 are there. Set --model.dtype")
    return {"model.dtype": "float32"}


def prompt_limit(value: Any, options: Options) -> dict[str, Any]:
    return {"tasks.max_prompt_tokens": max(value - options("trl.max_completion_length"), 1)}


def completion_limit(value: Any, options: Options) -> dict[str, Any]:
    if not value:
        raise Unanswered("it is not set, and TRL then has no limit: set --rollout.max_new_tokens")
    return {"rollout.max_new_tokens": value}


# Where it is shown


def tools(options: Options) -> list[str]:
    """The tools that are switched on."""
    named = [name for name in ("wandb", "tensorboard", "trackio", "mlflow") if _is_on(name, options)]
    return [name for name in named if name != "wandb" or options("wandb_mode") != "disabled"]


def _is_on(name: str, options: Options) -> bool:
    return bool(options(f"use_{name}") or (name in _PROJECTS and options(_PROJECTS[name])))


def trackers(value: Any, options: Options) -> dict[str, Any]:
    return shown.trackers(tools(options))


def project(value: Any, options: Options) -> dict[str, Any]:
    """Of the first tool that names one."""
    named = [options(_PROJECTS[tool]) for tool in tools(options) if tool in _PROJECTS]
    named = [name for name in named if name]
    values = {**trackers(value, options), **({"track.project": named[0]} if named else {})}
    if value and value not in named[:1]:
        raise Unanswered(f"all tools have one project, {named[0]}" if named else "its tool is switched off", values)
    return values


def run_name(value: Any, options: Options) -> dict[str, Any]:
    """Of the first tool that names one."""
    options_of = [option for tool in tools(options) for option in _NAMES.get(tool, ())]
    named = [options(option) for option in options_of if options(option)]
    return {"run.name": named[0]} if named else {}


def artifacts(value: Any, options: Options) -> dict[str, Any]:
    """The model, which a tool is given once, at the end."""
    on = options("wandb_log_model") in ("end", "checkpoint") and "wandb" in tools(options)
    on |= bool(options("hf_mlflow_log_artifacts")) and "mlflow" in tools(options)
    return {"track.artifacts": ["model"]} if on else {}
