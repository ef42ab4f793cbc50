"""One request under way: what was sampled for it, until its client has it.

Owns the spans: which weights each token was sampled under. The last chunk has them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

from rollover.engine.server.requests import GenerateBody
from rollover.openai_wire import Refusal, finish_reason
from rollover.types import StopReason


@dataclass(frozen=True)
class Chunk:
    """Some tokens; with a `finish_reason` (stop, length or abort) the last ones."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[dict[str, Any]] | None = None


class Stream:
    """`label()`: of the weights that sample now. `decode_text`: which stop string it was is found in the text."""

    def __init__(self, body: GenerateBody, label: Callable[[], str], decode_text: Callable[[list[int]], str]) -> None:
        self.body, self._label, self._decode_text = body, label, decode_text
        self.num_tokens = 0
        self.working: asyncio.Task[None] | None = None
        """What works on it; set by the service."""
        self.error: Refusal | None = None
        """What it failed with."""
        self._tokens: list[int] = []  # where there are stop strings
        self._spans: list[tuple[str, int]] = []  # label, index of its first token
        self._chunks: asyncio.Queue[Chunk | Refusal] = asyncio.Queue()
        self._ended = False

    @property
    def full_id(self) -> str:
        """What it is aborted by, as vLLM calls it."""
        return f"generate-tokens-{self.body.request_id}"

    @property
    def delivered(self) -> bool:
        """Whether its client's connection has been given all that there is."""
        return self._chunks.empty()

    def on_token(self, token: int, logprob: float, reason: StopReason | None) -> None:
        """A token was sampled; with a reason it is the last one."""
        if self._ended:
            return
        if not self._spans or self._spans[-1][0] != self._label():
            self._spans.append((self._label(), self.num_tokens))
        self.num_tokens += 1
        if self.body.sampling_params.stop_strings:
            self._tokens.append(token)
        if reason is None:
            self._chunks.put_nowait(Chunk([token], [logprob]))
        else:
            self._end(
                Chunk([token], [logprob], finish_reason(reason), self._stop_reason(token, reason), self._versions())
            )

    def abort(self) -> None:
        """It ends with what it has."""
        if not self._ended:
            self._end(Chunk([], [], "abort", None, self._versions()))

    def fail(self, error: Refusal) -> None:
        """It ends with this error."""
        if not self._ended:
            self.error = error
            self._end(error)

    async def chunks(self) -> AsyncIterator[list[Chunk]]:
        """What there is, whenever there is something, up to the last chunk. Raises what it failed with."""
        while True:
            found = [await self._chunks.get()]
            while not self._chunks.empty():
                found.append(self._chunks.get_nowait())
            if chunks := [chunk for chunk in found if isinstance(chunk, Chunk)]:
                yield chunks
            if isinstance(last := found[-1], Refusal):
                raise last
            if last.finish_reason is not None:
                return

    async def joined(self) -> Chunk:
        """All chunks as one, when the last one is there. Raises what it failed with."""
        chunks = [chunk async for some in self.chunks() for chunk in some]
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
        return replace(chunks[-1], token_ids=tokens, logprobs=logprobs)

    def _end(self, last: Chunk | Refusal) -> None:
        self._ended = True
        self._chunks.put_nowait(last)

    def _versions(self) -> list[dict[str, Any]]:
        ends = [start for _, start in self._spans[1:]] + [self.num_tokens]
        parts = zip(self._spans, ends, strict=False)  # without a token there is neither
        return [{"version": label, "start": start, "end": end} for (label, start), end in parts]

    def _stop_reason(self, token: int, reason: StopReason) -> int | str | None:
        """The token or the string of the request's own that ended it; None for the model's EOS."""
        asked = self.body.sampling_params
        if reason is StopReason.EOS and token in (asked.stop_token_ids or ()):
            return token
        if reason is StopReason.STOP_STRING:
            text = self._decode_text(self._tokens)
            return next((stop for stop in asked.stop_strings if stop in text), None)
        return None
