"""Prefill: which tokens are computed in the next pass, and which prompts are copied from a sibling instead.

Owns the order and the counters of it. Never decides who runs: the batcher does.
"""

from __future__ import annotations

import time

from rollover.engine.embedded.batcher import Batcher
from rollover.engine.embedded.runner import Chunk, Runner
from rollover.engine.embedded.sequence import Sequence
from rollover.types import Prompt


class Prefill:
    """At most `chunk_tokens` are computed in a pass, so that decoding is never held up for long.

    `same_version_only`: a prompt is copied only where its keys and values are of the present weights. `timed`: whether
    a forward pass returns when it is done, so that its seconds are known.
    """

    def __init__(
        self, batcher: Batcher, runner: Runner, chunk_tokens: int, *, same_version_only: bool, timed: bool
    ) -> None:
        self._batcher, self._runner = batcher, runner
        self._chunk_tokens = chunk_tokens
        self._same_version_only = same_version_only
        self._timed = timed
        self.num_computed = 0
        self.num_recomputed = 0
        """Tokens whose keys and values had been dropped."""
        self.num_shared = 0
        self.num_stale = 0
        """Of the shared ones those that earlier weights computed."""
        self.seconds = 0.0

    def step(self, version: int) -> None:
        """One forward over chunks of what is not cached yet; a prompt that a sibling has is copied, not computed.

        `version`: of the weights."""
        # Prompts that a sequence is computing, now or since an earlier step: its siblings wait for the copy.
        planned = {s.prompt_key for s in self._batcher.running if 0 < s.kv_len < s.num_prompt - 1}
        chunks = self._plan(planned, version)
        if not chunks:
            return
        started = time.perf_counter()
        self._runner.prefill(chunks)
        if self._timed:
            self.seconds += time.perf_counter() - started
        for chunk in chunks:
            recomputed = max(0, min(chunk.end, chunk.seq.computed) - chunk.start)
            self.num_recomputed += recomputed
            self.num_computed += chunk.end - chunk.start - recomputed
        for seq in self._batcher.running:
            if seq.kv_len == 0 and seq.prompt_key in planned:
                self._share(seq, version)

    def _plan(self, planned: set[tuple[str, Prompt]], version: int) -> list[Chunk]:
        """The next chunks. Adds to `planned` the prompts that they begin with."""
        budget = self._chunk_tokens
        chunks: list[Chunk] = []
        for seq in self._batcher.running:
            if seq.prefilled or budget == 0:
                continue
            if seq.kv_len == 0 and seq.num_prompt > 1:
                if seq.prompt_key in planned:
                    continue
                if not self._share(seq, version):
                    planned.add(seq.prompt_key)
                    seq.prompt_kv_version = version
                elif seq.prefilled:
                    continue
            end = seq.images.chunk_end(seq.kv_len, min(len(seq.tokens) - 1, seq.kv_len + budget))
            chunks.append(Chunk(seq, seq.kv_len, end))
            budget = max(0, budget - (end - seq.kv_len))
        return chunks

    def _share(self, seq: Sequence, version: int) -> bool:
        """Copy all of the prompt but its last token from a sequence that has it. False: none does."""
        donor = self._batcher.donor(seq, version if self._same_version_only else None)
        if donor is None:
            return False
        num_tokens = seq.num_prompt - 1
        self._batcher.cache.copy_prefix(donor, seq, num_tokens)
        seq.prompt_kv_version = donor.prompt_kv_version
        self.num_shared += num_tokens
        if donor.prompt_kv_version != version:
            self.num_stale += num_tokens
        return True
