export OMP_NUM_THREADS=1
torchrun --nnodes=2 --nproc_per_node 4 --rdzv_backend c10d train.py --model_name_or_path m/base --dataset_name rows.jsonl --reward_funcs mine.right --num_generations 4 --max_steps 12 --per_device_train_batch_size 8 --learning_rate 2e-6 --gradient_checkpointing
