import argparse

from datasets import load_dataset
from mine import right
from trl import GRPOConfig, GRPOTrainer


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default="2e-6")
    parser.add_argument("--model", "-m", default="m/base")
    parser.add_argument("--group-size", type=int, dest="n", default=4)
    parser.add_argument("--no-vllm", action="store_false", dest="vllm")
    parser.add_argument("--resume", action="store_true")
    parser.set_defaults(resume=False)
    return parser.parse_args()


def train(args, steps=12):
    config = GRPOConfig(
        "out",
        learning_rate=args.lr,
        num_generations=args.n,
        max_steps=steps,
        per_device_train_batch_size=args.n * 2,
        use_vllm=args.vllm,
    )
    data = load_dataset("json", data_files="rows.jsonl", split="train")
    GRPOTrainer(args.model, right, config, data).train()


if __name__ == "__main__":
    train(parse())
