"""Draws pictures of shapes with questions about them, and makes a tiny vision-language model that has learned nothing.

python shapes.py        writes model/, images/, examples.jsonl (solved, for `rollover sft`) and tasks.jsonl (for RL)
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

CELL, SIDE = 16, 3  # a picture has 3 x 3 cells, each of which the model sees as one token
SHAPES, COLORS = ("circle", "square", "triangle"), ("red", "green", "blue")
SPECIAL = ("<pad>", "<end>", "<user>", "<answer>", "<image>", "<fake_token_around_image>", "<global-img>")
WORDS = (*SHAPES, *COLORS, "how", "many", "are", "?", ":", *map(str, range(10)))
TEMPLATE = (
    "{% for m in messages %}{{ '<user>' if m.role == 'user' else '<answer>' }}{% if m.content is string %}"
    "{{ m.content }}{% else %}{% for part in m.content %}{{ '<image>' if part.type == 'image' else part.text }}"
    "{% endfor %}{% endif %}{{ '<end>' if m.role != 'user' else '' }}{% endfor %}"
    "{{ '<answer>' if add_generation_prompt else '' }}"
)


def picture(cells: dict[int, tuple[str, str]]) -> Image.Image:
    image = Image.new("RGB", (CELL * SIDE, CELL * SIDE), "white")
    draw = ImageDraw.Draw(image)
    for cell, (shape, color) in cells.items():
        left, top = cell % SIDE * CELL + 2, cell // SIDE * CELL + 2
        right, bottom = left + CELL - 5, top + CELL - 5
        corners = [(left, bottom), (right, bottom), ((left + right) / 2, top)]
        if shape == "triangle":
            draw.polygon(corners, fill=color)
        else:
            (draw.ellipse if shape == "circle" else draw.rectangle)((left, top, right, bottom), fill=color)
    return image


def write(folder: Path, num: int, solved: int, seed: int) -> None:
    """`num` pictures; the first `solved` of them with an answer that lists all shapes, then the number asked for."""
    draw = random.Random(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for number in range(num):
        cells = {cell: (draw.choice(SHAPES), draw.choice(COLORS)) for cell in range(draw.randint(2, 6))}
        picture(cells).save(folder / "images" / f"{number}.png")
        color = draw.choice(COLORS)
        count, listed = 0, []
        for shape, of in cells.values():
            count += of == color
            listed.append(f"{of} {shape} {count}")
        text = f"how many are {color} ?"
        question = [{"type": "image", "image": f"images/{number}.png"}, {"type": "text", "text": text}]
        answer = f"{' '.join(listed)} : {count}"
        prompt = [{"role": "user", "content": question}]
        rows.append({"prompt": prompt, "answer": str(count), "completion": answer})
    for name, part in (("examples", rows[:solved]), ("tasks", rows[solved:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")


def write_model(folder: Path, seed: int) -> None:
    """An Idefics3 of 0.4 million weights, with the processor and the tokenizer that it wants."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate((*SPECIAL, *WORDS))}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    core.add_special_tokens(list(SPECIAL))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<end>")
    tokenizer.chat_template = TEMPLATE
    sizes = {"size": {"longest_edge": CELL * SIDE}, "max_image_size": {"longest_edge": CELL * SIDE}}
    images = transformers.Idefics3ImageProcessor(do_image_splitting=False, **sizes)
    ids = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    text = {"model_type": "llama", "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 3, "num_key_value_heads": 3, "vocab_size": len(tokenizer), **ids}
    tower = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.Idefics3Config(
        text_config={**text, "max_position_embeddings": 256, "tie_word_embeddings": True},
        vision_config={**tower, "image_size": CELL * SIDE, "patch_size": CELL // 2},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        tie_word_embeddings=True,
        **ids,
    )
    torch.manual_seed(seed)
    transformers.Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    transformers.Idefics3Processor(
        images, tokenizer, image_seq_len=SIDE * SIDE, chat_template=TEMPLATE
    ).save_pretrained(folder)


def right(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """1 where the last word is the number that was asked for."""
    return [float(c[-1]["content"].split()[-1:] == [a]) for c, a in zip(completions, answer, strict=True)]


if __name__ == "__main__":
    write(Path("."), num=3000, solved=2000, seed=0)
    write_model(Path("model"), seed=int(sys.argv[1]) if sys.argv[1:] else 0)
