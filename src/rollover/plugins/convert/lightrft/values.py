"""How values of LightRFT's flags become values of ours: the functions that rows.py names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollover.plugins.convert.files import is_file_of_rows
from rollover.plugins.convert.mapping import Options, Unanswered
from rollover.plugins.convert.shown import trackers, where

BUDGET = 1024  # what its trainer has without max_token_budget, which no flag sets
_ADVANTAGES = {
    "gae": "gae",
    "group_norm": "grpo",
    "reinforce": "reinforce_plus_plus_tokens",
    "reinforce_baseline": "reinforce_plus_plus_baseline",
}
_OVER_TOKENS = ("gae", "reinforce")  # rewards are not compared with siblings, and a KL is taken off each token's


def vision(value: Any, options: Options) -> Mapping[str, Any]:
    """Of the prefixes of parameters that are frozen: those of the tower and the projector alone can be."""
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
    """Evaluations draw as training does."""
    values = {"rollout.group_size": value, "eval.samples_per_task": value}
    return values | ({"rewards.min_valid": 1} if value == 1 else {})


def truncated(value: Any, options: Options) -> dict[str, Any]:
    """LightRFT corrects for nothing: not for truncated sampling, and not for tokens of older versions."""
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
    """Of rewards as they come: with group_norm and the like LightRFT changes what has been compared with siblings."""

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
    """W&B, else TensorBoard, as there."""
    return ["wandb"] if options("use_wandb") else ["tensorboard"] if options("use_tensorboard") else []


def shown_in(value: Any, options: Options) -> dict[str, Any]:
    return trackers(tools(options)) | where(tools, "track.tracker_rollouts")(0, options)


def asked(question: str) -> Any:
    def to(value: Any, options: Options) -> dict[str, Any]:
        raise Unanswered(question)

    return to
