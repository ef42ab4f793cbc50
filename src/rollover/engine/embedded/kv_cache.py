"""KV cache of running and kept sequences, in buckets of equal row length.

Shapes: L layers, R rows, K key/value heads, T row length in tokens, D head size.

A bucket has a pair of tensors [R, K, T, D] per layer, whose rows 0..n-1 are in use: decode attention over a bucket is
two batched matmuls on contiguous memory, and short sequences do not pay for long ones. A sequence that outgrows its row
moves to a bucket of longer rows; the last row moves into a freed one. A bucket is resized layer by layer, so that old
and new copies exist of one layer only. All buckets together, copies included, never take more than `max_bytes`.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import torch

_MIN_ROW_TOKENS = 64
_MIN_ROWS = 4
_ROOMY_TOKENS = (128, 192, 256, 384, 512)


def row_tokens_for(num_tokens: int) -> int:
    """Return the row length for a sequence of this many tokens: 64, 128, 192, 256, 384, 512, 768, 1024, ..."""
    size = _MIN_ROW_TOKENS
    while size < num_tokens:
        half_step = size + size // 2
        if size >= 2 * _MIN_ROW_TOKENS and half_step >= num_tokens:
            return half_step
        size *= 2
    return size


@dataclass(eq=False, slots=True, kw_only=True)
class RowOwner:
    """The row of a sequence, and its number of cached tokens. Set by the cache; the runner increases `kv_len`."""

    bucket: Bucket | None = None
    row: int = -1
    kv_len: int = 0


class Bucket:
    """Rows of one length. `owners[i]` is the sequence in row i."""

    def __init__(self, row_tokens: int) -> None:
        self.row_tokens = row_tokens
        self.owners: list[RowOwner] = []
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.capacity = 0

    def copy_row(self, row: int, source: Bucket, source_row: int, num_tokens: int) -> None:
        """Copy the first num_tokens of another row into `row`."""
        for mine, theirs in ((self.keys, source.keys), (self.values, source.values)):
            for target, tensor in zip(mine, theirs, strict=True):
                target[row, :, :num_tokens] = tensor[source_row, :, :num_tokens]


class KVCache:
    """Allocator of rows within `max_bytes`. If memory is short it returns False: the caller evicts and retries."""

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        max_bytes: int,
        *,
        roomy_for: int = 0,
    ) -> None:
        """Create an empty cache. `roomy_for`: number of sequences that get long rows at once, within half of the
        memory.

        For devices that commit memory when it is first written, and attention that reads a row up to its last token.
        """
        self._shape = (num_layers, num_kv_heads, head_size)
        self._dtype, self._device = dtype, device
        self.bytes_per_token = 2 * num_layers * num_kv_heads * head_size * dtype.itemsize
        self.max_bytes = max_bytes
        self.buckets: dict[int, Bucket] = {}
        self._roomy_rows, self._roomy_tokens = roomy_for, 0
        for size in _ROOMY_TOKENS:
            if roomy_for and roomy_for * size * self.bytes_per_token <= max_bytes // 2:
                self._roomy_tokens = size

    @property
    def num_bytes(self) -> int:
        return self.bytes_per_token * sum(b.capacity * b.row_tokens for b in self.buckets.values())

    @property
    def max_tokens(self) -> int:
        """Return the longest sequence that fits into an empty cache: one row of the longest possible bucket."""
        longest, size = 0, _MIN_ROW_TOKENS
        while size * (1 + 1 / self._shape[0]) * self.bytes_per_token <= self.max_bytes:
            longest, size = size, row_tokens_for(size + 1)
        return longest

    def reserve(self, seq: RowOwner, num_tokens: int) -> bool:
        """Give `seq` a row of at least num_tokens, moving its cached tokens. False if memory is short."""
        old = seq.bucket
        if old is not None and old.row_tokens >= num_tokens:
            return True
        fitting = row_tokens_for(num_tokens)
        for size in dict.fromkeys((max(fitting, self._roomy_tokens), fitting)):
            bucket = self.buckets.setdefault(size, Bucket(size))
            if len(bucket.owners) < bucket.capacity or self._grow(bucket):
                break
        else:
            return False
        row = len(bucket.owners)
        if old is not None:
            bucket.copy_row(row, old, seq.row, seq.kv_len)
            self._vacate(seq)
        bucket.owners.append(seq)
        seq.bucket, seq.row = bucket, row
        return True

    def free(self, seq: RowOwner) -> None:
        """Free the row of `seq`."""
        if seq.bucket is not None:
            self._vacate(seq)
        seq.kv_len = 0

    def copy_prefix(self, source: RowOwner, target: RowOwner, num_tokens: int) -> None:
        """Copy the cached first num_tokens of `source` into `target`'s row."""
        assert source.bucket is not None and target.bucket is not None and source.kv_len >= num_tokens
        target.bucket.copy_row(target.row, source.bucket, source.row, num_tokens)
        target.kv_len = num_tokens

    def _vacate(self, seq: RowOwner) -> None:
        bucket, row = seq.bucket, seq.row
        assert bucket is not None
        last = bucket.owners.pop()
        if last is not seq:
            bucket.copy_row(row, bucket, last.row, last.kv_len)
            bucket.owners[row] = last
            last.row = row
        seq.bucket, seq.row = None, -1
        if not bucket.owners:
            del self.buckets[bucket.row_tokens]
        elif bucket.capacity > self._first_capacity(bucket) and len(bucket.owners) * 4 <= bucket.capacity:
            # Give memory back, so that other buckets can grow.
            self._resize(bucket, max(self._first_capacity(bucket), len(bucket.owners) * 2))

    def _first_capacity(self, bucket: Bucket) -> int:
        return self._roomy_rows if bucket.row_tokens == self._roomy_tokens else _MIN_ROWS

    def _grow(self, bucket: Bucket) -> bool:
        # All sequences of other buckets may move here: make room for them at once, if there is memory.
        num_sequences = sum(len(b.owners) for b in self.buckets.values())
        old = bucket.capacity
        first = self._first_capacity(bucket)
        for capacity in dict.fromkeys((max(first, num_sequences, old * 2), old * 2, old + _MIN_ROWS)):
            if capacity > old and self._resize(bucket, capacity):
                return True
        for other in self.buckets.values():
            if other is not bucket and other.capacity > len(other.owners):
                self._resize(other, len(other.owners))
        for capacity in (old + _MIN_ROWS, old + 1):
            if self._resize(bucket, capacity):
                return True
        if not bucket.owners:
            self.buckets.pop(bucket.row_tokens, None)
        return False

    def _resize(self, bucket: Bucket, capacity: int) -> bool:
        """Resize the bucket to `capacity` rows, layer by layer. False if there is no memory to grow."""
        layers, heads, size = self._shape
        if capacity > bucket.capacity:
            # Keep one layer of the largest bucket free, so that shrinking never fails.
            sizes = [b.capacity * b.row_tokens for b in self.buckets.values() if b is not bucket]
            sizes.append(capacity * bucket.row_tokens)
            if (sum(sizes) + max(sizes) / layers) * self.bytes_per_token > self.max_bytes:
                return False
        shape = (capacity, heads, bucket.row_tokens, size)
        num = min(len(bucket.owners), capacity)
        for tensors in (bucket.keys, bucket.values):
            for layer in range(layers):
                new = self._zeros(shape)
                if bucket.capacity:
                    new[:num] = tensors[layer][:num]
                    tensors[layer] = new
                else:
                    tensors.append(new)
        bucket.capacity = capacity
        return True

    def _zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        # Zeros, not empty: masked positions are multiplied by probability 0, and 0 * NaN would not vanish.
        if self._device.type != "cpu":
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        # mmap commits pages when they are first written, and frees them all: unused rows cost nothing.
        num_bytes = math.prod(shape) * self._dtype.itemsize
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(pages, dtype=self._dtype).view(shape)
