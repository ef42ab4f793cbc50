"""One rollout being continued: its tokens, its open segment, and when it stops."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from rollover.engine.embedded.kv_cache import KVCache, RowOwner
from rollover.engine.embedded.sampling import LogitsProcessor
from rollover.engine.protocol import ExtendRequest
from rollover.engine.stop import stop_reason
from rollover.models.vision import NO_IMAGES, ImagePlaces
from rollover.types import Prompt, Segment, StopReason

# Told of each token as it is sampled: the token, its log-prob, and why the sequence stops with it (None: it goes on).
OnToken = Callable[[int, float, StopReason | None], None]


@dataclass(eq=False, slots=True)
class Sequence(RowOwner):
    """`tokens` = prompt + generated before + new. KV of tokens[:kv_len] is cached; the last token never is: it is the
    next decode step's input, so the logits of every sampled token come from one code path."""

    request: ExtendRequest
    future: asyncio.Future[list[Segment]] | None
    tokens: list[int]
    prompt_kv_version: int = -1
    computed: int = 0
    """What is prefilled of tokens[:computed] had been computed before."""
    segments: list[Segment] = field(default_factory=list)
    open_logprobs: list[float] = field(default_factory=list)
    on_token: OnToken | None = None
    cache_salt: str = ""
    """It shares the KV of its prompt with those of the same salt alone."""
    processor: LogitsProcessor | None = None
    """None: its logits are taken as they are."""
    images: ImagePlaces = NO_IMAGES

    @classmethod
    def start(
        cls, request: ExtendRequest, future: asyncio.Future[list[Segment]], computed: int | None = None
    ) -> Sequence:
        """`computed`: how many of its tokens were computed here before; None: that is not known, and all of one that
        goes on were, by whoever generated them."""
        tokens = [*request.prompt.ids, *request.generated_ids]
        if computed is None:
            computed = len(tokens) if request.generated_ids else 0
        return cls(request, future, tokens, computed=computed)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def prompt_key(self) -> tuple[str, Prompt]:
        """Equal for those that may share the KV of their prompts."""
        return self.cache_salt, self.request.prompt

    @property
    def num_new(self) -> int:
        return len(self.tokens) - self.num_prompt - len(self.request.generated_ids)

    @property
    def next_index(self) -> int:
        """Absolute index, in the generated part, of the token to be sampled next."""
        return len(self.tokens) - self.num_prompt

    @property
    def prefilled(self) -> bool:
        return self.kv_len == len(self.tokens) - 1

    def continues(self, request: ExtendRequest) -> bool:
        """Whether the cached KV of this kept sequence is a prefix of what `request` asks for, without its last token.

        More than what it has may be asked for: an environment wrote something after its turn.
        """
        asked = [*request.prompt.ids, *request.generated_ids]
        return (
            self.request.prompt == request.prompt
            and self.request.later_media == request.later_media[: len(self.request.later_media)]
            and self.kv_len < len(asked)
            and self.tokens[: self.kv_len] == asked[: self.kv_len]
        )

    def resume(self, request: ExtendRequest, future: asyncio.Future[list[Segment]]) -> None:
        self.request, self.future = request, future
        self.tokens = [*request.prompt.ids, *request.generated_ids]
        self.segments, self.open_logprobs = [], []

    def append(self, token: int, logprob: float) -> None:
        self.tokens.append(token)
        self.open_logprobs.append(logprob)

    def stop_reason(self, decode_text: Callable[[list[int]], str] | None) -> StopReason | None:
        """Why it stops with the token that was sampled last; None: it goes on."""
        tokens = self.tokens
        return stop_reason(self.request, self.num_new, lambda num: tokens[len(tokens) - num :], decode_text)

    def keeps_kv(self, reason: StopReason) -> bool:
        """Whether what is cached is of use after it ended for this reason."""
        return reason is StopReason.PAUSED or (self.request.may_go_on and reason is not StopReason.LENGTH)

    def open_segment(self, version: int, reason: StopReason) -> Segment:
        """The tokens sampled since the last cut, as a Segment of `version`."""
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
        """Close the open segment. An empty one is kept only where it is the answer to an interruption."""
        if self.open_logprobs or (reason is not StopReason.PAUSED) or not self.segments:
            self.segments.append(self.open_segment(version, reason))
        self.open_logprobs = []

    def resolve(self, version: int, reason: StopReason) -> None:
        """End its `extend`, which gets its segments."""
        self.close_segment(version, reason)
        if self.future is not None and not self.future.done():
            self.future.set_result(self.segments)
        self.future = None

    def on_new_weights(self, version: int) -> None:
        """New weights: what was sampled so far belongs to `version`."""
        if self.open_logprobs:
            self.close_segment(version, StopReason.PAUSED)


class Batcher:
    """At most `max_running` sequences run, in order of arrival."""

    def __init__(self, cache: KVCache, max_running: int) -> None:
        self.cache = cache
        self.max_running = max_running
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.kept: dict[str, Sequence] = {}
        self._evicted: dict[str, int] = {}  # id of a rollout that was kept and lost its KV -> how many tokens of it
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
                # Alone, a sequence fits (checked when it came in): what is in the way is its own smaller row.
                self.drop_kv(seq)
                assert self._reserve_or_evict_idle(seq, len(seq.tokens)), "a sequence must fit into an empty cache"
            self.running.append(self.waiting.popleft())

    def make_room(self) -> list[Sequence]:
        """Reserve rows for the next token of all that can decode now, and return those; preempts the youngest until the
        rest fits."""
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
        """Everyone loses their KV, and those that ran wait again, in their order: after a weight update."""
        self.waiting.extendleft(reversed(self.running))
        self.running.clear()
        for seq in self.waiting:
            self.drop_kv(seq)
        while self.kept:
            self._evict(self.kept.popitem()[1])

    def retire(self, seq: Sequence, *, keep_kv: bool) -> None:
        """`seq` no longer runs or waits. With keep_kv what it has cached stays until evicted or released."""
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
        """The kept sequence of this rollout, if there is one: it is kept no longer, though its KV still lies there."""
        return self.kept.pop(rollout_id, None)

    def pop_evicted(self, rollout_id: str) -> int | None:
        """How many tokens of this rollout had been computed before it lost its KV; None: it has not lost any. It is
        forgotten then."""
        return self._evicted.pop(rollout_id, None)

    def release(self, rollout_id: str) -> None:
        """Forget what is kept of this rollout."""
        self.pop_evicted(rollout_id)
        if (seq := self.pop_kept(rollout_id)) is not None:
            self.cache.free(seq)

    def donor(self, target: Sequence, version: int | None) -> Sequence | None:
        """A sequence with the same prompt and salt whose cached KV covers it (computed under `version`, if given)."""
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
        """Its KV goes, and its rollout may go on: what is prefilled then is told apart from what was appended."""
        self.drop_kv(seq)
        if seq.computed:
            self._evicted[seq.request.rollout_id] = seq.computed

    def _reserve_or_evict_idle(self, seq: Sequence, num_tokens: int) -> bool:
        """Reserve; while memory is short, evict what does not run: kept ones first, then the last in the queue."""
        while not self.cache.reserve(seq, num_tokens):
            if self.kept:
                self._evict(self.kept.pop(next(iter(self.kept))))
                continue
            idle = next((s for s in reversed(self.waiting) if s is not seq and s.bucket is not None), None)
            if idle is None:
                return False
            self.drop_kv(idle)
        return True
