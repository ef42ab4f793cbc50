python3 -m verl.experimental.one_step_off_policy.main_ppo --config-path=config --config-name=one_step_off_ppo_trainer \
    data.train_files=/d/a.parquet data.train_batch_size=8 actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    algorithm.adv_estimator=grpo actor_rollout_ref.model.path=m/base actor_rollout_ref.rollout.n=8 \
    trainer.total_training_steps=20 rollout.n_gpus_per_node=2
