import os
from dataclasses import dataclass, field

from datasets import load_dataset
from mine import right
from transformers import HfArgumentParser
from trl import GRPOConfig, GRPOTrainer


@dataclass
class Base:
    lr: float = 1e-6
    model: str = field(default="m/base", metadata={"help": "the policy"})


@dataclass
class Run(Base):
    lr: float = 2e-6
    steps: int = int(os.environ.get("STEPS", "12"))
    weights: list = field(default_factory=lambda: [1.0])


class Sampling:
    N = 4
    TEMPERATURE = 0.9


def main():
    parser = HfArgumentParser((Run,))
    (run,) = parser.parse_args_into_dataclasses()
    settings = {"batch": Sampling.N * 2}
    config = GRPOConfig(
        output_dir="out",
        learning_rate=run.lr,
        num_generations=Sampling.N,
        max_steps=run.steps,
        temperature=Sampling.TEMPERATURE,
        per_device_train_batch_size=settings["batch"],
        reward_weights=run.weights,
    )
    GRPOTrainer(
        model=run.model,
        reward_funcs=[right],
        args=config,
        train_dataset=load_dataset("json", data_files="rows.jsonl", split="train"),
    ).train()


if __name__ == "__main__":
    main()
