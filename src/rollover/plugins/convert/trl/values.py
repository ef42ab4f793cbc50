"""Functions of rows.py that convert values of TRL's GRPOConfig and of GRPOTrainer's arguments.

TRL counts updates of the optimizer. Here a training step has `updates(options)` of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rollover.plugins.convert.mapping import Options, Unanswered, tracker_values

# fmt: off
_LOSSES = {
    "grpo": ("clip", "seq-mean-token-mean"), "dapo": ("clip", "token-mean"), "bnpo": ("clip", "token-mean"),
    "dr_grpo": ("clip", "seq-mean-token-sum-norm"), "cispo": ("cispo", "token-mean"),
    "sapo": ("sapo", "seq-mean-token-mean"), "luspo": ("luspo", "seq-mean-token-sum"), "vespo": ("vespo", "token-mean"),
}
_OPTIMIZERS = {
    "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adamw_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit", "paged_adamw_8bit": "adamw_8bit", "sgd": "sgd",
}
_SCHEDULES = {
    "linear": "linear", "cosine": "cosine", "cosine_with_min_lr": "cosine", "constant": "constant",
    "constant_with_warmup": "constant",
}
# Of transformers' GenerationConfig or vLLM's SamplingParams.
_GENERATION = {
    "temperature": "rollout.temperature", "top_p": "rollout.top_p", "top_k": "rollout.top_k", "min_p": "rollout.min_p",
    "max_new_tokens": "rollout.max_new_tokens", "max_tokens": "rollout.max_new_tokens",
    "repetition_penalty": "rollout.logits.repetition_penalty", "presence_penalty": "rollout.logits.presence_penalty",
    "frequency_penalty": "rollout.logits.frequency_penalty", "min_new_tokens": "rollout.logits.min_new_tokens",
    "min_tokens": "rollout.logits.min_new_tokens", "suppress_tokens": "rollout.logits.banned_token_ids",
    "stop": "rollout.stop", "stop_strings": "rollout.stop", "stop_token_ids": "rollout.stop_token_ids",
}
# fmt: on


# How many samples a step has, and in how many updates


def _samples(options: Options) -> tuple[int, int]:
    """Return (samples generated at once, their micro-batches)."""
    micro = options("per_device_train_batch_size") * options("num_processes")
    at_once, portions = options("generation_batch_size"), options("steps_per_generation")
    if at_once and portions:
        raise Unanswered("generation_batch_size and steps_per_generation say the same: TRL takes one of them")
    if at_once and at_once % micro:
        raise Unanswered(f"{at_once} samples are no whole number of micro-batches of {micro}: TRL refuses that")
    portions = at_once // micro if at_once else portions or options("gradient_accumulation_steps")
    return micro * portions, portions


def step(options: Options) -> tuple[int, int]:
    """Return (groups of a training step, its minibatches)."""
    samples, portions = _samples(options)
    of_update = options("gradient_accumulation_steps")
    if of_update > portions:  # an update of several generations, all by the same weights
        if of_update % portions or options("num_iterations") > 1:
            raise Unanswered(
                f"an update of {of_update} micro-batches with {portions} a generation and num_iterations ="
                f" {options('num_iterations')}: here a step has one or more whole updates"
            )
        samples, portions = samples * of_update // portions, of_update
    if samples % options("num_generations"):
        raise Unanswered(f"{samples} samples are no whole groups of {options('num_generations')}: TRL refuses that")
    groups = samples // options("num_generations")
    if portions % of_update or groups % (portions // of_update):
        raise Unanswered(
            f"{groups} groups in {portions / of_update:g} updates: TRL parts groups among updates, here each update"
            " has whole groups, all as many"
        )
    return groups, portions // of_update


def updates(options: Options) -> int:
    """Return the updates of the optimizer in a training step."""
    return step(options)[1] * options("num_iterations")


def groups(value: Any, options: Options) -> dict[str, Any]:
    groups, minibatches = step(options)
    return {"rollout.groups_per_step": groups, "train.minibatches_per_step": minibatches}


def steps(value: Any, options: Options) -> dict[str, Any]:
    return {"train.num_steps": math.ceil(value / updates(options))} if value > 0 else {}


def in_steps(value: Any, options: Options) -> int:
    """Convert a number of updates, or a share of all updates, to training steps."""
    if value < 1:
        if not (options("max_steps") or 0) > 0:
            raise Unanswered(f"{value} is a share of the run, of whose length nothing is known")
        value = math.ceil(value * options("max_steps"))
    return max(1, math.ceil(value / updates(options)))


# The algorithm


def _loss_name(options: Options) -> tuple[str, str]:
    name = options("loss_type")
    if name not in _LOSSES:
        raise Unanswered(f"{name} is no loss that there is here")
    loss, aggregation = _LOSSES[name]
    sequence = options("importance_sampling_level") == "sequence"
    if loss == "luspo" and not sequence:
        loss = "clip"
    return ("gspo" if sequence and loss == "clip" else loss), aggregation


def loss(value: Any, options: Options) -> dict[str, Any]:
    loss, aggregation = _loss_name(options)
    values: dict[str, Any] = {"algorithm.loss": loss, "algorithm.aggregation": aggregation}
    further: dict[str, Any] = {}
    if options("importance_sampling_level") == "sequence" and loss in ("cispo", "sapo"):
        further["level"] = "sequence"
    if loss == "sapo":
        further |= {"tau_positive": options("sapo_temperature_pos"), "tau_negative": options("sapo_temperature_neg")}
    if loss == "vespo":
        for name in ("k", "lambda"):
            further[f"{name}_positive"] = options(f"vespo_{name}_pos")
            further[f"{name}_negative"] = options(f"vespo_{name}_neg")
    return values | ({"algorithm.loss_options": further} if further else {})


def clip_low(value: Any, options: Options) -> dict[str, Any]:
    loss, _ = _loss_name(options)
    if loss in ("sapo", "vespo"):
        return {}
    return {"algorithm.clip_low": 1.0 if loss == "cispo" else value}


def clip_high(value: Any, options: Options) -> dict[str, Any]:
    loss, _ = _loss_name(options)
    if loss in ("sapo", "vespo"):
        return {}
    value = options("epsilon") if value is None else value
    if loss != "cispo":
        return {"algorithm.clip_high": value}
    if value <= 1:
        raise Unanswered(f"with loss_type = cispo it is the largest ratio itself, and {value} is below 1 (5.0, say)")
    return {"algorithm.clip_high": value - 1}


def delta(value: Any, options: Options) -> dict[str, Any]:
    if value is None:
        return {}
    high = options("epsilon") if options("epsilon_high") is None else options("epsilon_high")
    if _loss_name(options)[0] != "clip":
        raise Unanswered("there is a second bound of the ratios of tokens alone, with the clipped loss")
    if value <= 1 + high:
        raise Unanswered("below 1 + epsilon_high it bounds positive advantages, too: here it bounds negative ones")
    return {"algorithm.dual_clip": value}


def advantage(value: Any, options: Options) -> dict[str, Any]:
    if options("multi_objective_aggregation") == "normalize_then_sum":
        rows = reward_rows(options)
        weights = {row["name"]: row.get("weight", 1.0) for row in rows}
        if len(rows) < 2:
            raise Unanswered("normalize_then_sum is of several rewards, and reward_funcs names none or one")
        return {"algorithm.advantage": "gdpo", "algorithm.reward_weights": weights}
    if options("multi_objective_aggregation") != "sum_then_normalize":
        raise Unanswered(f"{options('multi_objective_aggregation')} is no aggregation that there is here")
    value = options("scale_rewards")
    if value in ("none", False):
        return {"algorithm.advantage": "dr_grpo"}
    std = "batch" if value == "batch" else "sample"
    return {"algorithm.advantage": "grpo", "algorithm.advantage_std": std}


def syncs_reference(options: Options) -> bool:
    return bool(options("beta") and options("sync_ref_model"))


# Off-policy correction: TRL corrects for vLLM's log-probs alone


def correction(value: Any, options: Options) -> dict[str, Any]:
    on = options("use_vllm") and options("vllm_importance_sampling_correction")
    mode, low = options("vllm_importance_sampling_mode"), options("vllm_importance_sampling_clip_min")
    old = options("vllm_importance_sampling_cap")  # of older releases
    cap = options("vllm_importance_sampling_clip_max") if old is None else old
    if options("loss_type") == "vespo":  # contains the weight itself, as token_truncate
        if not on:
            return {}
        if mode != "token_truncate" or low or cap is None:
            raise Unanswered("the loss vespo holds weights of tokens that are truncated from above")
        return {"algorithm.correction_cap": cap}
    if not on:
        return {"algorithm.correction": "none"}
    values = {"algorithm.correction": mode, "algorithm.correction_cap": 1e9 if cap is None else cap}
    return values | ({"algorithm.correction_floor": low} if low else {})


def sampled(key: str) -> Any:
    """Return the function of a sampling option. TRL does not correct for top_p and the like."""

    def to(value: Any, options: Options) -> dict[str, Any]:
        default = {"rollout.top_p": 1.0, "rollout.logits.repetition_penalty": 1.0}.get(key, 0)
        value = default if value is None else value
        return {key: value} | ({} if value == default else _uncorrected(options))

    return to


def _uncorrected(options: Options) -> dict[str, Any]:
    on = options("use_vllm") and options("vllm_importance_sampling_correction")
    return {} if on or options("loss_type") == "vespo" else {"algorithm.allow_uncorrected": True}


def regex(value: Any, options: Options) -> dict[str, Any]:
    return {"rollout.logits.regex": value} | _uncorrected(options) if value else {}


def generation(value: Any, options: Options) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, item in (value or {}).items():
        if name == "do_sample" and item is True or name in ("num_return_sequences", "use_cache"):
            continue
        if name not in _GENERATION:
            raise Unanswered(f"there is no option for {name} of a generation")
        key = _GENERATION[name]
        values[key] = [item] if key == "rollout.stop" and isinstance(item, str) else item
        if key.startswith("rollout.logits") or name in ("top_p", "top_k", "min_p"):
            values |= _uncorrected(options)
    return values


# The optimizer


def optimizer(value: Any, options: Options) -> dict[str, Any]:
    if value not in _OPTIMIZERS:
        raise Unanswered(f"there is no optimizer {value}: {', '.join(_OPTIMIZERS)} are")
    ours = _OPTIMIZERS[value]
    return {"train.optimizer": ours} | ({"train.momentum": 0.0} if ours == "sgd" else {})


def has_adam(options: Options) -> bool:
    return _OPTIMIZERS.get(options("optim")) != "sgd"


def schedule(value: Any, options: Options) -> dict[str, Any]:
    name, further = str(options("lr_scheduler_type")), dict(options("lr_scheduler_kwargs") or {})
    if name not in _SCHEDULES:
        raise Unanswered(f"there is no schedule {name}: {', '.join(_SCHEDULES)} are")
    lowest = further.pop("min_lr", 0.0) / (options("learning_rate") or 1.0) + further.pop("min_lr_rate", 0.0)
    if further:
        raise Unanswered(f"there is no option for {', '.join(further)} of a schedule")
    values: dict[str, Any] = {"train.schedule": _SCHEDULES[name]}
    return values | ({"train.min_lr_ratio": lowest} if lowest else {})


def warmup(value: Any, options: Options) -> dict[str, Any]:
    value = options("warmup_steps") or options("warmup_ratio")  # in TRL, too, steps go before a share
    if options("lr_scheduler_type") == "constant" or not value:
        return {}
    return {"train.warmup_ratio": value} if value < 1 else {"train.warmup_steps": int(value)}


def reward_rows(options: Options) -> list[dict[str, Any]]:
    """Return [[rewards.functions]] of reward_funcs: names of functions (FILE:NAME) or models, or whole rows."""
    given, weights = options("reward_funcs") or [], options("reward_weights")
    given = given if isinstance(given, list | tuple) else [given]
    if given and weights is not None and len(weights) != len(given):
        raise Unanswered(f"{len(weights)} weights of {len(given)} reward functions")
    rows = []
    for i, one in enumerate(given):
        if isinstance(one, Mapping):
            row = dict(one)
        elif ":" in one:
            row = {"function": one, "name": one.rpartition(":")[2]}
        else:
            row = {"function": "reward_model", "name": one.rpartition("/")[2], "params": {"path": one}}
        rows.append(row | ({} if weights is None else {"weight": float(weights[i])}))
    return rows


# fmt: off
_LORA = {
    "r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout", "exclude_modules": "exclude_modules",
    "use_rslora": "rslora", "use_dora": "dora",
}
_LORA_DEFAULTS: dict[str, Any] = {"r": 8, "lora_alpha": 8}
_LORA_NO_RESULT = ("task_type", "peft_type", "inference_mode", "base_model_name_or_path", "revision", "auto_mapping",
                   "peft_version", "runtime_config", "ephemeral_gpu_offload")
_NO_RESULT_OF_A_MODEL = ("attn_implementation", "device_map", "use_cache", "low_cpu_mem_usage", "trust_remote_code",
                         "use_kernels", "cache_dir", "local_files_only", "token")
# fmt: on
NO_EVALUATION = "no"
_ALL = 100_000  # held-out tasks


# Data and rewards


def _place(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {"path": value}


def sources(value: Any, options: Options) -> dict[str, Any]:
    train, held_out = _place(options("train_dataset")), options("eval_dataset")
    source = {"kind": "dataset"} | train
    if held_out is None:
        return {"tasks.sources": [source], "tasks.eval_fraction": 0.0}
    held_out = _place(held_out)
    if held_out["path"] != train["path"]:
        source["eval_path"] = held_out["path"]
    if "split" in held_out:
        source["eval_split"] = held_out["split"]
    return {"tasks.sources": [source]}


def prompt_limit(value: Any, options: Options) -> dict[str, Any]:
    if not value:
        return {"tasks.max_prompt_tokens": 1_000_000}
    return {"tasks.max_prompt_tokens": value, "tasks.truncation": "left"}


def rewards(value: Any, options: Options) -> dict[str, Any]:
    rows = reward_rows(options)
    if not rows:
        return {}
    if len(rows) == 1 and rows[0].keys() <= {"function", "name"}:
        return {"rewards.function": rows[0]["function"]}
    return {"rewards.functions": rows}


def lora(value: Any, options: Options) -> dict[str, Any]:
    """Convert the arguments of peft's LoraConfig."""
    values: dict[str, Any] = {}
    for name, item in (_LORA_DEFAULTS | {"target_modules": None} | dict(value)).items():
        if name == "target_modules":
            item = ["q_proj", "v_proj"] if item is None else ["all-linear"] if item == "all-linear" else item
            if isinstance(item, str):
                raise Unanswered(f"target_modules = {item!r} is an expression: name the layers in a list")
            values["model.lora.target_modules"] = sorted(item)
        elif name in _LORA:
            if item not in (None, False):
                key = f"model.lora.{_LORA[name]}"
                values[key] = sorted(item) if isinstance(item, list | set) else item
        elif (
            name not in _LORA_NO_RESULT
            and item not in (None, False, [], {}, "none")
            and (name != "init_lora_weights" or item is not True)
        ):
            raise Unanswered(f"there is no option for {name} of LoraConfig")
    return values


