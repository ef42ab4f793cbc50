read -r -d '' OPTIONS <<'EOF'
actor_rollout_ref.actor.optim.lr=2e-6
data.max_response_length=777
EOF
MORE=$(cat <<EOF
actor_rollout_ref.rollout.temperature=0.75
EOF
)
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=/d/a.parquet data.val_files=/d/b.parquet data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.model.path=m/base actor_rollout_ref.rollout.n=8 trainer.total_training_steps=20 $OPTIONS $MORE
