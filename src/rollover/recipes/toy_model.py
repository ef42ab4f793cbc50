"""A toy model that adds two digits, made on a CPU in seconds: what the tutorials train.

    python -m rollover.recipes.toy_model toy     writes the folder `toy`, a model for transformers' from_pretrained

Asked `3+4=` it thinks in dots, answers and ends: `...7`. Now and then it loses the thread (`~~~~~~~`), for ten times as
long, so that lengths have the long tail of reasoning models. It was shown right and random answers alike, so that
about half of its own are right: what reinforcement learning has to find is there, and found in seconds.
"""

from __future__ import annotations

import argparse
import random
import string
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SEED, STEPS, RATE = 0, 300, 5e-3
RIGHT = 0.5  # share of the answers that are right by intention; of the others one in 19 is by chance
LOST = 0.2  # share of those that lose the thread
SHORT, LONG = 4, 40  # mean number of thoughts of each kind
MAX_SHOWN = 24  # characters of an example: an end that comes later is not seen, and not needed to learn when to end
_PLAIN = "{% for m in messages %}{{ m['content'] }}{% endfor %}"  # a chat template that adds nothing


def make(folder: Path) -> int:
    """Write the model and its tokenizer. Returns its number of weights."""
    tokenizer = character_tokenizer(_PLAIN)
    model = _random_model(len(tokenizer))
    _teach(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


def character_tokenizer(chat_template: str) -> PreTrainedTokenizerFast:
    """One token per printable ASCII character, plus <pad> (0) and <eos> (1)."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocab = {"<pad>": 0, "<eos>": 1, **{c: i + 2 for i, c in enumerate(string.printable)}}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    out = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    out.chat_template = chat_template
    return out


def _random_model(vocab_size: int) -> PreTrainedModel:
    torch.manual_seed(SEED)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _teach(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Supervised training on what `_shown` draws, every sum once a step."""
    draw = random.Random(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 20, 1 - step / STEPS))
    ids, ignored = tokenizer.convert_tokens_to_ids, -100
    for _ in range(STEPS):
        rows = [ids([*_shown(a, b, draw), "<eos>"])[:MAX_SHOWN] for a in range(10) for b in range(10)]
        width = max(map(len, rows))
        inputs = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
        labels = torch.tensor([[ignored] * 4 + row[4:] + [ignored] * (width - len(row)) for row in rows])
        model(input_ids=inputs, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def _shown(a: int, b: int, draw: random.Random) -> str:
    """A question and an answer, with thoughts between them."""
    lost = draw.random() < LOST
    thoughts = ("~" if lost else ".") * int(draw.expovariate(1 / (LONG if lost else SHORT)))
    return f"{a}+{b}={thoughts}{a + b if draw.random() < RIGHT else draw.randrange(19)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="where it is written")
    folder = parser.parse_args().folder
    print(f"{folder}: a model of {make(folder):,} weights")


if __name__ == "__main__":
    main()
