"""Axolotl (GRPO and its asynchronous trainer, commit 067b021, with TRL 1.8): its options by our keys, row by row.

Most of `trl:` goes to TRL unchanged, whose rows (trl/rows.py) apply. The rows assume one process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollover.plugins.convert.files import flatten
from rollover.plugins.convert.mapping import (
    COMPUTE,
    TRACKING,
    Options,
    Row,
    System,
    Unanswered,
    for_trackers,
    log_completions,
    tracker_values,
    without,
)
from rollover.plugins.convert.trl.rows import TRL

# Fields of TRL's GRPOConfig by Axolotl's names.
TRL_FIELDS = {"base_model": "model"} | {f"trl.{name}": name for name in (
    "num_generations", "temperature", "repetition_penalty", "num_iterations", "loss_type",
    "importance_sampling_level", "beta", "use_bias_correction_kl", "sync_ref_model", "ref_model_sync_steps",
    "ref_model_mixup_alpha", "mask_truncated_completions", "off_policy_mask_threshold",
)}  # fmt: skip
# Further fields that the rows of these read.
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
# A project name enables its tracker.
_PROJECTS = {"wandb": "wandb_project", "mlflow": "mlflow_experiment_name", "trackio": "trackio_project_name"}
_NAMES = {"wandb": ("wandb_name", "wandb_run_id"), "mlflow": ("mlflow_run_name",), "trackio": ("trackio_run_name",)}


def trl_row(option: str, **changed: Any) -> Row:
    """Return the row of the TRL field behind `option`, with changes for Axolotl."""
    row = _ROWS[TRL_FIELDS[option]]
    names = {field: name for name, field in TRL_FIELDS.items()}

    def to(value: Any, options: Options) -> dict[str, Any]:
        given = {field: options(name) for field, name in (names | _BESIDE).items()}
        theirs = Options({field: item for field, item in given.items() if item is not None}, TRL.rows)
        return dict(row.values(value, theirs))

    values = {"default": row.default, "example": row.example, "note": row.note} | changed
    return Row(option, row.keys, to, **values)


def is_asynchronous(options: Options) -> bool:
    """Return whether Axolotl uses AsyncGRPOTrainer, not TRL's trainer or the sequence-parallel one."""
    parallel = int(options("context_parallel_size") or options("sequence_parallel_degree") or 1) > 1
    return not parallel and bool(options("trl.use_data_producer") or options("trl.async_prefetch"))


def _samples_an_update(options: Options) -> int:
    return int(options("micro_batch_size")) * int(options("gradient_accumulation_steps"))


def minibatches(options: Options) -> int:
    """Return the updates of one pass over the samples generated at once."""
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
    """Return the updates of a training step."""
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
    """Return the function that converts a number or share of updates to steps."""

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
    """Convert the data sets; a transformation of their rows is a question."""
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
    """Convert a function's module path, or a model of the hub or a folder."""
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
    """Convert generation ahead of training and the interval of weight syncs, which both increase staleness."""
    if not is_asynchronous(options):
        return {}
    waits = options("trl.use_vllm") and options("trl.async_prefetch")  # else weights are synced with every batch
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
    except Unanswered:  # `groups` asks about it
        values["rollout.in_flight_groups"] = "auto"
    return values


def correction(value: Any, options: Options) -> dict[str, Any]:
    """Convert the correction of TRL's trainer, or of Axolotl's, with other defaults and a floor of 1 / cap."""
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
    """Convert streaming: groups are scored and trained as they arrive."""
    if not options("trl.streaming_partial_batch"):
        return {}
    least = int(options("trl.streaming_min_groups") or 1)
    try:
        whole = least >= groups(None, options)["rollout.groups_per_step"]
    except Unanswered:  # `groups` asks about it
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
    """Convert warm-up. transformers' `constant` has none; Axolotl changes one update to two."""
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


# Trackers


def tools(options: Options) -> list[str]:
    """Return the enabled trackers."""
    named = [name for name in ("wandb", "tensorboard", "trackio", "mlflow") if _is_on(name, options)]
    return [name for name in named if name != "wandb" or options("wandb_mode") != "disabled"]


def _is_on(name: str, options: Options) -> bool:
    return bool(options(f"use_{name}") or (name in _PROJECTS and options(_PROJECTS[name])))


def trackers(value: Any, options: Options) -> dict[str, Any]:
    return tracker_values(tools(options))


