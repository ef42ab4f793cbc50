A=1 B=2
export RESPONSE=777
rollout() { local N=99; PENALTY=0.1; }
rollout
source "$(dirname "$0")/hydra/settings.sh"
echo set up > /dev/null && N=8
cat > options.sh <<EOF
KL=0.01
EOF
echo "ENTROPY=0.002" >> options.sh
source ./options.sh
FILES=(/d/a.parquet /d/c.parquet)
IFS=,
env STEPS=20 bash -c "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=[${FILES[*]}] data.val_files=/d/b.parquet data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.model.path=m/base actor_rollout_ref.rollout.n=$N actor_rollout_ref.actor.optim.lr=${LR:-1e-6} actor_rollout_ref.rollout.temperature=$TEMPERATURE actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.actor.kl_loss_coef=$KL actor_rollout_ref.actor.entropy_coeff=$ENTROPY data.max_response_length=\${RESPONSE:-1} trainer.total_training_steps=\${STEPS:-1}"
