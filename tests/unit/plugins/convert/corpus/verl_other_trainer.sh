python3 -m recipe.spin.main_spin data.train_files=/d/a.parquet data.train_batch_size=8 \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 algorithm.adv_estimator=grpo actor_rollout_ref.model.path=m/base \
    actor_rollout_ref.rollout.n=8 trainer.total_training_steps=20
