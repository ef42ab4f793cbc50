"""Functions of rows.py that convert values of verl's options."""

from __future__ import annotations

import math
from typing import Any

from rollover.config.traits import LOSSES
from rollover.plugins.convert.mapping import Options, Unanswered, for_trackers
from rollover.plugins.convert.verl.programs import ASYNC, SYNC, bypass, groups, mode_of
from rollover.rewards.built_in import BY_DATA_SOURCE, make_spec

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
IS = "algorithm.rollout_correction"
OLDER_IS = "algorithm.rollout_is"  # of verl 0.6
RLLM_SWITCH = "rllm"  # an option with a default in rLLM's rows only
_OFF = (None, "null", "none", "off")
_ADVANTAGES = {name: name for name in (
    "gae", "grpo", "rloo", "remax", "opo", "grpo_passk", "gpg", "gdpo", "reinforce_plus_plus_baseline",
    "optimal_token_baseline", "tir_optimal_token_baseline",
)} | {
    "reinforce_plus_plus": "reinforce_plus_plus_tokens", "grpo_vectorized": "grpo", "rloo_vectorized": "rloo",
}  # fmt: skip
_LOSSES = {name: name for name in ("gspo", "sapo", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl", "dro", "cispo")} | {
    "vanilla": "clip", "gpg": "reinforce", "geo_mean": "gmpo",
}  # fmt: skip
_KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_KL |= {"kl+": "k1+", "k1+": "k1+", "low_var_kl+": "k3+", "k3+": "k3+"}


def look_up(table: dict[str, str], value: Any, what: str) -> str:
    if value not in table:
        raise Unanswered(f"{value} is no {what} that there is here")
    return table[value]


def loss(options: Options) -> str:
    if _unclipped(options):
        return "reinforce"
    return look_up(_LOSSES, options(f"{ACTOR}.policy_loss.loss_mode"), "policy loss")


def _unclipped(options: Options) -> bool:
    """Return whether verl's bypass mode replaces `loss_mode` by the weighted loss without clipping."""
    return bypass(options) and options(f"{IS}.loss_type") == "reinforce"


def has_critic(options: Options) -> bool:
    return options("algorithm.adv_estimator") == "gae"


def advantage(value: Any, options: Options) -> dict[str, Any]:
    name = look_up(_ADVANTAGES, value, "advantage estimator")
    by_std = options("algorithm.norm_adv_by_std_in_grpo")
    if name == "grpo":
        return {"algorithm.advantage": "grpo" if by_std else "dr_grpo"}
    if name == "grpo_passk":
        return {"algorithm.advantage": name, "algorithm.passk_std": "sample" if by_std else "none"}
    return {"algorithm.advantage": name}


def has_bounds(options: Options) -> bool:
    return bool(LOSSES[loss(options)].bounds)


def loss_values(value: Any, options: Options) -> dict[str, Any]:
    if _unclipped(options):
        return {"algorithm.loss": "reinforce"}
    values: dict[str, Any] = {"algorithm.loss": look_up(_LOSSES, value, "policy loss")}
    names = {
        "sapo": {"tau_pos": "tau_positive", "tau_neg": "tau_negative"},
        "clip_cov": {"policy_loss.clip_cov_ratio": "share", "policy_loss.clip_cov_lb": "cov_low",
                     "policy_loss.clip_cov_ub": "cov_high"},
        "kl_cov": {"policy_loss.kl_cov_ratio": "share", "policy_loss.ppo_kl_coef": "kl_coef"},
        "dro": {"policy_loss.dro_beta": "beta"},
    }.get(value, {})  # fmt: skip
    further = {ours: options(f"{ACTOR}.{theirs}") for theirs, ours in names.items()}
    further = {name: item for name, item in further.items() if item is not None}
    return values | ({"algorithm.loss_options": further} if further else {})


def further(value: Any, options: Options) -> dict[str, Any]:
    return loss_values(options(f"{ACTOR}.policy_loss.loss_mode"), options)


def kl_in_loss(options: Options) -> bool:
    return bool(options(f"{ACTOR}.use_kl_loss") and options(f"{ACTOR}.kl_loss_coef"))


def kl_in_reward(options: Options) -> bool:
    return bool(options("algorithm.use_kl_in_reward") and options("algorithm.kl_ctrl.kl_coef"))


def kl(value: Any, options: Options) -> dict[str, Any]:
    """Convert both KL switches at once: verl may have the KL in the loss, in the reward, or in both."""
    values: dict[str, Any] = {}
    kinds: list[str] = []
    if kl_in_loss(options):
        kinds.append(look_up(_KL, options(f"{ACTOR}.kl_loss_type"), "estimator of the KL"))
        if kinds[0] == "k1":
            raise Unanswered("the gradient of k1 in the loss is 0 on average: name k3 or k1+ (algorithm.kl_kind)")
        coef = options(f"{ACTOR}.kl_loss_coef")
        values = {"algorithm.kl_in": "loss", "algorithm.kl_coef": coef, "algorithm.kl_kind": kinds[0]}
    if kl_in_reward(options):
        kinds.append(look_up(_KL, options("algorithm.kl_penalty"), "estimator of the KL").removesuffix("+"))
        prefix = "algorithm.kl_reward_" if values else "algorithm.kl_"
        values |= {"algorithm.kl_in": "both" if values else "reward"}
        values |= {f"{prefix}coef": options("algorithm.kl_ctrl.kl_coef"), f"{prefix}kind": kinds[-1]}
        if options("algorithm.kl_ctrl.type") == "adaptive":
            values["algorithm.kl_target"] = options("algorithm.kl_ctrl.target_kl")
            values["algorithm.kl_horizon"] = options("algorithm.kl_ctrl.horizon")
    return values | ({"algorithm.kl_max": 10.0} if any(kind.startswith("k3") for kind in kinds) else {})


def uniform(value: Any, options: Options) -> dict[str, Any]:
    """Convert rLLM's rejection sampling."""
    if not value:
        return {}
    if not options("rllm.rejection_sample.filter_uniform_groups"):
        raise Unanswered("it rejects whole batches: set `filters.zero_variance` to replace groups of equal scores")
    return {"filters.zero_variance": True}


def overlong_masked(value: Any, options: Options) -> dict[str, Any]:
    """Convert rLLM's compact filtering, which masks answers at the limit by default."""
    masks = options("rllm.compact_filtering.mask_max_response_length_exceeded")
    return {"filters.mask_truncated": True} if value and masks is not False else {}


def batch(value: Any, options: Options) -> dict[str, Any]:
    values: dict[str, Any] = {"rollout.groups_per_step": groups(options)}
    return values if mode_of(options) == ASYNC else values | {"tasks.drop_last": True}


def updates(options: Options) -> int:
    return minibatches(options) * options(f"{ACTOR}.ppo_epochs")


def minibatches(options: Options) -> int:
    num, size = groups(options), options(f"{ACTOR}.ppo_mini_batch_size")
    if options(RLLM_SWITCH) and num % max(1, num // size) == 0:
        return int(max(1, num // size))  # rLLM sets the number of updates, and splits the rows
    if num % size:
        raise Unanswered(
            f"{num} groups a step in minibatches of {size}: the last one is smaller there; here all have as many"
            f" groups. Set --train.minibatches_per_step {math.ceil(num / size)}, say"
        )
    return num // size


def has_older_correction(options: Options) -> bool:
    """Return whether verl 0.6.0 applies its weights: without `rollout_is` it only measures them."""
    return options(f"{OLDER_IS}_threshold") not in _OFF and bool(options(OLDER_IS))


def older_correction(value: Any, options: Options) -> dict[str, Any]:
    """Convert verl 0.6.0's names of the rollout correction. The mode `mask` sets weights out of bounds to 0."""
    cap, level, mode = (
        float(options(f"{OLDER_IS}_threshold")),
        options(f"{OLDER_IS}_level") or "token",
        options(f"{OLDER_IS}_mode") or "truncate",
    )
    if level not in ("token", "sequence"):
        raise Unanswered(f"weights of the level {level}: set --algorithm.correction")
    if mode not in ("truncate", "mask"):
        raise Unanswered(f"the mode {mode}: set --algorithm.correction")
    values: dict[str, Any] = {"algorithm.correction": f"{level}_{mode}", "algorithm.correction_cap": cap}
    if mode == "mask":
        low = options(f"{OLDER_IS}_threshold_lower")
        values["algorithm.correction_floor"] = 1 / cap if low in _OFF else float(low)
    return values


def older_veto(value: Any, options: Options) -> dict[str, Any]:
    """Convert verl 0.6.0's veto, which drops a sequence if the ratio of one of its tokens is below the bound."""
    if value in _OFF or not float(value):
        return {}
    # Log-ratios are clipped to +-20, so that -20 is no upper bound of the ratio.
    return {"algorithm.rejection": {"sequence_max_k1": [-20.0, round(-math.log(float(value)), 6)]}}


def correction(value: Any, options: Options) -> dict[str, Any]:
    if bypass(options) and not _unclipped(options):
        return {"algorithm.proximal": "behavior"}
    cap, level = options(f"{IS}.rollout_is_threshold"), options(f"{IS}.rollout_is")
    if level in _OFF:
        return {"algorithm.correction": "none"}
    if "_" in str(cap):
        if level != "token":
            raise Unanswered("two bounds of the weights of sequences: there are those of tokens alone (icepop)")
        low, high = map(float, str(cap).split("_"))
        values = {"algorithm.correction": "icepop", "algorithm.correction_floor": low, "algorithm.correction_cap": high}
    else:
        values = {"algorithm.correction": f"{level}_truncate", "algorithm.correction_cap": float(cap)}
    if options(f"{IS}.rollout_is_batch_normalize"):
        values["algorithm.correction_normalize"] = True
    return values


_REJECTIONS = ("token_k1", "token_k2", "token_k3", "sequence_max_k2", "sequence_max_k3") + tuple(
    f"sequence_{how}_{kind}" for how in ("sum", "mean") for kind in ("k1", "k2", "k3")
)


def rejection(value: Any, options: Options) -> dict[str, Any]:
    if value in (None, "null", "none"):
        return {}
    kinds = str(value).split(",")
    bounds = str(options(f"{IS}.rollout_rs_threshold")).split(",")
    bounds = bounds * len(kinds) if len(bounds) == 1 else bounds
    rejection: dict[str, Any] = {}
    for kind, bound in zip(kinds, bounds, strict=True):
        name = kind.strip().replace("seq_", "sequence_")
        if name not in _REJECTIONS:
            raise Unanswered(f"verl 0.9.1 has no {kind.strip()}: set --algorithm.rejection")
        numbers = [float(part) for part in bound.split("_")]
        if name.endswith("k1"):  # verl bounds the ratio, ours its logarithm
            numbers = [round(math.log(number), 6) for number in numbers]
        rejection[name] = numbers if len(numbers) > 1 else numbers[0]
    return {"algorithm.rejection": rejection}


def uncorrected(value: Any, options: Options) -> dict[str, Any]:
    """Allow training without correction, as verl does after top_p, top_k, older weights, or without a ratio."""
    clipped = bypass(options) and not _unclipped(options)
    if options(f"{IS}.rollout_is") not in _OFF or has_older_correction(options) or clipped:
        return {}
    truncated = options(f"{ROLLOUT}.top_p") < 1 or int(options(f"{ROLLOUT}.top_k")) > 0
    without_ratio = loss(options) == "reinforce" and updates(options) > 1
    stale = mode_of(options) != SYNC
    return {"algorithm.allow_uncorrected": True} if truncated or without_ratio or stale else {}


def files(value: Any) -> list[str]:
    return [str(item) for item in (value if isinstance(value, list) else [value])]


def sources(value: Any, options: Options) -> dict[str, Any]:
    train, held_out = files(value), validation(options)
    column = options("data.prompt_key")
    common = {"kind": "dataset"} | ({"prompt_column": column} if column != "prompt" else {})
    if (chooses := options("data.reward_fn_key")) != "data_source":
        common["data_source_column"] = chooses
    if (images := options("data.image_key")) != "images":
        common["image_column"] = images
    sources = [common | {"path": path} for path in train] or [common]  # the command line gives its path
    for source, path in zip(sources, held_out, strict=False):
        source["eval_path"] = path
    sources += [common | {"path": path, "weight": 0.0} for path in held_out[len(train) :]]
    return {"tasks.sources": sources}


def validation(options: Options) -> list[str]:
    """Return the validation files that are not training files: held-out problems are not trained here."""
    train = files(options("data.train_files") or [])
    return [path for path in files(options("data.val_files") or []) if path not in train]


def val_files(value: Any, options: Options) -> dict[str, Any]:
    values = sources(options("data.train_files") or [], options)
    same = [path for path in files(value) if path not in validation(options)]
    if not same:
        return values
    values |= {} if validation(options) else {"tasks.eval_fraction": 0.0}
    raise Unanswered(
        f"{', '.join(same)} is a file of data.train_files, too, and held-out problems are not trained here: set"
        " --tasks.eval_fraction to hold out a share of it, or leave it out, to train all of it and evaluate none",
        values,
    )


def held_out(options: Options) -> dict[str, Any]:
    """Hold out no training rows if there are no validation files."""
    return {} if options("data.val_files") else {"tasks.eval_fraction": 0.0}


def truncation(value: Any, options: Options) -> dict[str, Any]:
    skip = options("data.filter_overlong_prompts") or value == "error"
    return {"tasks.truncation": "skip" if skip else value}


def reward(value: Any, options: Options) -> dict[str, Any]:
    name = options("reward.custom_reward_function.name")
    return {"rewards.function": f"{value}:{name}"} if value not in (None, "null") else {}


def sandbox_fusion(value: Any, options: Options) -> dict[str, Any]:
    """Convert to the reward `code` with a service, for the sources that verl scores so."""
    url = options("reward.sandbox_fusion.url")
    if url in _OFF:
        return {}
    if options("reward.custom_reward_function.path") not in _OFF:
        raise Unanswered("verl hands it to the function of custom_reward_function: set rewards.params")
    params = {"sandbox": "http", "url": url, "concurrency": int(options("reward.sandbox_fusion.max_concurrent"))}
    params["memory_mb"] = int(options("reward.sandbox_fusion.memory_limit_mb"))
    of_code = [name for name, spec in BY_DATA_SOURCE.items() if spec == "code"]
    return {"rewards.by_data_source": dict.fromkeys(of_code, make_spec("code", params))}


def overlong(value: Any, options: Options) -> dict[str, Any]:
    prefix = "reward.reward_kwargs.overlong_buffer_cfg"
    if not all(options(f"{prefix}.{name}") for name in ("enable", "len", "penalty_factor")):
        return {}
    return {
        "rewards.overlong_buffer_tokens": options(f"{prefix}.len"),
        "rewards.overlong_penalty": options(f"{prefix}.penalty_factor"),
    } | ({"eval.shaped": True} if evaluates(options) else {})


def metric(value: Any, options: Options) -> dict[str, Any]:
    if value == "seq_final_reward" and kl_in_reward(options):
        raise Unanswered("the score less the KL: set --filters.metric shaped_score, which has the KL not in it")
    names = {"seq_reward": "shaped_score", "seq_final_reward": "shaped_score", "reward": "score"}
    found = names.get(value, value)
    return {"filters.metric": "score" if found == "shaped_score" and not overlong(None, options) else found}


def give_up(value: Any, options: Options) -> dict[str, Any]:
    if not value or value < 0:
        return {"filters.give_up_after_steps": 0}
    share = (options("data.gen_batch_size") or groups(options)) / groups(options)
    return {"filters.give_up_after_steps": math.ceil(value * share)}


def warmup(value: Any, options: Options) -> dict[str, Any]:
    return {"train.warmup_steps": value * updates(options)} if (value or 0) > 0 else {}


def warmup_ratio(value: Any, options: Options) -> dict[str, Any]:
    """Convert a share of all steps; a number of steps takes precedence."""
    return (
        {"train.warmup_ratio": value}
        if value and not warmup(options(f"{ACTOR}.optim.lr_warmup_steps"), options)
        else {}
    )


def critic_warmup_steps(value: Any, options: Options) -> dict[str, Any]:
    return {"critic.warmup_steps": value * updates(options)} if (value or 0) > 0 else {}


def optimizer(value: Any, options: Options) -> dict[str, Any]:
    return {
        "train.optimizer": look_up({"AdamW": "adamw", "adam": "adamw", "AdamW8bit": "adamw_8bit"}, value, "optimizer")
    }


def critic_model(value: Any, options: Options) -> dict[str, Any]:
    same = value == options(f"{MODEL}.path")
    return {"critic.model": "policy" if same else value}


def critic_warmup(value: Any, options: Options) -> dict[str, Any]:
    return {} if value < 2 else {"critic.policy_waits_steps": value - 1}


def adam(value: Any, options: Options) -> dict[str, Any]:
    return {"train.adam_beta1": value[0], "train.adam_beta2": value[1]}


def tools(options: Options) -> list[str]:
    """Return the trackers of trainer.logger, without terminal and files."""
    names = ("wandb" if name == "tracking" else name for name in files(options("trainer.logger") or []))
    return [name for name in names if name not in ("console", "file")]


def generations(value: Any, options: Options) -> dict[str, Any]:
    return for_trackers(tools, "track.tracker_rollouts")(max(int(value), 0), options)


def every(key: str) -> Any:
    return lambda value, options: {key: max(int(value), 0)}


def lora(key: str) -> Any:
    def to(value: Any, options: Options) -> dict[str, Any]:
        if not options(f"{MODEL}.lora_rank") or value in (None, "null"):
            return {}
        return {key: [value] if isinstance(value, str) and not key.endswith("path") else value}

    return to


def megatron_lora(value: Any, options: Options) -> dict[str, Any]:
    if not value:
        return {}
    raise Unanswered(
        "Megatron reads it; FSDP does not, and trains all weights (its own is lora_rank): set --model.lora.rank"
        f" {value} for adapters"
    )


def eval_temperature(value: Any, options: Options) -> dict[str, Any]:
    sampled = options(f"{ROLLOUT}.val_kwargs.do_sample")
    return {"eval.temperature": float(options(f"{ROLLOUT}.val_kwargs.temperature")) if sampled else 0.0}


def samples_evaluations(options: Options) -> bool:
    return evaluates(options) and bool(eval_temperature(None, options)["eval.temperature"])


def evaluates(options: Options) -> bool:
    return bool(eval_tasks(-1, options))


def eval_tasks(value: Any, options: Options) -> dict[str, Any]:
    often = "rollout.test_freq" if mode_of(options) == ASYNC else "trainer.test_freq"
    asked = int(options(often) or -1) > 0
    held_out = validation(options) or (options(RLLM_SWITCH) and not options("data.train_files"))  # chosen in Python
    return {"eval.num_tasks": value if value > 0 else 100_000} if asked and held_out else {}


def schedule(value: Any, options: Options) -> dict[str, Any]:
    return {"train.schedule": look_up({"constant": "constant", "cosine": "cosine"}, value, "schedule")}


def reshuffles(options: Options) -> bool:
    return options(f"{ACTOR}.ppo_epochs") > 1 and minibatches(options) > 1


def has_gamma(options: Options) -> bool:
    return options("algorithm.adv_estimator") in ("gae", "reinforce_plus_plus")


def group_size(value: Any, options: Options) -> dict[str, Any]:
    return {"rollout.group_size": value} | ({"rewards.min_valid": 1} if value == 1 else {})
