"""LightRFT (examples/gsm8k_geo3k/train_colocate.py, with the partial rollout of pull request 29): what its flags are
here, row by row."""

from __future__ import annotations

from rollover.config.run import TOOLS
from rollover.plugins.convert.lightrft.values import (
    advantage,
    asked,
    batches,
    before_comparing,
    budget,
    clip_range,
    critic_model,
    critic_rate,
    data,
    group_size,
    kl,
    lora,
    over_tokens,
    overlong,
    partial,
    running_norm,
    shown_in,
    sources,
    tools,
    truncated,
    vision,
    with_critic,
)
from rollover.plugins.convert.mapping import SHOWN, WHERE, Row, System
from rollover.plugins.convert.shown import where

# fmt: off
_GAE = {"advantage_estimator": "gae", "critic_pretrain": "another"}
_KL_REWARD = _GAE | {"use_kl_loss": False, "kl_estimator": "k1"}
_PARTIAL = {"use_partial": True, "generate_max_len": 4096}
_LORA = {"lora_rank": 8}
_SHOWN_IN = {"use_wandb": "a-key"}
_OVERLONG = {"overlong_buffer": True, "overlong_buffer_len": 64}
_NORM = _GAE | {"reward_running_norm": True}

_VISION = "it is of the vision part of the model"
NO_RESULT = {
    WHERE: (
        "micro_train_batch_size", "micro_rollout_batch_size", "engine_type", "engine_tp_size", "engine_mem_util",
        "enable_engine_sleep", "disable_engine_sleep", "packing_samples", "sp_size", "fsdp", "fsdp_cpu_offload",
        "zero_stage", "zpg", "adam_offload", "actor_init_on_gpu", "flash_attn", "grad_accum_dtype", "overlap_comm",
        "gradient_checkpointing_use_reentrant", "disable_fast_tokenizer", "disable_logprobs_flashattn", "meta_init",
        "initial_model_shard_size", "local_rank", "rm_use_engine", "rm_engine_cudagraph", "fused_linear_logprob",
        "chunk_size", "use_ms",
    ),
    SHOWN: (
        "save_trajectories", "num_trajectories_to_save", "mark_high_entropy_tokens", "trajectory_analysis",
        "print_replay_buffer_stats", "logging_steps", "save_hf_ckpt", "disable_ds_ckpt", "max_ckpt_mem",
        "load_checkpoint", "save_value_network", "log_dir", "plot_every", "ckpt_path",
    ),
    _VISION: ("limit_mm_image_per_prompt", "mixed_mm_data", "no_shard_vit"),
    "rows with images show them": ("text_only",),
    "its examples choose a reward by it": ("label_key",),
    "goes with `use_gspo`": ("normalize_advantages", "use_sequence_rewards"),
    "goes with `pretrain_data`": ("ptx_coef", "pretrain_data_probs", "pretrain_split"),
    "deprecated there": ("max_len",),
    "a name in its checkpoints": ("value_head_prefix",),
}
# Flag -> why it has no counterpart, and the values without which as much is learned.
_NOT_THERE = {
    "loss_agg_mode": ("none of its trainers reads it, and the loss is the mean of each answer's mean: set"
                      " `algorithm.aggregation`", ("seq-mean-token-mean",)),
    "use_gspo": ("none of its trainers reads it: set `algorithm.loss = \"gspo\"`", (False,)),
    "use_cpg_loss": ("there is no CPGD", (False,)),
    "dynamic_sampling": ("it takes groups of equal rewards out of the loss, and generates none in their place: set"
                         " `filters.zero_variance`, which does", (False,)),
    "advantages_norm": ("it normalises every micro-batch besides the whole batch, which alone is here", (False,)),
    "advantage_clip": ("advantages are not clipped", (0, 0.0)),
    "normalize_reward_for_critic": ("a critic's rewards are those of the policy", (False,)),
    "enable_ema": ("there is no mean of weights over time", (False,)),
    "aux_loss_coef": ("there is no loss of balance between experts", (0, 0.0)),
    "load_in_4bit": ("weights of 4 bits are not there", (False,)),
    "pretrain_data": ("there is no loss of pretraining beside", ()),
    "remote_rm_url": ("a reward is a function, which may ask a server (docs/rewards.md)", ()),
    "input_template": ("the model's own template is used", ()),
    "max_samples": ("give a file of so many rows", (1000000,)),
}

