"""The embedded engine behind the Engine contract: one step loop for all pending `extend` calls.

Owns the step loop and the version stamp. Runs in the caller's event loop: a step blocks it, between steps others run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch

from rollover.config import Config, EngineConfig
from rollover.engine.embedded.batcher import Batcher
from rollover.engine.embedded.kv_cache import KVCache
from rollover.engine.embedded.runner import Chunk, Runner
from rollover.engine.embedded.sampler import sample, uniforms
from rollover.engine.embedded.sequence import Sequence
from rollover.engine.protocol import ExtendRequest, WeightLoad
from rollover.engine.repetition import CHECK_EVERY, repeats_itself
from rollover.models.attention import cache_shape
from rollover.models.limits import Limits
from rollover.models.team import Team
from rollover.types import Segment, StopReason

_TURNS_BETWEEN_STEPS = 16
# What a decode step takes whatever its batch, in rows: the weights' way through memory (docs/performance.md, growth).
_FIXED_ROWS = 16

KVPolicy = Literal["recompute", "keep", "salt"]


class EmbeddedEngine:
    """Continuous batching over `model` (the engine's own copy, in compute dtype).

    `decode_text` turns token ids into text; it is needed for stop strings only.
    """

    def __init__(
        self,
        model: Any,
        config: EngineConfig,
        *,
        kv_on_resume: KVPolicy = "recompute",
        decode_text: Callable[[list[int]], str] | None = None,
        policy_version: int = 0,
        team: Team | None = None,
    ) -> None:
        text_config = model.config.get_text_config()
        kv_heads, head_size = cache_shape(model)
        first = next(model.parameters())
        self._runner = Runner(model, config.max_running)
        cache = KVCache(
            num_layers=text_config.num_hidden_layers,
            num_kv_heads=kv_heads,
            head_size=head_size,
            dtype=first.dtype,
            device=first.device,
            max_bytes=int(config.kv_memory_gb * 1e9),
            roomy_for=config.max_running if self._runner.kernels is not None else 0,
        )
        self._batcher = Batcher(cache, config.max_running)
        self._chunk_tokens = config.prefill_chunk_tokens
        self._limits = Limits.of(model)
        self._kv_policy: KVPolicy = kv_on_resume
        self._decode_text = decode_text
        self._version = policy_version
        self._team = team or Team()
        self._loop: asyncio.Task[None] | None = None
        # Only where a forward pass returns when it is done: elsewhere its time is not known without waiting for it.
        self._timed = first.device.type == "cpu"
        self._counts: dict[str, float] = dict.fromkeys(
            (
                "engine/decode_steps",
                "engine/prefill_tokens",
                "engine/reprefill_tokens",
                "kv/stale_prefix_tokens",
                "kv/kept_tokens",
                "kv/shared_prompt_tokens",
                *(("engine/prefill_s",) if self._timed else ()),
            ),
            0,
        )

    @classmethod
    def over(cls, model: Any, tokenizer: Any, config: Config) -> EmbeddedEngine:
        """An engine that takes `model`, in compute dtype, for its own."""
        return cls(
            model.requires_grad_(False),
            config.engine,
            kv_on_resume=config.rollout.kv_on_resume,
            decode_text=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
            team=Team.of(config.run, next(model.parameters()).device),
        )

    @property
    def max_tokens(self) -> int:
        """The longest rollout, prompt included, that the model's positions and the KV memory allow."""
        return min(self._batcher.cache.max_tokens, self._limits.positions or self._batcher.cache.max_tokens)

    @property
    def kv_bytes_per_token(self) -> int:
        return self._batcher.cache.bytes_per_token

    @property
    def oldest_version(self) -> int:
        return self._version

    async def extend(self, request: ExtendRequest) -> list[Segment]:
        """See Engine. ValueError for what the model cannot be given, or what does not fit into the KV memory."""
        self._limits.check(request.rollout_id, request.prompt_ids, request.generated_ids)
        if request.max_new_tokens < 1:
            raise ValueError(
                f"rollout {request.rollout_id} is extended by {request.max_new_tokens} tokens: by at least 1"
            )
        total = len(request.prompt_ids) + len(request.generated_ids) + request.max_new_tokens
        if total > self.max_tokens:
            raise ValueError(
                f"a rollout of {total} tokens (prompt and rollout.max_new_tokens) is above the {self.max_tokens} that"
                f" fit: the model has {self._limits.positions or 'unlimited'} positions, engine.kv_memory_gb holds"
                f" {self._batcher.cache.max_tokens}. Lower rollout.max_new_tokens or tasks.max_prompt_tokens"
            )
        if request.stop_strings and self._decode_text is None:
            raise ValueError("stop strings need the engine's decode_text")
        future: asyncio.Future[list[Segment]] = asyncio.get_running_loop().create_future()
        seq = self._batcher.take_kept(request.rollout_id)
        if seq is not None and seq.continues(request):
            seq.resume(request, future)
            self._counts["kv/kept_tokens"] += seq.kv_len
        else:
            if seq is not None:
                self._batcher.cache.free(seq)
            seq = Sequence.start(request, future)
        self._batcher.waiting.append(seq)
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        try:
            while self._batcher.busy:
                # Others run first: calls made together are batched together, and a reward's round trip through pipes
                # and locks takes many turns of the event loop, which must not cost a decode step each.
                for _ in range(_TURNS_BETWEEN_STEPS):
                    await asyncio.sleep(0)
                self.step()
        except Exception as error:
            for seq in list(self._batcher.active()):
                self._batcher.retire(seq, keep_kv=False)
                if seq.future is not None and not seq.future.done():
                    seq.future.set_exception(error)

    @torch.no_grad()
    def step(self) -> None:
        """Admit, prefill at most one chunk budget, decode one token of everything that is prefilled."""
        self._team.assemble()
        self._discard_cancelled()
        self._batcher.admit()
        self._prefill()
        # Sequences of a bucket must stand together, in row order, for attention without gathers.
        order = sorted(self._batcher.make_room(), key=lambda s: (s.bucket.row_tokens if s.bucket else 0, s.row))
        if not order:
            return
        self._counts["engine/decode_steps"] += 1
        with self._team.piece(_FIXED_ROWS + len(order)):
            logits_BV = self._runner.decode(order)
            draws_B = uniforms([s.request.seed for s in order], [s.next_index for s in order])
            tokens, logprobs = sample(logits_BV, [s.request.sampling for s in order], draws_B, self._runner.kernels)
        for seq, token, logprob in zip(order, tokens, logprobs, strict=True):
            seq.append(token, logprob)
            reason = self._stop_reason(seq, token)
            if reason is not None:
                self._batcher.retire(seq, keep_kv=reason is StopReason.PAUSED)
                self._resolve(seq, reason)

    def _discard_cancelled(self) -> None:
        for seq in [s for s in self._batcher.active() if s.future is not None and s.future.cancelled()]:
            self._batcher.retire(seq, keep_kv=False)

    def _prefill(self) -> None:
        """One forward over chunks of what is not cached yet; a prompt that a sibling has is copied, not computed."""
        budget = self._chunk_tokens
        chunks: list[Chunk] = []
        # Prompts that a sequence is computing, now or since an earlier step: its siblings wait for the copy.
        planned = {s.request.prompt_ids for s in self._batcher.running if 0 < s.kv_len < s.num_prompt - 1}
        salt = self._version if self._kv_policy == "salt" else None
        for seq in self._batcher.running:
            if seq.prefilled or budget == 0:
                continue
            prompt_only = seq.num_prompt - 1
            if seq.kv_len == 0 and prompt_only > 0:
                if seq.request.prompt_ids in planned:
                    continue
                donor = self._batcher.donor(seq, salt)
                if donor is not None:
                    self._share_prompt(donor, seq, prompt_only)
                    if seq.prefilled:
                        continue
                else:
                    planned.add(seq.request.prompt_ids)
                    seq.prompt_kv_version = self._version
            end = min(len(seq.tokens) - 1, seq.kv_len + budget)
            chunks.append(Chunk(seq, seq.kv_len, end))
            budget -= end - seq.kv_len
        if not chunks:
            return
        started = time.perf_counter()
        self._runner.prefill(chunks)
        if self._timed:
            self._counts["engine/prefill_s"] += time.perf_counter() - started
        for chunk in chunks:
            kind = "engine/reprefill_tokens" if chunk.seq.recomputing else "engine/prefill_tokens"
            self._counts[kind] += chunk.end - chunk.start
        for seq in self._batcher.running:
            if seq.kv_len == 0 and seq.request.prompt_ids in planned:
                donor = self._batcher.donor(seq, salt)
                if donor is not None:
                    self._share_prompt(donor, seq, seq.num_prompt - 1)

    def _share_prompt(self, donor: Sequence, seq: Sequence, num_tokens: int) -> None:
        self._batcher.cache.copy_prefix(donor, seq, num_tokens)
        seq.prompt_kv_version = donor.prompt_kv_version
        self._counts["kv/shared_prompt_tokens"] += num_tokens
        if donor.prompt_kv_version != self._version:
            self._counts["kv/stale_prefix_tokens"] += num_tokens

    def _stop_reason(self, seq: Sequence, token: int) -> StopReason | None:
        request = seq.request
        if token in request.stop_token_ids:
            return StopReason.EOS
        if request.stop_strings and self._decode_text is not None:
            # A character takes at most four tokens, so this tail holds any stop string that just ended.
            tail = max(map(len, request.stop_strings)) * 4 + 8
            text = self._decode_text(seq.tokens[max(seq.num_prompt + request.text_start, len(seq.tokens) - tail) :])
            if any(stop in text for stop in request.stop_strings):
                return StopReason.STOP_STRING
        if seq.num_new >= request.max_new_tokens:
            return StopReason.LENGTH
        if request.stop_repetition_tokens and seq.next_index % CHECK_EVERY == 0:
            if repeats_itself(seq.tokens[seq.num_prompt :], request.stop_repetition_tokens):
                return StopReason.REPETITION
        return StopReason.PAUSED if seq.num_new == request.pause_after else None

    def _resolve(self, seq: Sequence, reason: StopReason) -> None:
        seq.cut(self._version, reason)
        if seq.future is not None and not seq.future.done():
            seq.future.set_result(seq.segments)
        seq.future = None

    def interrupt(self, rollout_ids: Iterable[str] | None = None) -> None:
        wanted = None if rollout_ids is None else set(rollout_ids)
        for seq in list(self._batcher.active()):
            if wanted is None or seq.request.rollout_id in wanted:
                self._batcher.retire(seq, keep_kv=True)
                self._resolve(seq, StopReason.PAUSED)

    async def progress(self, rollout_ids: Iterable[str]) -> dict[str, list[Segment]]:
        wanted = set(rollout_ids)
        return {
            s.request.rollout_id: [*s.segments, s.open_segment(self._version, StopReason.PAUSED)]
            for s in self._batcher.active()
            # One that was cancelled stands here until the next step, beside the call that goes on from it.
            if s.request.rollout_id in wanted and s.future is not None and not s.future.cancelled()
        }

    async def queued(self, rollout_ids: Iterable[str]) -> set[str]:
        idle = [*self._batcher.waiting, *(s for s in self._batcher.running if not s.prefilled)]
        return {s.request.rollout_id for s in idle}.intersection(rollout_ids)

    def release(self, rollout_ids: Iterable[str]) -> None:
        for rollout_id in rollout_ids:
            seq = self._batcher.take_kept(rollout_id)
            if seq is not None:
                self._batcher.cache.free(seq)

    async def load_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightLoad:
        started = time.perf_counter()
        with torch.no_grad():
            num_bytes = self._runner.load_weights(tensors)
        if version != self._version:
            for seq in self._batcher.active():
                seq.cut_at_update(self._version)
            if self._kv_policy == "recompute":
                self._batcher.requeue_running()
            for seq in (*self._batcher.active(), *self._batcher.kept.values()):
                if self._kv_policy == "recompute":
                    self._batcher.drop_kv(seq)
                else:
                    self._counts["kv/stale_prefix_tokens"] += seq.kv_len
            if self._kv_policy == "recompute":
                self._batcher.kept.clear()
            self._version = version
        return WeightLoad(num_bytes, time.perf_counter() - started)

    def use_threads(self, num: int) -> None:
        """Decode with so many CPU threads from now on; with run.threads = auto with so many at most."""
        self._team.use(num)

    def stats(self) -> dict[str, float]:
        team = {"engine/decode_s": self._team.seconds, "engine/decode_thread_s": self._team.thread_seconds}
        return {
            **self._counts,
            "engine/flops": self._runner.flops,
            **({"engine/kernels": float(self._runner.compiled)} if self._timed else {}),
            **(team if self._timed else {}),
            "engine/preemptions": self._batcher.num_preemptions,
            "kv/bytes": self._batcher.cache.num_bytes,
        }

    async def close(self) -> None:
        """Interrupt what runs and wait for the step loop to end."""
        self.interrupt()
        if self._loop is not None:
            await asyncio.wait([self._loop])
            if not self._loop.cancelled():
                self._loop.exception()  # seen: a second Ctrl-C ends the step loop with an error of its own
        self._batcher.kept.clear()
