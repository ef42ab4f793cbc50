"""Operations of the server over one engine. HTTP is in app.py.

    generate ──▶ RequestStream ──sampled──▶ chunks ──▶ client
                    └── aborted, or the client disconnected: it ends with its tokens
    start ─▶ update ─▶ finish        pause ─▶ resume        sleep ─▶ wake_up

Owns the requests in flight, the label of the weights, and whether it is paused. Tokens carry the label under which they
were sampled. Refused weights change nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors.torch import load_file

from rollover.config import Config
from rollover.engine.embedded.engine import EmbeddedEngine
from rollover.engine.protocol import ExtendRequest
from rollover.engine.server.requests import GenerateBody, ImagePart
from rollover.logs import terminal
from rollover.models.load import LoadedModel, stop_token_ids
from rollover.models.vision import Pixels
from rollover.openai_wire import Refusal, finish_reason
from rollover.types import Media, StopReason
from rollover.weights.verifier import Verifier, shapes_of


@dataclass(frozen=True)
class TokenChunk:
    """Tokens of a request; with a `finish_reason` (stop, length or abort) the last ones."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[dict[str, Any]] | None = None


NO_UPDATE_YET = "default"
TAGS = ("weights", "kv_cache")
_BROKEN = 1  # exit code
_LOAD_S = 60.0  # to map a verified file
_MAX_CHECKED = 10_000  # images that are remembered as valid
_DRAIN_S = 1.0  # a client that does not read must not delay a weight update


class CheckedImages:
    """Images of requests, validated before the engine sees them: there an invalid one would fail the whole batch.

    `processor`: of the model; None: it takes text alone.
    """

    def __init__(self, processor: Pixels | None) -> None:
        self._processor = processor
        self._storing = asyncio.Lock()
        self._known: dict[Media, None] = {}  # in order, offset apart

    async def media(self, parts: Sequence[ImagePart]) -> tuple[Media, ...]:
        """Return the media of these parts. Raises Refusal for an invalid image, or not the one of the prompt."""
        if self._processor is None:
            raise Refusal("content_parts: this model takes text alone", "content_parts")
        try:
            async with self._storing:  # siblings have the same image
                media = await asyncio.to_thread(lambda: tuple(part.stored() for part in parts))
            for image in media:
                self._check(self._processor, image)
        except ValueError as error:
            raise Refusal(f"content_parts: {error}", "content_parts") from error
        return media

    def _check(self, processor: Pixels, image: Media) -> None:
        """Check an image. Runs in the event loop, as the engine does: processors are not thread-safe."""
        if (key := replace(image, offset=0)) in self._known:
            return
        processor.pixels(image)
        self._known[key] = None
        if len(self._known) > _MAX_CHECKED:
            self._known.pop(next(iter(self._known)))


