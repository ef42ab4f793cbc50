"""JSON of requests and segments between an engine process and its parent. No torch.

A float32 survives as the shortest decimal of the same double: the receiver gets the bits that were sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from rollover.engine.protocol import ExtendRequest
from rollover.types import Prompt, Segment


@dataclass(frozen=True)
class _Calls:
    """Requests with deduplicated prompts. `calls`: number, index of the prompt in `prompts`, request without prompt."""

    prompts: list[Prompt]
    calls: list[tuple[int, int, ExtendRequest]]


_CALLS = TypeAdapter(_Calls)


def requests_to_json(requests: Mapping[int, ExtendRequest]) -> dict[str, Any]:
    """Return requests by call number, each distinct prompt once."""
    prompts: dict[Prompt, int] = {}
    calls = [
        (number, prompts.setdefault(request.prompt, len(prompts)), replace(request, prompt=Prompt()))
        for number, request in requests.items()
    ]
    return _CALLS.dump_python(_Calls(list(prompts), calls), mode="json", exclude_defaults=True)


def requests_from_json(data: Mapping[str, Any]) -> dict[int, ExtendRequest]:
    received = _CALLS.validate_python(data)
    return {number: replace(request, prompt=received.prompts[index]) for number, index, request in received.calls}


def segments_to_json(segments: Iterable[Segment]) -> list[dict[str, Any]]:
    return [s.to_json() | {"token_ids": s.token_ids.tolist(), "logprobs": s.logprobs.tolist()} for s in segments]


def segments_from_json(data: Iterable[Mapping[str, Any]]) -> list[Segment]:
    return [
        Segment.from_json(s, np.array(s["token_ids"], dtype=np.int32), np.array(s["logprobs"], dtype=np.float32))
        for s in data
    ]
