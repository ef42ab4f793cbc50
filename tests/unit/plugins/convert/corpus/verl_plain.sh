#!/usr/bin/env bash
set -xeuo pipefail

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=/d/a.parquet \
    data.val_files=/d/b.parquet \
    data.train_batch_size=64 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.model.path=m/base \
    actor_rollout_ref.rollout.n=8 \
    trainer.total_training_steps=20 \
    actor_rollout_ref.actor.optim.lr=3e-6 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    trainer.logger='["console","wandb"]' \
    trainer.project_name=sums "$@"
