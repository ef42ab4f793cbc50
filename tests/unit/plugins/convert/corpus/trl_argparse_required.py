import argparse

from datasets import load_dataset
from mine import right
from trl import GRPOConfig, GRPOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("--lr", type=float, required=True)
parser.add_argument("--beta", type=float)
args, rest = parser.parse_known_args()
args.beta = args.beta or 0.1
config = GRPOConfig(
    output_dir="out",
    learning_rate=args.lr,
    beta=args.beta,
    num_generations=4,
    max_steps=12,
    per_device_train_batch_size=8,
)
trainer = GRPOTrainer(
    model="m/base",
    reward_funcs=right,
    args=config,
    train_dataset=load_dataset("json", data_files="rows.jsonl", split="train"),
)
trainer.train()
