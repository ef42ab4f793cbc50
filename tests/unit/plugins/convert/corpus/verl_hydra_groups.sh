CONFIG_PATH="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/hydra"
python3 -m verl.trainer.main_ppo --config-path="$CONFIG_PATH" --config-name=groups
