from datasets import load_dataset
from mine import right
from trl import GRPOConfig, GRPOTrainer


class Config(GRPOConfig):
    beta: float = 0.04

    def __post_init__(self):
        self.temperature = 0.5


class Trainer(GRPOTrainer):
    pass


config = Config("out", learning_rate=2e-6, num_generations=4, max_steps=12, per_device_train_batch_size=8)
if config.beta > 0:
    config.top_p = 0.9
trainer = Trainer(
    model="m/base",
    reward_funcs=right,
    args=config,
    train_dataset=load_dataset("json", data_files="rows.jsonl", split="train"),
)
trainer.add_callback(print)
trainer.train()