ROWS = (
    Row("prompt_data", ("tasks.sources", "tasks.eval_fraction"), data, example="other",
        note="several, with commas, are several sources"),
    Row("prompt_data_probs", ("tasks.sources",), sources, "1.0", "0.3,0.7", {"prompt_data": "a,b",
        "prompt_data_probs": "0.5,0.5"}, note="`weight` of a source"),
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
    Row("system_prompt", ("tasks.system_prompt",),
        lambda v, o: {"tasks.system_prompt": v} if o("apply_chat_template") else {}, example="Think.",
        beside={"apply_chat_template": True}),
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
    Row("lora_alpha", ("model.lora.alpha",), lambda v, o: {"model.lora.alpha": v} if o("lora_rank") else {}, 16, 64,
        _LORA),
    Row("lora_dropout", ("model.lora.dropout",), lambda v, o: {"model.lora.dropout": v} if o("lora_rank") else {}, 0,
        0.1, _LORA),
    Row("target_modules", ("model.lora.target_modules",), lora("model.lora.target_modules"), "all-linear",
        ["q_proj", "k_proj"], _LORA),
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
        {"generate_max_len": 4096}, note="old tokens are trained as new there, and without a bound: `max_staleness` is"
        " 1 here, and `--algorithm.correction token_truncate` corrects. There a step takes `micro_rollout_batch_size`"
        " answers for each of its prompts, here all of a group"),
    Row("max_budget", ("rollout.token_budget",), budget, example=512, beside=_PARTIAL, also=("max_token_budget",),
        note="taken as it is; LightRFT's trainer reads `max_token_budget`, which no flag sets, and has 1024"),
    Row("partial_percent", ("rollout.complete_fraction",),
        lambda v, o: {"rollout.complete_fraction": v} if o("use_partial") else {}, 0.7, 0.5, _PARTIAL,
        note="there a step trains this share of its groups, and goes on with as many as it lacks; here every one that"
        " is ready, and it goes on with all if it lacks any"),
    Row("advantage_estimator", ("algorithm.advantage",), advantage, "gae", "reinforce_baseline",
        note="`group_norm` is `grpo`, `reinforce` `reinforce_plus_plus_tokens`, `reinforce_baseline`"
        " `reinforce_plus_plus_baseline`"),
    Row("gamma", ("algorithm.gamma",), over_tokens("algorithm.gamma"), 1, 0.9, _GAE),
    Row("lambd", ("algorithm.gae_lambda",), with_critic("algorithm.gae_lambda"), 0.95, 0.9, _GAE),
    Row("eps_clip", ("algorithm.clip_low", "algorithm.clip_high", "algorithm.aggregation"),
        lambda v, o: {"algorithm.clip_low": v, "algorithm.clip_high": v,
                      "algorithm.aggregation": "seq-mean-token-mean"}, 0.2, 0.1),
    Row("high_entropy_token_ratio", ("algorithm.top_entropy_share",),
        lambda v, o: {"algorithm.top_entropy_share": v} if v else {}, 0.0, 0.2,
        note="there the share of each answer's tokens, here of a minibatch's"),
    Row("use_kl_loss", ("algorithm.kl_coef", "algorithm.kl_in", "algorithm.kl_kind", "algorithm.kl_target"), kl, False,
        True, _GAE | {"use_kl_loss": False, "kl_estimator": "k3"}),
    Row("init_kl_coef", ("algorithm.kl_coef", "algorithm.kl_in", "algorithm.kl_kind", "algorithm.kl_target"), kl, 0.01,
        0.1),
    Row("kl_estimator", ("algorithm.kl_kind", "algorithm.kl_in", "algorithm.kl_coef", "algorithm.kl_target"), kl, "k1",
        "k2", note="k1 in the loss has no gradient on average: asked about"),
    Row("kl_target", ("algorithm.kl_target", "algorithm.kl_in", "algorithm.kl_coef", "algorithm.kl_kind"), kl,
        example=0.1, beside=_KL_REWARD),
    Row("critic_pretrain", ("critic.model",), critic_model, example="other", beside=_GAE),
    Row("critic_learning_rate", ("critic.learning_rate", "critic.head_learning_rate"), critic_rate, 9e-6, 1e-4, _GAE,
        note="with its cosine to a tenth"),
    Row("value_clip", ("critic.value_clip",), with_critic("critic.value_clip"), 0.2, 0.5, _GAE),
    Row("freezing_actor_steps", ("critic.policy_waits_steps",),
        lambda v, o: {"critic.policy_waits_steps": v} if v > 0 and o("advantage_estimator") == "gae" else {}, -1, 5,
        _GAE),
    Row("reward_running_norm", ("rewards.running_norm",), before_comparing(running_norm), False, True, _GAE,
        note="`scale`"),
    Row("reward_running_norm_minus_mean", ("rewards.running_norm",), before_comparing(running_norm), False, True,
        _NORM, note="`whiten`"),
    Row("reward_clip", ("rewards.clip_range",), before_comparing(clip_range), 0.0, 5.0, _GAE),
    Row("overlong_buffer", ("rewards.overlong_buffer_tokens", "rewards.overlong_penalty"), overlong, False, True,
        {"overlong_buffer_len": 64}, note="shaping: no part of the score that evaluations and filters see"),
    Row("overlong_buffer_len", ("rewards.overlong_buffer_tokens",), overlong, 1024, 32, _OVERLONG),
    Row("overlong_buffer_penalty_factor", ("rewards.overlong_penalty",), overlong, 1.0, 0.5, _OVERLONG),
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
    *(Row(name, (key,), where(tools, key, of), example="mine", beside=_SHOWN_IN) for name, key, of in (
        ("wandb_org", "track.entity", ("wandb",)), ("wandb_group", "track.group", TOOLS),
        ("wandb_project", "track.project", TOOLS), ("wandb_run_name", "run.name", TOOLS))),
    Row("save_steps", ("checkpoint.every_steps",), lambda v, o: {"checkpoint.every_steps": max(int(v), 0)}, -1, 20),
    Row("max_ckpt_num", ("checkpoint.keep",), None, 3, 5),
    Row("seed", ("run.seed",), None, 42, 7),
    *(Row(name, note=note) for note, names in NO_RESULT.items() for name in names),
    *(Row(name, note=note, neutral=neutral) for name, (note, neutral) in _NOT_THERE.items()),
)
BASE = {
    "pretrain": "smollm2-135m", "prompt_data": "train", "advantage_estimator": "group_norm", "use_kl_loss": True,
    "kl_estimator": "k3", "n_samples_per_prompt": 8, "rollout_batch_size": 128, "train_batch_size": 128,
    "text_only": True,
}
# fmt: on
LIGHTRFT = System("lightrft", ROWS, BASE, "num_episodes")
