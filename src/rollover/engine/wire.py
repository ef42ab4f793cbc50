"""Requests and segments as JSON, for an engine in another process. No torch.

A float32 survives as the shortest decimal of the same double: what comes out has the bits of what went in.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import numpy as np

from rollover.engine.protocol import ExtendRequest
from rollover.types import SamplingParams, Segment


def request_to_json(request: ExtendRequest) -> dict[str, Any]:
    # Not asdict(request), which copies every token id: this runs beside the trainer, in the same interpreter.
    out = {field.name: getattr(request, field.name) for field in fields(request)}
    return out | {"sampling": asdict(request.sampling), "stop_token_ids": sorted(request.stop_token_ids)}


def request_from_json(data: dict[str, Any]) -> ExtendRequest:
    return ExtendRequest(
        **{
            **data,
            "prompt_ids": tuple(data["prompt_ids"]),
            "generated_ids": tuple(data["generated_ids"]),
            "sampling": SamplingParams(**data["sampling"]),
            "stop_token_ids": frozenset(data["stop_token_ids"]),
            "stop_strings": tuple(data["stop_strings"]),
        }
    )


def segment_to_json(segment: Segment) -> dict[str, Any]:
    return segment.to_json() | {"token_ids": segment.token_ids.tolist(), "logprobs": segment.logprobs.tolist()}


def segment_from_json(data: dict[str, Any]) -> Segment:
    token_ids = np.array(data["token_ids"], dtype=np.int32)
    return Segment.from_json(data, token_ids, np.array(data["logprobs"], dtype=np.float32))
