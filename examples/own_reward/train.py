"""Two rewards of your own, in Python: the answer is right, and it is short.

python train.py
"""

import re
from typing import Any

import rollover

ROWS = [
    {"prompt": f"What is {a} + {b}? Answer with the number alone.", "answer": str(a + b)}
    for a in range(10)
    for b in range(10)
]


def right(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 where the last number is the answer. Columns of the rows come as lists, one entry for each completion."""
    found = [re.findall(r"\d+", text) for text in completions]
    return [float(bool(numbers) and numbers[-1] == a) for numbers, a in zip(found, answer, strict=True)]


def brief(completions: list[str], **columns: Any) -> list[float]:
    """From 0.5 for an empty answer down to 0 for one of 100 characters."""
    return [0.5 * max(0.0, 1 - len(text) / 100) for text in completions]


def main(**changes: Any) -> rollover.Run:
    """Train; `changes` are keys of the configuration, such as num_steps=2."""
    settings: dict[str, Any] = dict(
        model="smollm2-135m",
        tasks=ROWS,
        eval_fraction=0.2,  # of the rows, which are not trained
        reward=[right, brief],  # their sum is trained; each is logged as reward/extra/NAME
        num_steps=10,
        groups_per_step=4,
        group_size=8,
        max_new_tokens=24,
        learning_rate=2e-5,
        warmup_steps=0,
        eval={"num_tasks": 16, "samples_per_task": 2},
        checkpoint={"every_steps": 0, "save_final_model": False},
    )
    return rollover.train(**{**settings, **changes})


if __name__ == "__main__":
    run = main(**{"run.dir": "runs/own_reward"})
    for row in run.metrics:
        print(row["step"], round(row["reward/extra/right"], 2), round(row["reward/extra/brief"], 2))
    print(max(run.records(), key=lambda record: (record["step"], record["score"]))["completion"])
