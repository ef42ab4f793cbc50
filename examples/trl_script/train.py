"""A script for TRL's GRPOTrainer. One line is another one than with TRL: the import.

python ../toy.py toy
python train.py
"""

from typing import Any

from rollover.compat.trl import GRPOConfig, GRPOTrainer  # with TRL: from trl import GRPOConfig, GRPOTrainer

ROWS = [{"prompt": f"write {letter}{number}"} for letter in "abcdefghijklmnop" for number in range(8)]


def digits(completions: list[str], **kwargs: Any) -> list[float]:
    """The share of digits: a random model writes a tenth."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) for text in completions]


def brief(completions: list[str], **kwargs: Any) -> list[float]:
    """1 for an empty answer, 0 for one of 16 characters."""
    return [1 - len(text) / 16 for text in completions]


def main(model: str = "toy", **changes: Any) -> GRPOTrainer:
    """Train; `changes` are fields of GRPOConfig."""
    fields: dict[str, Any] = dict(
        output_dir="runs/trl_script",
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        num_generations=8,
        per_device_train_batch_size=64,  # samples of a step: eight prompts of eight answers
        max_completion_length=16,
        max_steps=20,
        reward_weights=[1.0, 0.2],
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[digits, brief],
        args=GRPOConfig(**{**fields, **changes}),
        train_dataset=ROWS,
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    for row in main().state.log_history:
        print(row.get("step"), row.get("reward"), row.get("completions/mean_length"))
