"""Options of TRL's GRPOConfig, and what GRPOTrainer is given, as values of ours: data, rewards, the model, evaluations
and checkpoints. What values.py leaves, for rows.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollover.plugins.convert import shown
from rollover.plugins.convert.mapping import Options, Unanswered
from rollover.plugins.convert.trl.values import in_steps, reward_rows

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
    """peft's LoraConfig, by its arguments."""
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
            continue  # master weights are float32 in any case, and bf16 says what is computed with
        else:
            raise Unanswered(f"there is no option for {name} = {item} of a model")
    return values


def dtype(value: Any, options: Options) -> dict[str, Any]:
    """Not set, TRL takes bfloat16 where the device has it."""
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


# Where it is shown


def tools(options: Options) -> list[str]:
    """What report_to names; "all" stays, as it depends on what is installed."""
    named = options("report_to") or []
    return [name for name in ([named] if isinstance(named, str) else named) if name != "none"]


def trackers(value: Any, options: Options) -> dict[str, Any]:
    if "all" in tools(options):
        raise Unanswered("which tools are installed is not known here: name them in `track.trackers`")
    return shown.trackers(tools(options))


def given(key: str) -> Any:
    return lambda value, options: {} if value is None else {key: value}
