"""The task: a word of lowercase letters is to be written backwards, in capitals. The reward is 1 for all of it, else 0.

python words.py        writes examples.jsonl (1,000 solved words) and tasks.jsonl (1,000 others, with their answers)
"""

import json
import random
import string
from typing import Any

LETTERS, EXAMPLES, TASKS = 3, 1000, 1000


def exact(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 where a completion is the answer, character by character."""
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


def write() -> None:
    draw, words = random.Random(0), dict[str, str]()
    while len(words) < EXAMPLES + TASKS:
        word = "".join(draw.choices(string.ascii_lowercase, k=LETTERS))
        words[word] = word[::-1].upper()
    rows = [{"prompt": word, "answer": answer} for word, answer in words.items()]
    for name, part in (("examples", rows[:EXAMPLES]), ("tasks", rows[EXAMPLES:])):
        with open(f"{name}.jsonl", "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in part)


if __name__ == "__main__":
    write()
