MODEL=/models/org/m-base.v2
DATA=/data/sums/train.parquet
NAME=${MODEL##*/}
STEM=${NAME%.*}
DIR=$(dirname "$DATA")
FILE=$(basename $DATA .parquet)
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files="$DATA" data.val_files="$DIR/test.parquet" \
  data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.model.path=$MODEL actor_rollout_ref.rollout.n=8 trainer.total_training_steps=20 \
  trainer.experiment_name="${STEM//-/_}-$FILE" trainer.default_local_dir="${OUT:-$(pwd)/ck}/${STEM^^}"
