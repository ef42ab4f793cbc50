"""Who runs: waiting and running sequences, kept ones that still have KV, and whose KV goes when memory is short.

Owns the queues; never touches the model. Preempted sequences lose their KV and wait at the head of the queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from rollover.engine.embedded.kv_cache import KVCache
from rollover.engine.embedded.sequence import Sequence


class Batcher:
    """At most `max_running` sequences run, in order of arrival."""

    def __init__(self, cache: KVCache, max_running: int) -> None:
        self.cache = cache
        self.max_running = max_running
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.kept: dict[str, Sequence] = {}
        self._lost: dict[str, int] = {}  # id of a rollout that was kept and lost its KV -> how many tokens of it
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
            self._lose(self.kept.popitem()[1])

    def retire(self, seq: Sequence, *, keep_kv: bool) -> None:
        """`seq` no longer runs or waits. With keep_kv what it has cached stays until evicted or released."""
        if seq in self.running:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        if keep_kv and seq.kv_len:
            self.kept[seq.request.rollout_id] = seq
        elif keep_kv:
            self._lose(seq)
        else:
            self.cache.free(seq)

    def take_kept(self, rollout_id: str) -> Sequence | None:
        """The kept sequence of this rollout, if there is one: it is kept no longer, though its KV still lies there."""
        return self.kept.pop(rollout_id, None)

    def take_lost(self, rollout_id: str) -> int | None:
        """How many tokens of this rollout had been computed before it lost its KV; None: it has not lost any. It is
        forgotten then."""
        return self._lost.pop(rollout_id, None)

    def release(self, rollout_id: str) -> None:
        """Forget what is kept of this rollout."""
        self.take_lost(rollout_id)
        if (seq := self.take_kept(rollout_id)) is not None:
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

    def _lose(self, seq: Sequence) -> None:
        """Its KV goes, and its rollout may go on: what is prefilled then is told apart from what was appended."""
        self.drop_kv(seq)
        if seq.computed:
            self._lost[seq.request.rollout_id] = seq.computed

    def _reserve_or_evict_idle(self, seq: Sequence, num_tokens: int) -> bool:
        """Reserve; while memory is short, evict what does not run: kept ones first, then the last in the queue."""
        while not self.cache.reserve(seq, num_tokens):
            if self.kept:
                self._lose(self.kept.pop(next(iter(self.kept))))
                continue
            idle = next((s for s in reversed(self.waiting) if s is not seq and s.bucket is not None), None)
            if idle is None:
                return False
            self.drop_kv(idle)
        return True
