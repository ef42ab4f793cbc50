KL="--use_kl_loss --kl_estimator k3 --init_kl_coef 0.01"
torchrun --nnodes 1 --nproc-per-node 8 examples/lightrft/train_colocate.py \
  --pretrain m/base --text_only --rollout_batch_size 16 --train_batch_size 128 --n_samples_per_prompt 8 \
  --advantage_estimator group_norm --generate_max_len 512 --max_epochs 1 --prompt_data /d/rows --input_key prompt \
  --actor_learning_rate ${LR:-1e-6} --adam_betas 0.9 0.95 --reward_pretrain "{}" $KL $EXTRA_ARGS 2>&1 | tee log
