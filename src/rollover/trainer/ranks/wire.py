"""Samples, counts and streams as JSON with arrays, which goes between the loop's process and a rank's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from rollover.trainer.backend import Stream
from rollover.trainer.objective import Counts
from rollover.types import Media, Sample


def samples_to_json(samples: list[Sample]) -> list[dict[str, Any]]:
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
