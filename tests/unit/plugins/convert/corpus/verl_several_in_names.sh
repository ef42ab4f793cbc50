KL="actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.005"
LENGTHS='data.max_prompt_length=1024 data.max_response_length=4096'
OPTIM="actor_rollout_ref.actor.optim.lr=2e-6"
ALL="$KL $OPTIM"
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=/d/a.parquet data.val_files=/d/b.parquet data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.model.path=m/base actor_rollout_ref.rollout.n=8 trainer.total_training_steps=20 $ALL $LENGTHS
