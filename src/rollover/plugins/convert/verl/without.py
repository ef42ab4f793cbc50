"""Options of verl 0.9.1, and of releases before it, that have no counterpart here: part of rows.py.

A name is matched as a whole; `*` stands in the place of what several options have in common, and of a table whose
options are all about one thing. What of such a table changes what is learned comes before it.
"""

from __future__ import annotations

from rollover.plugins.convert.mapping import SHOWN, WHERE, Row
from rollover.plugins.convert.verl.values import ACTOR, IS, MODEL, ROLLOUT

# fmt: off
_NULL = (None, "null")
_REF = "actor_rollout_ref.ref"
_REWARDS = "rewards are called one way: docs/rewards.md has a table of verl's managers"
_MODEL = "the model's own files are used"
_VIDEOS = "there are no videos or sounds"
_VISION = "it is of the vision part of the model"
_AGENT = "agents are functions, environments classes: set `workflow.function`, `workflow.environment` (docs/agents.md)"
_LORA = "goes with `model.lora.rank`"

# Option -> why it has no counterpart, and the values without which as much is learned (None: no result depends on it).
ASKED = {
    f"{ACTOR}.clip_ratio": ("verl 0.9.1 reads `clip_ratio_low` and `clip_ratio_high` in its place, which are 0.2: set"
                            " those", (0.2,)),
    f"{_REF}.sync_ref_model": ("no trainer of verl 0.9.1 reads it. Set `algorithm.reference_refresh_steps`", (False,)),
    "data.train_max_samples": ("give a file of so many rows", (-1,)),
    "data.custom_cls.path": ("a source of one's own: docs/own-functions.md", _NULL),
    "data.sampler.class_path": ("docs/tasks.md says in which order tasks come", _NULL),
    "data.datagen.path": ("a source of one's own: docs/own-functions.md", _NULL),
    "data.tokenizer": (_MODEL, _NULL),
    f"{ROLLOUT}.multi_turn.enable": ("tools are methods of a class (`workflow.environment`, docs/agents.md)", (False,)),
    f"{ROLLOUT}.agent.default_agent_loop": ("an agent is a workflow (docs/agents.md)", ("single_turn_agent",)),
    f"{ROLLOUT}.do_sample": ("training rollouts are drawn", (True,)),
    f"{ROLLOUT}.ignore_eos": ("a rollout ends where the model ends it", (False,)),
    f"{ROLLOUT}.over_sample_rate": ("set `rollout.in_flight_groups` and `rollout.interrupt`", (0, 0.0)),
    f"{ROLLOUT}.val_kwargs.top_k": ("evaluations draw by `eval.temperature` and `eval.top_p`", (-1, 0)),
    f"{ROLLOUT}.quantization": ("the engine has the trained weights as they are", _NULL),
    f"{ROLLOUT}.enable_rollout_routing_replay": ("experts are routed anew in training", (False,)),
    f"{MODEL}.custom_chat_template": (_MODEL, _NULL),
    "critic.model.custom_chat_template": (_MODEL, _NULL),
    f"{MODEL}.mtp.enable": ("there is no prediction of several tokens", (False,)),
    "critic.model.mtp.enable": ("there is no prediction of several tokens", (False,)),
    "critic.model.lora.rank": ("a critic has no adapters", (0,)),
    "critic.model.lora_rank": ("a critic has no adapters", (0,)),
    f"{MODEL}.external_lib": ("docs/own-functions.md says what may be one's own here", _NULL),
    "critic.model.external_lib": ("docs/own-functions.md says what may be one's own here", _NULL),
    "*.override_config": ("dropout and the like are the model's own configuration", ({}, *_NULL)),
    "*.override_config.*": ("dropout and the like are the model's own configuration", ("0.", 0, 0.0)),
    "*.override_transformer_config.*coef*": ("losses of a mixture of experts are not there", (0, 0.0)),
    "*.override_transformer_config.*dropout*": ("dropout is the model's own configuration", (0, 0.0)),
    "*.qat.enable": ("there is no training for quantised weights", (False,)),
    "*.fsdp_config.dtype": ("set `model.dtype`", ("bfloat16", "bf16")),
    "*.megatron.dtype": ("set `model.dtype`", ("bfloat16", "bf16")),
    "critic.fsdp.dtype": ("set `model.dtype`", ("bfloat16", "bf16")),
    "*.fsdp_config.model_dtype": ("master weights are float32", ("fp32", "float32")),
    "critic.fsdp.model_dtype": ("master weights are float32", ("fp32", "float32")),
    f"{ACTOR}.optim.optimizer_impl": ("set `train.optimizer`", ("torch.optim", "bitsandbytes.optim")),
    f"{ACTOR}.optim.override_optimizer_config": ("set `[train]`", ({}, *_NULL)),
    "*.optim.lr_decay_style": ("set `train.schedule` and `critic.schedule`", ("constant",)),
    "*.optim.lr_decay_steps": ("a schedule ends with the run", _NULL),
    "*.optim.lr_wsd_decay_steps": ("a schedule ends with the run", _NULL),
    "*.optim.lr_warmup_init": ("warm-up begins at 0", (0, 0.0)),
    "*.optim.min_lr": ("set `train.min_lr_ratio` and `critic.min_lr_ratio`", (0, 0.0)),
    "*.optim.weight_decay_incr_style": ("weight decay stays what it is", ("constant",)),
    "*.optim.use_precision_aware_optimizer": ("moments are float32, or of 8 bits (`train.optimizer`)", (False,)),
    f"{ACTOR}.optim.num_cycles": ("the cosine is half a wave", (0.5,)),
    "critic.optim.optimizer": ("a critic has AdamW", ("AdamW", "adam")),
    "critic.optim.optimizer_impl": ("a critic has AdamW", ("torch.optim",)),
    "critic.optim.override_optimizer_config": ("set `[critic]`", ({}, *_NULL)),
    "critic.optim.num_cycles": ("the cosine is half a wave", (0.5,)),
    "critic.optim.lr_warmup_steps_ratio": ("set `critic.warmup_steps`", (0, 0.0)),
    "critic.optim.betas": ("a critic's betas are those of AdamW", ([0.9, 0.999],)),
    f"{IS}.rollout_rs_threshold_lower": ("an older name: the bound is the first part of `rollout_rs_threshold`", _NULL),
    f"{IS}.rollout_token_veto_threshold": ("no release since 0.7 reads it: set `algorithm.rejection`", _NULL),
    "reward*.reward_model.enable": ("a reward model is the reward `reward_model` (docs/rewards.md)", (False,)),
    "reward_model.enable": ("a reward model is the reward `reward_model` (docs/rewards.md)", (False, *_NULL)),
    "reward_model.reward_manager": (_REWARDS, ("naive", "batch", "dapo", "prime", *_NULL)),
    "reward.reward_manager.name": (_REWARDS, ("naive", "batch", "dapo", "prime", *_NULL)),
    "reward.reward_manager.module.path": (_REWARDS, _NULL),
    "reward_model.reward_loop_module_path": (_REWARDS, _NULL),
    "reward_model.reward_loop_class_name": (_REWARDS, _NULL),
    "distillation.enabled": ("set `[distill]` (docs/distillation.md)", (False,)),
    "trainer.v1.trainer_mode": ("docs/modes.md says which settings of `[rollout]` each mode is", ("sync",)),
    "algorithm.use_pf_ppo": ("there is no PF-PPO", (False,)),
    f"{ACTOR}.use_token_level_loss": ("an older name of `loss_agg_mode=token-mean`", (True,)),
    f"{ACTOR}.use_gpg_loss": ("an older name of `policy_loss.loss_mode=gpg`", (False,)),
    "critic.ppo_epochs": ("policy and critic learn on the same minibatches", (1,)),
    "critic.loss_agg_mode": ("a critic's loss is a mean over tokens", ("token-mean",)),
    "critic.loss_scale_factor": ("a critic's loss is a mean over tokens", _NULL),
    "critic.enable": ("there is a critic where `adv_estimator` needs one", (True, *_NULL)),
    "trainer.val_only": ("`rollover eval CONVERTED.toml` evaluates the model without training", (False,)),
    "skip.*.enable": ("set `run.train_on_recorded` to train recorded rollouts", (False,)),
    f"{ROLLOUT}.skip_rollout": ("set `run.train_on_recorded` to train recorded rollouts", (False,)),
    # rLLM, whose scripts are verl's with tables of its own.
    "rllm/backend": ("a Tinker-compatible service is `backend.type = \"tinker\"` (docs/backends.md)", ("verl",)),
    "rllm.stepwise_advantage.normalize_by_steps": ("a turn has the advantage of its trajectory", (False,)),
    "rllm.rejection_sample.multiplier": ("set `rollout.in_flight_groups`", (1,)),
    "rllm.algorithm.kl_beta": ("set `algorithm.kl_coef`", (0, 0.0)),
    "rllm.async_training.enable": ("set `[rollout]` as docs/async.md says of each mode", (False,)),
    "rllm.remote_runtime.enabled": (_AGENT, (False,)),
    "rllm.trainer.total_batches": ("set `train.num_steps`", (-1,)),
    "rllm.agent.*": (_AGENT, ()),
    "rllm.env.*": (_AGENT, ()),
    "rllm.workflow.*": (_AGENT, ()),
}
_ENGINES = (ROLLOUT, "reward.reward_model.rollout", "reward_model.rollout")
NO_RESULT = {
    WHERE: (
        "*.*micro_batch_size", "*.*micro_batch_size_per_gpu", "*.use_dynamic_bsz", "*.log_prob_use_dynamic_bsz",
        "*.*max_token_len_per_gpu", "*.fsdp_config.*", "critic.fsdp.*", "*.megatron.*", "*.veomni.*", "*.torchtitan.*",
        "*.fsdp_size",
        "*.param_offload", "*.grad_offload", "*.optimizer_offload", "*.ulysses_sequence_parallel_size",
        "*.use_remove_padding", "*.use_fused_kernels", "*.fused_kernel_options.*", "*.use_liger",
        "*.use_torch_compile", "*.use_shm", "*.use_prefix_grouper", "*.entropy_from_logits_with_chunking",
        "*.entropy_from_logits_chunk_size", "*.entropy_checkpointing", "*.pad_to_length",
        "*.tiled_mlp.*", "*.enable_activation_offload", "critic.model.enable_gradient_checkpointing",
        "critic.model.trust_remote_code", "*.rollout_n", "*.data_loader_seed", "*.full_determinism",
        *(f"{engine}.{name}" for engine in _ENGINES for name in (
            "name", "mode", "dtype", "tensor_model_parallel_size", "pipeline_model_parallel_size",
            "data_parallel_size", "expert_parallel_size", "gpu_memory_utilization", "enforce_eager",
            "free_cache_engine", "load_format", "layered_summon", "enable_chunked_prefill", "enable_prefix_caching",
            "enable_sleep_mode", "max_num_batched_tokens", "max_model_len", "engine_kwargs", "engine_kwargs.*",
            "checkpoint_engine.*", "disable_log_stats", "multi_stage_wake_up", "cudagraph_capture_sizes",
            "scheduling_policy", "skip_tokenizer_init", "disaggregation.*", "update_weights_bucket_megabytes",
            "nnodes", "n_gpus_per_node", "seed", "limit_images", "quantization_config_file")),
        f"{ROLLOUT}.agent.num_workers", f"{ROLLOUT}.agent.agent_loop_config_path",
        f"{ROLLOUT}.agent.custom_async_server.*", f"{ROLLOUT}.calculate_log_probs", f"{ROLLOUT}.logprobs_mode",
        f"{ROLLOUT}.router_config_path", f"{ROLLOUT}.mtp", f"{ROLLOUT}.qat", f"{ROLLOUT}.prompt_length",
        f"{ROLLOUT}.response_length", "actor_rollout_ref.hybrid_engine", "actor_rollout_ref.nccl_timeout",
        "critic.nccl_timeout", "critic.ppo_mini_batch_size", "critic.shuffle", "model_engine",
        "trainer.n_gpus_per_node", "trainer.nnodes", "rollout.n_gpus_per_node", "rollout.nnodes", "rollout.n",
        "async_training.checkpoint_engine.*", "async_training.use_trainer_do_validate", "trainer.balance_batch",
        "trainer.device",
        "trainer.use_legacy_worker_impl", "trainer.use_v1", "trainer.ray_wait_register_center_timeout", "ray_init.*",
        "ray_kwargs.*", "transfer_queue.*", "data.return_raw_chat", "data.return_raw_input_ids",
        "data.return_full_prompt", "data.return_multi_modal_inputs", "data.val_batch_size", "data.validation_shuffle",
        "data.dataloader_num_workers", "data.filter_overlong_prompts_workers", "reward.num_workers",
        "reward_model.num_workers", "reward_model.launch_reward_fn_async", "*.total_training_steps",
        "*.optim.zero_indexed_step", "*.optim.use_checkpoint_opt_param_scheduler",
        "*.optim.use_layer_wise_distributed_optimizer",
        "*.enable_resource_pool", "reward_model.n_gpus_per_node", "reward_model.nnodes",
        "reward.reward_model.n_gpus_per_node", "reward.reward_model.nnodes", "actor_rollout_ref.model.hf_config_path",
        "critic.model.hf_config_path", f"{MODEL}.tokenizer_path", "critic.model.tokenizer_path",
        "algorithm.filter_groups.max_inflight_gen_batches",
    ),
    SHOWN: (
        "trainer.rollout_data_dir", "trainer.validation_data_dir", "*.profiler.*", "global_profiler.*",
        "trainer.profile_steps", f"{ROLLOUT}.prometheus.*",
        "*.prometheus.*", "trainer.default_hdfs_dir", "trainer.max_critic_ckpt_to_keep",
        "trainer.del_local_ckpt_after_load",
        "trainer.esi_redundant_time", "trainer.checkpoint_callback_class", "*.checkpoint.*",
        "*.overlong_buffer.log", "*.overlong_buffer_cfg.log", f"{ROLLOUT}.trace.*", f"{ACTOR}.calculate_entropy",
        f"{ACTOR}.calculate_sum_pi_squared", f"{ROLLOUT}.moe_load_balance_metrics_interval",
    ),
    _REWARDS: ("reward_model.use_reward_loop", "reward.reward_manager.source", "reward.reward_manager.module.name",
               "reward_model.reward_loop_source"),
    _VIDEOS: ("data.video_key", "data.audio_key"),
    _VISION: ("data.image_patch_size",),
    "a group that was filtered is replaced at once, by one (`rollout.in_flight_groups`)": ("data.gen_batch_size",),
    "goes with `sync_ref_model`": (f"{_REF}.ref_model_*",),
    "it is `rollout.max_new_tokens`": ("reward.reward_kwargs.max_resp_len", "reward_model.reward_kwargs.max_resp_len",
                                       "custom_reward_function.max_resp_len", "reward_model.max_resp_len"),
    "goes with `multi_turn.enable`": (f"{ROLLOUT}.multi_turn.*", "data.tool_config_path", "data.function_tool_path"),
    "goes with `algorithm.use_pf_ppo`": ("algorithm.pf_ppo.*",),
    "goes with `reward_model.enable`": ("reward_model.rollout.*", "reward_model.model.*", "reward_model.*micro_batch*",
        "reward_model.max_length", "reward.reward_model.*"),
    "goes with `optim.optimizer`, `optim.lr_wsd_decay_steps` or `optim.use_precision_aware_optimizer`": (
        "*.optim.muon_*", "*.optim.lr_wsd_decay_style", "*.optim.main_grads_dtype", "*.optim.exp_avg_dtype",
        "*.optim.exp_avg_sq_dtype"),
    "`--resume` continues a run; without it a directory that holds one is refused": (
        "trainer.resume_mode", "trainer.resume_from_path",
    ),
    "`backend.type = \"ranks\"` spreads the model over processes (FSDP2); there is no tensor or pipeline parallelism": (
        "*.strategy",
    ),
    "Hydra's own: configuration files are read where they lie beside the script": ("hydra.*",),
    "of rLLM: turns have the advantage of their trajectory (`workflow.credit = \"broadcast\"`), there too": (
        "rllm.stepwise_advantage.*",
    ),
    "of rLLM: set by other options": ("rllm.algorithm.use_rllm", "model.name", "rllm.model.name"),
    "goes with `rllm.async_training.enable`": ("rllm.async_training.*",),
    "goes with `rllm.remote_runtime.enabled`": ("rllm.remote_runtime.*",),
    "goes with `rllm.compact_filtering.enable` or `rllm.rejection_sample.enable`; episodes that fail have no reward": (
        "rllm.compact_filtering.*", "rllm.rejection_sample.*",
    ),
    "goes with `qat.enable`": ("*.qat.*",),
    "goes with `mtp.enable`": ("*.mtp.*",),
    "goes with `trainer.v1.trainer_mode`": ("trainer.v1.*",),
    _LORA: (f"{MODEL}.lora.*", "critic.model.lora.*", "critic.model.lora_alpha", "critic.model.lora_adapter_path",
            "critic.model.target_modules", "critic.model.exclude_modules"),
    "goes with `distillation.enabled`": ("distillation.*",),
    "goes with `data.custom_cls.path`, `data.sampler.class_path` or `data.datagen.path`": (
        "data.custom_cls.name", "data.sampler.class_name", "data.datagen.name"),
    "goes with `skip.*.enable`": ("skip.*",),
}
_EPISODES = ("rllm.workflow.n_parallel_tasks", "rllm.workflow.retry_limit", "rllm.workflow.raise_on_error")
WITHOUT = (
    *(Row(name, note="of rLLM: how many episodes run at a time, and what becomes of one that fails")
      for name in _EPISODES),
    *(Row(name, note=note, neutral=neutral) for name, (note, neutral) in ASKED.items()),
    *(Row(name, note=note) for note, names in NO_RESULT.items() for name in names),
)
# fmt: on
