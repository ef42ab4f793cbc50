"""The processor of a vision-language model: messages with images -> token ids with placeholders; image -> pixels.

    prompt(messages)   chat template, one call of transformers' processor, the placeholders of each image
    pixels(media)      the keyword arguments of get_image_features for one image, read again from its file

Owns the only expansion of placeholders: afterwards only token ids count. The first image loads the processor, as it may
need packages that a run of texts does not.
"""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rollover.files import read_object
from rollover.images import digest_of, read_image, read_unchanged
from rollover.models.vision import takes_images
from rollover.types import Media, Prompt, content_text, images_in, without_sources

_FILES = (
    "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "chat_template.json",
)  # fmt: skip
_OF_LOADING = {"use_fast", "backend"}  # arguments of from_pretrained
_MOST_KNOWN = 10_000  # images whose placeholders are cached
_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
_MARK = "wvzq"  # a word that occurs in no chat template


class _Shape(NamedTuple):
    """Placeholders of an image in every prompt: `count`, within `span` tokens from the first to the last."""

    count: int
    span: int
    grid: tuple[int, ...]


class Processor:
    """The processor of the vision-language model at `path` (`source`: arguments of from_pretrained).

    `kwargs`: model.processor_kwargs. `tokenizer`: the model's, whose chat template renders messages; its config names
    the token that stands for a piece of an image. ValueError if the processor cannot be loaded.
    """

    def __init__(
        self, path: str, source: Mapping[str, Any], kwargs: Mapping[str, Any], tokenizer: Any, config: Any
    ) -> None:
        self.path, self.tokenizer = path, tokenizer
        self._source, self._kwargs = source, kwargs
        self.placeholder_id = int(config.image_token_id)
        """The token that stands for a piece of an image."""
        self._known: OrderedDict[str, _Shape] = OrderedDict()  # by digest

    def prompt(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> Prompt:
        """Encode messages, some of which show images (types.Task), with the arguments of apply_chat_template.

        ValueError for an unreadable image, a text like an image token, or a template or processor that omits an image.
        """
        sources = images_in(messages)
        text = self.rendered(messages, **arguments)
        if (num := text.count(self._token)) != len(sources):
            raise ValueError(f"the chat template shows {num} of its {len(sources)} images: put them into user messages")
        return self.tokens(text, sources)

    def rendered(self, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
        """Render messages, with one token for each image. ValueError for a text like that token."""
        self._check_texts(messages)
        return self.tokenizer.apply_chat_template(list(map(without_sources, messages)), tokenize=False, **arguments)

    def tokens(self, text: str, sources: Sequence[str]) -> Prompt:
        """Encode a text of `rendered` with its images: the first of `sources`."""
        sources = sources[: text.count(self._token)]
        if not sources:
            return Prompt.of(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        images = [read_image(source) for source in sources]
        digests = list(map(digest_of, images))
        ids = self._called(text, images)["input_ids"][0].tolist()
        places = [i for i, token_id in enumerate(ids) if token_id == self.placeholder_id]
        shapes = [self._shape(digest, image) for digest, image in zip(digests, images, strict=True)]
        media, begin = [], 0
        for source, digest, image, shape in zip(sources, digests, images, shapes, strict=True):
            of_image = places[begin : begin + shape.count]
            begin += shape.count
            if len(of_image) < shape.count or of_image[-1] + 1 - of_image[0] != shape.span:
                break
            media.append(Media(source, digest, image.size, of_image[0], shape.span, shape.grid))
        if len(media) < len(images) or begin != len(places):
            raise ValueError(
                f"its images have {[shape.count for shape in shapes]} placeholders by themselves, and {len(places)} in"
                " the prompt, or these lie apart: the model's processor cannot be used"
            )
        return Prompt(tuple(ids), tuple(media))

    def pixels(self, media: Media) -> dict[str, torch.Tensor]:
        """Return the keyword arguments of the model's get_image_features for this image alone.

        ValueError naming the image if it cannot be read, or differs from the prompt's.
        """
        shape, pixels = self._alone(read_unchanged(media.source, media.digest))
        if (shape.span, shape.grid) != (media.count, media.grid):
            raise ValueError(
                f"image {media.source} has {shape.span} tokens and the grid {shape.grid}, and had {media.count} and"
                f" {media.grid} when it was put into a prompt: the model's processor, or model.processor_kwargs, has"
                " changed since. Set it back"
            )
        return pixels

    def save(self, folder: Path) -> None:
        """Save it beside a model: its original files, unless model.processor_kwargs changed it."""
        for name in _FILES:
            if (file := _file_of(self.path, name, self._source)) is not None:
                shutil.copyfile(file, folder / name)
        if self._kwargs and "_own" in self.__dict__:  # only if loaded: a run of texts may lack its packages
            self._own.to_json_file(folder / "processor_config.json")

    # Private

    @cached_property
    def _own(self) -> Any:
        """Return the processor of transformers."""
        from transformers import AutoProcessor
        from transformers.processing_utils import ProcessorMixin

        try:
            found = AutoProcessor.from_pretrained(self.path, **{**self._kwargs, **self._source})
        except Exception as error:  # boundary: damaged files, missing packages, wrong arguments
            if isinstance(error, ImportError) or "torchvision" in str(error).lower():
                why = " ".join(str(error).split())
                raise ValueError(
                    f"model.path = {self.path!r}: its processor needs packages that are not installed: pip install"
                    f" 'rollover[vision]' (Pillow, torchvision, num2words). transformers says: {why:.300}"
                ) from error
            raise ValueError(f"model.path = {self.path!r}: its processor cannot be loaded: {error}") from error
        if not isinstance(found, ProcessorMixin) or getattr(found, "image_processor", None) is None:
            raise ValueError(
                f"model.path = {self.path!r}: it has no image processor (preprocessor_config.json or"
                " processor_config.json): copy these files from the model that it was made of"
            )
        parts = (found, found.image_processor)
        known = {name for part in parts for name in (*vars(part), *_arguments(part))} | _OF_LOADING
        if unknown := sorted(self._kwargs.keys() - known):
            raise ValueError(
                f"model.processor_kwargs.{unknown[0]}: {type(found.image_processor).__name__} has no such argument; it"
                f" has {', '.join(sorted(_arguments(found.image_processor)))}"
            )
        return found

    @property
    def _token(self) -> str:
        """The token of an image in a rendered prompt, before it is expanded."""
        return self._own.image_token

    def _check_texts(self, messages: Sequence[Mapping[str, Any]]) -> None:
        tokens = {self._token, self.tokenizer.convert_ids_to_tokens(self.placeholder_id)}
        for message in messages:
            text = content_text(message["content"], lambda _: "\n")
            if token := next((token for token in tokens if token in text), None):
                raise ValueError(f"the text of its {message['role']} message has {token}, which stands for an image")

    def _called(self, text: str, images: list[Any]) -> Any:
        try:
            return self._own(text=[text], images=[images], add_special_tokens=False, return_tensors="pt")
        except Exception as error:  # boundary: user arguments in a library
            sizes = ", ".join(f"{image.width} x {image.height}" for image in images)
            given = f" with model.processor_kwargs = {dict(self._kwargs)}" if self._kwargs else ""
            why = " ".join(f"{type(error).__name__}: {error}".split())
            raise ValueError(f"the model's processor refuses its images ({sizes}){given}: {why:.300}") from error

    def _alone(self, image: Any) -> tuple[_Shape, dict[str, torch.Tensor]]:
        """Process an image by itself; return its shape and the tensors for the model's vision part."""
        found = self._called(self._token, [image])
        pixels = {name: tensor for name, tensor in found.items() if name not in _OF_TEXT}
        grid = pixels.get("image_grid_thw")
        places = [i for i, token_id in enumerate(found["input_ids"][0].tolist()) if token_id == self.placeholder_id]
        if not places:
            raise ValueError("the model's processor makes no placeholder of an image: it cannot be used")
        shape = _Shape(len(places), places[-1] + 1 - places[0], () if grid is None else tuple(grid[0].tolist()))
        return shape, pixels

    def _shape(self, digest: str, image: Any) -> _Shape:
        if digest not in self._known:
            self._known[digest], _ = self._alone(image)
        self._known.move_to_end(digest)
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        return self._known[digest]


def build_processor(
    path: str, source: Mapping[str, Any], kwargs: Mapping[str, Any], tokenizer: Any, config: Any
) -> Processor | None:
    """Return the processor of a vision-language model, whose tokenizer then takes text contents; else None."""
    if not takes_images(config):
        return None
    processor = Processor(path, source, kwargs, tokenizer, config)
    if not tokenizer.chat_template:  # older folders have it only in the processor's files
        tokenizer.chat_template = _older_template(path, source)
    if tokenizer.chat_template and not _takes_text(tokenizer):
        tokenizer.apply_chat_template = partial(_in_parts, tokenizer.apply_chat_template)
    return processor


def _file_of(path: str, name: str, source: Mapping[str, Any]) -> str | None:
    """Return a file of the model's folder, or of the hub's cache; None without one."""
    if Path(path).is_dir():
        return str(Path(path) / name) if (Path(path) / name).is_file() else None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(path, name, revision=source.get("revision"))
    return found if isinstance(found, str) else None


def _older_template(path: str, source: Mapping[str, Any]) -> str | None:
    """Return the chat template from the processor's settings, where older folders have it."""
    for name in ("chat_template.json", "processor_config.json"):
        if (file := _file_of(path, name, source)) is not None:
            found = read_object(Path(file)).get("chat_template")
            if template := found.get("default") if isinstance(found, dict) else found:
                return template
    return None


def _arguments(part: Any) -> set[str]:
    """Return the argument names that an image processor, or a processor, declares."""
    of_images = getattr(part, "valid_kwargs", None)
    return set(getattr(of_images, "__annotations__", ()))


def _takes_text(tokenizer: Any) -> bool:
    """Return whether the chat template renders a text content: SmolVLM's renders only parts."""
    try:
        return _MARK in tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False)
    except Exception:  # boundary: a template is a program
        return False


def _in_parts(apply: Any, messages: Sequence[Mapping[str, Any]], *args: Any, **options: Any) -> Any:
    return apply([_parts(message) for message in messages], *args, **options)


def _parts(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}] if isinstance(content, str) else content}
