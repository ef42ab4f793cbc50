from datasets import load_dataset
from mine import right
from trl import GRPOConfig, GRPOTrainer

LR = 2e-6


def warm():
    LR = 1.0
    n = 99
    return LR * n


def main():
    n = 4
    config = GRPOConfig("out", learning_rate=LR, num_generations=n, max_steps=3 * n, per_device_train_batch_size=8)
    GRPOTrainer(
        model="m/base",
        reward_funcs=right,
        args=config,
        train_dataset=load_dataset("json", data_files="rows.jsonl", split="train"),
    ).train()


if __name__ == "__main__":
    main()