class Service:
    """Service of the model `loaded`, by the name of its path. Clients control its KV, by cache_salt and clear_cache."""

    def __init__(self, loaded: LoadedModel, config: Config) -> None:
        self.model_name, self.tokenizer = config.model.path, loaded.tokenizer
        self._eos = stop_token_ids(loaded, [])
        self._images = CheckedImages(loaded.processor)
        self.label = NO_UPDATE_YET
        self.verifier = Verifier(sum(weight.nbytes for weight in loaded.model.parameters()))
        rollout = config.rollout.model_copy(update={"kv_on_resume": "keep"})
        self.engine = EmbeddedEngine.over(loaded.model, loaded, config.model_copy(update={"rollout": rollout}))
        self.streams: dict[str, RequestStream] = {}
        """Requests in flight, by the engine's rollout id."""
        self.num_prompt_tokens = self.num_ended_tokens = self.num_updates = 0
        self.asleep: set[str] = set()
        """Those of TAGS whose memory is freed."""
        self._has_weights, self._allocate_weights = True, lambda: None
        self._ids = map(str, itertools.count())
        self._updating = asyncio.Lock()
        self._update_begun = False
        self._may_begin = asyncio.Event()  # cleared by pause?mode=wait: new requests wait, running ones continue
        self._may_begin.set()

    # Requests

    def _decoded(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def check_model(self, name: str | None) -> None:
        """Raise Refusal unless the request names the served model or none."""
        if name not in (None, self.model_name):
            why = f"model: there is no {name!r} here, but {self.model_name!r}"
            raise Refusal(why, "model", 404, code="model_not_found")

    async def generate(self, body: GenerateBody) -> RequestStream:
        """Begin this request. Raises Refusal if it is invalid."""
        self.check_model(body.model)
        rollout_id = next(self._ids)
        media = await self._images.media(body.content_parts) if body.content_parts else ()
        request = body.request(rollout_id, self.engine.max_tokens, self._eos, secrets.randbits(63), media)
        stream = self.streams[rollout_id] = RequestStream(body, lambda: self.label, self._decoded)
        stream.working = asyncio.ensure_future(self._work(stream, request))
        stream.working.add_done_callback(lambda _: self._remove(rollout_id, request))
        await asyncio.sleep(0)  # the engine refuses invalid requests now
        if stream.error is not None:
            raise stream.error
        return stream

    async def _work(self, stream: RequestStream, request: ExtendRequest) -> None:
        try:
            await self._may_begin.wait()
            await self.engine.extend(request, stream.on_token, stream.body.cache_salt or "")
            stream.abort()  # no effect after a last token; else it was interrupted
        except ValueError as error:
            stream.fail(Refusal(str(error), "token_ids"))
        except Exception as error:  # boundary: sent to the client
            stream.fail(Refusal(f"{type(error).__name__}: {error}", status=500))

    def _remove(self, rollout_id: str, request: ExtendRequest) -> None:
        """Remove a request that was answered or cancelled."""
        self.num_ended_tokens += self.streams.pop(rollout_id).num_tokens
        self.num_prompt_tokens += len(request.prompt)

    def abort(self, stream: RequestStream) -> None:
        """Abort a request: it ends with its tokens. No effect if it has ended."""
        stream.abort()
        if stream.working is not None:
            stream.working.cancel()

    def abort_ids(self, full_ids: Iterable[str]) -> None:
        """Abort all requests with these ids (RequestStream.full_id, which need not be unique)."""
        wanted = set(full_ids)
        for stream in list(self.streams.values()):
            if stream.full_id in wanted:
                self.abort(stream)

    def abort_all(self) -> int:
        """Abort all requests. Returns their number."""
        streams = list(self.streams.values())
        for stream in streams:
            self.abort(stream)
        return len(streams)

    # Pausing

    @property
    def is_paused(self) -> bool:
        """Return whether new requests wait for `resume`."""
        return not (self.engine.may_step.is_set() and self._may_begin.is_set())

    async def pause(self, mode: str, *, clear_cache: bool) -> None:
        """Pause sampling until `resume`. Returns when all sampled tokens were sent to the clients.

        mode: "keep" continues running requests after `resume`, "abort" ends them, "wait" lets them finish first.
        """
        if mode == "wait":
            self._may_begin.clear()
            running = [stream.working for stream in self.streams.values() if stream.working is not None]
            while running and not self._may_begin.is_set():
                _, pending = await asyncio.wait(running, timeout=0.05)
                running = list(pending)
        else:
            self.engine.may_step.clear()
        if mode == "abort":
            self.abort_all()
        if clear_cache:
            self.engine.drop_kv()
        await self._drain()

    def resume(self) -> None:
        """Resume, unless it sleeps or lacks weights."""
        self._may_begin.set()
        if self._has_weights and not self.asleep:
            self.engine.may_step.set()

    async def _drain(self) -> None:
        deadline = time.monotonic() + _DRAIN_S
        while time.monotonic() < deadline and not all(s.delivered for s in self.streams.values()):
            await asyncio.sleep(0.001)

    def drop_kv(self, *, of_running: bool) -> bool:
        """Drop cached KV. Returns False without effect if requests are in flight, unless `of_running`."""
        if self.streams and not of_running:
            return False
        self.engine.drop_kv()
        return True

    # Sleep

    async def sleep(self, level: int) -> None:
        """Abort all requests, and free the memory of KV and weights until `wake_up`. No effect if it sleeps.

        level 1: keep the weights on the CPU; 2: a weight update must follow.
        """
        async with self._updating:
            if self.asleep:
                return
            await self.pause("abort", clear_cache=True)
            self._allocate_weights = self.engine.free_weights(keep=level == 1)
            self.asleep, self._has_weights = set[str](TAGS), self._has_weights and level == 1

    def wake_up(self, tags: Collection[str]) -> None:
        """Allocate the memory of these TAGS; requests resume when both have theirs, and there are weights."""
        if "weights" in self.asleep.intersection(tags):
            self._allocate_weights()
        self.asleep.difference_update(tags)
        if not self.asleep:
            self.resume()

    # Weights

    def start_update(self) -> None:
        """Begin an update; an unfinished one, which was refused, is dropped."""
        self._update_begun = True

    async def update(self, path: str, sha256: str) -> None:
        """Load this file's weights: it is read while requests run, and swapped in between two steps.

        Raises Refusal, without effect, if the SHA-256 differs or it is not the whole model.
        """
        if not self._update_begun:
            raise Refusal("an update begins with /start_weight_update", status=500)
        if "weights" in self.asleep:
            raise Refusal("refused: the weights sleep, POST /wake_up?tags=weights first", status=500)
        async with self._updating:
            try:
                async with asyncio.timeout(self.verifier.limit_s + _LOAD_S):  # a read may never return
                    tensors = await asyncio.to_thread(self._read, path, sha256)
            except TimeoutError as error:
                raise Refusal("refused: reading the file takes too long", status=500) from error
            except (ValueError, OSError) as error:
                raise Refusal(f"refused: {error}", status=500) from error
            try:
                await self.engine.load_weights(self.num_updates + 1, tensors.items())
            except Exception as error:
                why = f"the weights of {path} were loaded in part only ({type(error).__name__}: {error})"
                terminal.error(f"{why}: the server ends")
                os._exit(_BROKEN)  # at once: no token may be sampled with half a model
                raise  # tests replace os._exit
            self.num_updates, self._has_weights = self.num_updates + 1, True

    def _read(self, path: str, sha256: str) -> Mapping[str, torch.Tensor]:
        self.verifier.verify(path, sha256)
        shapes = {name: shape for name, (_, shape) in shapes_of(path).items()}
        if reason := self.engine.load_error(shapes):
            raise ValueError(f"{path} {reason}")
        return load_file(path)

    def finish_update(self, label: str | None) -> None:
        """Finish an update: tokens carry this label from now on; None: the old one."""
        self._update_begun = False
        self.label = self.label if label is None else label


class RequestStream:
    """Tokens of one request until its client has them, and the weights that sampled each.

    `label()`: of the current weights. `decode_text`: to find out which stop string ended the request.
    """

    def __init__(self, body: GenerateBody, label: Callable[[], str], decode_text: Callable[[list[int]], str]) -> None:
        self.body, self._label, self._decode_text = body, label, decode_text
        self.num_tokens = 0
        self.working: asyncio.Task[None] | None = None
        """Task of its `extend`; set by the service."""
        self.error: Refusal | None = None
        self._tokens: list[int] = []  # only with stop strings
        self._spans: list[tuple[str, int]] = []  # label, index of its first token
        self._chunks: asyncio.Queue[TokenChunk | Refusal] = asyncio.Queue()
        self._ended = False

    @property
    def full_id(self) -> str:
        """Return the id for aborts, as in vLLM."""
        return f"generate-tokens-{self.body.request_id}"

    @property
    def delivered(self) -> bool:
        """Return whether all tokens so far were passed to the client's connection."""
        return self._chunks.empty()

    def on_token(self, token: int, logprob: float, reason: StopReason | None) -> None:
        """Add a sampled token; with a reason it is the last one."""
        if self._ended:
            return
        if not self._spans or self._spans[-1][0] != self._label():
            self._spans.append((self._label(), self.num_tokens))
        self.num_tokens += 1
        if self.body.sampling_params.stop_strings:
            self._tokens.append(token)
        if reason is None:
            self._chunks.put_nowait(TokenChunk([token], [logprob]))
        else:
            self._end(
                TokenChunk(
                    [token], [logprob], finish_reason(reason), self._stop_reason(token, reason), self._versions()
                )
            )

    def abort(self) -> None:
        """End the stream with the tokens so far."""
        if not self._ended:
            self._end(TokenChunk([], [], "abort", None, self._versions()))

    def fail(self, error: Refusal) -> None:
        """End the stream with this error."""
        if not self._ended:
            self.error = error
            self._end(error)

    async def chunks(self) -> AsyncIterator[list[TokenChunk]]:
        """Yield the available chunks until the last one. Raises the stream's error."""
        while True:
            found = [await self._chunks.get()]
            while not self._chunks.empty():
                found.append(self._chunks.get_nowait())
            if chunks := [chunk for chunk in found if isinstance(chunk, TokenChunk)]:
                yield chunks
            if isinstance(last := found[-1], Refusal):
                raise last
            if last.finish_reason is not None:
                return

    async def joined(self) -> TokenChunk:
        """Wait for the last chunk, and return all as one. Raises the stream's error."""
        chunks = [chunk async for some in self.chunks() for chunk in some]
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
        return replace(chunks[-1], token_ids=tokens, logprobs=logprobs)

    def _end(self, last: TokenChunk | Refusal) -> None:
        self._ended = True
        self._chunks.put_nowait(last)

    def _versions(self) -> list[dict[str, Any]]:
        ends = [start for _, start in self._spans[1:]] + [self.num_tokens]
        parts = zip(self._spans, ends, strict=False)  # without a token there is no span
        return [{"version": label, "start": start, "end": end} for (label, start), end in parts]

    def _stop_reason(self, token: int, reason: StopReason) -> int | str | None:
        """Return the stop token or string of the request that ended it; None for the model's EOS."""
        params = self.body.sampling_params
        if reason is StopReason.EOS and token in (params.stop_token_ids or ()):
            return token
        if reason is StopReason.STOP_STRING:
            text = self._decode_text(self._tokens)
            return next((stop for stop in params.stop_strings if stop in text), None)
        return None
