"""Attention of the engine without compiled kernels, as on a GPU: how exact its scores are, and what a layer costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rollover.engine.embedded.batch import Sequence
from rollover.engine.embedded.kv_cache import KVCache
from rollover.engine.embedded.runner import DecodeAttention, PrefillAttention, SequenceChunk
from rollover.engine.protocol import ExtendRequest
from rollover.types import Prompt, SamplingParams

CPU = torch.device("cpu")
HEADS, KV_HEADS, SIZE = 6, 2, 16


def cached(num: int, tokens: int, dtype: torch.dtype) -> list[Sequence]:
    """Sequences in one bucket, in row order; what is cached of them is random."""
    cache = KVCache(1, KV_HEADS, SIZE, dtype, CPU, 10**8)
    order = []
    for i in range(num):
        seq = Sequence.start(ExtendRequest(str(i), Prompt((3,) * tokens), (), 8, i, SamplingParams()), None)
        assert cache.reserve(seq, tokens)
        order.append(seq)
    (bucket,) = cache.buckets.values()
    generator = torch.Generator().manual_seed(0)
    for tensor in (bucket.keys[0], bucket.values[0]):
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 3)
    return order


def new_tokens(num: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(num, heads, SIZE, generator=generator).to(dtype) * 3 for heads in (HEADS, KV_HEADS, KV_HEADS)]


@pytest.mark.parametrize("softcap", [None, 50.0])
def test_decode_scores_are_not_rounded_to_the_caches_dtype(softcap: float | None) -> None:
    """Scores around 40, which bfloat16 has in steps of 1/4: against the softmax of exact ones over the same numbers."""
    order = cached(5, 60, torch.bfloat16)
    for seq in order:
        seq.kv_len = len(seq.tokens) - 1
    row = new_tokens(5, torch.bfloat16)
    got = DecodeAttention(order, CPU).attend(0, *row, scale=0.5, window=None, softcap=softcap)
    errors = []
    for i, seq in enumerate(order):
        assert seq.bucket is not None
        keys, values = (x[0][seq.row, :, : len(seq.tokens)].double() for x in (seq.bucket.keys, seq.bucket.values))
        query = row[0][i].double().view(KV_HEADS, HEADS // KV_HEADS, SIZE)
        scores = query @ keys.transpose(1, 2) * 0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        assert scores.abs().max() > 30
        exact = (torch.softmax(scores, -1) @ values).view(HEADS, SIZE)
        errors.append(((got[i].double() - exact).abs().max() / exact.abs().max()).item())
    # What is left is the rounding of probabilities and of the result: 2^-9 each.
    assert max(errors) < 0.008


class Operations(TorchDispatchMode):
    """Counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("start", [0, 20])
def test_prefill_operations_do_not_grow_with_chunks(start: int) -> None:
    """Each is a launch on a GPU. Chunks of a new sequence, and those after a prompt that was copied from a sibling."""
    counts = []
    for num in (4, 40):
        order = cached(num, 50, torch.float32)
        attention = PrefillAttention([SequenceChunk(seq, start, 50) for seq in order], CPU)
        row = new_tokens(num * (50 - start), torch.float32)
        options: Any = {"scale": 0.25, "window": None, "softcap": None}
        attention.attend(0, *row, **options)  # builds what all layers share
        with Operations() as operations:
            attention.attend(0, *row, **options)
        counts.append(operations.num)
    assert counts[0] == counts[1]


def test_chunks_of_other_lengths_do_not_pad_one_another() -> None:
    """One long chunk beside many of one token: attention is computed over a row that is at most a third longer."""
    order = cached(20, 300, torch.float32)
    spans = [(10, 300), *[(298 + i % 2, 299 + i % 2) for i in range(19)]]
    attention = PrefillAttention([SequenceChunk(s, *span) for s, span in zip(order, spans, strict=True)], CPU)
    tokens = sum(end - start for start, end in spans)
    assert sum(batch.tokens_bt.numel() for batch in attention.batches) <= tokens / 0.75
