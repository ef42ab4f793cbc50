: "${LR:=4e-6}"
: ${STEPS:=20}
BATCH=${BATCH:-64}
RESPONSE=${RESPONSE-$((1024 * 3))}
MODEL=${1:-m/base}
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=/d/a.parquet data.val_files=/d/b.parquet \
  data.train_batch_size=$BATCH actor_rollout_ref.actor.ppo_mini_batch_size=$((BATCH / 2)) actor_rollout_ref.model.path=$MODEL actor_rollout_ref.rollout.n=8 \
  trainer.total_training_steps=$STEPS actor_rollout_ref.actor.optim.lr=$LR data.max_response_length=${RESPONSE}
