python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=/d/a.parquet data.val_files=/d/b.parquet data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.model.path=m/base actor_rollout_ref.rollout.n=8 trainer.total_training_steps=20 \
  +data.apply_chat_template_kwargs.enable_thinking=False \
  "actor_rollout_ref.actor.optim={lr: 3e-6, weight_decay: 0.1}" \
  +actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache=True \
  trainer.default_local_dir="ck/\${trainer.project_name}" trainer.project_name=sums
