python3 -m recipe.partial_rollout.main_ppo \
    +async_training.partial_rollout=True \
    algorithm.adv_estimator=grpo \
    algorithm.rollout_correction.rollout_is=token \
    data.train_files=/d/a.parquet \
    data.train_batch_size=16 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.model.path=m/base \
    actor_rollout_ref.rollout.n=8 \
    trainer.total_training_steps=20 \
