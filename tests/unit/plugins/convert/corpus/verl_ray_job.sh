ray job submit --address="http://127.0.0.1:8265" --runtime-env=runtime.yaml --no-wait -- \
  env WANDB_MODE=offline python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=/d/a.parquet data.val_files=/d/b.parquet data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.model.path=m/base actor_rollout_ref.rollout.n=8 trainer.total_training_steps=20 ++actor_rollout_ref.actor.entropy_coeff=0.002 +actor_rollout_ref.actor.use_dynamic_bsz=True \
  2>&1 | tee log.txt