def project(value: Any, options: Options) -> dict[str, Any]:
    """Return the project of the first tracker that has one."""
    named = [options(_PROJECTS[tool]) for tool in tools(options) if tool in _PROJECTS]
    named = [name for name in named if name]
    values = {**trackers(value, options), **({"track.project": named[0]} if named else {})}
    if value and value not in named[:1]:
        raise Unanswered(f"all tools have one project, {named[0]}" if named else "its tool is switched off", values)
    return values


def run_name(value: Any, options: Options) -> dict[str, Any]:
    """Return the run name of the first tracker that has one."""
    options_of = [option for tool in tools(options) for option in _NAMES.get(tool, ())]
    named = [options(option) for option in options_of if options(option)]
    return {"run.name": named[0]} if named else {}


def artifacts(value: Any, options: Options) -> dict[str, Any]:
    """Convert uploads of the model, which happen once, at the end."""
    on = options("wandb_log_model") in ("end", "checkpoint") and "wandb" in tools(options)
    on |= bool(options("hf_mlflow_log_artifacts")) and "mlflow" in tools(options)
    return {"track.artifacts": ["model"]} if on else {}


# fmt: off
ROWS = (
    Row("rl", ("algorithm.advantage", "algorithm.reward_weights"), advantage, "grpo", "gdpo",
        note="`grpo` and `gdpo`; others have no rollouts"),
    Row("datasets", ("tasks.sources",), sources, example=[{"path": "other.jsonl"}],
        note="`path`, `name`, `split`, `data_files`; a `type` is a function of rows, whose results are to be given"),
    Row("test_datasets", ("tasks.sources", "eval.num_tasks"), sources, example=[{"path": "test.jsonl"}],
        note="sources with `weight = 0`"),
    Row("val_set_size", ("tasks.eval_fraction", "eval.num_tasks"), held_out, 0.0, 0.2,
        note="held out by a hash of the problem, in every run the same"),
    trl_row("base_model"),
    Row("revision_of_model", ("model.revision",), example="v2"),
    Row("trust_remote_code", ("model.trust_remote_code",), example=True),
    Row("bf16", ("model.dtype",), dtype, "auto", False, also=("bfloat16",)),
    Row("float32", ("model.dtype",), lambda v, o: {"model.dtype": "float32"} if v else {}, example=True),
    Row("gradient_checkpointing", ("train.gradient_checkpointing",),
        lambda v, o: {"train.gradient_checkpointing": bool(v)}, example=True),
    Row("adapter", ("model.lora.rank", "model.lora.alpha", "model.lora.target_modules"), adapter, example="lora",
        note="`lora`; there is no `qlora`"),
    Row("lora_r", ("model.lora.rank",), example=16, when=has_lora),
    Row("lora_alpha", ("model.lora.alpha",), example=64, when=has_lora),
    Row("lora_dropout", ("model.lora.dropout",), default=0.0, example=0.1, when=has_lora),
    Row("lora_target_linear", ("model.lora.target_modules",), targets, example=True, when=has_lora,
        note="`all-linear`"),
    Row("lora_target_modules", ("model.lora.target_modules",), targets, example=["q_proj"], when=has_lora),
    Row("lora_model_dir", ("model.lora.path",), example="adapter", when=has_lora),
    Row("peft_use_rslora", ("model.lora.rslora",), example=True, when=has_lora),
    Row("peft_use_dora", ("model.lora.dora",), example=True, when=has_lora),
    Row("micro_batch_size", ("rollout.groups_per_step",), groups, 1, 16,
        note="multiplied by `gradient_accumulation_steps` and divided by `num_generations`: the groups of a step"),
    Row("gradient_accumulation_steps", ("rollout.groups_per_step",), groups, 1, 16),
    Row("trl.generation_batch_size", ("rollout.groups_per_step", "train.minibatches_per_step"), groups, example=128,
        note="samples that are generated at once; several updates of them are minibatches"),
    trl_row("trl.num_generations", example=16),
    Row("trl.max_completion_length", ("rollout.max_new_tokens",), completion_limit, 0, 512,
        note="not set, it has no limit there: asked for"),
    Row("vllm.max_model_len", ("tasks.max_prompt_tokens",), prompt_limit, example=2048,
        note="less `max_completion_length`; longer prompts are skipped here. Axolotl has no other limit of prompts"),
    trl_row("trl.temperature"),
    Row("trl.top_p", ("rollout.top_p",), None, 1.0, 0.9),
    Row("trl.top_k", ("rollout.top_k",), lambda v, o: {"rollout.top_k": max(int(v), 0)}, 0, 20),
    Row("trl.min_p", ("rollout.min_p",), example=0.1),
    trl_row("trl.repetition_penalty"),
    Row("trl.vllm_guided_decoding_regex", ("rollout.logits.regex",), example="[0-9]+",
        when=lambda o: o("trl.use_vllm")),
    Row("trl.reward_funcs", ("rewards.function", "rewards.functions"), rewards, [], ["mine.other"],
        note="`module.function` is `module:function`; a path of the hub is the reward `reward_model`"),
    Row("trl.reward_weights", ("rewards.functions",), rewards, example=[1.0, 0.5]),
    Row("trl.scale_rewards", ("algorithm.advantage", "algorithm.advantage_std"), advantage, True, False,
        note="off: `dr_grpo`"),
    Row("trl.multi_objective_aggregation", ("algorithm.advantage", "algorithm.reward_weights"), advantage,
        example="normalize_then_sum", note="`normalize_then_sum` is `gdpo`"),
    trl_row("trl.loss_type"),
    trl_row("trl.importance_sampling_level"),
    Row("trl.epsilon", ("algorithm.clip_low", "algorithm.clip_high"), clip, 0.2, 0.1),
    Row("trl.epsilon_high", ("algorithm.clip_high",), clip, example=0.28, note="not set: as `epsilon`"),
    trl_row("trl.num_iterations"),
    trl_row("trl.mask_truncated_completions"),
    trl_row("trl.off_policy_mask_threshold"),
    trl_row("trl.beta", also=("rl_beta",)),
    trl_row("trl.use_bias_correction_kl", default=False, example=True),
    trl_row("trl.sync_ref_model"),
    trl_row("trl.ref_model_sync_steps", default=64, example=8),
    trl_row("trl.ref_model_mixup_alpha", default=0.9, example=0.6),
    Row("trl.use_vllm", ("algorithm.correction", "algorithm.allow_uncorrected"), correction, False, True,
        note="without vLLM nothing is corrected there, with it TRL's `sequence_mask` up to 3; vLLM itself: `[engine]`"),
    Row("trl.use_data_producer", ("algorithm.correction", "algorithm.correction_floor"),
        lambda v, o: correction(v, o) | overlap(v, o), False, True,
        note="Axolotl's own trainer: `token_truncate`, with a floor of 1 / cap"),
    Row("trl.async_prefetch", ("rollout.overlap", "rollout.in_flight_groups", "rollout.max_staleness"), overlap,
        False, True, note="`interrupt = \"never\"`: what is generated ahead has one version"),
    Row("trl.prefetch_depth", ("rollout.max_staleness", "rollout.in_flight_groups"), overlap, 1, 2,
        note="`(1 + prefetch_depth) * groups_per_step` groups; their age is bounded here"),
    Row("trl.vllm_sync_interval", ("train.publish_every", "rollout.max_staleness"), overlap, 1, 2,
        note="with `async_prefetch`. Axolotl counts updates, here they are steps"),
    Row("trl.vllm_importance_sampling_correction", ("algorithm.correction",), correction, True, False),
    Row("trl.vllm_importance_sampling_mode", ("algorithm.correction",), correction, example="sequence_truncate",
        note="a masked weight is 0 here; in Axolotl's own trainer it comes back as 1 / cap"),
    Row("trl.vllm_importance_sampling_cap", ("algorithm.correction_cap",), correction, 3.0, 2.0,
        note="without `use_data_producer` and `async_prefetch` it has no effect there"),
    Row("trl.reward_num_workers", ("rewards.num_workers",),
        lambda v, o: {"rewards.num_workers": max(1, int(v))}, 1, 4, when=is_asynchronous, note="below 1 is 1"),
    Row("trl.streaming_partial_batch", ("rewards.streaming", "train.streaming_min_groups"), streaming, False, True,
        when=is_asynchronous),
    Row("trl.streaming_min_groups", ("rewards.streaming", "train.streaming_min_groups"), streaming, 1, 2,
        when=is_asynchronous),
    Row("trl.replay_buffer_size", ("replay.size", "replay.max_staleness"), replay, 0, 64, when=is_asynchronous,
        note="their age is bounded here, and a step of `streaming_partial_batch` is replayed into, too"),
    Row("trl.reroll_start_fraction", ("reroll.start_fraction", "reroll.max_groups", "reroll.failed_at_most"),
        reroll, 1.0, 0.25, when=is_asynchronous,
        note="as the option describes; at commit 067b021 no code calls the hook (`_pre_produce_hook`)"),
    Row("trl.reroll_max_groups", ("reroll.max_groups",), reroll, 1, 2, when=is_asynchronous),
    Row("trl.skip_zero_advantage_batches", ("train.skip_zero_advantage",), default=True, example=False,
        when=is_asynchronous),
    Row("learning_rate", ("train.learning_rate",), lambda v, o: {"train.learning_rate": float(v)}, example=1e-6),
    Row("lr_scheduler", ("train.schedule",), schedule, "cosine", "linear"),
    Row("cosine_min_lr_ratio", ("train.min_lr_ratio",), example=0.1, when=lambda o: o("lr_scheduler") == "cosine"),
    Row("warmup_ratio", ("train.warmup_ratio",), warmup, 0.03, 0.1, note="a schedule `constant` has none there"),
    Row("warmup_steps", ("train.warmup_steps",), warmup, example=10),
    Row("optimizer", ("train.optimizer",), optimizer, "adamw_torch_fused", "adamw_8bit"),
    *(Row(name, (key,), None, default, example, when=has_adam) for name, key, default, example in (
        ("adam_beta1", "train.adam_beta1", 0.9, 0.8), ("adam_beta2", "train.adam_beta2", 0.999, 0.95),
        ("adam_epsilon", "train.adam_eps", 1e-8, 1e-6))),
    Row("weight_decay", ("train.weight_decay",), None, 0.0, 0.1),
    Row("max_grad_norm", ("train.max_grad_norm",), None, 1.0, 0.5),
    Row("max_steps", ("train.num_steps",), steps, example=20, note="Axolotl counts updates"),
    Row("num_epochs", ("tasks.epochs",), epochs, 1.0, 3.0, note="without effect beside `max_steps`, as there"),
    Row("eval_steps", ("eval.every_steps",), every("eval.every_steps"), example=5, when=evaluates),
    Row("save_steps", ("checkpoint.every_steps",), every("checkpoint.every_steps"), example=20,
        note="updates, or a share of `max_steps`"),
    Row("save_total_limit", ("checkpoint.keep",), None, 4, 8),
    Row("output_dir", ("run.dir",), example="folder"),
    *(Row(f"use_{name}", ("track.trackers",), trackers, example=True)
      for name in ("wandb", "tensorboard", "trackio", "mlflow")),
    Row("use_comet", note="there is no Comet: docs/trackers.md has the tools that there are"),
    Row("wandb_mode", ("track.trackers",), trackers, example="disabled",
        note="`offline` is W&B's own variable `WANDB_MODE`"),
    *(Row(name, ("track.project", "track.trackers"), project, example="mine",
          note="a project switches its tool on") for name in
      ("wandb_project", "mlflow_experiment_name", "trackio_project_name")),
    *(Row(name, ("run.name",), run_name, example="mine")
      for name in ("wandb_name", "wandb_run_id", "mlflow_run_name", "trackio_run_name")),
    Row("wandb_entity", ("track.entity",), for_trackers(tools, "track.entity", of=("wandb",)), example="us"),
    Row("wandb_log_model", ("track.artifacts",), artifacts, example="end", note="the model of the end"),
    Row("hf_mlflow_log_artifacts", ("track.artifacts",), artifacts, example=True,
        note="the model of the end, no checkpoints"),
    Row("trl.log_completions", ("track.tracker_rollouts",), log_completions(tools), False, True,
        note="four of each step, where TRL sends all"),
    Row("seed", ("run.seed",), None, 42, 7),
    *without(COMPUTE, "trl.vllm_mode", "trl.vllm_server_host", "trl.vllm_server_port", "trl.vllm_server_timeout",
        "trl.vllm_enable_sleep_mode", "trl.vllm_lora_sync", "trl.use_liger_loss", "vllm.host", "vllm.port",
        "vllm.device", "vllm.dtype", "vllm.tensor_parallel_size", "vllm.data_parallel_size",
        "vllm.gpu_memory_utilization", "vllm.enable_prefix_caching", "vllm.enforce_eager", "vllm.serve_module",
        "vllm.worker_extension_cls", "vllm.enable_reasoning", "vllm.reasoning_parser", "batch_flattening",
        "eval_batch_size", "auto_find_batch_size", "attn_implementation", "flash_attention", "sdp_attention",
        "xformers_attention", "flex_attention", "sage_attention", "eager_attention", "flash_attn_cross_entropy",
        "flash_attn_fuse_mlp", "tf32", "gradient_checkpointing_kwargs", "selective_checkpointing",
        "activation_offloading", "layer_offloading", "torch_compile", "torch_compile_backend", "torch_compile_mode",
        "torch_compile_options", "deepspeed", "deepcompile", "fsdp", "fsdp_config.*", "fsdp_version",
        "fsdp_final_state_dict_type", "ddp", "ddp_*", "device", "device_map", "world_size", "local_rank",
        "dp_shard_size", "dp_replicate_size", "context_parallel_size", "sequence_parallel_degree", "heads_k_stride",
        "ring_attn_func", "tensor_parallel_size", "max_memory", "gpu_memory_limit", "low_cpu_mem_usage", "gc_steps",
        "gc_collect_steps", "torch_empty_cache_steps", "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel",
        "lora_embedding_kernel", "lora_on_cpu", "use_ray", "ray_num_workers", "resources_per_worker", "tiled_mlp",
        "tiled_mlp_*", "chunked_cross_entropy", "chunked_cross_entropy_num_chunks", "liger_*", "cut_cross_entropy",
        "use_kernels", "experts_implementation"),
    *without(TRACKING, "trl.num_completions_to_print", "logging_steps", "wandb_*", "mlflow_*", "comet_*", "trackio_*",
        "use_otel_metrics", "otel_metrics_*", "gradio_*", "ray_run_name", "profiler_steps", "profiler_steps_start",
        "include_tokens_per_second", "include_tkps", "hub_model_id", "hub_strategy", "hub_revision",
        "hf_use_auth_token", "save_safetensors", "save_strategy", "saves_per_epoch", "save_first_step",
        "save_only_model", "evals_per_epoch", "eval_strategy", "eval_table_size", "eval_max_new_tokens",
        "resume_from_checkpoint", "auto_resume_from_checkpoints", "strict", "loss_watchdog_*", "generate_samples",
        "tokenizer_save_jinja_files", "axolotl_config_path", "debug"),
    *without("how the data are prepared and stored before training",
        "dataset_prepared_path", "dataset_processes", "dataset_num_proc", "dataset_keep_in_memory",
        "dataset_shard_num", "num_dataset_shards_to_save", "skip_prepare_dataset", "push_dataset_to_hub",
        "dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor", "remove_unused_columns",
        "tokenizer_use_fast", "preprocess_iterable", "shuffle_merged_datasets", "shuffle_before_merging_datasets"),
    *without("no part of training by rollouts: other kinds of training read it",
        "sequence_len", "eval_sequence_len", "excess_length_strategy", "min_sample_len", "max_prompt_len",
        "sample_packing", "sample_packing_*", "eval_sample_packing", "pad_to_sequence_len", "pad_to_multiple_of",
        "train_on_inputs", "group_by_length", "batch_size", "do_bench_eval", "do_causal_lm_eval",
        "eval_causal_lm_metrics", "bench_*", "reward_model", "process_reward_model", "num_labels", "dpo_*", "kto_*",
        "orpo_alpha", "cpo_alpha", "simpo_gamma", "ebft", "ebft.*", "model_type", "type_of_model", "tokenizer_type",
        "is_*_derived_model"),
    *without("weights of 8 bits are not there", "load_in_8bit", "fp8", neutral=(False,)),
    *without("weights of 4 bits are not there", "load_in_4bit", neutral=(False,)),
    *without("there is no float16: set `model.dtype`", "fp16", "float16", neutral=(False,)),
    *without("the model's own template is used", "chat_template", neutral=("tokenizer_default",)),
    *without("the model's own template is used", "chat_template_jinja", neutral=()),
    *without("what is padded is in no loss", "special_tokens.pad_token"),
    *without("the model's own special tokens are used", "special_tokens.*", neutral=()),
    *without("no tokens are added to the vocabulary", "tokens", neutral=([],)),
    *without("no tokens are added to the vocabulary", "added_tokens_overrides", neutral=({},)),
    *without("the model's own tokenizer is used", "tokenizer_config", neutral=()),
    *without("Axolotl's GRPO does not hand it on, so it has no effect there. To use it here,"
        " set `model.chat_template_kwargs`", "trl.chat_template_kwargs", neutral=({},)),
    *without("Axolotl's GRPO does not hand it on, so it has no effect there. To use it here,"
        " set `[rollout]` and `[rollout.logits]`", "trl.generation_kwargs", neutral=({},)),
    *without("an agent is a workflow or an environment (docs/agents.md)", "trl.rollout_func", neutral=()),
    *without("replayed groups are always weighted again", "trl.replay_recompute_logps", neutral=(True,)),
    *without("a trainer of one's own: docs/own-functions.md says what may be one's own here", "trainer_cls",
        neutral=()),
    *without("docs/own-functions.md says what may be one's own here", "plugins",
        neutral=(["axolotl.integrations.liger.LigerPlugin"],
                 ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"])),
    *without("an environment of NeMo Gym is none of ours: `rollout.environment` and `[workflow]` take others"
        " (docs/agents.md)", "nemo_gym_*", neutral=()),
    *without("give a folder of weights that are random", "reinit_weights", neutral=(False,)),
    *without("rows that are there twice are trained twice", "dataset_exact_deduplication", neutral=(False,)),
    *without("give a file of the rows", "dataset_shard_idx", neutral=()),
    *without("set `streaming` of a source", "streaming", neutral=(False,)),
    *without("there is no pretraining", "pretraining_dataset", neutral=()),
    *without("docs/tasks.md says in which order tasks come", "curriculum_sampling", neutral=(False,)),
    *without("a schedule has `train.warmup_steps` and `train.min_lr_ratio`", "lr_scheduler_kwargs", neutral=({},)),
    *without("the cosine ends with the run", "cosine_constant_lr_ratio", neutral=()),
    *without("all weights have one learning rate", "lr_groups", "embedding_lr", "embedding_lr_scale", neutral=()),
    *without("both factors of an adapter have one learning rate", "loraplus_lr_ratio", neutral=()),
    *without("set `[train]`", "optim_args", neutral=({},)),
    *without("there is no GaLore", "optim_target_modules", neutral=()),
    *without("with adapters nothing else is trained", "lora_modules_to_save", neutral=([],)),
    *without("adapters are of linear layers", "lora_target_parameters", neutral=([],)),
    *without("adapters have one rank", "lora_rank_pattern", neutral=({},)),
    *without("adapters have one alpha", "lora_alpha_pattern", neutral=({},)),
    *without("name the layers in `model.lora.target_modules`", "peft_layers_to_transform", neutral=()),
    *without("adapters begin as peft's default has them", "peft_init_lora_weights", neutral=(True,)),
    *without("adapters begin as peft's default has them", "peft", neutral=({},)),
    *without("all weights are trained, or adapters", "unfrozen_parameters", neutral=()),
    *without("there is no noise on embeddings", "neftune_noise_alpha", neutral=()),
    *without("there is no LISA", "lisa_*", neutral=()),
    *without("there is no ReLoRA", "relora", neutral=(False,)),
    *without("there is no training for quantised weights", "qat", "quantization", neutral=()),
    *without("the model's own configuration is used", "overrides_of_model_config", "overrides_of_model_kwargs",
        neutral=({},)),
    *without("set `eval.patience`, which counts evaluations of rewards", "early_stopping_patience", neutral=()),
    *without("set `checkpoint.save_best_model`", "load_best_model_at_end", neutral=(False,)),
    *without("set `eval.metric`", "metric_for_best_model", neutral=()),
)
# fmt: on
BASE = {
    "rl": "grpo",
    "base_model": "smollm2-135m",
    "datasets": [{"path": "train.jsonl"}],
    "trl.num_generations": 8,
    "trl.max_completion_length": 256,
    "trl.reward_funcs": ["mine.score"],
    "micro_batch_size": 8,
    "gradient_accumulation_steps": 8,
    "learning_rate": 1e-5,
}  # fmt: skip
AXOLOTL = System("axolotl", ROWS, BASE, "max_steps")


def is_axolotl(tables: Mapping[str, Any]) -> bool:
    return any(name in tables for name in ("base_model", "trl", "rl", "micro_batch_size", "adapter"))


def options_of_axolotl(tables: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Read the options that have a value, nested ones as `trl.beta`."""
    kind = tables.get("rl")
    if kind not in ("grpo", "gdpo"):
        raise ValueError(f"rl: {kind} trains on no rollouts of the policy; rl: grpo and rl: gdpo can be converted")
    return {name: value for name, value in flatten(tables, whole="kwargs").items() if value is not None}
