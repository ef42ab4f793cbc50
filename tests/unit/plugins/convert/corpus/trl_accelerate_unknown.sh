accelerate launch --config_file /nowhere/zero3.yaml train.py --model_name_or_path m/base --dataset_name rows.jsonl --reward_funcs mine.right --num_generations 4 --max_steps 12 --per_device_train_batch_size 8 --learning_rate $LR stray.txt
python3 -c "print('done')" $EXTRA_FLAGS
