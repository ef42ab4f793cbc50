#!/bin/bash
#SBATCH --nodes=2
export HYDRA_FULL_ERROR=1
CMD="python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=/d/a.parquet data.val_files=/d/b.parquet data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.model.path=m/base actor_rollout_ref.rollout.n=8 trainer.total_training_steps=20 actor_rollout_ref.actor.grad_clip=0.5"
srun --nodes=1 --ntasks=1 -w "$HEAD" bash -c "$CMD trainer.nnodes=$SLURM_NNODES"
