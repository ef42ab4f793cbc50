PROCESSES=4
accelerate launch --config_file zero3.yaml --num_processes=$PROCESSES --main_process_port 29501 train.py \
  --config recipe.yaml --max_steps 12 > log.txt 2>&1
