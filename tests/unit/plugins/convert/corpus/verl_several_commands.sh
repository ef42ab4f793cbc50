python3 examples/prepare.py --local_dir /d
python3 -m verl.trainer.sft_trainer data.train_files=/d/sft.parquet data.train_batch_size=8
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=/d/a.parquet data.val_files=/d/b.parquet data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.model.path=m/base actor_rollout_ref.rollout.n=8 trainer.total_training_steps=20 actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.rollout.temperature=1.0 && \
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=/d/a.parquet data.val_files=/d/b.parquet data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.model.path=m/base actor_rollout_ref.rollout.n=8 trainer.total_training_steps=20 actor_rollout_ref.actor.optim.lr=5e-7 actor_rollout_ref.rollout.temperature=1.0 data.truncation=left
python3 -m verl.model_merger merge --local_dir ck
