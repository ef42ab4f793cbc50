"""The forward passes: prefill of chunks, decode of one token per sequence. Reads and writes the KV cache's rows.

Shapes: N tokens of the row (decode: one per sequence), H query heads, K key/value heads, G = H / K, D head size,
n rows of a bucket, T its row length.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from rollover.engine.embedded.kv_cache import Bucket
from rollover.engine.embedded.sequence import Sequence
from rollover.models.attention import Attention, PackedAttention, causal_attention, hidden_states
from rollover.models.inference import InferenceDecoder
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
            assert bucket is not None
            row_keys, row_values = bucket.keys[layer][chunk.seq.row], bucket.values[layer][chunk.seq.row]
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
            scores = torch.matmul(query, keys[: plan.num_rows].transpose(2, 3)).float().mul_(scale)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            limit = window if window is not None and window < bucket.row_tokens else None
            if (index, limit) not in self._bias:
                self._bias[index, limit] = plan.bias(limit)
            probs = torch.softmax(scores.add_(self._bias[index, limit]), dim=-1)
            out = torch.matmul(probs.to(values.dtype), values[: plan.num_rows])
            outputs.append((out if plan.whole else out[plan.rows]).reshape(-1, heads, size))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class Runner:
    """Runs the engine's own copy of the model. Owns no sequence and no memory but the weights."""

    def __init__(self, model: Any, rows: int) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.rows = rows
        self.decoder = InferenceDecoder(model, rows) if InferenceDecoder.supported(model) else None
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
        """Replace weights in place, then the copies made of them. Returns the bytes written."""
        num_bytes = 0
        for name, tensor in tensors:
            parameter = self._parameters.get(name)
            assert parameter is not None, f"the engine's model has no parameter {name}"
            packed = None if self.decoder is None else self.decoder.load(name, tensor)
            if packed is None:
                parameter.copy_(tensor)
                packed = parameter.numel() * parameter.element_size()
            num_bytes += packed
        if self.decoder is not None:
            self.decoder.reload_norms()
        self.head = Head.of(self.model).precise(self.rows)
        return num_bytes

    def prefill(self, chunks: list[Chunk]) -> None:
        """Compute and cache keys and values of the chunks. No logits: the last known token is decoded."""
        tokens = [t for c in chunks for t in c.seq.tokens[c.start : c.end]]
        positions = [p for c in chunks for p in range(c.start, c.end)]
        self.hidden_states(tokens, positions, PrefillAttention(chunks))
        for chunk in chunks:
            chunk.seq.kv_len = chunk.end

    def decode(self, order: list[Sequence]) -> torch.Tensor:
        """Float32 logits [N, V] for the next token of each sequence; sequences of a bucket stand together."""
        hidden_NE = self.hidden_states(
            [s.tokens[-1] for s in order], [s.kv_len for s in order], DecodeAttention(order, self.device)
        )
        for seq in order:
            seq.kv_len += 1
        return self.head.logits(hidden_NE)
