"""Engine over a Tinker-compatible service. It samples in chunks, as the service does not stream.

    extend ──▶ chunk ──▶ chunk ──▶ ... ──▶ a stop token, a stop string, the budget, an interruption

A cancelled call loses its tokens. So the engine samples each rollout in calls of backend.chunk_tokens, each with its
own seed, and an interruption loses at most one chunk. Owns the current weights and the running rollouts.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from rollover.engine.build import EngineSetup
from rollover.engine.protocol import Engine, EngineDied, ExtendRequest, InvalidAnswer, WeightLoad
from rollover.engine.remote.extend_state import ExtendState
from rollover.engine.validate import valid_logprobs
from rollover.models.load import ModelLimits
from rollover.plugins.tinker.service import TinkerSession
from rollover.types import Segment, StopReason

if TYPE_CHECKING:
    import torch

_STATS = (
    "engine/decode_steps", "engine/prefill_tokens", "engine/reprefill_tokens", "engine/preemptions",
    "kv/stale_prefix_tokens", "kv/kept_tokens", "kv/shared_prompt_tokens", "kv/bytes",
)  # fmt: skip


class _Sequence(ExtendState):
    """One running `extend`, with its finished chunks."""

    version: int | None = None
    """The policy version of the pending `call`."""
    call: asyncio.Future[Any] | None = None


class TinkerEngine:
    """See `Engine`. `decode_text` turns token ids into text, for stop strings.

    `service.base_model` has policy version 0. The service supports stop tokens only: the engine looks for stop strings
    and repetitions in finished chunks, and discards the tokens behind them.
    """

    def __init__(self, service: TinkerSession, max_tokens: int, decode_text: Callable[[list[int]], str]) -> None:
        self.service, self.max_tokens, self._decode_text = service, max_tokens, decode_text
        self._version, self._sampler = 0, service.sampler(service.base_model)
        self._running: dict[str, _Sequence] = {}
        self._stats: dict[str, float] = dict.fromkeys(_STATS, 0.0)

    @property
    def oldest_version(self) -> int:
        return min((s.version for s in self._running.values() if s.version is not None), default=self._version)

    async def extend(self, request: ExtendRequest) -> list[Segment]:
        assert request.rollout_id not in self._running, f"rollout {request.rollout_id} is running already"
        if request.media:
            raise EngineDied(
                f"rollouts show images ({request.media[0].source}), and engines over a Tinker service take text"
                ' alone: train with backend.type = "local", or take tasks without images'
            )
        sequence = self._running[request.rollout_id] = _Sequence(request, self._decode_text)
        try:
            reason = None
            while reason is None:
                reason = await self._chunk(sequence)
            return sequence.segments(reason)
        finally:
            if self._running.get(request.rollout_id) is sequence:
                del self._running[request.rollout_id]

    def interrupt(self, rollout_ids: Iterable[str] | None = None) -> None:
        for rollout_id in list(self._running) if rollout_ids is None else rollout_ids:
            if rollout_id in self._running:
                self._running[rollout_id].interrupt()

    async def progress(self, rollout_ids: Iterable[str]) -> dict[str, list[Segment]]:
        running = [i for i in rollout_ids if i in self._running]
        return {i: self._running[i].progress() for i in running}

    async def queued(self, rollout_ids: Iterable[str]) -> set[str]:
        """Return an empty set: the service does not report its queue."""
        return set()

    def release(self, rollout_ids: Iterable[str]) -> None:
        """Do nothing: the service manages its own prompt cache."""

    async def load_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightLoad:
        """Switch to new weights, and return when the pending chunks of older ones are done.

        tensors: one from `TinkerBackend.publish`, whose name is the path of the weights at the service.
        """
        started = time.perf_counter()
        ((path, _),) = tensors
        self._sampler = await asyncio.to_thread(self.service.sampler, path)
        self._version = version
        if calls := [s.call for s in self._running.values() if s.call is not None]:
            await asyncio.wait(calls)
        return WeightLoad(num_bytes=0, seconds=time.perf_counter() - started)

    def use_threads(self, num: int) -> None:
        """Do nothing: the service computes."""

    def stats(self) -> dict[str, float]:
        return dict(self._stats)

    async def close(self) -> None:
        self.interrupt()
        await asyncio.to_thread(self.service.close)

    # Private

    async def _chunk(self, sequence: _Sequence) -> StopReason | None:
        """Sample one more chunk. Return why the rollout ends, if it does."""
        if sequence.interrupted:
            return StopReason.PAUSED
        num_tokens = self._size(sequence)
        sequence.version = version = self._version
        work = sequence.call = asyncio.ensure_future(self._sample(sequence, num_tokens))
        interrupted = asyncio.ensure_future(sequence.end.wait())
        try:
            await asyncio.wait([work, interrupted], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return StopReason.PAUSED
            answer = work.result()
        finally:
            sequence.version = sequence.call = None
            work.cancel()
            interrupted.cancel()
        ids, logprobs = answer.tokens, answer.logprobs
        if logprobs is None or len(logprobs) != len(ids) or not 0 < len(ids) <= num_tokens:
            raise InvalidAnswer(f"the service was asked for {num_tokens} tokens with log-probs, and gave {len(ids)}")
        given, why_invalid = valid_logprobs(ids, [float(x) for x in logprobs], None)
        if why_invalid:
            raise InvalidAnswer(f"the service {why_invalid}")
        sequence.add([int(t) for t in ids], given, version)
        if sequence.reason is None and answer.stop_reason == "stop":
            raise InvalidAnswer("the service ended an answer without one of the stop tokens that it was given")
        return sequence.reason

    def _size(self, sequence: _Sequence) -> int:
        """Return the tokens of the next call: up to the next multiple of chunk_tokens."""
        chunk = self.service.config.chunk_tokens
        done = len(sequence.request.generated_ids) + len(sequence.tokens)
        return min(chunk - done % chunk, sequence.remaining)

    async def _sample(self, sequence: _Sequence, num_tokens: int) -> Any:
        request, types, sampling = sequence.request, self.service.sdk.types, sequence.request.sampling
        before = (*request.prompt.ids, *request.generated_ids, *sequence.tokens)
        first = len(before) == len(request.prompt)
        self._stats["engine/prefill_tokens" if first else "engine/reprefill_tokens"] += len(before)
        params = types.SamplingParams(
            max_tokens=num_tokens,
            seed=_chunk_seed(request.seed, len(before) - len(request.prompt)),
            stop=sorted(request.stop.token_ids),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k or -1,
        )
        future = self._sampler.sample(types.ModelInput.from_ints(list(before)), 1, params)
        (answer,) = (await self.service.await_result("sampling", future)).sequences
        self._stats["engine/decode_steps"] += len(answer.tokens)
        return answer


def _chunk_seed(seed: int, index: int) -> int:
    """Return the seed of the call that begins at this token. 31 bits: services accept no more."""
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def make_tinker(setup: EngineSetup) -> TinkerEngine:
    """Open a session at the service, and create its engine. Errors: see `TinkerSession`."""
    loaded = setup.model()

    def decode_text(ids: list[int]) -> str:
        return loaded.tokenizer.decode(ids, skip_special_tokens=False)

    longest = ModelLimits.from_model(loaded.model).positions or 2**31
    service = TinkerSession(setup.config)
    try:
        return TinkerEngine(service, longest, decode_text)
    except BaseException:
        service.close()
        raise


def session_of(engine: Engine | None) -> TinkerSession:
    """Return the session that the engine of `make_tinker` samples in. ValueError for another engine."""
    if not isinstance(engine, TinkerEngine):
        raise ValueError('backend.type = "tinker" samples at the service, too: it needs its own engine')
    return engine.service
