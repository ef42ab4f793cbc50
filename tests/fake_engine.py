"""A fake engine: the whole Engine contract without a model. No torch, no wall time.

Owns nothing but the rollouts that run. Every step gives each of them one token and yields to the event loop once.
Token ids are a hash of (seed, absolute index), so they survive any interruption, as with a real engine under frozen
weights; log-probs also depend on the policy version, so that tests see which version a token came from.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rollover.engine.protocol import ExtendRequest, WeightLoad, last_of, stop_reason
from rollover.types import Segment, StopReason

if TYPE_CHECKING:
    import torch

_STATS = (
    "engine/decode_steps",
    "engine/prefill_tokens",
    "engine/reprefill_tokens",
    "engine/preemptions",
    "kv/stale_prefix_tokens",
    "kv/kept_tokens",
    "kv/shared_prompt_tokens",
    "kv/bytes",
)


@dataclass(slots=True, eq=False)
class _Sequence:
    """One running `extend`: its tokens so far, each with log-prob and version."""

    request: ExtendRequest
    target_length: int
    done: asyncio.Future[list[Segment]]
    tokens: list[tuple[int, float, int]] = field(default_factory=list)
    interrupted: bool = False

    def segments(self, stop_reason: StopReason, current_version: int) -> list[Segment]:
        """One per policy version met, the last with `stop_reason`; one empty if there is no token."""
        versions = list(dict.fromkeys(version for _, _, version in self.tokens)) or [current_version]
        segments, start = [], len(self.request.generated_ids)
        for version in versions:
            part = [(token, logprob) for token, logprob, v in self.tokens if v == version]
            segments.append(
                Segment(
                    token_ids=np.array([token for token, _ in part], dtype=np.int32),
                    logprobs=np.array([logprob for _, logprob in part], dtype=np.float32),
                    policy_version=version,
                    sampling=self.request.sampling,
                    stop_reason=stop_reason if version == versions[-1] else StopReason.PAUSED,
                    start=start,
                )
            )
            start += len(part)
        return segments


class FakeEngine:
    """Engine whose rollouts stop after a given number of generated tokens (over all extensions together).

    `lengths` gives it: by rollout id, or as a function of the request's seed. A rollout whose length is within its
    budget ends with EOS (the smallest of its stop token ids, if any, is its last token), a longer one with LENGTH.
    Between two steps others get `turns_between_steps` turns of the event loop; with 16, as the embedded engine gives,
    whatever a step's end leads to has happened before the next step. `decode_text` turns token ids into text, for stop
    strings; without it there are none.
    """

    def __init__(
        self,
        lengths: Mapping[str, int] | Callable[[int], int],
        policy_version: int = 0,
        vocab_size: int = 1000,
        turns_between_steps: int = 1,
        decode_text: Callable[[list[int]], str] | None = None,
        max_tokens: int = 2**20,
    ) -> None:
        self.max_tokens = max_tokens
        self._lengths = lengths
        self._policy_version = policy_version
        self._vocab_size = vocab_size
        self._turns = turns_between_steps
        self._decode_text = decode_text
        self._running: dict[str, _Sequence] = {}
        self._loop_task: asyncio.Task[None] | None = None
        self._stats: dict[str, float] = dict.fromkeys(_STATS, 0.0)

    @property
    def oldest_version(self) -> int:
        return self._policy_version

    async def extend(self, request: ExtendRequest) -> list[Segment]:
        assert request.rollout_id not in self._running, f"rollout {request.rollout_id} is running already"
        assert request.max_new_tokens >= 1
        length = self._lengths(request.seed) if callable(self._lengths) else self._lengths[request.rollout_id]
        sequence = _Sequence(request, length, asyncio.get_running_loop().create_future())
        num_prefill = len(request.prompt) + len(request.generated_ids)
        self._stats["engine/reprefill_tokens" if request.generated_ids else "engine/prefill_tokens"] += num_prefill
        self._running[request.rollout_id] = sequence
        if self._loop_task is None or self._loop_task.done():
            self._loop_task = asyncio.ensure_future(self._run())
        try:
            return await sequence.done
        finally:
            # Still there only if this call was cancelled.
            if self._running.get(request.rollout_id) is sequence:
                del self._running[request.rollout_id]

    def interrupt(self, rollout_ids: Iterable[str] | None = None) -> None:
        for rollout_id in list(self._running) if rollout_ids is None else rollout_ids:
            if rollout_id in self._running:
                self._running[rollout_id].interrupted = True

    async def progress(self, rollout_ids: Iterable[str]) -> dict[str, list[Segment]]:
        running = [i for i in rollout_ids if i in self._running]
        return {i: self._running[i].segments(StopReason.PAUSED, self._policy_version) for i in running}

    async def queued(self, rollout_ids: Iterable[str]) -> set[str]:
        """None ever waits: there is room for everyone."""
        return set()

    def release(self, rollout_ids: Iterable[str]) -> None:
        """Nothing is kept for a rollout that does not run."""

    async def load_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightLoad:
        self._policy_version = version
        return WeightLoad(num_bytes=0, seconds=0.0)

    def use_threads(self, num: int) -> None:
        """Ignored: it computes nothing."""

    def stats(self) -> dict[str, float]:
        return dict(self._stats)

    async def close(self) -> None:
        if self._loop_task is not None and not self._loop_task.done():
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        for sequence in self._running.values():
            sequence.done.cancel()

    async def _run(self) -> None:
        while self._running:
            for _ in range(self._turns):
                await asyncio.sleep(0)
            self._step()

    def _step(self) -> None:
        """One token for everyone who was not interrupted; whoever stops leaves."""
        if any(not s.interrupted for s in self._running.values()):
            self._stats["engine/decode_steps"] += 1
        for rollout_id, sequence in list(self._running.items()):
            stop_reason = StopReason.PAUSED if sequence.interrupted else self._decode(sequence)
            if stop_reason is not None:
                del self._running[rollout_id]
                if not sequence.done.done():
                    sequence.done.set_result(sequence.segments(stop_reason, self._policy_version))

    def _decode(self, sequence: _Sequence) -> StopReason | None:
        request = sequence.request
        index = len(request.generated_ids) + len(sequence.tokens)
        ends = index + 1 >= sequence.target_length
        token_id = _hash(request.seed, index) % self._vocab_size
        if ends and request.stop.token_ids:
            token_id = min(request.stop.token_ids)
        while not ends and token_id in request.stop.token_ids:
            token_id = (token_id + 1) % self._vocab_size
        logprob = -(1 + _hash(request.seed, index, self._policy_version) % 1000) / 256
        sequence.tokens.append((token_id, logprob, self._policy_version))
        if ends:
            return StopReason.EOS
        new = [token for token, _, _ in sequence.tokens]
        if self._decode_text is None:
            request = replace(request, stop=replace(request.stop, strings=()))
        return stop_reason(request, len(new), last_of(request, new), self._decode_text)


class RecordingEngine(FakeEngine):
    """A fake engine that keeps the requests that it gets."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.requests: list[ExtendRequest] = []

    async def extend(self, request: ExtendRequest) -> list[Segment]:
        self.requests.append(request)
        return await super().extend(request)


def _hash(*parts: int) -> int:
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
