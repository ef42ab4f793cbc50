MODEL_ARGS=(
  actor_rollout_ref.model.path="m/base"   # the policy
  actor_rollout_ref.model.enable_gradient_checkpointing=True
)
DATA_ARGS=(data.train_files=/d/a.parquet data.val_files=/d/b.parquet data.train_batch_size=64)
ROLLOUT_ARGS=(actor_rollout_ref.rollout.n=8)
ROLLOUT_ARGS+=(actor_rollout_ref.rollout.temperature=0.9 "actor_rollout_ref.rollout.top_p=0.95")
python3 -m verl.trainer.main_ppo "${MODEL_ARGS[@]}" "${DATA_ARGS[@]}" "${ROLLOUT_ARGS[@]}" \
  algorithm.adv_estimator=grpo actor_rollout_ref.actor.ppo_mini_batch_size=32 trainer.total_training_steps=20
