"""A tiny Idefics3 for servers: its folder, its processor as servers without torchvision have it, prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rollover.images import digest_of, read_image
from rollover.types import Media, Prompt
from vision import families

_TOKEN = "<image>"


def write(folder: Path) -> Path:
    """Its heads have 32 features: vLLM's attention for the CPU knows no smaller ones."""
    text = families._text

    def larger(tokenizer: Any, model_type: str = "", **changes: Any) -> dict[str, Any]:
        return text(tokenizer, model_type, **changes | {"num_attention_heads": 2, "head_dim": 32})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(families, "_text", larger)
        return families.write("idefics3", folder)


def picture(folder: Path, seed: int, size: tuple[int, int] = (32, 24)) -> str:
    """The path of an image of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    path = folder / f"{hashlib.sha256(pixels.tobytes()).hexdigest()[:8]}.png"
    Image.fromarray(pixels).save(path)
    return str(path)


class Processor:
    """The processor of a folder that `write` made. Resizing by Pillow and by torchvision differs by a level of 255."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoProcessor

        self._own: Any = AutoProcessor.from_pretrained(folder, backend="pil")
        self.placeholder = self._own.image_token_id

    def prompt(self, *parts: str) -> Prompt:
        """Of texts, and paths of images (.png), as one message of a user."""
        shown = [part for part in parts if part.endswith(".png")]
        text = "".join(_TOKEN if part in shown else part for part in parts)
        text = f"<|im_start|>User:{text}<end_of_utterance>\nAssistant:"
        if not shown:
            return Prompt.of(self._own.tokenizer(text, add_special_tokens=False)["input_ids"])
        ids = self._called(text, [read_image(path) for path in shown])["input_ids"][0]
        places, media = [i for i, token in enumerate(ids) if token == self.placeholder], []
        for path in shown:
            image = read_image(path)
            num = self._called(_TOKEN, [image])["input_ids"][0].count(self.placeholder)
            of_image, places = places[:num], places[num:]
            span = of_image[-1] + 1 - of_image[0]
            media.append(Media(path, digest_of(image), image.size, of_image[0], span))
        assert not places
        return Prompt(tuple(ids), tuple(media))

    def pixels(self, media: Media) -> dict[str, Any]:
        image = read_image(media.source)
        if digest_of(image) != media.digest:
            raise ValueError(f"image {media.source} has changed")
        found = self._called(_TOKEN, [image], return_tensors="pt")
        if found["input_ids"][0].tolist().count(self.placeholder) > media.count:
            raise ValueError(f"image {media.source} has another number of placeholders")
        return {name: found[name] for name in ("pixel_values", "pixel_attention_mask")}

    def _called(self, text: str, images: Sequence[Any], **options: Any) -> Any:
        return self._own(text=[text], images=[list(images)], add_special_tokens=False, **options)
