trl sft --model_name_or_path m/base --dataset_name o/d --learning_rate 5e-5 --output_dir sft
trl grpo --model_name_or_path sft --dataset_name rows.jsonl --reward_funcs mine.right --num_generations 4 --max_steps 12 --per_device_train_batch_size 8 --learning_rate 2e-6 --scale_rewards none --report_to none --output_dir out
