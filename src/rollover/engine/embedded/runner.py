"""Forward passes of the embedded engine: prefill of chunks, decode of one token per sequence. Uses the KV cache's rows.

Shapes: N tokens of the row (decode: one per sequence), H query heads, K key/value heads, G = H / K, D head size,
n rows of a bucket, T its row length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rollover.engine.embedded.batch import Sequence
from rollover.engine.embedded.kv_cache import Bucket
from rollover.models import kernels
from rollover.models.adapters import Adapters
from rollover.models.attention import (
    Attention,
    PackedAttention,
    hidden_states,
    masked_attention,
    similar_lengths,
)
from rollover.models.flops import ModelFlops
from rollover.models.inference import InferenceDecoder
from rollover.models.kernels import CachedRows, Kernels
from rollover.models.logprobs import Head
from rollover.models.operations import TorchOperations
from rollover.models.packed import float32_product
from rollover.models.vision import ImageTokens, RowImages, Vision, joined_positions
from rollover.weights import NamedTensors, WeightHolder

if TYPE_CHECKING:
    import torch


# Head sizes that are a multiple of this fill the kernel's vectors. Others are computed element by element, which
# prefill, unlike decode, can avoid (head size 80, 2,048 tokens: 592 ms a layer, padded 81).
_VECTOR_SIZE = 32
_LOGIT_ROWS = 256  # rows of a prompt whose logits are computed together


@dataclass(frozen=True)
class SequenceChunk:
    """Tokens [start, end) of `seq` to compute; its row has room for them."""

    seq: Sequence
    start: int
    end: int

    @property
    def bucket(self) -> Bucket:
        """Return the bucket of the sequence's row."""
        assert self.seq.bucket is not None
        return self.seq.bucket

    @property
    def bidirectional(self) -> list[tuple[int, int]]:
        """Return the spans of its tokens that attend to each other, later ones included."""
        return [span for span in self.seq.images.bidirectional if self.start <= span[0] and span[1] <= self.end]


