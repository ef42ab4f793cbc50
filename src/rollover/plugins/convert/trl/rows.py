"""TRL 1.16 (GRPOConfig, and what GRPOTrainer is given): what its fields are here, row by row.

Every field has a row, also those of TrainingArguments that it inherits; tests/parity/test_trl_fields.py holds them to
the installed TRL. `num_processes` is accelerate's; `prompts` says what the data's prompts are.
"""

from __future__ import annotations

from rollover.plugins.convert.mapping import SHOWN, WHERE, Row, System
from rollover.plugins.convert.shown import where
from rollover.plugins.convert.trl import data
from rollover.plugins.convert.trl import values as to

_PER_STEP = ("rollout.groups_per_step", "train.minibatches_per_step")
_EVAL = ("eval.num_tasks", "eval.every_steps")

# No result depends on these: they say where and how fast something is computed, or what is shown of it.
_HUB = "nothing is uploaded: `model/` of the run is a folder as `from_pretrained` reads it"
_OTHERS = "of other trainers: GRPOTrainer does not read it"
_ADAPTIVE = "goes with `use_adaptive_entropy`"

# fmt: off
_NO_RESULT = (
    *((name, WHERE) for name in (
        "per_device_eval_batch_size", "eval_accumulation_steps", "eval_do_concat_batches", "eval_use_gather_object",
        "batch_eval_metrics", "activation_checkpointing", "activation_checkpointing_kwargs",
        "gradient_checkpointing_kwargs", "torch_compile", "torch_compile_backend", "torch_compile_mode", "tf32",
        "bf16_full_eval", "fp16_full_eval", "use_liger_kernel", "liger_kernel_config", "use_cache",
        "torch_empty_cache_steps", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers",
        "dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order", "ddp_*", "fsdp",
        "fsdp_config", "deepspeed", "accelerator_config", "parallelism_config", "average_tokens_across_devices",
        "local_rank", "ds3_gather_for_generation", "pad_to_multiple_of", "cache_implementation", "vllm_mode",
        "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_server_*", "vllm_group_port",
        "vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_tensor_parallel_size",
        "use_transformers_continuous_batching", "transformers_continuous_batching_config", "use_transformers_paged",
        "enable_jit_checkpoint", "save_on_each_node", "skip_memory_metrics", "debug",
    )),
    *((name, SHOWN) for name in (
        "logging_*", "log_level", "log_level_replica", "log_on_each_node", "log_multimodal", "log_unique_prompts",
        "log_completions_hub_repo", "disable_tqdm", "trackio_*", "include_num_input_tokens_seen",
        "include_for_metrics", "num_completions_to_print",
    )),
    *((name, _HUB) for name in ("push_to_hub", "hub_*")),
    *((name, _OTHERS) for name in (
        "label_smoothing_factor", "label_names", "train_sampling_strategy", "length_column_name", "data_seed",
        "do_train", "do_eval", "do_predict", "prediction_loss_only",
    )),
    ("remove_unused_columns", "a reward is given the columns that it names"),
    ("dataloader_drop_last", "a step has all its groups, from the next epoch where one ends"),
    ("full_determinism", "the same seed gives the same run, with a number of `run.threads`"),
    ("disable_dropout", "a model's dropout is always off; of adapters it is `model.lora.dropout`"),
    ("eval_delay", "evaluations come every `eval.every_steps` steps"),
    ("greater_is_better", "the best evaluation is that of the highest mean reward"),
    ("metric_for_best_model", "goes with `load_best_model_at_end`"),
    ("save_only_model", "a checkpoint has all that a run goes on from"),
    ("num_train_epochs", "how many steps that is depends on the rows: `train.num_steps` says it"),
)
_ASKED = (
    ("fp16", (False,), "there is no float16: `model.dtype` is bfloat16 or float32"),
    ("use_adaptive_entropy", (False,), "the weight of the entropy bonus is fixed: `algorithm.entropy_coef`"),
    ("cast_lm_head_to_fp32", (False,), "logits are computed in `model.dtype`, and log-probs of them in float32"),
    ("router_aux_loss_coef", (None, 0, 0.0), "there is no load-balancing loss of experts"),
    ("optim_args", (None,), "there are no further arguments of an optimizer"),
    ("optim_target_modules", (None,), "there is no GaLore: layers are chosen by `model.lora.target_modules`"),
    ("neftune_noise_alpha", (None, 0), "there is no noise on embeddings"),
    ("auto_find_batch_size", (False,), "GRPOTrainer refuses it, too; `train.micro_batch_tokens` bounds the memory"),
    ("resume_from_checkpoint", (None, False, ""), "`--resume` goes on with a run"),
    ("ignore_data_skip", (False,), "a run that goes on takes the tasks that were not trained yet"),
    ("restore_callback_states_from_checkpoint", (False,), "the state of hooks (docs/trainer.md) is their own"),
    ("max_tool_calling_iterations", (None,), "goes with `tools`"),
    ("tools", (None, []), "tools are methods of a class (`workflow.environment`, docs/agents.md)"),
    ("environment_factory", (None,), "an environment is a class (`workflow.environment`, docs/agents.md)"),
    ("rollout_func", (None,), "rollouts of your own are a workflow (docs/agents.md) or `tasks.producer`"),
    ("callbacks", (None, []), "a class whose methods a run calls: `run.hooks` (docs/trainer.md)"),
    ("optimizers", (None, (None, None)), "the optimizer is `train.optimizer`, the schedule `train.schedule`"),
    ("quantization_config", (None,), "there are no weights of 4 or 8 bits"),
    ("args", (None,), "it is the `GRPOConfig`, whose fields are these rows"),
    ("rows", (None,), "the rows of a data set are those of its file"),
    ("processing_class", (None,), "the tokenizer is that of the model's folder"),
    ("reward_processing_classes", (None, []), "the tokenizer of a reward model is that of its folder"),
)



