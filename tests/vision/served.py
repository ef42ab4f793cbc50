"""A tiny Idefics3 for servers: its folder, images of noise, prompts that show them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from rollover.config import ModelConfig
from rollover.engine.protocol import ExtendRequest
from rollover.envs.chat import Chat
from rollover.models.load import LoadedModel, load_model
from rollover.types import Prompt
from vision import families

PROCESSOR_KWARGS = {"size": {"longest_edge": 48}, "max_image_size": {"longest_edge": 16}}
"""Images are larger than by the model's own files: a server that ignores it expands them to fewer placeholders."""


def write(folder: Path) -> Path:
    """Its heads have 32 features: vLLM's attention for the CPU knows no smaller ones."""
    return families.write("idefics3", folder, num_attention_heads=2, head_dim=32)


def load(folder: Path) -> LoadedModel:
    """Its processor is Pillow's: resizing by torchvision, which the server lacks, differs by a level of 255."""
    return load_model(ModelConfig(path=str(folder), processor_kwargs={**PROCESSOR_KWARGS, "backend": "pil"}))


def picture(folder: Path, seed: int, size: tuple[int, int] = (32, 24)) -> str:
    """The path of an image of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    path = folder / f"{seed}.png"
    Image.fromarray(pixels).save(path)
    return str(path)


def prompt(loaded: LoadedModel, *parts: str) -> Prompt:
    """Texts, and paths of images (.png), as one message of a user."""
    assert loaded.processor is not None
    content = [_part(part) for part in parts]
    message = {"role": "user", "content": content}
    if not any(part["type"] == "image" for part in content):
        return Prompt.of(loaded.tokenizer.apply_chat_template([message], return_dict=False, add_generation_prompt=True))
    return loaded.processor.prompt([message], add_generation_prompt=True)


def answered(loaded: LoadedModel, request: ExtendRequest, tokens: Sequence[int], *parts: str) -> ExtendRequest:
    """The request after its turn `tokens`, to which an environment said these texts and images."""
    message = {"role": "user", "content": [_part(part) for part in parts]}
    answer = Chat(loaded.tokenizer, processor=loaded.processor).continuation(tokens, [message])
    first = len(request.prompt) + len(request.generated_ids) + len(tokens)
    return replace(
        request,
        generated_ids=(*request.generated_ids, *tokens, *answer.ids),
        later_media=(*request.later_media, *(image.moved(first) for image in answer.media)),
    )


def as_prompt(request: ExtendRequest) -> ExtendRequest:
    """The same tokens as one prompt."""
    return replace(request, prompt=request.shown, generated_ids=(), later_media=())


def _part(part: str) -> dict[str, str]:
    return {"type": "image", "image": part} if part.endswith(".png") else {"type": "text", "text": part}
