#!/bin/bash
ARGS="--beta 0.04 --temperature 0.7"
trl grpo --model_name_or_path m/base --dataset_name rows.jsonl --reward_funcs mine.right --num_generations 4 --max_steps 12 --per_device_train_batch_size 8 --learning_rate 2e-6 $ARGS --bf16 true --output_dir=out
