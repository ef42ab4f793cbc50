FILES=$(ls /d/*.parquet | head -1)
STAMP=$(date +%Y%m%d)
GPUS=$(nvidia-smi -L | wc -l)
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=$FILES data.train_batch_size=64 \
  actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.model.path=m/base actor_rollout_ref.rollout.n=8 trainer.total_training_steps=20 \
  trainer.n_gpus_per_node=$GPUS trainer.experiment_name=run-$STAMP
