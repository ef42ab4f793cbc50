"""A tiny vision-language model that has learned nothing: an Idefics3 of 0.4 million weights.

python model.py model        writes the folder `model`, with the processor and the tokenizer that it needs
"""

import sys
from pathlib import Path

from shapes import CELL, COLORS, SHAPES, SIDE

SPECIAL = ("<pad>", "<end>", "<user>", "<answer>", "<image>", "<fake_token_around_image>", "<global-img>")
WORDS = (*SHAPES, *COLORS, "what", "is", "there", "?")
TEMPLATE = (
    "{% for m in messages %}{{ '<user>' if m.role == 'user' else '<answer>' }}{% if m.content is string %}"
    "{{ m.content }}{% else %}{% for part in m.content %}{{ '<image>' if part.type == 'image' else part.text }}"
    "{% endfor %}{% endif %}{{ '<end>' if m.role != 'user' else '' }}{% endfor %}"
    "{{ '<answer>' if add_generation_prompt else '' }}"
)


def write(folder: Path, seed: int) -> None:
    """The files that transformers' from_pretrained reads."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate((*SPECIAL, *WORDS))}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    core.add_special_tokens(list(SPECIAL))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<end>")
    size = {"longest_edge": CELL * SIDE}
    images = transformers.Idefics3ImageProcessor(do_image_splitting=False, size=size, max_image_size=size)
    processor = transformers.Idefics3Processor(images, tokenizer, image_seq_len=SIDE * SIDE, chat_template=TEMPLATE)
    ids = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"model_type": "llama", "hidden_size": 96, "intermediate_size": 256, "vocab_size": len(tokenizer)}
    tower = {"hidden_size": 64, "intermediate_size": 128, "image_size": CELL * SIDE, "patch_size": CELL // 2}
    config = transformers.Idefics3Config(
        text_config={**text, **heads, **ids, "max_position_embeddings": 256, "tie_word_embeddings": True},
        vision_config={**tower, **heads},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,  # 6 x 6 patches become 3 x 3 tokens
        tie_word_embeddings=True,
        **ids,
    )
    torch.manual_seed(seed)
    transformers.Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    processor.save_pretrained(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]), seed=int((*sys.argv[2:], 0)[0]))
