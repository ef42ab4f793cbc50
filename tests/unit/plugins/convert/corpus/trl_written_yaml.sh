OUT=runs/a
cat <<EOF > grpo.yaml
model_name_or_path: m/base
dataset_name: rows.jsonl
reward_funcs: [mine.right]
num_generations: 4
max_steps: 12
per_device_train_batch_size: 8
learning_rate: 2e-6
output_dir: $OUT
EOF
trl grpo --config grpo.yaml
