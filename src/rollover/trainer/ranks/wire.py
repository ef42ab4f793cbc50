"""What goes between the loop's process and a rank's: JSON, in which an array is a place among the bytes that follow.

Nothing is pickled: a rank may be on another machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from rollover.engine.process.wire import Channel
from rollover.trainer.backend import Stream
from rollover.trainer.objective import Counts
from rollover.types import Media, Sample

_ARRAY = "array:"  # the only key of what stands for one


def send(channel: Channel, message: Mapping[str, Any], limit_s: float | None = None) -> None:
    """A message with arrays among its values. Errors as of `Channel.send`."""
    arrays: list[np.ndarray] = []

    def place(value: object) -> object:
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, np.ndarray):
            raise TypeError(f"a {type(value).__name__} cannot be sent")
        arrays.append(np.ascontiguousarray(value))
        return {_ARRAY: [value.dtype.str, list(value.shape)]}

    text = json.dumps(message, default=place)
    channel.send({"text": text, "bytes": sum(a.nbytes for a in arrays)}, limit_s=limit_s)
    for array in arrays:
        if array.nbytes:
            channel.send_bytes(array.data.cast("B"), limit_s)


def receive(channel: Channel, limit_s: float | None = None) -> dict[str, Any]:
    """What `send` sent. Errors as of `Channel.receive`."""
    frame = channel.receive(limit_s)
    data, used = channel.receive_bytes(frame["bytes"], limit_s), 0

    def restore(value: dict[str, Any]) -> Any:
        nonlocal used
        if value.keys() != {_ARRAY}:
            return value
        dtype, shape = np.dtype(value[_ARRAY][0]), value[_ARRAY][1]
        count = int(np.prod(shape))
        array = np.frombuffer(data, dtype, count, used) if count else np.empty(0, dtype)
        used += array.nbytes
        return array.reshape(shape)

    return json.loads(frame["text"], object_hook=restore)


def samples_to_json(samples: list[Sample]) -> list[dict[str, Any]]:
    """With arrays, for `send`."""
    return [
        {field.name: getattr(s, field.name) for field in fields(s)} | {"media": [media.to_json() for media in s.media]}
        for s in samples
    ]


def samples_from_json(data: list[dict[str, Any]]) -> list[Sample]:
    return [Sample(**{**values, "media": tuple(map(Media.from_json, values["media"]))}) for values in data]


def counts_to_json(counts: Counts) -> dict[str, Any]:
    return {
        "tokens": counts.tokens,
        "sequence_tokens": list(counts.sequence_tokens.items()),
        "group_tokens": list(counts.group_tokens.items()),
        "divided": counts.divided,
    }


def counts_from_json(data: dict[str, Any]) -> Counts:
    return Counts(data["tokens"], dict(data["sequence_tokens"]), dict(data["group_tokens"]), data["divided"])


def streams_of(samples: list[Sample], known: Mapping[str, Stream]) -> dict[str, Stream]:
    """Of streams of a whole minibatch those of these samples."""
    ids = {s.rollout_id for s in samples}
    return {name: {key: values for key, values in stream.items() if key in ids} for name, stream in known.items()}