def model_options(value: Any, options: Options) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, item in (value or {}).items():
        if name in _NO_RESULT_OF_A_MODEL or item is None:
            continue
        if name == "revision":
            values["model.revision"] = item
        elif name in ("dtype", "torch_dtype") and str(item).removeprefix("torch.") in ("auto", "bfloat16", "float32"):
            continue  # master weights are always float32, and bf16 sets the compute dtype
        else:
            raise Unanswered(f"there is no option for {name} = {item} of a model")
    return values


def dtype(value: Any, options: Options) -> dict[str, Any]:
    """Convert bf16; if it is not set, TRL uses bfloat16 on devices that support it."""
    return {"model.dtype": "auto" if value is None else "bfloat16" if value else "float32"}


# Evaluations and checkpoints


def evaluates(options: Options) -> bool:
    return options("eval_dataset") is not None and (
        options("eval_strategy") != NO_EVALUATION or bool(options("eval_on_start"))
    )


def evaluation(value: Any, options: Options) -> dict[str, Any]:
    if not evaluates(options):
        return {}
    strategy = str(options("eval_strategy"))
    if strategy == "epoch":
        raise Unanswered("how many steps an epoch is depends on the rows of the data")
    every = options("eval_steps") or options("logging_steps")
    return {
        "eval.num_tasks": _ALL,
        "eval.every_steps": in_steps(every, options) if strategy == "steps" else 0,
        "eval.samples_per_task": options("num_generations_eval") or options("num_generations"),
        "eval.at_start": bool(options("eval_on_start")),
        "eval.temperature": options("temperature"),
        "eval.top_p": options("top_p") or 1.0,
    }


def best(value: Any, options: Options) -> dict[str, Any]:
    if not value or not evaluates(options):
        return {}
    if options("metric_for_best_model") not in ("reward", "eval_reward"):
        raise Unanswered("the best evaluation is that of the highest mean reward: metric_for_best_model = eval_reward")
    return {"checkpoint.keep_best": True, "checkpoint.save_best_model": True}


def saves(value: Any, options: Options) -> dict[str, Any]:
    strategy = str(options("save_strategy"))
    if strategy == "no":
        return {"checkpoint.every_steps": 0}
    if strategy != "steps":
        raise Unanswered(f"a checkpoint is written every so many steps: {strategy} is none")
    return {"checkpoint.every_steps": in_steps(options("save_steps"), options)}


# Trackers


def tools(options: Options) -> list[str]:
    """Return the trackers of report_to, with "all" as it is."""
    named = options("report_to") or []
    return [name for name in ([named] if isinstance(named, str) else named) if name != "none"]


def trackers(value: Any, options: Options) -> dict[str, Any]:
    if "all" in tools(options):
        raise Unanswered("which tools are installed is not known here: name them in `track.trackers`")
    return tracker_values(tools(options))


def given(key: str) -> Any:
    return lambda value, options: {} if value is None else {key: value}
