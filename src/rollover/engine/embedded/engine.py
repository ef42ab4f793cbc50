"""The embedded engine: one step loop for all pending `extend` calls.

    step: admit ──▶ prefill a chunk budget, or copy a sibling's prompt ──▶ decode one token of each sequence ──▶ sample

Owns the step loop, the order of prefill and the version stamp. Runs in the caller's event loop: a step blocks it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, Literal

import torch

from rollover.config import Config, EngineConfig
from rollover.engine.embedded.batch import Batcher, OnToken, Sequence
from rollover.engine.embedded.kv_cache import KVCache
from rollover.engine.embedded.runner import Runner, SequenceChunk
from rollover.engine.embedded.sampling import make_processor, process_logits, sample, uniforms
from rollover.engine.embedded.structures import Structures
from rollover.engine.protocol import ExtendRequest, ImageRefused, WeightLoad
from rollover.models.attention import cache_shape
from rollover.models.devices import synchronize
from rollover.models.load import LoadedModel, ModelLimits
from rollover.models.threads import Team
from rollover.models.vision import Pixels, Vision, image_places, trains_tower
from rollover.types import Prompt, Segment, StopReason

_TURNS_BETWEEN_STEPS = 16
# Fixed cost of a decode step, in rows: reading the weights from memory (docs/performance.md, growth).
_FIXED_ROWS = 16

KVPolicy = Literal["recompute", "keep", "salt"]


class EmbeddedEngine:
    """Engine with continuous batching over `model` (its own copy, in compute dtype).

    `tokenizer`: for stop strings and structured answers. `processor`: for images. `tower_changes`: new weights change
    the vision tower.
    """

    def __init__(
        self,
        model: Any,
        config: EngineConfig,
        *,
        kv_on_resume: KVPolicy = "recompute",
        tokenizer: Any = None,
        team: Team | None = None,
        processor: Pixels | None = None,
        tower_changes: bool = True,
    ) -> None:
        text_config = model.config.get_text_config()
        kv_heads, head_size = cache_shape(model)
        first = next(model.parameters())
        self._vision = None if processor is None else Vision(model, processor, keeps=True)
        self._tower_changes = tower_changes
        self._runner = Runner(model, config.max_running, self._vision)
        self.free_weights = self._runner.free_weights
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
        self._limits = ModelLimits.from_model(model)
        self._kv_policy: KVPolicy = kv_on_resume
        self._tokenizer = tokenizer
        self._structures = None if tokenizer is None else Structures(tokenizer)
        self._num_logits = len(model.get_output_embeddings().weight)
        self._version = 0
        self._team = team or Team()
        self._loop: asyncio.Task[None] | None = None
        self.may_step = asyncio.Event()  # while cleared, requests wait; interrupted ones return at once
        self.may_step.set()
        # Elsewhere a forward pass returns before it is done, and its time is not known without waiting for it.
        self._device, self._timed = first.device, first.device.type == "cpu"
        self._prefill = Prefill(
            self._batcher,
            self._runner,
            config.prefill_chunk_tokens,
            same_version_only=kv_on_resume == "salt",
            timed=self._timed,
        )
        self._num_decode_steps = 0
        self._num_kept = 0  # tokens that resumed rollouts still had cached
        self._num_stale = 0  # tokens that stayed cached when the weights changed

    @classmethod
    def over(cls, model: Any, loaded: LoadedModel, config: Config) -> EmbeddedEngine:
        """Return an engine that owns `model`, in compute dtype: that of `loaded`, or a copy."""
        return cls(
            model.requires_grad_(False),
            config.engine,
            kv_on_resume=config.rollout.kv_on_resume,
            tokenizer=loaded.tokenizer,
            team=Team.from_config(config.run, next(model.parameters()).device),
            processor=loaded.processor,
            tower_changes=loaded.processor is not None and trains_tower(loaded.model),
        )

    @property
    def max_tokens(self) -> int:
        """Return the longest rollout, prompt included, that the model's positions and the KV memory allow."""
        return min(self._batcher.cache.max_tokens, self._limits.positions or self._batcher.cache.max_tokens)

    @property
    def kv_bytes_per_token(self) -> int:
        return self._batcher.cache.bytes_per_token

    @property
    def oldest_version(self) -> int:
        return self._version

    def load_error(self, shapes: Mapping[str, Seq[int]]) -> str:
        """Return why weights of these names and shapes are not the whole model's; "" if they are."""
        return self._runner.load_error(shapes)

    async def extend(
        self, request: ExtendRequest, on_token: OnToken | None = None, cache_salt: str = ""
    ) -> list[Segment]:
        """See Engine. Raises ValueError for invalid requests, and those that do not fit into the KV memory.

        `on_token` is called within the decode step that samples the token. `cache_salt`: requests share the KV of a
        prompt only under the same salt.
        """
        self._limits.check(request.rollout_id, request.prompt.ids, request.generated_ids)
        if request.max_new_tokens < 1:
            raise ValueError(
                f"rollout {request.rollout_id} is extended by {request.max_new_tokens} tokens: by at least 1"
            )
        total = len(request.prompt) + len(request.generated_ids) + request.max_new_tokens
        if total > self.max_tokens:
            raise ValueError(
                f"a rollout of {total} tokens (prompt and rollout.max_new_tokens) is above the {self.max_tokens} that"
                f" fit: the model has {self._limits.positions or 'unlimited'} positions, engine.kv_memory_gb holds"
                f" {self._batcher.cache.max_tokens}. Lower rollout.max_new_tokens or tasks.max_prompt_tokens"
            )
        if request.stop.strings and self._tokenizer is None:
            raise ValueError("stop strings need the engine's tokenizer")
        try:  # here it fails this rollout alone
            images = image_places(self._vision, request.shown)
            images.check_text_follows(len(request.prompt) + len(request.generated_ids))
            if self._vision is not None and self.may_step.is_set():  # else its weights may be freed
                self._vision.prepare(images)
        except ValueError as error:
            raise ImageRefused(str(error)) from error
        except Exception as error:  # boundary: decoders and processors raise errors of any kind
            raise ImageRefused(f"an image cannot be computed: {type(error).__name__}: {error}") from error
        processor = make_processor(request, self._num_logits, self._structures)
        future: asyncio.Future[list[Segment]] = asyncio.get_running_loop().create_future()
        seq = self._batcher.pop_kept(request.rollout_id)
        if seq is not None and seq.continues(request):
            seq.resume(request, future)
            self._num_kept += seq.kv_len
        else:
            if seq is not None:
                self._batcher.cache.free(seq)
            seq = Sequence.start(request, future, self._batcher.pop_evicted(request.rollout_id))
        seq.on_token, seq.cache_salt, seq.processor, seq.images = on_token, cache_salt, processor, images
        self._batcher.waiting.append(seq)
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        try:
            while self._batcher.busy:
                # Yield first: calls made together are batched together, and a reward's round trip through pipes and
                # locks takes many turns of the event loop, which must not cost a decode step each.
                for _ in range(_TURNS_BETWEEN_STEPS):
                    await asyncio.sleep(0)
                await self.may_step.wait()
                self.step()
        except Exception as error:
            for seq in list(self._batcher.active()):
                self._batcher.retire(seq, keep_kv=False)
                if seq.future is not None and not seq.future.done():
                    seq.future.set_exception(error)

    @torch.no_grad()
    def step(self) -> None:
        """Admit, prefill at most one chunk budget, decode one token of each prefilled sequence."""
        self._team.assemble()
        self._discard_cancelled()
        self._batcher.admit()
        self._prefill.step(self._version)
        # Sequences of a bucket must be adjacent, in row order, for attention without gathers.
        order = sorted(self._batcher.make_room(), key=lambda s: (s.bucket.row_tokens if s.bucket else 0, s.row))
        if not order:
            return
        self._num_decode_steps += 1
        with self._team.piece(_FIXED_ROWS + len(order)):
            logits_BV = self._runner.decode(order)
            process_logits(logits_BV, [s.processor for s in order], [s.tokens for s in order])
            draws_B = uniforms([s.request.seed for s in order], [s.next_index for s in order])
            tokens, logprobs = sample(logits_BV, [s.request.sampling for s in order], draws_B, self._runner.kernels)
        for seq, token, logprob in zip(order, tokens, logprobs, strict=True):
            seq.append(token, logprob)
            reason = seq.stop_reason(self._decoded)
            if seq.on_token is not None:
                seq.on_token(token, logprob, reason)
            if reason is not None:
                self._batcher.retire(seq, keep_kv=seq.keeps_kv(reason))
                seq.resolve(self._version, reason)

    def _decoded(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _discard_cancelled(self) -> None:
        for seq in [s for s in self._batcher.active() if s.future is not None and s.future.cancelled()]:
            self._batcher.retire(seq, keep_kv=False)

    @torch.no_grad()
    def prompt_logprobs(self, token_ids: Seq[int]) -> tuple[list[float], list[int], list[float]]:
        """Return, for every token but the first: its log-prob, the likeliest token there, and its log-prob.

        At temperature 1, computed at once between two steps, without caching. Raises ValueError for invalid tokens.
        """
        self._limits.check("prompt", tuple(token_ids), ())
        return self._runner.prompt_logprobs(list(token_ids))

    def drop_kv(self) -> None:
        """Drop the KV of all sequences."""
        self._batcher.drop_all_kv()

    def interrupt(self, rollout_ids: Iterable[str] | None = None) -> None:
        wanted = None if rollout_ids is None else set(rollout_ids)
        for seq in list(self._batcher.active()):
            if wanted is None or seq.request.rollout_id in wanted:
                self._batcher.retire(seq, keep_kv=True)
                seq.resolve(self._version, StopReason.PAUSED)

    async def progress(self, rollout_ids: Iterable[str]) -> dict[str, list[Segment]]:
        wanted = set(rollout_ids)
        return {
            s.request.rollout_id: [*s.segments, s.open_segment(self._version, StopReason.PAUSED)]
            for s in self._batcher.active()
            # A cancelled one is listed until the next step, beside the call that resumes it.
            if s.request.rollout_id in wanted and s.future is not None and not s.future.cancelled()
        }

    async def queued(self, rollout_ids: Iterable[str]) -> set[str]:
        idle = [*self._batcher.waiting, *(s for s in self._batcher.running if not s.prefilled)]
        return {s.request.rollout_id for s in idle}.intersection(rollout_ids)

    def release(self, rollout_ids: Iterable[str]) -> None:
        for rollout_id in rollout_ids:
            self._batcher.release(rollout_id)

    async def load_weights(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightLoad:
        started = time.perf_counter()
        with torch.no_grad():
            num_bytes = self._runner.load_weights(tensors)
        if self._vision is not None and self._tower_changes:
            self._vision.forget()
        synchronize(self._device)  # to time the copies
        if version != self._version:
            for seq in self._batcher.active():
                seq.on_new_weights(self._version)
            if self._kv_policy == "recompute":
                self._batcher.drop_all_kv()
            else:
                self._num_stale += sum(seq.kv_len for seq in (*self._batcher.active(), *self._batcher.kept.values()))
            self._version = version
        return WeightLoad(num_bytes, time.perf_counter() - started)

    def use_threads(self, num: int) -> None:
        """Decode with this number of CPU threads from now on; with run.threads = auto, at most."""
        self._team.use(num)

    def stats(self) -> dict[str, float]:
        timed = {
            "engine/prefill_s": self._prefill.seconds,
            "engine/kernels": float(self._runner.compiled),
            "engine/decode_s": self._team.seconds,
            "engine/decode_thread_s": self._team.thread_seconds,
        }
        return {
            "engine/decode_steps": self._num_decode_steps,
            "engine/prefill_tokens": self._prefill.num_computed,
            "engine/reprefill_tokens": self._prefill.num_recomputed,
            "kv/stale_prefix_tokens": self._prefill.num_stale + self._num_stale,
            "kv/kept_tokens": self._num_kept,
            "kv/shared_prompt_tokens": self._prefill.num_shared,
            "engine/flops": self._runner.flops,
            **(timed if self._timed else {}),
            "engine/preemptions": self._batcher.num_preemptions,
            "kv/bytes": self._batcher.cache.num_bytes,
        }

    async def close(self) -> None:
        """Interrupt running rollouts, and wait for the step loop to end."""
        self.interrupt()
        self.may_step.set()
        if self._loop is not None:
            await asyncio.wait([self._loop])
            if not self._loop.cancelled():
                self._loop.exception()  # read it: a second Ctrl-C ends the step loop with an error
        self._batcher.kept.clear()


class Prefill:
    """Prefill of at most `chunk_tokens` per step, so that decoding is never blocked for long.

    `same_version_only`: copy a prompt's KV only if the present weights computed it. `timed`: a forward pass returns
    when it is done, so that its seconds are known.
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
        """Tokens whose KV had been dropped."""
        self.num_shared = 0
        self.num_stale = 0
        """Shared tokens whose KV was computed by earlier weights."""
        self.seconds = 0.0

    def step(self, version: int) -> None:
        """Run one forward pass over chunks that are not cached yet; copy a prompt that a sibling has computed.

        `version`: of the weights.
        """
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

    def _plan(self, planned: set[tuple[str, Prompt]], version: int) -> list[SequenceChunk]:
        """Return the next chunks, and add the prompts that they begin with to `planned`."""
        budget = self._chunk_tokens
        chunks: list[SequenceChunk] = []
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
            chunks.append(SequenceChunk(seq, seq.kv_len, end))
            budget = max(0, budget - (end - seq.kv_len))
        return chunks

    def _share(self, seq: Sequence, version: int) -> bool:
        """Copy the KV of the prompt, except its last token, from a sequence that has it. False if there is none."""
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
