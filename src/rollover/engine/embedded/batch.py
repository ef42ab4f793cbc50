"""Sequences of the embedded engine, and the batcher that decides which of them run.

    Sequence   one `extend` in progress: tokens, open segment, stop condition
    Batcher    waiting and running sequences, and kept ones that still have KV; evicts KV when memory is short

Preempted sequences lose their KV and wait at the head of the queue. Never touches the model.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from rollover.engine.embedded.kv_cache import KVCache, RowOwner
from rollover.engine.embedded.sampling import LogitsProcessor
from rollover.engine.protocol import ExtendRequest, stop_reason
from rollover.models.vision import NO_IMAGES, ImagePlaces
from rollover.types import Prompt, Segment, StopReason

# Called with each sampled token, its log-prob, and why the sequence stops with it (None: it continues).
OnToken = Callable[[int, float, StopReason | None], None]


@dataclass(eq=False, slots=True)
class Sequence(RowOwner):
    """One `extend` in progress. `tokens` = prompt + generated before + new.

    KV of tokens[:kv_len] is cached. The last token never is: it is the input of the next decode step, so that the
    logits of all sampled tokens come from one code path.
    """

    request: ExtendRequest
    future: asyncio.Future[list[Segment]] | None
    tokens: list[int]
    prompt_kv_version: int = -1
    computed: int = 0
    """Tokens whose KV was computed before: their prefill counts as recomputed."""
    segments: list[Segment] = field(default_factory=list)
    open_logprobs: list[float] = field(default_factory=list)
    on_token: OnToken | None = None
    cache_salt: str = ""
    """Sequences share the KV of a prompt only under the same salt."""
    processor: LogitsProcessor | None = None
    images: ImagePlaces = NO_IMAGES

    @classmethod
    def start(
        cls, request: ExtendRequest, future: asyncio.Future[list[Segment]], computed: int | None = None
    ) -> Sequence:
        """Return a new sequence. `computed`: tokens whose KV was computed before; None: all, if it resumes."""
        tokens = [*request.prompt.ids, *request.generated_ids]
        if computed is None:
            computed = len(tokens) if request.generated_ids else 0
        return cls(request, future, tokens, computed=computed)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def prompt_key(self) -> tuple[str, Prompt]:
        """Return a key that is equal for sequences that may share the KV of their prompts."""
        return self.cache_salt, self.request.prompt

    @property
    def num_new(self) -> int:
        return len(self.tokens) - self.num_prompt - len(self.request.generated_ids)

    @property
    def next_index(self) -> int:
        """Return the index, in the generated part, of the next token."""
        return len(self.tokens) - self.num_prompt

    @property
    def prefilled(self) -> bool:
        return self.kv_len == len(self.tokens) - 1

    def continues(self, request: ExtendRequest) -> bool:
        """Return whether the cached KV of this kept sequence is a prefix of the request's tokens, without the last one.

        The request may have more tokens, if an environment wrote after the turn.
        """
        wanted = [*request.prompt.ids, *request.generated_ids]
        return (
            self.request.prompt == request.prompt
            and self.request.later_media == request.later_media[: len(self.request.later_media)]
            and self.kv_len < len(wanted)
            and self.tokens[: self.kv_len] == wanted[: self.kv_len]
        )

    def resume(self, request: ExtendRequest, future: asyncio.Future[list[Segment]]) -> None:
        self.request, self.future = request, future
        self.tokens = [*request.prompt.ids, *request.generated_ids]
        self.segments, self.open_logprobs = [], []

    def append(self, token: int, logprob: float) -> None:
        self.tokens.append(token)
        self.open_logprobs.append(logprob)

    def stop_reason(self, decode_text: Callable[[list[int]], str] | None) -> StopReason | None:
        """Return why it stops with its last token; None: it continues."""
        tokens = self.tokens
        return stop_reason(self.request, self.num_new, lambda num: tokens[len(tokens) - num :], decode_text)

    def keeps_kv(self, reason: StopReason) -> bool:
        """Return whether its KV may be used again after it ended for this reason."""
        return reason is StopReason.PAUSED or (self.request.may_continue and reason is not StopReason.LENGTH)

    def open_segment(self, version: int, reason: StopReason) -> Segment:
        """Return the tokens of the open segment as a Segment of `version`."""
        num = len(self.open_logprobs)
        return Segment(
            token_ids=np.asarray(self.tokens[len(self.tokens) - num :], dtype=np.int32),
            logprobs=np.asarray(self.open_logprobs, dtype=np.float32),
            policy_version=version,
            sampling=self.request.sampling,
            stop_reason=reason,
            start=self.next_index - num,
        )

    def close_segment(self, version: int, reason: StopReason) -> None:
        """Close the open segment. An empty PAUSED one is kept only if there is no other."""
        if self.open_logprobs or (reason is not StopReason.PAUSED) or not self.segments:
            self.segments.append(self.open_segment(version, reason))
        self.open_logprobs = []

    def resolve(self, version: int, reason: StopReason) -> None:
        """End its `extend`, which returns the segments."""
        self.close_segment(version, reason)
        if self.future is not None and not self.future.done():
            self.future.set_result(self.segments)
        self.future = None

    def on_new_weights(self, version: int) -> None:
        """Close the open segment, whose tokens belong to the old `version`."""
        if self.open_logprobs:
            self.close_segment(version, StopReason.PAUSED)


class Batcher:
    """Queues of sequences: at most `max_running` run, in order of arrival."""

    def __init__(self, cache: KVCache, max_running: int) -> None:
        self.cache = cache
        self.max_running = max_running
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.kept: dict[str, Sequence] = {}
        self._evicted: dict[str, int] = {}  # rollout id of a kept sequence without KV -> tokens once computed
        self.num_preemptions = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def active(self) -> Iterable[Sequence]:
        yield from self.running
        yield from self.waiting

    def admit(self) -> None:
        """Start waiting sequences while there is room for them and their next token."""
        while self.waiting and len(self.running) < self.max_running:
            seq = self.waiting[0]
            if not self._reserve_or_evict_idle(seq, len(seq.tokens)):
                if self.running:
                    return
                # Alone, a sequence fits (checked on arrival): its own smaller row is in the way.
                self.drop_kv(seq)
                assert self._reserve_or_evict_idle(seq, len(seq.tokens)), "a sequence must fit into an empty cache"
            self.running.append(self.waiting.popleft())

    def make_room(self) -> list[Sequence]:
        """Reserve rows for the next token of all prefilled sequences. Returns those that fit; preempts the youngest."""
        ready = [s for s in self.running if s.prefilled]
        for seq in ready:
            while seq.bucket is not None and not self._reserve_or_evict_idle(seq, len(seq.tokens)):
                self.preempt(self.running[-1])
        return [s for s in ready if s.bucket is not None]

    def preempt(self, seq: Sequence) -> None:
        self.num_preemptions += 1
        self.running.remove(seq)
        self.drop_kv(seq)
        self.waiting.appendleft(seq)

    def drop_kv(self, seq: Sequence) -> None:
        seq.computed = max(seq.computed, seq.kv_len)
        self.cache.free(seq)

    def drop_all_kv(self) -> None:
        """Drop the KV of all sequences after a weight update; running ones wait again, in order."""
        self.waiting.extendleft(reversed(self.running))
        self.running.clear()
        for seq in self.waiting:
            self.drop_kv(seq)
        while self.kept:
            self._evict(self.kept.popitem()[1])

    def retire(self, seq: Sequence, *, keep_kv: bool) -> None:
        """Remove `seq` from the queues. With keep_kv its KV stays until evicted or released."""
        if seq in self.running:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        if keep_kv and seq.kv_len:
            self.kept[seq.request.rollout_id] = seq
        elif keep_kv:
            self._evict(seq)
        else:
            self.cache.free(seq)

    def pop_kept(self, rollout_id: str) -> Sequence | None:
        """Remove and return the kept sequence of this rollout, with its KV."""
        return self.kept.pop(rollout_id, None)

    def pop_evicted(self, rollout_id: str) -> int | None:
        """Remove and return how many tokens of this rollout were computed before its eviction; None if not evicted."""
        return self._evicted.pop(rollout_id, None)

    def release(self, rollout_id: str) -> None:
        """Free the KV of a kept sequence."""
        self.pop_evicted(rollout_id)
        if (seq := self.pop_kept(rollout_id)) is not None:
            self.cache.free(seq)

    def donor(self, target: Sequence, version: int | None) -> Sequence | None:
        """Return a sequence with the same prompt key and the prompt's KV (computed under `version`, if given)."""
        need = target.num_prompt - 1
        for seq in (*self.running, *self.kept.values(), *self.waiting):
            if (
                seq is not target
                and seq.kv_len >= need
                and seq.prompt_key == target.prompt_key
                and version in (None, seq.prompt_kv_version)
            ):
                return seq
        return None

    def _evict(self, seq: Sequence) -> None:
        """Drop the KV of a kept sequence; remember its length, to count recomputed tokens if the rollout resumes."""
        self.drop_kv(seq)
        if seq.computed:
            self._evicted[seq.request.rollout_id] = seq.computed

    def _reserve_or_evict_idle(self, seq: Sequence, num_tokens: int) -> bool:
        """Reserve; while memory is short, evict sequences that do not run: kept ones, then the last in the queue."""
        while not self.cache.reserve(seq, num_tokens):
            if self.kept:
                self._evict(self.kept.pop(next(iter(self.kept))))
                continue
            idle = next((s for s in reversed(self.waiting) if s is not seq and s.bucket is not None), None)
            if idle is None:
                return False
            self.drop_kv(idle)
        return True
