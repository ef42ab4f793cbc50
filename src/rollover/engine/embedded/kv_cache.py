"""Keys and values of running and parked sequences, in buckets of equal row length. A discardable accelerator.

Shapes: L layers, R rows, K key/value heads, T row length in tokens, D head size.

A bucket is one pair of tensors [L, R, K, T, D] whose rows 0..n-1 are in use, so decode attention over a bucket is two
batched matmuls on contiguous memory, and short sequences do not pay for long ones. A sequence that outgrows its row
moves to a bucket of longer rows; a freed row is filled by the last one. All buckets together, old and new copies during
a move included, never take more than `max_bytes`.
"""

from __future__ import annotations

import torch

from rollover.engine.embedded.sequence import Sequence

_MIN_ROW_TOKENS = 64
_MIN_ROWS = 4


def row_tokens_for(num_tokens: int) -> int:
    """Row length of the bucket for a sequence of this many tokens: 64, 128, 192, 256, 384, 512, 768, 1024, ..."""
    size = _MIN_ROW_TOKENS
    while size < num_tokens:
        half_step = size + size // 2
        if size >= 2 * _MIN_ROW_TOKENS and half_step >= num_tokens:
            return half_step
        size *= 2
    return size


class Bucket:
    """Rows of one length. `owners[i]` is the sequence in row i."""

    def __init__(self, row_tokens: int) -> None:
        self.row_tokens = row_tokens
        self.owners: list[Sequence] = []
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    @property
    def capacity(self) -> int:
        return 0 if self.keys is None else self.keys.shape[1]


class KVCache:
    """Allocates rows within `max_bytes`; raises nothing: a caller that gets False makes room and asks again."""

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        max_bytes: int,
    ) -> None:
        self._shape = (num_layers, num_kv_heads, head_size)
        self._dtype, self._device = dtype, device
        self.bytes_per_token = 2 * num_layers * num_kv_heads * head_size * dtype.itemsize
        self.max_bytes = max_bytes
        self.buckets: dict[int, Bucket] = {}

    @property
    def num_bytes(self) -> int:
        return self.bytes_per_token * sum(b.capacity * b.row_tokens for b in self.buckets.values())

    @property
    def max_tokens(self) -> int:
        """The longest sequence that fits into an otherwise empty cache: one row of the longest possible bucket."""
        longest, size = 0, _MIN_ROW_TOKENS
        while size * self.bytes_per_token <= self.max_bytes:
            longest, size = size, row_tokens_for(size + 1)
        return longest

    def reserve(self, seq: Sequence, num_tokens: int) -> bool:
        """Give `seq` a row of at least num_tokens, moving what it has cached. False if memory is short."""
        old = seq.bucket
        if old is not None and old.row_tokens >= num_tokens:
            return True
        size = row_tokens_for(num_tokens)
        bucket = self.buckets.setdefault(size, Bucket(size))
        if len(bucket.owners) == bucket.capacity and not self._grow(bucket):
            return False
        row = len(bucket.owners)
        assert bucket.keys is not None and bucket.values is not None
        if old is not None:
            assert old.keys is not None and old.values is not None
            num = seq.kv_len
            bucket.keys[:, row, :, :num] = old.keys[:, seq.row, :, :num]
            bucket.values[:, row, :, :num] = old.values[:, seq.row, :, :num]
            self._vacate(seq)
        bucket.owners.append(seq)
        seq.bucket, seq.row = bucket, row
        return True

    def free(self, seq: Sequence) -> None:
        """Forget what is cached of `seq`."""
        if seq.bucket is not None:
            self._vacate(seq)
        seq.kv_len = 0

    def copy_prefix(self, source: Sequence, target: Sequence, num_tokens: int) -> None:
        """Copy the cached first num_tokens of `source` into `target`'s row."""
        here, there = source.bucket, target.bucket
        assert here is not None and there is not None and source.kv_len >= num_tokens
        assert here.keys is not None and here.values is not None
        assert there.keys is not None and there.values is not None
        there.keys[:, target.row, :, :num_tokens] = here.keys[:, source.row, :, :num_tokens]
        there.values[:, target.row, :, :num_tokens] = here.values[:, source.row, :, :num_tokens]
        target.kv_len = num_tokens

    def _vacate(self, seq: Sequence) -> None:
        bucket, row = seq.bucket, seq.row
        assert bucket is not None and bucket.keys is not None and bucket.values is not None
        last = bucket.owners.pop()
        if last is not seq:
            num = last.kv_len
            bucket.keys[:, row, :, :num] = bucket.keys[:, last.row, :, :num]
            bucket.values[:, row, :, :num] = bucket.values[:, last.row, :, :num]
            bucket.owners[row] = last
            last.row = row
        seq.bucket, seq.row = None, -1
        if not bucket.owners:
            del self.buckets[bucket.row_tokens]
        elif bucket.capacity > _MIN_ROWS and len(bucket.owners) * 4 <= bucket.capacity:
            # Give memory back, so that other buckets can grow; a failure to shrink is no harm.
            self._resize(bucket, max(_MIN_ROWS, len(bucket.owners) * 2))

    def _grow(self, bucket: Bucket) -> bool:
        wanted = max(_MIN_ROWS, bucket.capacity * 2)
        for capacity in dict.fromkeys((wanted, bucket.capacity + _MIN_ROWS, bucket.capacity + 1)):
            if self._resize(bucket, capacity):
                return True
        if not bucket.owners:
            self.buckets.pop(bucket.row_tokens, None)
        return False

    def _resize(self, bucket: Bucket, capacity: int) -> bool:
        """Move the bucket to tensors of `capacity` rows; the old ones count until the copy is done."""
        layers, heads, size = self._shape
        if self.num_bytes + capacity * bucket.row_tokens * self.bytes_per_token > self.max_bytes:
            return False
        shape = (layers, capacity, heads, bucket.row_tokens, size)
        # Zeros, not empty: masked positions are multiplied by probability 0, and 0 * NaN would not vanish.
        keys = torch.zeros(shape, dtype=self._dtype, device=self._device)
        values = torch.zeros(shape, dtype=self._dtype, device=self._device)
        num = len(bucket.owners)
        if num and bucket.keys is not None and bucket.values is not None:
            keys[:, :num] = bucket.keys[:, :num]
            values[:, :num] = bucket.values[:, :num]
        bucket.keys, bucket.values = keys, values
        return True
