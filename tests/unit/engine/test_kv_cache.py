"""The KV cache under any sequence of events: rows keep their content, memory keeps its bound."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollover.engine.embedded.batch import Sequence
from rollover.engine.embedded.kv_cache import KVCache, row_tokens_for
from rollover.engine.protocol import ExtendRequest
from rollover.types import Prompt, SamplingParams

LAYERS, HEADS, SIZE = 3, 2, 4


BYTES_PER_TOKEN = 2 * HEADS * SIZE * 4  # a layer


def cache(max_tokens: int, layers: int = LAYERS, roomy_for: int = 0) -> KVCache:
    max_bytes = max_tokens * layers * BYTES_PER_TOKEN
    return KVCache(layers, HEADS, SIZE, torch.float32, torch.device("cpu"), max_bytes, roomy_for=roomy_for)


def sequence(name: int) -> Sequence:
    request = ExtendRequest(str(name), Prompt((1,)), (), 1, 0, SamplingParams())
    return Sequence(request, None, [1])


def fill(seq: Sequence, name: int, num: int) -> None:
    """Write tokens up to `num`: a number that names the sequence, the layer and the position."""
    assert seq.bucket is not None
    for layer in range(LAYERS):
        for position in range(seq.kv_len, num):
            seq.bucket.keys[layer][seq.row, :, position] = name * 1000 + layer * 0.25 + position
            seq.bucket.values[layer][seq.row, :, position] = -(name * 1000 + layer * 0.25 + position)
    seq.kv_len = num


def check(seq: Sequence, name: int) -> None:
    assert seq.bucket is not None and seq.bucket.owners[seq.row] is seq
    for layer in range(LAYERS):
        expected = name * 1000 + layer * 0.25 + torch.arange(seq.kv_len, dtype=torch.float32)
        for head in range(HEADS):
            assert torch.equal(seq.bucket.keys[layer][seq.row, head, : seq.kv_len, 0], expected)
            assert torch.equal(seq.bucket.values[layer][seq.row, head, : seq.kv_len, -1], -expected)


@settings(max_examples=60, deadline=None)
@given(
    max_tokens=st.integers(100, 6000),
    roomy_for=st.sampled_from([0, 2, 8]),
    events=st.lists(st.tuples(st.integers(0, 11), st.sampled_from(["grow", "free"]), st.integers(1, 120)), max_size=60),
)
def test_rows_keep_their_content_within_the_bound(
    max_tokens: int, roomy_for: int, events: list[tuple[int, str, int]]
) -> None:
    kv = cache(max_tokens, roomy_for=roomy_for)
    held: dict[int, Sequence] = {}
    for name, kind, num in events:
        if kind == "free":
            if name in held:
                kv.free(held.pop(name))
        else:
            seq = held.get(name) or sequence(name)
            wanted = seq.kv_len + num
            if kv.reserve(seq, wanted):
                held[name] = seq
                fill(seq, name, wanted)
            elif seq.bucket is None:
                assert len(held) or row_tokens_for(wanted) > kv.max_tokens, "an empty cache holds what fits alone"
        assert kv.num_bytes <= kv.max_bytes
        for other, seq in held.items():
            check(seq, other)
        assert sum(len(b.owners) for b in kv.buckets.values()) == len(held)


def test_little_memory_is_used_well() -> None:
    """64 sequences that grow together: no second copy of a whole bucket, no unused rows where memory is short."""
    kv = cache(64 * 256, layers=24)
    seqs = [sequence(i) for i in range(64)]
    for num in (60, 120, 190, 250):
        held = 0
        for seq in seqs:
            held += kv.reserve(seq, num)
        assert held >= 50, f"only {held} of 64 fit at {num} tokens"


def test_roomy_rows_save_the_moving() -> None:
    """Where half the memory holds a long row for each of the sequences expected, they get it at once."""
    kv = cache(2 * 8 * 256, roomy_for=8)
    seqs = [sequence(i) for i in range(8)]
    for num in (60, 120, 190, 250):
        assert all(kv.reserve(seq, num) for seq in seqs)
        assert {size: len(b.owners) for size, b in kv.buckets.items()} == {256: 8}
