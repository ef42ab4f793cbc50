"""The forward passes: prefill of chunks, decode of one token per sequence. Reads and writes the KV cache's rows.

Shapes: N tokens of the row (decode: one per sequence), H query heads, K key/value heads, G = H / K, D head size,
n rows of a bucket, T its row length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rollover.engine.embedded.kv_cache import Bucket
from rollover.engine.embedded.sequence import Sequence
from rollover.models.attention import PackedAttention, causal_attention, hidden_states
from rollover.models.logprobs import Head


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, end) of `seq`, to be prefilled; its row has room for them."""

    seq: Sequence
    start: int
    end: int


class PrefillAttention:
    """Writes each chunk's keys and values to its row; chunks attend to what is cached before them and to themselves."""

    def __init__(self, chunks: list[Chunk]) -> None:
        self.chunks = chunks
        self.lengths = [c.end - c.start for c in chunks]
        # Whole prompts from the start need nothing cached: attention over the packed row as in training.
        self.packed = PackedAttention(self.lengths) if all(c.start == 0 for c in chunks) else None

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
        outputs, offset = [], 0
        for chunk, length in zip(self.chunks, self.lengths, strict=True):
            bucket, part = chunk.seq.bucket, slice(offset, offset + length)
            assert bucket is not None and bucket.keys is not None and bucket.values is not None
            row_keys, row_values = bucket.keys[layer, chunk.seq.row], bucket.values[layer, chunk.seq.row]
            row_keys[:, chunk.start : chunk.end] = key_NKD[part].transpose(0, 1)
            row_values[:, chunk.start : chunk.end] = value_NKD[part].transpose(0, 1)
            if self.packed is None:
                out = causal_attention(
                    query_NHD[part].transpose(0, 1)[None],
                    row_keys[None, :, : chunk.end],
                    row_values[None, :, : chunk.end],
                    scale=scale,
                    window=window,
                    softcap=softcap,
                )
                outputs.append(out[0].transpose(0, 1))
            offset += length
        if self.packed is None:
            return torch.cat(outputs)
        return self.packed.attend(layer, query_NHD, key_NKD, value_NKD, scale=scale, window=window, softcap=softcap)


@dataclass(frozen=True)
class _BucketPlan:
    """One bucket's share of a decode step: tokens [part] of the row belong to `rows_n` of its n used rows."""

    bucket: Bucket
    part: slice
    rows: torch.Tensor
    positions: torch.Tensor
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
            self.plans.append(_BucketPlan(bucket, slice(start, end), rows, positions, whole, num_rows, of_rows))
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
            assert bucket.keys is not None and bucket.values is not None
            keys, values = bucket.keys[layer], bucket.values[layer]
            keys[plan.rows, :, plan.positions] = key_NKD[plan.part]
            values[plan.rows, :, plan.positions] = value_NKD[plan.part]
            query = query_NHD[plan.part].reshape(-1, kv_heads, heads // kv_heads, size)
            if not plan.whole:
                query = query.new_zeros(plan.num_rows, *query.shape[1:]).index_copy_(0, plan.rows, query)
            # Whole rows, not the longest used part: a slice would be copied before the batched matmul.
            # In float32, as causal_attention: see there.
            scores = torch.matmul(query.float(), keys[: plan.num_rows].float().transpose(2, 3)) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            limit = window if window is not None and window < bucket.row_tokens else None
            if (index, limit) not in self._bias:
                self._bias[index, limit] = plan.bias(limit)
            probs = torch.softmax(scores + self._bias[index, limit], dim=-1)
            out = torch.matmul(probs, values[: plan.num_rows].float()).to(query.dtype)
            outputs.append((out if plan.whole else out[plan.rows]).reshape(-1, heads, size))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class Runner:
    """Runs the engine's own copy of the model. Owns no sequence and no memory but the weights."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.head = Head.of(model).in_float32()
        self.device = next(model.parameters()).device

    def on_new_weights(self) -> None:
        """The model's parameters were replaced in place: take the output layer again."""
        self.head = Head.of(self.model).in_float32()

    def prefill(self, chunks: list[Chunk]) -> None:
        """Compute and cache keys and values of the chunks. No logits: the last known token is decoded."""
        tokens = [t for c in chunks for t in c.seq.tokens[c.start : c.end]]
        positions = [p for c in chunks for p in range(c.start, c.end)]
        hidden_states(
            self.model,
            torch.tensor(tokens, device=self.device),
            torch.tensor(positions, device=self.device),
            PrefillAttention(chunks),
        )
        for chunk in chunks:
            chunk.seq.kv_len = chunk.end

    def decode(self, order: list[Sequence]) -> torch.Tensor:
        """Float32 logits [N, V] for the next token of each sequence; sequences of a bucket stand together."""
        hidden_NE = hidden_states(
            self.model,
            torch.tensor([s.tokens[-1] for s in order], device=self.device),
            torch.tensor([s.kv_len for s in order], device=self.device),
            DecodeAttention(order, self.device),
        )
        for seq in order:
            seq.kv_len += 1
        return self.head.logits(hidden_NE)
