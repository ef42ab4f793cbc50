"""A toy model that adds two digits, trained on a CPU in seconds, for the tutorials.

    python -m rollover.recipes.toy_model toy     writes the folder `toy`, a model for transformers' from_pretrained

Prompted with `3+4=` it writes dots as thoughts, the answer, and the end: `...7`. Half of the time it gives up at once:
`?`. Sometimes it loses the thread (`~~~~~~~`) for ten times as long, so lengths have the long tail of reasoning models.
Reinforcement learning has to find that trying pays, which takes seconds.
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

SEED, STEPS, RATE = 0, 360, 3e-3
GIVEN_UP, FROM = 0.5, 0.8  # share of `?` answers, from this share of the steps on; none before
LOST = 0.2  # share of the other answers that lose the thread
SHORT, LONG = 3, 30  # mean number of thoughts of each kind
MAX_SHOWN = 14  # characters per example; shorter ones are enough to learn when to end
# A chat template that adds only the end of an answer.
_PLAIN = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"


def make(folder: Path) -> int:
    """Write the model and its tokenizer. Returns its number of weights."""
    torch.set_num_threads(1)  # more threads only wait for each other in so small a model
    tokenizer = character_tokenizer(_PLAIN)
    model = _random_model(len(tokenizer))
    _teach(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


def character_tokenizer(chat_template: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per printable ASCII character, plus <pad> (0) and <eos> (1)."""
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
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.1,  # with the usual 0.02 so small a model learns very slowly
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _teach(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Train on examples of `_example`, every sum once per step."""
    draw = random.Random(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 20, 1 - step / STEPS))
    ids, ignored = tokenizer.get_vocab(), -100
    for step in range(STEPS):
        given_up = GIVEN_UP if step >= FROM * STEPS else 0.0
        examples = [_example(a, b, given_up, draw) for a in range(10) for b in range(10)]
        rows = [[ids[token] for token in (*text, "<eos>")][:MAX_SHOWN] for text in examples]
        width = max(map(len, rows))
        inputs = torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows])
        labels = torch.tensor([[ignored] * 4 + row[4:] + [ignored] * (width - len(row)) for row in rows])
        model(input_ids=inputs, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def _example(a: int, b: int, given_up: float, draw: random.Random) -> str:
    """Return a question with thoughts and the right answer, or with `?`."""
    if draw.random() < given_up:
        return f"{a}+{b}=?"
    thought, mean = ("~", LONG) if draw.random() < LOST else (".", SHORT)
    return f"{a}+{b}={thought * (1 + int(draw.expovariate(1 / mean)))}{a + b}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="where it is written")
    folder = parser.parse_args().folder
    print(f"{folder}: a model of {make(folder):,} weights")


if __name__ == "__main__":
    main()
