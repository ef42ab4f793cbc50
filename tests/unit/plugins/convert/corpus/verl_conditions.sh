MODE=${MODE:-base}
TEMPERATURE=1.0
case "$MODE" in
  base) LR=1e-6 ;;
  fast|faster) LR=5e-6 ;;
  *) echo "unknown $MODE"; exit 1 ;;
esac
if [ "$MODE" = fast ]; then
  TEMPERATURE=0.6
  SEED=3
else
  SEED=3
fi
EXTRA=(data.shuffle=False)
[[ -n "${KL:-}" ]] && EXTRA+=(actor_rollout_ref.actor.entropy_coeff=0.01)
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=/d/a.parquet data.val_files=/d/b.parquet data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.model.path=m/base actor_rollout_ref.rollout.n=8 trainer.total_training_steps=20 actor_rollout_ref.actor.optim.lr=$LR actor_rollout_ref.rollout.temperature=$TEMPERATURE data.seed=$SEED "${EXTRA[@]}"
