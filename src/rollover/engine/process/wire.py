"""What goes between an engine's process and its parent: requests and segments as JSON, the control channel. No torch.

A float32 survives as the shortest decimal of the same double: what comes out has the bits of what went in.
"""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from rollover.config.logits import LogitsProcessing
from rollover.engine.protocol import ExtendRequest
from rollover.types import Media, Prompt, SamplingParams, Segment

_NOTHING = LogitsProcessing()


def requests_to_json(requests: Mapping[int, ExtendRequest]) -> dict[str, Any]:
    """Requests by the number of their call. A prompt that several of them have, as siblings do, is in it once."""
    prompts: dict[Prompt, int] = {}  # its place in the list
    calls = []
    for number, request in requests.items():
        prompt = prompts.setdefault(request.prompt, len(prompts))
        # Not asdict(request), which copies every token id: this runs beside the trainer, in the same interpreter.
        out = {field.name: getattr(request, field.name) for field in fields(request) if field.name != "prompt"}
        out |= {"sampling": asdict(request.sampling), "stop_token_ids": sorted(request.stop_token_ids)}
        out["processing"] = processing_to_json(request.processing)
        out["later_media"] = [media.to_json() for media in request.later_media]
        calls.append({"call": number, "prompt": prompt, "request": out})
    return {"prompts": [{"ids": prompt.ids} | prompt.media_to_json() for prompt in prompts], "calls": calls}


def requests_from_json(data: Mapping[str, Any]) -> dict[int, ExtendRequest]:
    prompts = [Prompt.of(**prompt) for prompt in data["prompts"]]
    return {
        call["call"]: ExtendRequest(
            **{
                **(request := call["request"]),
                "prompt": prompts[call["prompt"]],
                "generated_ids": tuple(request["generated_ids"]),
                "sampling": SamplingParams(**request["sampling"]),
                "stop_token_ids": frozenset(request["stop_token_ids"]),
                "stop_strings": tuple(request["stop_strings"]),
                "processing": processing_from_json(request["processing"]),
                "later_media": tuple(map(Media.from_json, request["later_media"])),
            }
        )
        for call in data["calls"]
    }


def processing_to_json(processing: LogitsProcessing) -> dict[str, Any]:
    """What differs from the default. JSON has no -inf: a banned token has the bias null."""
    out = {name: value for name, value in asdict(processing).items() if value != getattr(_NOTHING, name)}
    if processing.logit_bias:
        out["logit_bias"] = [(token, bias if math.isfinite(bias) else None) for token, bias in processing.logit_bias]
    return out


def processing_from_json(data: Mapping[str, Any]) -> LogitsProcessing:
    given = dict(data)
    if "logit_bias" in given:
        given["logit_bias"] = tuple((token, -math.inf if bias is None else bias) for token, bias in given["logit_bias"])
    if "forced_token_ids" in given:
        given["forced_token_ids"] = tuple(given["forced_token_ids"])
    return LogitsProcessing(**given)


def segment_to_json(segment: Segment) -> dict[str, Any]:
    return segment.to_json() | {"token_ids": segment.token_ids.tolist(), "logprobs": segment.logprobs.tolist()}


def segment_from_json(data: dict[str, Any]) -> Segment:
    token_ids = np.array(data["token_ids"], dtype=np.int32)
    return Segment.from_json(data, token_ids, np.array(data["logprobs"], dtype=np.float32))


class Channel:
    """JSON lines over one end of a socket pair; a message may carry one open file, and bytes may follow it. Knows
    nothing of their meaning."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = b""
        self._files: list[int] = []

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def pending(self) -> bool:
        """Whether a message, or its beginning, was received together with an earlier one."""
        return bool(self._buffer)

    def send(self, message: dict[str, Any], *, file: int | None = None, limit_s: float | None = None) -> None:
        """TimeoutError if the other end takes nothing for `limit_s` (None: no limit), ConnectionError if it is gone."""
        line = json.dumps(message).encode() + b"\n"
        self._socket.settimeout(limit_s)
        if file is not None:
            line = line[socket.send_fds(self._socket, [line], [file]) :]
        self._socket.sendall(line)

    def receive(self, limit_s: float | None = None) -> dict[str, Any]:
        """The next message. TimeoutError if it is not there whole within `limit_s`, ConnectionError at the end."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise TimeoutError
            self._socket.settimeout(left_s)
            data, files, _, _ = socket.recv_fds(self._socket, 2**16, 1)
            if not data:
                raise ConnectionError("the other end is closed")
            self._buffer += data
            self._files += files
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def send_bytes(self, data: memoryview, limit_s: float | None = None) -> None:
        """What the message before has announced. Errors as of `send`."""
        self._socket.settimeout(limit_s)
        self._socket.sendall(data)

    def receive_bytes(self, num: int, limit_s: float | None = None) -> bytearray:
        """The `num` bytes that follow the message before. TimeoutError if the other end sends nothing for `limit_s`,
        ConnectionError at the end."""
        found = bytearray(num)
        have = min(num, len(self._buffer))
        found[:have], self._buffer = self._buffer[:have], self._buffer[have:]
        view = memoryview(found)
        self._socket.settimeout(limit_s)
        while have < num:
            got = self._socket.recv_into(view[have:])
            if not got:
                raise ConnectionError("the other end is closed")
            have += got
        return found

    def take_file(self) -> int | None:
        """The file that came with the message, if one did; the caller closes it."""
        return self._files.pop(0) if self._files else None

    def close(self) -> None:
        self._socket.close()
