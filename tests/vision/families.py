"""Tiny image-text models of seven families with random weights, in folders as from_pretrained takes them.

    write(family, folder)     config, weights, tokenizer, chat template and the family's own processor

Every family has its real model and processor classes. Its tokens: 256 bytes, and the special tokens of the family. An
image is 4 to 20 placeholders: 20 in five tiles for SmolVLM and Idefics3 (12 in three for one twice as wide), 4 a tile
for InternVL (1 to 4 tiles), 4 for Gemma 3, and one for 8 x 8 pixels, of at most 32 x 32, for the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

TILE = 16  # pixels a side

_TEXT: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=2048,
)
_VISION: dict[str, Any] = dict(hidden_size=32, intermediate_size=48)
_TOWER = dict(num_hidden_layers=2, num_attention_heads=2, image_size=TILE, patch_size=4)

# The families' own chat templates, shortened: SmolVLM's and Idefics3's take content as a list of parts only.
_UTTERANCES = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
_QWEN = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}<|im_end|>\n{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_GEMMA = (
    "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}{%- if messages[0]['content'] is string -%}"
    "{%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}{%- else -%}"
    "{%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}{%- endif -%}"
    "{%- set loop_messages = messages[1:] -%}{%- else -%}{%- set first_user_prefix = '' -%}"
    "{%- set loop_messages = messages -%}{%- endif -%}{%- for message in loop_messages -%}"
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif -%}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}"
    "{{ first_user_prefix if loop.first else '' }}{%- if message['content'] is string -%}"
    "{{ message['content'] | trim }}{%- else -%}{%- for item in message['content'] -%}"
    "{%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}{%- elif item['type'] == 'text' -%}"
    "{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}{%- endif -%}{{ '<end_of_turn>\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}"
)
_INTERNVL = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' %}"
    "{{ '<IMG_CONTEXT>\n' }}{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}"
    "{{ '[SYSTEM_PROMPT]' + message['content'] + '[/SYSTEM_PROMPT]' }}{% elif message['role'] == 'user' %}"
    "{{ '[INST]' }}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for block in message['content'] %}{% if block['type'] == 'text' %}{{ block['text'] }}"
    "{% elif block['type'] in ['image', 'image_url'] %}{{ '[IMG]' }}{% endif %}{% endfor %}{% endif %}{{ '[/INST]' }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class _Family:
    """`tokens`: special ones by name, where the family's tokenizer has names for them. `config`, `processor`: of the
    tokenizer, as both need ids."""

    template: str
    pad: str
    eos: str
    bos: str | None
    config: Callable[[Any], Any]
    processor: Callable[[Any], Any]
    names: dict[str, str] = field(default_factory=dict)
    tokens: tuple[str, ...] = ()


def write(family: str, folder: Path, seed: int = 0, **text: Any) -> Path:
    """Write the model folder of a family. Weights that its class begins with zeros are random, too.

    `text`: changes of the configuration of its language model.
    """
    found = _FAMILIES[family]
    tokenizer = _tokenizer(found)
    processor = found.processor(tokenizer)
    torch.manual_seed(seed)
    config = found.config(tokenizer)
    for name, value in text.items():
        setattr(config.text_config, name, value)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # freshly initialised models are nearly uniform: sharper ones make mistakes visible
        for name, parameter in model.named_parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)
            if parameter.ndim >= 2 and "embed_tokens" not in name:
                parameter.mul_(4.0)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def _tokenizer(family: _Family) -> PreTrainedTokenizerFast:
    """A token for each byte, and the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.tokens])
    out = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=family.pad,
        eos_token=family.eos,
        **({} if family.bos is None else {"bos_token": family.bos}),
        **({"extra_special_tokens": family.names} if family.names else {}),
    )
    out.chat_template = family.template
    return out


def text_config(tokenizer: Any, model_type: str = "", **changes: Any) -> dict[str, Any]:
    named = {"model_type": model_type} if model_type else {}
    return {
        **named,
        **_TEXT,
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **changes,
    }


def _id(tokenizer: Any, token: str) -> int:
    return tokenizer.convert_tokens_to_ids(token)


def _utterances_config(model_type: str) -> Callable[[Any], Any]:
    def config(tokenizer: Any) -> Any:
        return AutoConfig.for_model(
            model_type,
            text_config=text_config(tokenizer, "llama", head_dim=16),
            vision_config={**_VISION, **_TOWER},
            image_token_id=_id(tokenizer, "<image>"),
            scale_factor=2,
        )

    return config


def _smolvlm_processor(tokenizer: Any) -> Any:
    sizes: dict[str, Any] = dict(size={"longest_edge": 2 * TILE}, max_image_size={"longest_edge": TILE})
    images = transformers.SmolVLMImageProcessor(**sizes)
    videos = transformers.SmolVLMVideoProcessor(**sizes)
    return transformers.SmolVLMProcessor(images, tokenizer, videos, image_seq_len=4, chat_template=_UTTERANCES)


def _idefics3_processor(tokenizer: Any) -> Any:
    images = transformers.Idefics3ImageProcessor(size={"longest_edge": 2 * TILE}, max_image_size={"longest_edge": TILE})
    return transformers.Idefics3Processor(images, tokenizer, image_seq_len=4, chat_template=_UTTERANCES)


def _qwen_ids(tokenizer: Any) -> dict[str, int]:
    names = dict(image="image_pad", video="video_pad", vision_start="vision_start", vision_end="vision_end")
    return {f"{name}_token_id": _id(tokenizer, f"<|{token}|>") for name, token in names.items()}


