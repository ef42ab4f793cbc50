"""TRL 1.16 (GRPOConfig): what its fields are here, row by row. One process is taken; more of them are more a batch."""

from __future__ import annotations

from typing import Any

from rollover.convert.mapping import Options, Row, System, Unanswered

# fmt: off
_LOSSES = {
    "grpo": ("clip", "seq-mean-token-mean"), "dapo": ("clip", "token-mean"), "bnpo": ("clip", "token-mean"),
    "dr_grpo": ("clip", "seq-mean-token-sum-norm"), "cispo": ("cispo", "token-mean"),
    "sapo": ("sapo", "seq-mean-token-mean"), "luspo": ("luspo", "seq-mean-token-sum"), "vespo": ("vespo", "token-mean"),
}


def _loss(value: Any, options: Options) -> dict[str, Any]:
    if value not in _LOSSES:
        raise Unanswered(f"{value} is no loss that there is here")
    loss, aggregation = _LOSSES[value]
    sequence = options("importance_sampling_level") == "sequence"
    values: dict[str, Any] = {"algorithm.aggregation": aggregation}
    if sequence and loss == "clip":
        loss = "gspo"
    elif sequence and loss in ("cispo", "sapo"):
        values["algorithm.loss_options"] = {"level": "sequence"}
    return values | {"algorithm.loss": loss}


def _level(value: Any, options: Options) -> dict[str, Any]:
    return _loss(options("loss_type"), options)


def _advantage(value: Any, options: Options) -> dict[str, Any]:
    if value in ("none", False):
        return {"algorithm.advantage": "dr_grpo"}
    std = "batch" if value == "batch" else "sample"
    return {"algorithm.advantage": "grpo", "algorithm.advantage_std": std}


def _clip_high(value: Any, options: Options) -> dict[str, Any]:
    return {"algorithm.clip_high": options("epsilon") if value is None else value}


def _with_beta(key: str) -> Any:
    return lambda value, options: {key: value} if options("beta") else {}


def _synced(key: str) -> Any:
    return lambda value, options: {key: value} if options("beta") and options("sync_ref_model") else {}


ROWS = (
    Row("train_dataset", ("tasks.sources",), lambda v, o: {"tasks.sources": [{"kind": "dataset", "path": v}]},
        example="other.jsonl", note="GRPOTrainer's argument: a file, a folder or a data set of the hub"),
    Row("model", ("model.path",), example="another", note="GRPOTrainer's argument"),
    Row("num_generations", ("rollout.group_size",), None, 8, 4),
    Row("max_completion_length", ("rollout.max_new_tokens",), None, 512, 256),
    Row("temperature", ("rollout.temperature",), None, 1.0, 0.7),
    Row("repetition_penalty", ("rollout.logits.repetition_penalty",), example=1.1),
    Row("chat_template_kwargs", ("model.chat_template_kwargs",), example={"enable_thinking": False}),
    Row("learning_rate", ("train.learning_rate",), None, 1e-6, 1e-5),
    Row("num_iterations", ("train.epochs_per_step",), None, 1, 2),
    Row("epsilon", ("algorithm.clip_low",), None, 0.2, 0.1),
    Row("epsilon_high", ("algorithm.clip_high",), _clip_high, example=0.28, note="not set: as `epsilon`"),
    Row("loss_type", ("algorithm.loss", "algorithm.aggregation"), _loss, "dapo", "cispo",
        note="`bnpo` divides by the tokens of a micro-batch, `dapo` by those of the step: here both are the latter"),
    Row("importance_sampling_level", ("algorithm.loss",), _level, "token", "sequence", note="`gspo`"),
    Row("scale_rewards", ("algorithm.advantage", "algorithm.advantage_std"), _advantage, "group", "batch",
        note="`none`: `dr_grpo`"),
    Row("beta", ("algorithm.kl_coef",), lambda v, o: {"algorithm.kl_coef": v} if v else {}, example=0.04),
    Row("use_bias_correction_kl", ("algorithm.kl_bias_correction",), _with_beta("algorithm.kl_bias_correction"), True,
        False, {"beta": 0.04}),
    Row("ref_model_sync_steps", ("algorithm.reference_refresh_steps",), _synced("algorithm.reference_refresh_steps"),
        512, 64, {"beta": 0.04, "sync_ref_model": True}),
    Row("ref_model_mixup_alpha", ("algorithm.reference_mixup",), _synced("algorithm.reference_mixup"), 0.6, 0.9,
        {"beta": 0.04, "sync_ref_model": True}),
    Row("sync_ref_model", ("algorithm.reference_refresh_steps",),
        lambda v, o: {"algorithm.reference_refresh_steps": o("ref_model_sync_steps")} if v and o("beta") else {},
        False, True, {"beta": 0.04}),
    Row("top_entropy_quantile", ("algorithm.top_entropy_share",), None, 1.0, 0.2),
    Row("entropy_coef", ("algorithm.entropy_coef",), None, 0.0, 0.01),
    Row("mask_truncated_completions", ("filters.mask_truncated",), None, False, True),
    Row("off_policy_mask_threshold", ("algorithm.off_policy_mask_threshold",), example=0.5),
    Row("shuffle_dataset", ("tasks.shuffle",), None, True, False),
    Row("max_steps", ("train.num_steps",), example=20, note="TRL counts updates: with several a step, divide"),
)
# fmt: on
TRL = System("trl", ROWS, {"train_dataset": "train.jsonl", "max_steps": 10}, "max_steps")
