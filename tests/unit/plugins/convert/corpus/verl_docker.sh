IMAGE=verl:latest
LR=9e-6
docker run --gpus all --rm -v $PWD:/workspace -e LENGTH=2048 -m 64g "$IMAGE" bash -lc "
  cd /workspace && pip install -e . &&
  python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=/d/a.parquet data.val_files=/d/b.parquet data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.model.path=m/base actor_rollout_ref.rollout.n=8 trainer.total_training_steps=20 \
    actor_rollout_ref.actor.optim.lr=$LR data.max_response_length=\$LENGTH
"