def _qwen2_5_vl_config(tokenizer: Any) -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    tower = dict(depth=2, num_heads=2, patch_size=4, window_size=16, fullatt_block_indexes=[1], out_hidden_size=64)
    return AutoConfig.for_model(
        "qwen2_5_vl",
        text_config=text_config(tokenizer, rope_parameters=rope),
        vision_config={**_VISION, **tower},
        **_qwen_ids(tokenizer),
    )


def _qwen3_vl_config(tokenizer: Any) -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    tower = dict(depth=2, num_heads=2, patch_size=4, num_position_embeddings=64, out_hidden_size=64)
    return AutoConfig.for_model(
        "qwen3_vl",
        text_config=text_config(tokenizer, head_dim=16, num_hidden_layers=3, rope_parameters=rope),
        vision_config={**_VISION, **tower, "deepstack_visual_indexes": [0, 1]},
        **_qwen_ids(tokenizer),
    )


def _qwen_processor(kind: str, videos: str) -> Callable[[Any], Any]:
    def processor(tokenizer: Any) -> Any:
        sizes: dict[str, Any] = dict(patch_size=4, size={"shortest_edge": 8 * 8, "longest_edge": 32 * 32})
        return getattr(transformers, kind)(
            transformers.Qwen2VLImageProcessor(**sizes),
            tokenizer,
            getattr(transformers, videos)(**sizes),
            chat_template=_QWEN,
        )

    return processor


def _gemma3_config(tokenizer: Any) -> Any:
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    return AutoConfig.for_model(
        "gemma3",
        text_config=text_config(
            tokenizer,
            "gemma3_text",
            head_dim=16,
            num_hidden_layers=len(layers),
            layer_types=layers,
            sliding_window=8,
            query_pre_attn_scalar=16,
        ),
        vision_config={"model_type": "siglip_vision_model", **_VISION, **_TOWER},
        mm_tokens_per_image=4,
        image_token_index=_id(tokenizer, "<image_soft_token>"),
        boi_token_index=_id(tokenizer, "<start_of_image>"),
        eoi_token_index=_id(tokenizer, "<end_of_image>"),
    )


def _gemma3_processor(tokenizer: Any) -> Any:
    images = transformers.Gemma3ImageProcessor(size={"height": TILE, "width": TILE})
    return transformers.Gemma3Processor(images, tokenizer, chat_template=_GEMMA, image_seq_length=4)


def _internvl_config(tokenizer: Any) -> Any:
    return AutoConfig.for_model(
        "internvl",
        text_config=text_config(tokenizer, "qwen2"),
        vision_config={**_VISION, **_TOWER},
        image_token_id=_id(tokenizer, "<IMG_CONTEXT>"),
        image_seq_length=4,
    )


def _internvl_processor(tokenizer: Any) -> Any:
    size = {"height": TILE, "width": TILE}
    images = transformers.GotOcr2ImageProcessor(size=size, crop_to_patches=True, min_patches=1, max_patches=3)
    videos = transformers.InternVLVideoProcessor(size=size)
    return transformers.InternVLProcessor(images, tokenizer, videos, image_seq_length=4, chat_template=_INTERNVL)


def _mistral3_config(tokenizer: Any) -> Any:
    return AutoConfig.for_model(
        "mistral3",
        text_config=text_config(tokenizer, "mistral", head_dim=16, sliding_window=None),
        vision_config={"model_type": "pixtral", **_VISION, **_TOWER, "image_size": 2 * TILE},
        image_token_index=_id(tokenizer, "[IMG]"),
        spatial_merge_size=2,
    )


def _mistral3_processor(tokenizer: Any) -> Any:
    images = transformers.PixtralImageProcessor(patch_size=4, size={"longest_edge": 2 * TILE})
    return transformers.PixtralProcessor(images, tokenizer, patch_size=4, spatial_merge_size=2, chat_template=_MISTRAL)


_TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5))
_IM_TOKENS = ("<|im_start|>", "<|im_end|>")
_QWEN_TOKENS = ("<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_UTTERANCE_TOKENS = ("<|im_start|>", "<fake_token_around_image>", "<image>", "<global-img>", *_TILES)

_FAMILIES = {
    "smolvlm": _Family(
        _UTTERANCES, "<|endoftext|>", "<end_of_utterance>", "<|im_start|>", _utterances_config("smolvlm"),
        _smolvlm_processor, tokens=_UTTERANCE_TOKENS,
    ),
    "idefics3": _Family(
        _UTTERANCES, "<|endoftext|>", "<end_of_utterance>", "<|im_start|>", _utterances_config("idefics3"),
        _idefics3_processor, tokens=_UTTERANCE_TOKENS,
    ),
    "qwen2_5_vl": _Family(
        _QWEN, "<|endoftext|>", "<|im_end|>", None, _qwen2_5_vl_config,
        _qwen_processor("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"), tokens=_QWEN_TOKENS,
    ),
    "qwen3_vl": _Family(
        _QWEN, "<|endoftext|>", "<|im_end|>", None, _qwen3_vl_config,
        _qwen_processor("Qwen3VLProcessor", "Qwen3VLVideoProcessor"), tokens=_QWEN_TOKENS,
    ),
    "gemma3": _Family(
        _GEMMA, "<pad>", "<end_of_turn>", "<bos>", _gemma3_config, _gemma3_processor,
        names={"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        tokens=("<start_of_turn>",),
    ),
    "internvl": _Family(
        _INTERNVL, "<|endoftext|>", "<|im_end|>", None, _internvl_config, _internvl_processor,
        names={
            "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        tokens=("<|im_start|>",),
    ),
    "mistral3": _Family(
        _MISTRAL, "<pad>", "</s>", "<s>", _mistral3_config, _mistral3_processor,
        tokens=("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    ),
}  # fmt: skip
FAMILIES = tuple(_FAMILIES)
