"""LightRFT: its options by our keys, row by row, and the flags of its launch scripts.

Rows are those of examples/gsm8k_geo3k/train_colocate.py, with the partial rollout of pull request 29.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollover.config.run import TOOLS
from rollover.plugins.convert.bash.script import read_script
from rollover.plugins.convert.files import is_file_of_rows
from rollover.plugins.convert.launch import find_program, merge_commands, read_flags
from rollover.plugins.convert.mapping import (
    COMPUTE,
    TRACKING,
    Options,
    Row,
    System,
    Unanswered,
    for_trackers,
    tracker_values,
    without,
)

BUDGET = 1024  # the trainer's default of max_token_budget, which no flag sets
_ADVANTAGES = {
    "gae": "gae",
    "group_norm": "grpo",
    "reinforce": "reinforce_plus_plus_tokens",
    "reinforce_baseline": "reinforce_plus_plus_baseline",
}
_OVER_TOKENS = ("gae", "reinforce")  # no comparison with siblings; the KL penalty is per token


def vision(value: Any, options: Options) -> Mapping[str, Any]:
    """Convert prefixes of frozen parameters: only the vision tower and the projector can be frozen."""
    if isinstance(value, bool):  # a flag in most of its scripts
        return {"model.vision": "frozen" if value else "trained"}
    prefixes = [value] if isinstance(value, str) else list(value or ())
    if other := [name for name in prefixes if not any(part in name for part in ("visual", "vision", "merger"))]:
        raise Unanswered(f"weights of {', '.join(other)} are frozen there: here it is the vision tower or nothing")
    return {"model.vision": "frozen" if prefixes else "trained"}


def advantage(value: Any, options: Options) -> dict[str, Any]:
    if value == "rloo":
        raise Unanswered(
            "its advantages are normalised over the batch besides, which those of rloo are not here: set"
            " --algorithm.advantage reinforce_plus_plus_baseline (which are) or rloo"
        )
    if value not in _ADVANTAGES:
        raise Unanswered(f"{value} is no advantage estimator that there is here")
    return {"algorithm.advantage": _ADVANTAGES[value]}


def has_critic(options: Options) -> bool:
    return options("advantage_estimator") == "gae"


def critic_model(value: Any, options: Options) -> dict[str, Any]:
    same = value == options("pretrain")
    return {"critic.model": "policy" if same else value}


def critic_rate(value: Any, options: Options) -> dict[str, Any]:
    own = {"critic.learning_rate": value} if options("critic_pretrain") else {}
    return own | {"critic.head_learning_rate": value, "critic.schedule": "cosine", "critic.min_lr_ratio": 0.1}


def over_tokens(options: Options) -> bool:
    return options("advantage_estimator") in _OVER_TOKENS


def kl(value: Any, options: Options) -> dict[str, Any]:
    coef, kind, target = options("init_kl_coef"), options("kl_estimator"), options("kl_target")
    if not coef:
        return {}
    values: dict[str, Any] = {"algorithm.kl_coef": coef, "algorithm.kl_kind": kind}
    if options("use_kl_loss"):
        values |= {"algorithm.kl_in": "loss"}
        if kind == "k1":
            raise Unanswered(
                "the gradient of k1 in the loss is 0 on average: set --algorithm.kl_kind k3 or k1+", values
            )
        if target is not None:
            raise Unanswered("kl_target steers the KL of a reward alone here: set --algorithm.kl_target 0", values)
        return values
    values |= {"algorithm.kl_in": "reward"}
    if not over_tokens(options):
        raise Unanswered(
            "there a KL is taken off when rewards have been compared with their siblings', here before that: set"
            " --algorithm.kl_in reward or loss",
            values,
        )
    return values | ({"algorithm.kl_target": target, "algorithm.kl_horizon": 10000} if target is not None else {})


def minibatches(options: Options) -> int:
    groups, size, samples = (
        int(options(name)) for name in ("rollout_batch_size", "n_samples_per_prompt", "train_batch_size")
    )
    if groups * size % samples or groups % (groups * size // samples):
        raise Unanswered(
            f"{groups} groups of {size} in minibatches of {samples} samples: here minibatches are of whole groups, all"
            " of as many. Set --train.minibatches_per_step"
        )
    return groups * size // samples


def batches(value: Any, options: Options) -> dict[str, Any]:
    several = minibatches(options) > 1
    unshuffled = {"train.reshuffle": False} if several and int(options("max_epochs")) > 1 else {}
    return {"train.minibatches_per_step": minibatches(options)} | unshuffled


def group_size(value: Any, options: Options) -> dict[str, Any]:
    """Return the group size, for evaluations too."""
    values = {"rollout.group_size": value, "eval.samples_per_task": value}
    return values | ({"rewards.min_valid": 1} if value == 1 else {})


def truncated(value: Any, options: Options) -> dict[str, Any]:
    """Disable correction: LightRFT corrects neither for truncated sampling nor for older versions."""
    wanting = float(options("top_p")) < 1 or bool(options("use_partial"))
    values = {"rollout.top_p": float(options("top_p")), "algorithm.correction": "none"}
    return values | ({"algorithm.allow_uncorrected": True} if wanting else {})


def partial(value: Any, options: Options) -> dict[str, Any]:
    values: dict[str, Any] = {
        "rollout.interrupt": "token_budget",
        "rollout.complete_fraction": options("partial_percent"),
        "rollout.max_continuations": 1,
        "rollout.order": "fifo",
        # More in flight would have to be trained within max_staleness, and so by steps larger than partial_percent.
        "rollout.in_flight_groups": int(options("rollout_batch_size")),
        "rollout.max_staleness": 1,
        **truncated(value, options),
    }
    budget = int(options("max_budget") or BUDGET)
    if options("generate_max_len") <= budget:
        raise Unanswered(
            f"the budget of its first pass is {budget} tokens, no less than generate_max_len: set"
            " --rollout.token_budget below that",
            values,
        )
    return values | {"rollout.token_budget": budget}


def sources(value: Any, options: Options) -> dict[str, Any]:
    paths = [path.strip() for path in str(options("prompt_data")).split(",")]
    shares = [float(share) for share in str(options("prompt_data_probs")).split(",")]
    common: dict[str, Any] = {"prompt_column": options("input_key")}
    if options("reference_key") is not None:
        common["answer_column"] = options("reference_key")
    if options("images_key") not in (None, "images"):
        common["image_column"] = options("images_key")
    if options("eval_data"):
        common["eval_path"] = options("eval_data")
    rows = [{"kind": "dataset", "path": path} | common for path in paths]
    for row in rows:  # a file has no splits
        if not is_file_of_rows(row["path"]):
            row["split"] = options("prompt_split")
        if not is_file_of_rows(row.get("eval_path", row["path"])):
            row["eval_split"] = options("eval_split")
    if len(paths) > 1:
        if len(shares) != len(paths):
            raise Unanswered(f"{len(paths)} data sets have {len(shares)} shares (prompt_data_probs)")
        for row, share in zip(rows, shares, strict=True):
            row["weight"] = share
    return {"tasks.sources": rows}


def data(value: Any, options: Options) -> dict[str, Any]:
    values = sources(value, options)
    if options("max_eval_samples") and any("eval_path" not in row and is_file_of_rows(row["path"])
                                           for row in values["tasks.sources"]):  # fmt: skip
        raise Unanswered(
            "there it is evaluated on the rows that it trains, as a file has no other split, and held-out problems are"
            " not trained here: set --tasks.sources.0.eval_path, or --tasks.eval_fraction to hold out a share",
            values,
        )
    return values


def overlong(value: Any, options: Options) -> dict[str, Any]:
    factor = options("overlong_buffer_penalty_factor")
    return {"rewards.overlong_buffer_tokens": options("overlong_buffer_len"), "rewards.overlong_penalty": factor}


def before_comparing(make: Any) -> Any:
    """Return the function for a change of raw rewards: group_norm and the like change compared rewards instead."""

    def to(value: Any, options: Options) -> dict[str, Any]:
        values = make(value, options)
        if values and not over_tokens(options):
            raise Unanswered(
                "there it is done when rewards have been compared with their siblings', here before", values
            )
        return values

    return to


def running_norm(value: Any, options: Options) -> dict[str, Any]:
    if not options("reward_running_norm"):
        return {}
    return {"rewards.running_norm": "whiten" if options("reward_running_norm_minus_mean") else "scale"}


def clip_range(value: Any, options: Options) -> dict[str, Any]:
    return {"rewards.clip_range": [-float(value), float(value)]} if value else {}


def has_lora(options: Options) -> bool:
    return bool(options("lora_rank"))


def tools(options: Options) -> list[str]:
    """Return W&B, else TensorBoard, as in LightRFT."""
    return ["wandb"] if options("use_wandb") else ["tensorboard"] if options("use_tensorboard") else []


def shown_in(value: Any, options: Options) -> dict[str, Any]:
    return tracker_values(tools(options)) | for_trackers(tools, "track.tracker_rollouts")(0, options)


def asked(question: str) -> Any:
    def to(value: Any, options: Options) -> dict[str, Any]:
        raise Unanswered(question)

    return to


# fmt: off
ROWS = (
    Row("prompt_data", ("tasks.sources", "tasks.eval_fraction"), data, example="other",
        note="several, with commas, are several sources"),
    Row("prompt_data_probs", ("tasks.sources",), sources, "1.0", "0.3,0.7", note="`weight` of a source"),
    Row("prompt_split", ("tasks.sources",), sources, "train", "other", note="`split` of a source"),
    Row("input_key", ("tasks.sources",), sources, "input", "question", note="`prompt_column` of a source"),
    Row("images_key", ("tasks.sources",), sources, "images", "figures", note="`image_column` of a source"),
    Row("freeze_prefix", ("model.vision",), vision, example=[],
        note="without it LightRFT trains the tower, and Rollover does not"),
    Row("reference_key", ("tasks.sources",), sources, example="solution", note="`answer_column` of a source"),
    Row("eval_data", ("tasks.sources",), sources, example="held_out", note="`eval_path` of a source"),
    Row("eval_split", ("tasks.sources",), sources, "test", "dev", note="`eval_split` of a source"),
    Row("max_eval_samples", ("eval.num_tasks",), None, 500, 64),
    Row("eval_steps", ("eval.every_steps", "eval.at_start"),
        lambda v, o: {"eval.every_steps": max(int(v), 0)} | ({"eval.at_start": False} if v > 0 else {}), -1, 20,
        note="-1 is once a pass there: set --eval.every_steps"),
    Row("apply_chat_template", ("tasks.chat",), None, False, True),
    Row("system_prompt", ("tasks.system_prompt",), example="Think.", when=lambda o: o("apply_chat_template")),
    Row("prompt_max_len", ("tasks.max_prompt_tokens", "tasks.truncation"),
        lambda v, o: {"tasks.max_prompt_tokens": v, "tasks.truncation": "right"}, 1024, 512,
        note="what is longer is cut on the right"),
    Row("reward_pretrain", ("rewards.function", "rewards.functions"),
        asked("rewards are code of its examples, or models by their own rules: set --rewards.function"), "",
        note="rewards are code of its examples: asked for"),
    Row("pretrain", ("model.path",), example="another"),
    Row("bf16", ("model.dtype",), lambda v, o: {"model.dtype": "bfloat16" if v else "float32"}, False, True),
    Row("gradient_checkpointing", ("train.gradient_checkpointing",), None, False, True),
    Row("lora_rank", ("model.lora.rank",), None, 0, 16),
    Row("lora_alpha", ("model.lora.alpha",), None, 16, 64, when=has_lora),
    Row("lora_dropout", ("model.lora.dropout",), None, 0, 0.1, when=has_lora),
    Row("target_modules", ("model.lora.target_modules",),
        lambda v, o: {"model.lora.target_modules": [v] if isinstance(v, str) else v}, "all-linear",
        ["q_proj", "k_proj"], when=has_lora),
    Row("rollout_batch_size", ("rollout.groups_per_step",), None, 512, 64),
    Row("n_samples_per_prompt", ("rollout.group_size", "eval.samples_per_task"), group_size, 1, 4),
    Row("train_batch_size", ("train.minibatches_per_step",), batches, 128, 64,
        note="`rollout_batch_size * n_samples_per_prompt` samples divided by it"),
    Row("max_epochs", ("train.epochs_per_step",), None, 1, 2),
    Row("num_episodes", ("tasks.epochs",), None, 1, 3),
    Row("generate_max_len", ("rollout.max_new_tokens",), None, 1024, 256),
    Row("temperature", ("rollout.temperature", "eval.temperature"),
        lambda v, o: {"rollout.temperature": v, "eval.temperature": v}, 1.0, 0.7),
    Row("top_p", ("rollout.top_p", "eval.top_p", "algorithm.correction", "algorithm.allow_uncorrected"),
        lambda v, o: truncated(v, o) | {"eval.top_p": float(v)}, 1.0, 0.9,
        note="LightRFT corrects for nothing (`correction = \"none\"`); here that is to be permitted"),
    Row("use_partial", ("rollout.interrupt", "rollout.token_budget", "rollout.max_continuations", "rollout.order",
        "rollout.in_flight_groups", "rollout.max_staleness", "algorithm.allow_uncorrected"), partial, False, True,
        when=lambda o: o("use_partial"),
        note="old tokens are trained as new there, and without a bound: `max_staleness` is"
        " 1 here, and `--algorithm.correction token_truncate` corrects. There a step takes `micro_rollout_batch_size`"
        " answers for each of its prompts, here all of a group"),
    Row("max_budget", ("rollout.token_budget",), lambda v, o: {"rollout.token_budget": int(v)}, example=512,
        also=("max_token_budget",), when=lambda o: o("use_partial"),
        note="taken as it is; LightRFT's trainer reads `max_token_budget`, which no flag sets, and has 1024"),
    Row("partial_percent", ("rollout.complete_fraction",), None, 0.7, 0.5, when=lambda o: o("use_partial"),
        note="there a step trains this share of its groups, and goes on with as many as it lacks; here every one that"
        " is ready, and it goes on with all if it lacks any"),
    Row("advantage_estimator", ("algorithm.advantage",), advantage, "gae", "reinforce_baseline",
        note="`group_norm` is `grpo`, `reinforce` `reinforce_plus_plus_tokens`, `reinforce_baseline`"
        " `reinforce_plus_plus_baseline`"),
    Row("gamma", ("algorithm.gamma",), None, 1, 0.9, when=over_tokens),
    Row("lambd", ("algorithm.gae_lambda",), None, 0.95, 0.9, when=has_critic),
    Row("eps_clip", ("algorithm.clip_low", "algorithm.clip_high", "algorithm.aggregation"),
        lambda v, o: {"algorithm.clip_low": v, "algorithm.clip_high": v,
                      "algorithm.aggregation": "seq-mean-token-mean"}, 0.2, 0.1),
    Row("high_entropy_token_ratio", ("algorithm.top_entropy_share",),
        lambda v, o: {"algorithm.top_entropy_share": v} if v else {}, 0.0, 0.2,
        note="there the share of each answer's tokens, here of a minibatch's"),
    Row("use_kl_loss", ("algorithm.kl_coef", "algorithm.kl_in", "algorithm.kl_kind", "algorithm.kl_target"), kl,
        False, True),
    Row("init_kl_coef", ("algorithm.kl_coef", "algorithm.kl_in", "algorithm.kl_kind", "algorithm.kl_target"), kl,
        0.01, 0.1),
    Row("kl_estimator", ("algorithm.kl_kind", "algorithm.kl_in", "algorithm.kl_coef", "algorithm.kl_target"), kl,
        "k1", "k2", note="k1 in the loss has no gradient on average: asked about"),
    Row("kl_target", ("algorithm.kl_target", "algorithm.kl_in", "algorithm.kl_coef", "algorithm.kl_kind"), kl,
        example=0.1),
    Row("critic_pretrain", ("critic.model",), critic_model, example="other", when=has_critic),
    Row("critic_learning_rate", ("critic.learning_rate", "critic.head_learning_rate"), critic_rate, 9e-6, 1e-4,
        when=has_critic, note="with its cosine to a tenth"),
    Row("value_clip", ("critic.value_clip",), None, 0.2, 0.5, when=has_critic),
    Row("freezing_actor_steps", ("critic.policy_waits_steps",),
        lambda v, o: {"critic.policy_waits_steps": v} if v > 0 else {}, -1, 5, when=has_critic),
    Row("reward_running_norm", ("rewards.running_norm",), before_comparing(running_norm), False, True,
        note="`scale`"),
    Row("reward_running_norm_minus_mean", ("rewards.running_norm",), before_comparing(running_norm), False, True,
        note="`whiten`"),
    Row("reward_clip", ("rewards.clip_range",), before_comparing(clip_range), 0.0, 5.0),
    Row("overlong_buffer", ("rewards.overlong_buffer_tokens", "rewards.overlong_penalty"), overlong, False, True,
        when=lambda o: o("overlong_buffer"),
        note="shaping: no part of the score that evaluations and filters see"),
    Row("overlong_buffer_len", ("rewards.overlong_buffer_tokens",), overlong, 1024, 32,
        when=lambda o: o("overlong_buffer")),
    Row("overlong_buffer_penalty_factor", ("rewards.overlong_penalty",), overlong, 1.0, 0.5,
        when=lambda o: o("overlong_buffer")),
    Row("actor_learning_rate", ("train.learning_rate", "train.schedule", "train.min_lr_ratio"),
        lambda v, o: {"train.learning_rate": v, "train.schedule": "cosine", "train.min_lr_ratio": 0.1}, 1e-6, 1e-5,
        note="its schedule is a cosine to a tenth"),
    Row("lr_warmup_ratio", ("train.warmup_ratio",), None, 0.03, 0.1),
    Row("adam_betas", ("train.adam_beta1", "train.adam_beta2"),
        lambda v, o: {"train.adam_beta1": v[0], "train.adam_beta2": v[1]}, [0.9, 0.95], [0.8, 0.99]),
    Row("l2", ("train.weight_decay",), None, 0.0, 0.1),
    Row("max_norm", ("train.max_grad_norm",), None, 1.0, 0.5),
    Row("save_path", ("run.dir",), example="folder"),
    Row("use_wandb", ("track.trackers", "track.tracker_rollouts"), shown_in, example="a-key", secret=True,
        note="its value is a key, which is not written down: W&B reads `WANDB_API_KEY`. Texts do not go there"),
    Row("use_tensorboard", ("track.trackers", "track.tracker_rollouts"), shown_in, example="folder",
        note="without `use_wandb`; the folder is `<run.dir>/tensorboard`"),
    *(Row(name, (key,), for_trackers(tools, key, of), example="mine") for name, key, of in (
        ("wandb_org", "track.entity", ("wandb",)), ("wandb_group", "track.group", TOOLS),
        ("wandb_project", "track.project", TOOLS), ("wandb_run_name", "run.name", TOOLS))),
    Row("save_steps", ("checkpoint.every_steps",), lambda v, o: {"checkpoint.every_steps": max(int(v), 0)}, -1, 20),
    Row("max_ckpt_num", ("checkpoint.keep",), None, 3, 5),
    Row("seed", ("run.seed",), None, 42, 7),
    *without(COMPUTE, "micro_train_batch_size", "micro_rollout_batch_size", "engine_type", "engine_tp_size",
        "engine_mem_util", "enable_engine_sleep", "disable_engine_sleep", "packing_samples", "sp_size", "fsdp",
        "fsdp_cpu_offload", "zero_stage", "zpg", "adam_offload", "actor_init_on_gpu", "flash_attn", "grad_accum_dtype",
        "overlap_comm", "gradient_checkpointing_use_reentrant", "disable_fast_tokenizer", "disable_logprobs_flashattn",
        "meta_init", "initial_model_shard_size", "local_rank", "rm_use_engine", "rm_engine_cudagraph",
        "fused_linear_logprob", "chunk_size", "use_ms"),
    *without(TRACKING, "save_trajectories", "num_trajectories_to_save", "mark_high_entropy_tokens",
        "trajectory_analysis", "print_replay_buffer_stats", "logging_steps", "save_hf_ckpt", "disable_ds_ckpt",
        "max_ckpt_mem", "load_checkpoint", "save_value_network", "log_dir", "plot_every", "ckpt_path"),
    *without("it is of the vision part of the model", "limit_mm_image_per_prompt", "mixed_mm_data", "no_shard_vit"),
    *without("rows with images show them", "text_only"),
    *without("its examples choose a reward by it", "label_key"),
    *without("goes with `use_gspo`", "normalize_advantages", "use_sequence_rewards"),
    *without("goes with `pretrain_data`", "ptx_coef", "pretrain_data_probs", "pretrain_split"),
    *without("deprecated there", "max_len"),
    *without("a name in its checkpoints", "value_head_prefix"),
    *without("none of its trainers reads it, and the loss is the mean of each answer's mean: set"
        " `algorithm.aggregation`", "loss_agg_mode", neutral=("seq-mean-token-mean",)),
    *without("none of its trainers reads it: set `algorithm.loss = \"gspo\"`", "use_gspo", neutral=(False,)),
    *without("there is no CPGD", "use_cpg_loss", neutral=(False,)),
    *without("it takes groups of equal rewards out of the loss, and generates none in their place: set"
        " `filters.zero_variance`, which does", "dynamic_sampling", neutral=(False,)),
    *without("it normalises every micro-batch besides the whole batch, which alone is here", "advantages_norm",
        neutral=(False,)),
    *without("advantages are not clipped", "advantage_clip", neutral=(0, 0.0)),
    *without("a critic's rewards are those of the policy", "normalize_reward_for_critic", neutral=(False,)),
    *without("there is no mean of weights over time", "enable_ema", neutral=(False,)),
    *without("there is no loss of balance between experts", "aux_loss_coef", neutral=(0, 0.0)),
    *without("weights of 4 bits are not there", "load_in_4bit", neutral=(False,)),
    *without("there is no loss of pretraining beside", "pretrain_data", neutral=()),
    *without("a reward is a function, which may ask a server (docs/rewards.md)", "remote_rm_url", neutral=()),
    *without("the model's own template is used", "input_template", neutral=()),
    *without("give a file of so many rows", "max_samples", neutral=(1000000,)),
)
BASE = {
    "pretrain": "smollm2-135m", "prompt_data": "train", "advantage_estimator": "group_norm", "use_kl_loss": True,
    "kl_estimator": "k3", "n_samples_per_prompt": 8, "rollout_batch_size": 128, "train_batch_size": 128,
    "text_only": True,
}
# fmt: on
LIGHTRFT = System("lightrft", ROWS, BASE, "num_episodes")


_SIGNS = re.compile(r"lightrft|train_colocate\.py", re.I)
# Flags with a meaning if absent: argparse's store_true.
_ABSENT = {"text_only": False, "reward_pretrain": ""}


def is_lightrft(text: str) -> bool:
    """Return whether a script starts LightRFT; OpenRLHF, which it is based on, has many of the same flags."""
    return bool(_SIGNS.search(text)) and "--pretrain" in text


def options_of_flags(text: str, path: Path, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Read the flags by name: True for a flag alone, a list for several values. ValueError if there are none."""
    found: list[tuple[int, dict[str, Any]]] = []
    for command in read_script(text, str(path), environment).commands:
        start = find_program(command.words)
        if start >= 0 and (options := read_flags(command.words[start + 1 :], command.line)) and "pretrain" in options:
            found.append((command.line, options))
    if not found:
        raise ValueError("no flags (--pretrain MODEL ...) behind a .py file are in it")
    return _ABSENT | merge_commands(found)
