"""The forward passes: prefill of chunks, decode of one token per sequence. Reads and writes the KV cache's rows.

Shapes: N tokens of the row (decode: one per sequence), H query heads, K key/value heads, G = H / K, D head size,
n rows of a bucket, T its row length.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from rollover.engine.embedded.kv_cache import Bucket
from rollover.engine.embedded.sequence import Sequence
from rollover.models import kernels
from rollover.models.adapters import Adapters
from rollover.models.attention import (
    Attention,
    PackedAttention,
    hidden_states,
    masked_attention,
    similar_lengths,
)
from rollover.models.inference import InferenceDecoder
from rollover.models.kernels import CachedRows, Kernels
from rollover.models.logprobs import Head
from rollover.models.operations import TorchOperations

# Heads of a multiple of so many numbers fill the kernel's vectors. It computes others number by number, for which
# prefill, unlike decode, has a better way (80 numbers, 2,048 tokens: 592 ms a layer, padded 81).
_VECTORS = 32


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, end) of `seq`, to be computed; its row has room for them."""

    seq: Sequence
    start: int
    end: int

    @property
    def bucket(self) -> Bucket:
        """Where the sequence's row is."""
        assert self.seq.bucket is not None
        return self.seq.bucket


class PrefillAttention:
    """Writes each chunk's keys and values to its row; chunks attend to what is cached before them and to themselves.

    Chunks that start a sequence need nothing cached: attention over the packed row, as in training. The others, whose
    prompt was copied from a sibling or whose first part was computed before, read their rows in batches.
    """

    def __init__(self, chunks: list[Chunk], device: torch.device) -> None:
        self.chunks = chunks
        ends = torch.tensor([c.end - c.start for c in chunks]).cumsum(0).tolist()
        self.parts = [slice(end - (c.end - c.start), end) for c, end in zip(chunks, ends, strict=True)]
        fresh = [i for i, c in enumerate(chunks) if c.start == 0]
        self.packed = PackedAttention([chunks[i].end for i in fresh]) if fresh else None
        self.fresh_tokens: torch.Tensor | None = None
        if len(fresh) < len(chunks):
            places = [torch.arange(self.parts[i].start, self.parts[i].stop) for i in fresh]
            self.fresh_tokens = torch.cat(places).to(device) if places else torch.zeros(0, dtype=torch.long)
        self.batches = similar_lengths({i: c.end for i, c in enumerate(chunks) if c.start > 0})
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}

    def attend(
        self,
        layer: int,
        query_NHD: torch.Tensor,
        key_NKD: torch.Tensor,
        value_NKD: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        for chunk, part in zip(self.chunks, self.parts, strict=True):
            bucket, row = chunk.bucket, chunk.seq.row
            bucket.keys[layer][row, :, chunk.start : chunk.end] = key_NKD[part].transpose(0, 1)
            bucket.values[layer][row, :, chunk.start : chunk.end] = value_NKD[part].transpose(0, 1)
        options: Any = {"scale": scale, "window": window, "softcap": softcap}
        if self.packed is not None and self.fresh_tokens is None:
            return self.packed.attend(layer, query_NHD, key_NKD, value_NKD, **options)
        out_NHD = torch.empty_like(query_NHD)
        if self.packed is not None:
            row = (x[self.fresh_tokens] for x in (query_NHD, key_NKD, value_NKD))
            out_NHD[self.fresh_tokens] = self.packed.attend(layer, *row, **options)
        for index, batch in enumerate(self.batches):
            query = pad_sequence([query_NHD[self.parts[i]] for i in batch], batch_first=True).transpose(1, 2)
            keys, values = self._cached(layer, batch)
            mask = self._mask(index, query.shape[2], keys.shape[2], window, query.device)
            attended = masked_attention(query, keys, values, mask, scale=scale, softcap=softcap).transpose(1, 2)
            for j, i in enumerate(batch):
                out_NHD[self.parts[i]] = attended[j, : self.chunks[i].end - self.chunks[i].start]
        return out_NHD

    def _cached(self, layer: int, batch: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [b, K, S, D] of the batch's sequences up to the end of their chunks, padded with zeros."""
        keys, values = [], []
        for i in batch:
            chunk = self.chunks[i]
            for rows, tensors in ((keys, chunk.bucket.keys), (values, chunk.bucket.values)):
                rows.append(tensors[layer][chunk.seq.row, :, : chunk.end].transpose(0, 1))
        padded = (pad_sequence(rows, batch_first=True).transpose(1, 2) for rows in (keys, values))
        return next(padded), next(padded)

    def _mask(
        self, index: int, num_queries: int, num_keys: int, window: int | None, device: torch.device
    ) -> torch.Tensor:
        """Bool [b, 1, queries, keys] of one batch, built once for all layers with this window."""
        if (index, window) not in self._masks:
            starts = torch.tensor([self.chunks[i].start for i in self.batches[index]], device=device)
            position = starts[:, None] + torch.arange(num_queries, device=device)
            key = torch.arange(num_keys, device=device)
            mask = key <= position[..., None]
            if window is not None:
                mask &= key > position[..., None] - window
            self._masks[index, window] = mask[:, None]
        return self._masks[index, window]


@dataclass(frozen=True)
class _BucketPlan:
    """One bucket's share of a decode step: tokens [part] of the row belong to `rows` of its n used rows.

    `places`: where their keys and values go, in a layer's [R, K, T, D] seen as [R * K * T, D].
    """

    bucket: Bucket
    part: slice
    rows: torch.Tensor
    places: torch.Tensor
    whole: bool
    num_rows: int
    positions_of_rows: torch.Tensor

    def bias(self, window: int | None) -> torch.Tensor:
        """Additive mask [n, 1, 1, T]: -inf beyond each row's last position (and before its window)."""
        key_T = torch.arange(self.bucket.row_tokens, device=self.positions_of_rows.device)
        last_n1 = self.positions_of_rows[:, None]
        visible = key_T <= last_n1
        if window is not None:
            visible &= key_T > last_n1 - window
        bias = torch.zeros(visible.shape, dtype=torch.float32, device=visible.device)
        return bias.masked_fill_(~visible, float("-inf"))[:, None, None, :]


class DecodeAttention:
    """One query per sequence against its row, a bucket at a time: two batched matmuls and a softmax in float32."""

    def __init__(self, order: list[Sequence], device: torch.device) -> None:
        self.plans: list[_BucketPlan] = []
        self._bias: dict[tuple[int, int | None], torch.Tensor] = {}
        start = 0
        while start < len(order):
            bucket = order[start].bucket
            assert bucket is not None
            end = start
            while end < len(order) and order[end].bucket is bucket:
                end += 1
            members = order[start:end]
            rows = torch.tensor([s.row for s in members], device=device)
            positions = torch.tensor([s.kv_len for s in members], device=device)
            num_rows = len(bucket.owners)
            whole = num_rows == len(members) and all(s.row == i for i, s in enumerate(members))
            of_rows = positions
            if not whole:
                of_rows = torch.zeros(num_rows, dtype=positions.dtype, device=device).index_copy_(0, rows, positions)
            kv_heads, length = bucket.keys[0].shape[1:3]
            head_K = torch.arange(kv_heads, device=device)
            places = ((rows[:, None] * kv_heads + head_K) * length + positions[:, None]).flatten()
            self.plans.append(_BucketPlan(bucket, slice(start, end), rows, places, whole, num_rows, of_rows))
            start = end

    def attend(
        self,
        layer: int,
        query_NHD: torch.Tensor,
        key_NKD: torch.Tensor,
        value_NKD: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        heads, size = query_NHD.shape[1:]
        kv_heads = key_NKD.shape[1]
        outputs = []
        for index, plan in enumerate(self.plans):
            bucket = plan.bucket
            keys, values = bucket.keys[layer], bucket.values[layer]
            keys.view(-1, size).index_copy_(0, plan.places, key_NKD[plan.part].reshape(-1, size))
            values.view(-1, size).index_copy_(0, plan.places, value_NKD[plan.part].reshape(-1, size))
            query = query_NHD[plan.part].reshape(-1, kv_heads, heads // kv_heads, size)
            if not plan.whole:
                query = query.new_zeros(plan.num_rows, *query.shape[1:]).index_copy_(0, plan.rows, query)
            # Whole rows, not the longest used part: a slice would be copied before the batched matmul. Both matmuls in
            # the cache's dtype: to convert the cache would cost as much again (docs/log.md).
            scores = torch.matmul(query, keys[: plan.num_rows].transpose(2, 3))
            limit = window if window is not None and window < bucket.row_tokens else None
            if (index, limit) not in self._bias:
                self._bias[index, limit] = plan.bias(limit)
            if softcap is None:
                scores = torch.add(self._bias[index, limit], scores, alpha=scale)  # in float32, by the bias's type
            else:
                scores = softcap * torch.tanh(scores.float() * (scale / softcap)) + self._bias[index, limit]
            probs = torch.softmax(scores, dim=-1)
            out = torch.matmul(probs.to(values.dtype), values[: plan.num_rows])
            outputs.append((out if plan.whole else out[plan.rows]).reshape(-1, heads, size))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class KernelAttention:
    """Either of the two by the compiled kernel, which reads a row up to the token and no further: nothing is padded."""

    def __init__(self, chunks: list[Chunk], kernels: Kernels) -> None:
        self.kernels = kernels
        buckets = {bucket: i for i, bucket in enumerate(dict.fromkeys(c.bucket for c in chunks))}
        tokens_C = torch.tensor([c.end - c.start for c in chunks])
        self.cached = CachedRows(
            [(bucket.keys, bucket.values) for bucket in buckets],
            torch.tensor([buckets[c.bucket] for c in chunks]).repeat_interleave(tokens_C),
            torch.tensor([c.seq.row for c in chunks]).repeat_interleave(tokens_C),
            torch.tensor([p for c in chunks for p in range(c.start, c.end)]),
        )

    def attend(
        self,
        layer: int,
        query_NHD: torch.Tensor,
        key_NKD: torch.Tensor,
        value_NKD: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        assert softcap is None
        return self.kernels.cached_attention(
            query_NHD.contiguous(), key_NKD.contiguous(), value_NKD, self.cached, layer, scale=scale, window=window
        )


class Runner:
    """Runs the engine's own copy of the model. Owns no sequence and no memory but the weights."""

    def __init__(self, model: Any, rows: int) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.rows = rows
        self.kernels = kernels.on(self.device.type)
        operations, fast = self.kernels or TorchOperations(), InferenceDecoder.supported(model)
        self.adapters = Adapters(model, attach=not fast)
        self.decoder = InferenceDecoder(model, rows, operations, self.adapters) if fast else None
        if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
            self.kernels = None  # whose attention has none
        self.head = Head.of(model).precise(rows)
        self._parameters = dict(model.named_parameters(remove_duplicate=False))

    def hidden_states(self, tokens: list[int], positions: list[int], attention: Attention) -> torch.Tensor:
        """Last hidden states [N, E] of tokens at these positions, float32."""
        input_ids_N = torch.tensor(tokens, device=self.device)
        position_ids_N = torch.tensor(positions, device=self.device)
        if self.decoder is not None:
            return self.decoder.hidden_states(input_ids_N, position_ids_N, attention)
        return hidden_states(self.model, input_ids_N, position_ids_N, attention)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Replace weights and adapters, then the copies made of them. Returns the bytes written."""
        num_bytes = 0
        for name, tensor in tensors:
            written = self.adapters.load(name, tensor)
            if written is None and self.decoder is not None:
                written = self.decoder.load(name, tensor)
            if written is None:
                parameter = self._parameters.get(name)
                assert parameter is not None, f"the engine's model has no parameter {name}"
                parameter.copy_(tensor)
                written = parameter.numel() * parameter.element_size()
            num_bytes += written
        self.adapters.refresh()
        if self.decoder is not None:
            self.decoder.refresh()
        self.head = Head.of(self.model).precise(self.rows)
        return num_bytes

    def prefill(self, chunks: list[Chunk]) -> None:
        """Compute and cache keys and values of the chunks. No logits: the last known token is decoded."""
        head_size = chunks[0].bucket.keys[0].shape[-1]
        if self.kernels is not None and head_size % _VECTORS == 0:
            self._compute(chunks, KernelAttention(chunks, self.kernels))
        else:
            self._compute(chunks, PrefillAttention(chunks, self.device))

    def decode(self, order: list[Sequence]) -> torch.Tensor:
        """Logits [N, V] for the next token of each sequence, in float32 or as the output layer computes them.

        Sequences of a bucket stand together.
        """
        chunks = [Chunk(s, s.kv_len, s.kv_len + 1) for s in order]
        if self.kernels is not None:
            hidden_NE = self._compute(chunks, KernelAttention(chunks, self.kernels))
        else:
            hidden_NE = self._compute(chunks, DecodeAttention(order, self.device))
        return self.head.narrow_logits(hidden_NE)

    def _compute(self, chunks: list[Chunk], attention: Attention) -> torch.Tensor:
        """Last hidden states [N, E] of the chunks' tokens, which are cached then."""
        tokens = [t for c in chunks for t in c.seq.tokens[c.start : c.end]]
        positions = [p for c in chunks for p in range(c.start, c.end)]
        hidden_NE = self.hidden_states(tokens, positions, attention)
        for chunk in chunks:
            chunk.seq.kv_len = chunk.end
        return hidden_NE
