"""Images in the messages of a task: content parts in every common form are normalised, and image columns fill
placeholders.

    {"type": "image", "image": "/data/a.png", "sha256": "..."}    in a Task's messages: a file, by its path
    {"type": "text", "text": "..."}

Accepted are TRL's and Qwen's {"type": "image", "image": ...}, OpenAI's image_url, and Hugging Face's url, path and
base64. Placeholders for the images of a column are `<image>` in a text (verl, LLaMA-Factory), and {"type": "image"}
without an image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollover.files import local_path
from rollover.images import BadImage, Places, is_image, read_image, stored
from rollover.types import Task

IMAGE_COLUMNS = ("images", "image")
PLACEHOLDER = "<image>"
_VALUES = ("image", "image_url", "url", "path", "base64", "bytes")
_IMAGE_TYPES = ("image", "image_url", "input_image")
_TEXT_TYPES = ("text", "input_text")
_OTHER_MEDIA = ("video", "video_url", "audio", "audio_url", "input_audio")

Store = Callable[[Any], tuple[str, str]]
"""Stores an image and returns its file's path and SHA-256 (`images.stored`)."""
Message = dict[str, Any]


def images_of(value: Any, column: str) -> list[Any]:
    """Return the images of a column's value: one, a list, or none. BadImage for nested lists."""
    if value is None:
        return []
    found = list(value) if isinstance(value, list | tuple) else [value]
    if any(isinstance(image, list | tuple) for image in found):
        raise BadImage(f"column {column!r} holds lists in a list: expected an image, or a list of images")
    if any(image is None for image in found):
        raise BadImage(f"column {column!r} holds a list with an empty value: remove it")
    return found


def with_images(
    messages: Sequence[Mapping[str, Any]], images: Sequence[Any] | None, column: str, store: Store
) -> tuple[Message, ...]:
    """Return the messages with each image as a stored part. `images`: those of `column`, None without such a column.

    They fill the placeholders in order; without placeholders, they precede the text of the first user message. A
    content without an image becomes one text. BadImage for a wrong number of images, a part without an image, or an
    unknown part type.
    """
    contents = [_parts(message.get("content"), split=images is not None) for message in messages]
    empty = [part for parts in contents for part in parts if part["type"] == "image" and "value" not in part]
    num_given = sum(part["type"] == "image" for parts in contents for part in parts) - len(empty)
    if images is None and empty:
        raise BadImage(
            'a message has a part {"type": "image"} without an image, and there is no column images: give it one, as'
            ' {"type": "image", "image": "path.png"}'
        )
    if images and num_given:
        raise BadImage(f"its messages have images, and column {column!r} has {len(images)} more: remove one of the two")
    if images and not empty:
        first = next((i for i, message in enumerate(messages) if message.get("role") == "user"), None)
        if first is None:
            raise BadImage(f"column {column!r} has an image, and there is no user message to show it in")
        empty = [{"type": "image"} for _ in images]
        contents[first] = [*empty, *contents[first]]
    if images is not None and len(images) != len(empty):
        raise BadImage(
            f"column {column!r} has {_count(len(images), 'image')}, and its messages have"
            f" {_count(len(empty), 'placeholder')} ({PLACEHOLDER}): give an image for each"
        )
    for i, (part, value) in enumerate(zip(empty, images or (), strict=True), start=1):
        part |= {"value": value, "where": f"column {column!r}{f', image {i}' if len(empty) > 1 else ''}"}
    return tuple(
        {**message, "content": _content(parts, store)} for message, parts in zip(messages, contents, strict=True)
    )


