"""A toy for the examples that show how something is wired, not what a language model learns: seconds on any CPU.

    python ../toy.py toy        writes the folder `toy`: a random model of 80,000 weights, and tasks.jsonl
    python ../toy.py toy 0.1    the same with larger weights

It writes characters at random, and `digits` rewards digits: a tenth of what it writes at first, nearly all of it soon.
"""

import json
import string
import sys
from pathlib import Path
from typing import Any


def digits(completions: list[str], **columns: Any) -> list[float]:
    """The share of digits in each completion; 0 for an empty one."""
    return [sum(c in string.digits for c in text) / max(1, len(text)) for text in completions]


def write(folder: Path, deviation: float = 0.02) -> None:
    """The model and its tokenizer of one token a character, as from_pretrained wants them, and the tasks.

    deviation: of the random weights. With the default's small ones adapters alone could change little.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from rollover.recipes.toy_model import character_tokenizer

    tokenizer = character_tokenizer("{% for m in messages %}{{ m['content'] + '<eos>' }}{% endfor %}")
    sizes: dict[str, Any] = dict(
        initializer_range=deviation,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=16,
    )
    special = dict(bos_token_id=None, eos_token_id=1, pad_token_id=0, tie_word_embeddings=True)
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", vocab_size=len(tokenizer), max_position_embeddings=512, **sizes, **special)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rows = [{"prompt": f"write {a}{b}"} for a in string.ascii_lowercase for b in "abcd"]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]), *map(float, sys.argv[2:]))
