"""Pictures of shapes in a row, tasks that ask what they show, and the reward: the share of shapes that is right.

python shapes.py        draws images/ and writes examples.jsonl (with answers, for `rollover sft`) and tasks.jsonl
"""

import json
import random
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

CELL, SIDE = 16, 3  # a picture has 3 x 3 cells, each of which the model sees as one token
COLORS, SHAPES = ("red", "green", "blue"), ("square", "bar", "dot")


def picture(shapes: list[tuple[str, str]]) -> Image.Image:
    """Shapes of a color each, from the upper left on."""
    image = Image.new("RGB", (CELL * SIDE, CELL * SIDE), "white")
    draw = ImageDraw.Draw(image)
    for cell, (color, shape) in enumerate(shapes):
        x, y = cell % SIDE * CELL + CELL // 2, cell // SIDE * CELL + CELL // 2
        width, height = {"square": (6, 6), "bar": (6, 2), "dot": (2, 2)}[shape]
        draw.rectangle((x - width, y - height, x + width, y + height), fill=color)
    return image


def write(folder: Path, num: int, solved: int, seed: int) -> None:
    """`num` pictures, of which `solved` become examples, and the others tasks."""
    draw = random.Random(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(num):
        shapes = [(draw.choice(COLORS), draw.choice(SHAPES)) for _ in range(draw.randint(2, SIDE * SIDE))]
        picture(shapes).save(folder / "images" / f"{number}.png")
        shown = [{"type": "image", "image": f"images/{number}.png"}, {"type": "text", "text": "what is there ?"}]
        answer = " ".join(f"{color} {shape}" for color, shape in shapes)
        rows.append({"prompt": [{"role": "user", "content": shown}], "answer": answer})
    for name, part in (("examples", rows[:solved]), ("tasks", rows[solved:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")


def right(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """The share of words that stand where they should; 0 for an answer of another length."""
    scores = []
    for completion, wanted in zip(completions, answer, strict=True):
        said, words = completion[-1]["content"].split(), wanted.split()
        scores.append(sum(map(str.__eq__, said, words)) / len(words) if len(said) == len(words) else 0.0)
    return scores


if __name__ == "__main__":
    write(Path("."), num=3000, solved=2000, seed=0)