def _places(rows_C: torch.Tensor, positions_C: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """Return the indices of these tokens' keys in a layer's [R, K, T, D] seen as [R * K * T, D]."""
    kv_heads, length = bucket.keys[0].shape[1:3]
    head_K = torch.arange(kv_heads, device=rows_C.device)
    return ((rows_C[:, None] * kv_heads + head_K) * length + positions_C[:, None]).flatten()


def _store(bucket: Bucket, layer: int, places: torch.Tensor, key_CKD: torch.Tensor, value_CKD: torch.Tensor) -> None:
    """Write tokens' keys and values to their places."""
    size = key_CKD.shape[-1]
    bucket.keys[layer].view(-1, size).index_copy_(0, places, key_CKD.reshape(-1, size))
    bucket.values[layer].view(-1, size).index_copy_(0, places, value_CKD.reshape(-1, size))


class _ChunkBatch:
    """Chunks of similar lengths: all at the start of their sequences, or all in one bucket and none at the start.

    Shapes: b chunks, t tokens of the longest, S keys up to the end of the last one.
    """

    def __init__(self, chunks: list[SequenceChunk], parts: list[slice], device: torch.device) -> None:
        self.bucket, self.fresh = chunks[0].bucket, chunks[0].start == 0
        self.rows_b = torch.tensor([c.seq.row for c in chunks], device=device)
        self.num_keys = max(c.end for c in chunks)
        longest = max(c.end - c.start for c in chunks)
        # Shorter chunks are padded by their last token.
        offset_bt = torch.arange(longest).expand(len(chunks), longest)
        last_b1 = torch.tensor([[c.end - c.start - 1] for c in chunks])
        inside_bt = offset_bt <= last_b1
        offset_bt = torch.minimum(offset_bt, last_b1)
        tokens_bt = torch.tensor([[part.start] for part in parts]) + offset_bt
        self.tokens_bt = tokens_bt.to(device)
        self.positions_bt = (torch.tensor([[c.start] for c in chunks]) + offset_bt).to(device)
        self._bidirectional = [[(s - c.start, e - c.start, s, e) for s, e in c.bidirectional] for c in chunks]
        self.inside = inside_bt.flatten().nonzero().flatten().to(device)
        self.tokens = tokens_bt[inside_bt].to(device)
        self._masks: dict[int | None, torch.Tensor] = {}

    def keys_and_values(
        self, layer: int, key_NKD: torch.Tensor, value_NKD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [b, K, S, D]: of the tokens alone, or with the cached ones before them."""
        if self.fresh:
            return key_NKD[self.tokens_bt].transpose(1, 2), value_NKD[self.tokens_bt].transpose(1, 2)
        keys, values = self.bucket.keys[layer], self.bucket.values[layer]
        return keys[self.rows_b, :, : self.num_keys], values[self.rows_b, :, : self.num_keys]

    def mask(self, window: int | None, softcap: float | None) -> torch.Tensor | None:
        """Return a bool mask [b, 1, t, S], built once for all layers with this window; None: plain causal."""
        if (
            self.fresh
            and softcap is None
            and (window is None or window >= self.num_keys)
            and not any(self._bidirectional)
        ):
            return None
        if window not in self._masks:
            key = torch.arange(self.num_keys, device=self.positions_bt.device)
            mask = key <= self.positions_bt[..., None]
            if window is not None:
                mask &= key > self.positions_bt[..., None] - window
            for row, spans in enumerate(self._bidirectional):
                for first, last, first_key, last_key in spans:
                    mask[row, first:last, first_key:last_key] = True
            self._masks[window] = mask[:, None]
        return self._masks[window]


class PrefillAttention:
    """Attention of prefill: writes each chunk's KV to its row; chunks attend to their cached tokens and themselves.

    Chunks of similar lengths are batched. Those that start a sequence need no cache; the others read their rows.
    Indices are computed once for all layers: the operations per layer do not depend on the number of chunks.
    """

    def __init__(self, chunks: list[SequenceChunk], device: torch.device) -> None:
        ends = torch.tensor([c.end - c.start for c in chunks]).cumsum(0).tolist()
        parts = [slice(end - (c.end - c.start), end) for c, end in zip(chunks, ends, strict=True)]
        self.writes: list[tuple[Bucket, torch.Tensor, torch.Tensor]] = []
        self.batches: list[_ChunkBatch] = []
        for bucket in dict.fromkeys(c.bucket for c in chunks):
            members = [i for i, c in enumerate(chunks) if c.bucket is bucket]
            tokens = torch.cat([torch.arange(parts[i].start, parts[i].stop) for i in members]).to(device)
            rows = torch.tensor([chunks[i].seq.row for i in members for _ in range(chunks[i].start, chunks[i].end)])
            positions = torch.tensor([p for i in members for p in range(chunks[i].start, chunks[i].end)])
            self.writes.append((bucket, tokens, _places(rows, positions, bucket).to(device)))
        kinds = dict.fromkeys((c.start == 0, None if c.start == 0 else c.bucket) for c in chunks)
        for fresh, bucket in kinds:
            members = [i for i, c in enumerate(chunks) if (c.start == 0) == fresh and bucket in (None, c.bucket)]
            for similar in similar_lengths({i: chunks[i].end - chunks[i].start for i in members}):
                for batch in similar_lengths({i: chunks[i].end for i in similar}):
                    self.batches.append(_ChunkBatch([chunks[i] for i in batch], [parts[i] for i in batch], device))

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
        for bucket, tokens, places in self.writes:
            _store(bucket, layer, places, key_NKD[tokens], value_NKD[tokens])
        out_NHD = torch.empty_like(query_NHD)
        for batch in self.batches:
            query = query_NHD[batch.tokens_bt].transpose(1, 2)
            keys, values = batch.keys_and_values(layer, key_NKD, value_NKD)
            mask = batch.mask(window, softcap)
            out = masked_attention(query, keys, values, mask, scale=scale, softcap=softcap)
            out_NHD[batch.tokens] = out.transpose(1, 2).flatten(0, 1)[batch.inside]
        return out_NHD


@dataclass(frozen=True)
class _BucketPlan:
    """Part of a decode step in one bucket: tokens [part] belong to `rows` of its n used rows.

    `places`: indices of their keys and values in a layer's [R, K, T, D] seen as [R * K * T, D].
    """

    bucket: Bucket
    part: slice
    rows: torch.Tensor
    places: torch.Tensor
    whole: bool
    num_rows: int
    positions_of_rows: torch.Tensor

    def bias(self, window: int | None) -> torch.Tensor:
        """Return an additive mask [n, 1, 1, T]: -inf beyond each row's last position (and before its window)."""
        key_T = torch.arange(self.bucket.row_tokens, device=self.positions_of_rows.device)
        last_n1 = self.positions_of_rows[:, None]
        visible = key_T <= last_n1
        if window is not None:
            visible &= key_T > last_n1 - window
        bias = torch.zeros(visible.shape, dtype=torch.float32, device=visible.device)
        return bias.masked_fill_(~visible, float("-inf"))[:, None, None, :]


class DecodeAttention:
    """Attention of decode: one query per sequence; per bucket two batched matmuls and a softmax in float32."""

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
            by_row = positions
            if not whole:
                by_row = torch.zeros(num_rows, dtype=positions.dtype, device=device).index_copy_(0, rows, positions)
            places = _places(rows, positions, bucket)
            self.plans.append(_BucketPlan(bucket, slice(start, end), rows, places, whole, num_rows, by_row))
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
            _store(bucket, layer, plan.places, key_NKD[plan.part], value_NKD[plan.part])
            query = query_NHD[plan.part].reshape(-1, kv_heads, heads // kv_heads, size)
            if not plan.whole:
                query = query.new_zeros(plan.num_rows, *query.shape[1:]).index_copy_(0, plan.rows, query)
            # Whole rows: a slice to the longest used part would be copied before the batched matmul. The scores stay in
            # float32: rounding to bfloat16 would change scores around 30 by 0.06, and the log-probs with them.
            keys_T = keys[: plan.num_rows].transpose(2, 3)
            scores = float32_product(query.flatten(0, 1), keys_T.flatten(0, 1)).view(*query.shape[:3], -1)
            limit = window if window is not None and window < bucket.row_tokens else None
            if (index, limit) not in self._bias:
                self._bias[index, limit] = plan.bias(limit)
            if softcap is None:
                scores = torch.add(self._bias[index, limit], scores, alpha=scale)
            else:
                scores = softcap * torch.tanh(scores * (scale / softcap)) + self._bias[index, limit]
            probs = torch.softmax(scores, dim=-1)
            out = torch.matmul(probs.to(values.dtype), values[: plan.num_rows])
            outputs.append((out if plan.whole else out[plan.rows]).reshape(-1, heads, size))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class KernelAttention:
    """Attention of prefill and decode by the compiled kernel, which reads a row only up to the token, unpadded."""

    def __init__(self, chunks: list[SequenceChunk], kernels: Kernels) -> None:
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
    """Forward passes of the engine's own copy of the model. `vision`: None if it takes no images."""

    def __init__(self, model: Any, rows: int, vision: Vision | None = None) -> None:
        self.model, self.vision = model, vision
        self.device = next(model.parameters()).device
        self.rows = rows
        # Recorded before packing, which frees the weights. A tied weight has several names.
        self._shapes = {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False)}
        self._names = {name for name, _ in model.named_parameters()}
        self._flops = ModelFlops.from_model(model)
        self.freed: list[tuple[torch.UntypedStorage, int, torch.UntypedStorage | None]] = []
        self._of_text = 0.0
        self.kernels = kernels.for_device(self.device.type)
        self.compiled = self.kernels is not None
        operations, fast = self.kernels or TorchOperations(), InferenceDecoder.supported(model)
        self.adapters = Adapters(model, attach=not fast)
        self.decoder = InferenceDecoder(model, rows, operations, self.adapters) if fast else None
        if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
            self.kernels = None  # their attention has no softcap
        self.head = Head.from_model(model).precise(rows)
        holders = [self.adapters, *([self.decoder] if self.decoder is not None else [])]
        self.weights = WeightWriter(model, holders)

    @property
    def flops(self) -> float:
        """Return the model FLOPs so far."""
        return self._of_text + (0.0 if self.vision is None else self.vision.flops)

    def hidden_states(
        self, tokens: list[int], position_ids: torch.Tensor, attention: Attention, images: RowImages | None = None
    ) -> torch.Tensor:
        """Return the last hidden states [N, E], float32, of tokens at these positions ([N] or [3, N])."""
        input_ids_N = torch.tensor(tokens, device=self.device)
        position_ids = position_ids.to(self.device)
        if self.decoder is not None:
            return self.decoder.hidden_states(input_ids_N, position_ids, attention, images)
        return hidden_states(self.model, input_ids_N, position_ids, attention, images)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Replace weights and adapters, then the copies of them. Returns the bytes written."""
        num_bytes = self.weights.write(tensors)
        self.head = Head.from_model(self.model).precise(self.rows)
        return num_bytes

    def free_weights(self, *, keep: bool) -> Callable[[], None]:
        """Free the memory of the weights (except those packed for the CPU). Returns a function that allocates it again.

        `keep`: copy the values to the CPU, and restore them.
        """
        for parameter in self.model.parameters():
            if not parameter.untyped_storage().resizable():  # mapped from the model's file
                parameter.data = parameter.data.clone()
            storage = parameter.untyped_storage()
            self.freed.append((storage, storage.nbytes(), storage.cpu().clone() if keep else None))
            storage.resize_(0)
        return self._allocate_weights

    def _allocate_weights(self) -> None:
        for storage, num_bytes, kept in reversed(self.freed):
            storage.resize_(num_bytes)
            if kept is not None:
                storage.copy_(kept)
        self.freed = []

    def load_error(self, shapes: Mapping[str, Seq[int]]) -> str:
        """Return why weights of these names and shapes are not the whole model's; "" if they are."""
        if lacking := sorted(self._names - shapes.keys()):
            return f"lacks {len(lacking)} weights, the first is {lacking[0]}"
        if unknown := sorted(shapes.keys() - self._shapes.keys()):
            return f"has {len(unknown)} unknown weights, the first is {unknown[0]}"
        for name, shape in shapes.items():
            if tuple(shape) != self._shapes[name]:
                return f"has {name} in the shape {list(shape)}, and the model's is {list(self._shapes[name])}"
        return ""

    def prefill(self, chunks: list[SequenceChunk]) -> None:
        """Compute and cache keys and values of the chunks, without logits."""
        head_size = chunks[0].bucket.keys[0].shape[-1]
        if self.kernels is not None and head_size % _VECTOR_SIZE == 0 and not any(c.bidirectional for c in chunks):
            self._compute(chunks, KernelAttention(chunks, self.kernels))
        else:
            self._compute(chunks, PrefillAttention(chunks, self.device))

    def decode(self, order: list[Sequence]) -> torch.Tensor:
        """Return the logits [N, V] of each sequence's next token, in float32 or as the output layer computes them.

        Sequences of a bucket must be adjacent.
        """
        chunks = [SequenceChunk(s, s.kv_len, s.kv_len + 1) for s in order]
        if self.kernels is not None:
            hidden_NE = self._compute(chunks, KernelAttention(chunks, self.kernels), len(chunks))
        else:
            hidden_NE = self._compute(chunks, DecodeAttention(order, self.device), len(chunks))
        return self.head.narrow_logits(hidden_NE)

    def prompt_logprobs(self, tokens: list[int]) -> tuple[list[float], list[int], list[float]]:
        """Return, for every token but the first: its log-prob, the likeliest token, its log-prob. No caching."""
        if self.freed:
            raise ValueError("the engine sleeps: wake it up first")
        num = len(tokens)
        self._of_text += self._flops.continued([(0, num)], num)
        hidden_NE = self.hidden_states(tokens, torch.arange(num), PackedAttention([num]))
        targets_N = torch.tensor(tokens[1:], device=self.device)
        found: list[torch.Tensor] = []
        for hidden_CE, targets_C in zip(hidden_NE[:-1].split(_LOGIT_ROWS), targets_N.split(_LOGIT_ROWS), strict=True):
            logprobs_CV = torch.log_softmax(self.head.logits(hidden_CE), -1)
            best_C, likeliest_C = logprobs_CV.max(-1)
            own_C = logprobs_CV.gather(1, targets_C[:, None])[:, 0]
            found.append(torch.stack([own_C.double(), likeliest_C.double(), best_C.double()]))
        own, likeliest, best = torch.cat(found, 1).tolist() if num > 1 else ([], [], [])
        return own, list(map(int, likeliest)), best

    def _compute(self, chunks: list[SequenceChunk], attention: Attention, num_logits: int = 0) -> torch.Tensor:
        """Compute and cache the chunks' tokens. Returns their last hidden states [N, E]; `num_logits` counts FLOPs."""
        self._of_text += self._flops.continued([(c.start, c.end) for c in chunks], num_logits)
        tokens = [t for c in chunks for t in c.seq.tokens[c.start : c.end]]
        if self.vision is None:
            positions, images = torch.tensor([p for c in chunks for p in range(c.start, c.end)]), None
        else:
            positions, images = self._with_images(chunks, self.vision)
        hidden_NE = self.hidden_states(tokens, positions, attention, images)
        for chunk in chunks:
            chunk.seq.kv_len = chunk.end
        return hidden_NE

    def _with_images(self, chunks: list[SequenceChunk], vision: Vision) -> tuple[torch.Tensor, RowImages | None]:
        """Return (positions [N] or [3, N] of the chunks' tokens, their images)."""
        tokens: list[ImageTokens] = []
        at = 0
        for chunk in chunks:
            tokens += chunk.seq.images.tokens(chunk.start, chunk.end, at)
            at += chunk.end - chunk.start
        positions = joined_positions([c.seq.images.positions(c.start, c.end) for c in chunks])
        return torch.from_numpy(positions), vision.row(tokens)


class WeightWriter:
    """Writes new weights into `model`: to a holder (packed weights, adapters) if one has the name, else a parameter."""

    def __init__(self, model: Any, holders: Seq[WeightHolder]) -> None:
        self._holders = holders
        self._parameters = dict(model.named_parameters(remove_duplicate=False))

    def write(self, tensors: NamedTensors) -> int:
        """Write weights, and return their bytes. Raises AssertionError for an unknown name."""
        import torch

        with torch.no_grad():
            num_bytes = sum(self._write(name, tensor) for name, tensor in tensors)
            for holder in self._holders:
                holder.refresh()
        return num_bytes

    def _write(self, name: str, tensor: torch.Tensor) -> int:
        for holder in self._holders:
            if (written := holder.load(name, tensor)) is not None:
                return written
        parameter = self._parameters.get(name)
        assert parameter is not None, f"the engine's model has no parameter {name}"
        parameter.copy_(tensor)
        return parameter.numel() * parameter.element_size()