def with_images_of_program(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Return messages from the user's code with each image as a stored part. Paths are relative to the working
    directory. BadImage as of `with_images`."""
    if not any(shows_images(message.get("content")) for message in messages):
        return tuple(map(dict, messages))
    return with_images(messages, None, "", stored_of_program)


def stored_of_program(value: Any) -> tuple[str, str]:
    """Store an image from the user's code, with paths relative to the working directory. Read it, to detect damage."""
    path, digest = stored(value, Places(local_path("")))
    read_image(path)
    return path, digest


def task_with_images(task: Task) -> Task:
    """Return a task from the user's code with each image as a stored part. BadImage as of `with_images`."""
    messages = task.messages if isinstance(task.messages, list | tuple) else ()
    if not any(isinstance(message, Mapping) and shows_images(message.get("content")) for message in messages):
        return task
    return replace(task, messages=with_images_of_program(messages))


def shows_images(content: Any) -> bool:
    """Return whether a message's content has a part that is not text."""
    return isinstance(content, list | tuple) and any(
        not (isinstance(part, Mapping) and part.get("type") in _TEXT_TYPES) for part in content
    )


def are_parts(value: Any) -> bool:
    """Return whether a value is a list of content parts that includes an image."""
    if not isinstance(value, list | tuple):
        return False
    kinds = [part.get("type") if isinstance(part, Mapping) else None for part in value]
    return all(kind in (*_TEXT_TYPES, *_IMAGE_TYPES) for kind in kinds) and any(kind in _IMAGE_TYPES for kind in kinds)


def holds_media(value: Any) -> bool:
    """Return whether a value contains an image, video or audio at any depth, as a part or a Pillow image."""
    if isinstance(value, list | tuple):
        return any(map(holds_media, value))
    kind = value.get("type") if isinstance(value, Mapping) else None
    return is_image(value) or kind in (*_IMAGE_TYPES, *_OTHER_MEDIA)


# Private


def _count(num: int, what: str) -> str:
    return f"{num} {what}{'' if num == 1 else 's'}"


def _parts(content: Any, *, split: bool) -> list[dict[str, Any]]:
    """Return the parts of a content. Images have a `value`, except placeholders. `split`: find those in texts, too."""
    out: list[dict[str, Any]] = []
    for part in [content] if isinstance(content, str | Mapping) else content or ():
        given = {"type": "text", "text": part} if isinstance(part, str) else _given(part)
        kind = given.get("type")
        if kind in _TEXT_TYPES and isinstance(text := given.get("text"), str):
            for i, piece in enumerate(text.split(PLACEHOLDER) if split else [text]):
                out += [{"type": "image"}] if i else []
                out += [{"type": "text", "text": piece}] if piece else []
        elif kind in _IMAGE_TYPES:
            values = [name for name in _VALUES if name in given]
            if len(values) > 1:
                raise BadImage(f"a part of type {kind!r} has {' and '.join(values)}: give one of them")
            out.append({"type": "image"} | ({"value": _value(given[values[0]], values[0])} if values else {}))
        else:
            raise BadImage(
                f"a message has a part of type {kind!r}: text and image are the ones that a prompt can show"
                if isinstance(kind, str) and kind not in _TEXT_TYPES
                else f"a message has a part {part!r:.100}: expected a table with type and text, or type and image"
            )
    return out


def _given(part: Any) -> dict[str, Any]:
    """Return a part without empty keys, which Arrow adds."""
    return {k: v for k, v in part.items() if v is not None} if isinstance(part, Mapping) else {}


def _value(value: Any, name: str) -> Any:
    if name == "image_url" and isinstance(value, Mapping):
        value = value.get("url")
    if isinstance(value, list | tuple):
        raise BadImage(f"a part of type image has a list as its {name}: give a part for each image")
    if name == "base64" and isinstance(value, str) and not value.startswith("data:"):
        return f"data:image/unknown;base64,{value}"
    return value


def _content(parts: list[dict[str, Any]], store: Store) -> str | list[dict[str, Any]]:
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    out: list[dict[str, Any]] = []
    for part in parts:
        if part["type"] == "image":
            try:
                path, digest = store(part["value"])
            except BadImage as error:
                raise BadImage(f"{part.get('where', 'an image of a message')}: {error}") from error
            out.append({"type": "image", "image": path, "sha256": digest})
        elif out and out[-1]["type"] == "text":
            out[-1] = {"type": "text", "text": out[-1]["text"] + part["text"]}
        else:
            out.append(part)
    return out
