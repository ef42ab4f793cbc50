TEST=${TEST_FILE:-["/d/test.parquet"]}
python3 -m verl.experimental.fully_async_policy.fully_async_main --config-name=fully_async_ppo_trainer \
    data.train_files=/d/a.parquet data.val_files="$TEST" data.train_batch_size=0 data.gen_batch_size=1 \
    actor_rollout_ref.model.path=m/base actor_rollout_ref.rollout.n=16 actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    algorithm.adv_estimator=grpo rollout.total_rollout_steps=$(((512*100))) rollout.test_freq=10 rollout.nnodes=1 \
    async_training.staleness_threshold=0.5 async_training.trigger_parameter_sync_step=4 \
    async_training.require_batches=4 async_training.partial_rollout=True