ROWS = (
    Row("train_dataset", ("tasks.sources", "tasks.eval_fraction"), data.sources, example="other.jsonl",
        note="a file, a folder or a data set of the hub. Without `eval_dataset` no row is held out"),
    Row("eval_dataset", ("tasks.sources",), data.sources, example="held_out.jsonl", note="`eval_path` of the source"),
    Row("prompts", ("tasks.chat",), lambda v, o: {"tasks.chat": v == "messages"}, example="text",
        note="TRL puts messages through the chat template, and leaves texts as they are"),
    Row("model", ("model.path",), example="another"),
    Row("model_init_kwargs", ("model.revision",), data.model_options, example={"revision": "v1"},
        note="`dtype`: master weights are float32 in any case. What else"
        " changes a model is asked about"),
    Row("trust_remote_code", ("model.trust_remote_code",), example=True),
    Row("peft_config", ("model.lora.rank", "model.lora.alpha", "model.lora.target_modules"), data.lora,
        example={"r": 16, "lora_alpha": 8}, note="arguments of `LoraConfig`; without `target_modules`: q_proj"
        " and v_proj, peft's own for most models"),
    Row("reward_funcs", ("rewards.function", "rewards.functions"), data.rewards, example=["mine.py:reward"],
        note="a model's name: the reward `reward_model`"),
    Row("reward_weights", ("rewards.functions",), data.rewards, example=[1.0, 0.5]),
    Row("multi_objective_aggregation", ("algorithm.advantage", "algorithm.reward_weights"), to.advantage,
        "sum_then_normalize", "normalize_then_sum", note="`normalize_then_sum`: `gdpo`"),
    Row("num_processes", _PER_STEP, to.groups, 1, 2, note="accelerate's: processes have a batch each"),
    Row("per_device_train_batch_size", _PER_STEP, to.groups, 8, 16,
        note="samples; a step here is what is generated at once"),
    Row("gradient_accumulation_steps", _PER_STEP, to.groups, 1, 2),
    Row("steps_per_generation", _PER_STEP, to.groups, example=2,
        note="minibatches have whole groups, where TRL shuffles their rollouts among them"),
    Row("generation_batch_size", _PER_STEP, to.groups, example=32),
    Row("num_generations", ("rollout.group_size",), default=8, example=4),
    Row("num_generations_eval", ("eval.samples_per_task",), data.evaluation, example=2),
    Row("max_steps", ("train.num_steps",), to.steps, example=20, note="TRL counts updates"),
    Row("max_prompt_length", ("tasks.max_prompt_tokens", "tasks.truncation"), data.prompt_limit, 0, 128,
        note="of earlier releases; without it no prompt is too long"),
    Row("max_completion_length", ("rollout.max_new_tokens",), default=512, example=256),
    Row("temperature", ("rollout.temperature",), default=1.0, example=0.7),
    Row("top_p", ("rollout.top_p", "algorithm.allow_uncorrected"), to.sampled("rollout.top_p"), example=0.9,
        note="TRL corrects for none of it; here that is to be permitted"),
    Row("top_k", ("rollout.top_k",), to.sampled("rollout.top_k"), example=20),
    Row("min_p", ("rollout.min_p",), to.sampled("rollout.min_p"), example=0.05),
    Row("repetition_penalty", ("rollout.logits.repetition_penalty",),
        to.sampled("rollout.logits.repetition_penalty"), example=1.1),
    Row("generation_kwargs", ("rollout.stop",), to.generation, example={"stop_strings": ["###"]},
        note="sampling, penalties, `min_new_tokens`, `suppress_tokens` and stops; others are asked about"),
    Row("vllm_structured_outputs_regex", ("rollout.logits.regex",), to.regex, example="[0-9]+"),
    Row("chat_template_kwargs", ("model.chat_template_kwargs",), data.given("model.chat_template_kwargs"),
        example={"enable_thinking": False}),
    Row("shuffle_dataset", ("tasks.shuffle",), default=True, example=False),
    Row("learning_rate", ("train.learning_rate",), default=1e-6, example=1e-5),
    Row("lr_scheduler_type", ("train.schedule",), to.schedule, "linear", "cosine"),
    Row("lr_scheduler_kwargs", ("train.min_lr_ratio",), to.schedule, example={"min_lr_rate": 0.1}),
    Row("warmup_steps", ("train.warmup_steps", "train.warmup_ratio"), to.warmup, example=10,
        note="below 1: a share. The first update has 1/n of the rate, in TRL 0"),
    Row("warmup_ratio", ("train.warmup_ratio",), to.warmup, example=0.1, note="of earlier releases"),
    Row("optim", ("train.optimizer",), to.optimizer, "adamw_torch_fused", "sgd"),
    Row("weight_decay", ("train.weight_decay",), default=0.0, example=0.1),
    Row("adam_beta1", ("train.adam_beta1",), None, 0.9, 0.8, when=to.has_adam),
    Row("adam_beta2", ("train.adam_beta2",), None, 0.999, 0.95, when=to.has_adam),
    Row("adam_epsilon", ("train.adam_eps",), None, 1e-8, 1e-6, when=to.has_adam),
    Row("max_grad_norm", ("train.max_grad_norm",), default=1.0, example=0.5),
    Row("num_iterations", ("train.epochs_per_step",), default=1, example=2),
    Row("gradient_checkpointing", ("train.gradient_checkpointing",), default=True, example=False),
    Row("bf16", ("model.dtype",), data.dtype, example=False, note="not set: `auto`"),
    Row("use_cpu", ("model.device",), lambda v, o: {"model.device": "cpu"} if v else {}, example=True),
    Row("epsilon", ("algorithm.clip_low",), to.clip_low, 0.2, 0.1),
    Row("epsilon_high", ("algorithm.clip_high",), to.clip_high, example=0.28,
        note="not set: as `epsilon`. With `cispo` it is the largest ratio itself, `clip_high + 1`"),
    Row("delta", ("algorithm.dual_clip",), to.delta, example=4.0, note="above `1 + epsilon_high`"),
    Row("loss_type", ("algorithm.loss", "algorithm.aggregation"), to.loss, "dapo", "sapo",
        note="`bnpo` divides by the tokens of a micro-batch, `dapo` by those of the step: here both are the latter"),
    Row("importance_sampling_level", ("algorithm.loss",), to.loss, "token", "sequence", note="`gspo`"),
    *(Row(name, ("algorithm.loss_options",), to.loss, default, example)
      for name, default, example in (
          ("sapo_temperature_pos", 1.0, 2.0), ("sapo_temperature_neg", 1.05, 2.0), ("vespo_k_pos", 2.0, 1.0),
          ("vespo_lambda_pos", 3.0, 1.0), ("vespo_k_neg", 3.0, 1.0), ("vespo_lambda_neg", 2.0, 1.0))),
    Row("scale_rewards", ("algorithm.advantage", "algorithm.advantage_std"), to.advantage, "group", "batch",
        note="`none`: `dr_grpo`"),
    Row("use_vllm", ("algorithm.correction",), to.correction, False, True,
        note="TRL corrects for vLLM's log-probs alone. What generates is `[engine]`"),
    Row("vllm_importance_sampling_correction", ("algorithm.correction",), to.correction, True, False),
    Row("vllm_importance_sampling_mode", ("algorithm.correction",), to.correction, "sequence_mask", "token_truncate"),
    Row("vllm_importance_sampling_clip_max", ("algorithm.correction_cap",), to.correction, 3.0, 2.0),
    Row("vllm_importance_sampling_clip_min", ("algorithm.correction_floor",), to.correction, example=0.5),
    Row("vllm_importance_sampling_cap", ("algorithm.correction_cap",), to.correction, example=2.0,
        note="of earlier releases"),
    Row("beta", ("algorithm.kl_coef",), None, 0.0, 0.04, when=lambda o: o("beta")),
    Row("use_bias_correction_kl", ("algorithm.kl_bias_correction",), None, True, False,
        when=lambda o: o("beta")),
    Row("sync_ref_model", ("algorithm.reference_refresh_steps",),
        lambda v, o: {"algorithm.reference_refresh_steps": to.in_steps(o("ref_model_sync_steps"), o)}, False, True,
        when=to.syncs_reference),
    Row("ref_model_sync_steps", ("algorithm.reference_refresh_steps",),
        lambda v, o: {"algorithm.reference_refresh_steps": to.in_steps(v, o)}, 512, 64, when=to.syncs_reference),
    Row("ref_model_mixup_alpha", ("algorithm.reference_mixup",), None, 0.6, 0.9,
        when=to.syncs_reference),
    Row("top_entropy_quantile", ("algorithm.top_entropy_share",), default=1.0, example=0.2),
    Row("entropy_coef", ("algorithm.entropy_coef",), default=0.0, example=0.01),
    Row("mask_truncated_completions", ("filters.mask_truncated",), default=False, example=True,
        note="a group without another rollout is replaced; in TRL it has no part in the loss"),
    Row("off_policy_mask_threshold", ("algorithm.off_policy_mask_above",),
        data.given("algorithm.off_policy_mask_above"), example=0.5),
    Row("seed", ("run.seed",), default=42, example=7),
    Row("output_dir", ("run.dir",), data.given("run.dir"), example="out"),
    Row("run_name", ("run.name",), data.given("run.name"), example="mine"),
    Row("report_to", ("track.trackers",), data.trackers, example=["wandb"],
        note="`wandb`, `tensorboard`, `trackio`, `mlflow` and `swanlab` (docs/trackers.md)"),
    Row("project", ("track.project",), where(data.tools, "track.project", of=("trackio",)), example="mine",
        note="of trackio alone there"),
    Row("log_completions", ("track.tracker_rollouts",), data.completions, False, True,
        note="four of each step, where TRL sends all"),
    Row("eval_strategy", _EVAL, data.evaluation, "no", "steps",
        note="with an `eval_dataset`. One more evaluation comes at the end"),
    Row("eval_steps", _EVAL[1:], data.evaluation, example=20, note="not set: `logging_steps`"),
    Row("eval_on_start", ("eval.at_start",), data.evaluation, False, True),
    Row("load_best_model_at_end", ("checkpoint.keep_best", "checkpoint.save_best_model"), data.best, False, True,
        note="`model/` is the last one, `best_model/` the best"),
    Row("save_strategy", ("checkpoint.every_steps",), data.saves, "steps", "no"),
    Row("save_steps", ("checkpoint.every_steps",), data.saves, 500, 20),
    Row("save_total_limit", ("checkpoint.keep",), data.given("checkpoint.keep"), example=5,
        note="not set: two, where TRL keeps all"),
    *(Row(name, note=why) for name, why in _NO_RESULT),
    *(Row(name, note=_ADAPTIVE) for name in
      ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target")),
    *(Row(name, note=why, neutral=neutral) for name, neutral, why in _ASKED),
)
# fmt: on
TRL = System("trl", ROWS, {"train_dataset": "train.jsonl", "prompts": "messages", "max_steps": 10}, "max_steps")
