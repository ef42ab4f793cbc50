"""Attention of packed rows on a GPU: one kernel over the whole row, which writes neither scores nor a mask.

Shapes: N tokens of the row, L the same rounded up to n whole tiles, H query heads, K key/value heads, D head size.

Dong et al. 2024, "Flex Attention" (arXiv 2412.05496). Owns which tiles of a row have a visible pair. Only
`packed_attention` chooses between this and models/attention.py's PackedAttention.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from rollover.models.attention import Attention, PackedAttention, Spans

TILE = 128


def visible_tiles(lengths: list[int], prefixes: list[int | None], *, windowed: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return (tiles with some visible pair, tiles with all pairs visible), bool [n, n]: query tiles, key tiles.

    A tile of the first kind may have none after all (beyond the window, or at a block's edges): the kernel then checks
    its pairs in vain.
    """
    starts = np.concatenate(([0], np.cumsum(lengths)))
    num = -(-int(starts[-1]) // TILE)
    some, every = np.zeros((2, num, num), dtype=bool)
    for block, prefix in enumerate(prefixes):
        for other in (block,) if prefix is None else (block, prefix):
            (q0, q1), (k0, k1) = starts[block : block + 2], starts[other : other + 2]
            some[q0 // TILE : -(-q1 // TILE), k0 // TILE : -(-k1 // TILE)] = True
            every[-(-q0 // TILE) : q1 // TILE, -(-k0 // TILE) : k1 // TILE] = not windowed
    return some & np.tri(num, dtype=bool), every & np.tri(num, k=-1, dtype=bool)


def _listed(tiles: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (number of True in each row [1, 1, n], their columns first [1, 1, n, n]), as in BlockMask."""
    columns = np.argsort(~tiles, axis=-1, kind="stable")
    counts = torch.from_numpy(tiles.sum(-1)).to(device, torch.int32)
    return counts[None, None], torch.from_numpy(columns).to(device, torch.int32)[None, None]


class FlexAttention:
    """PackedAttention by `kernel`: flex_attention, or it compiled."""

    def __init__(
        self, lengths: list[int], prefixes: list[int | None], device: torch.device, kernel: Callable[..., Any]
    ) -> None:
        self.lengths, self.prefixes, self._kernel = lengths, prefixes, kernel
        num = sum(lengths)
        self._padding = -num % TILE
        self.num = num + self._padding
        block, prefix, position = np.empty((3, self.num), dtype=np.int32)
        # Padding after the row: each token sees only itself.
        block[num:], prefix[num:], position[num:] = np.arange(self._padding) + len(lengths), -1, 0
        start = 0
        for index, (length, before) in enumerate(zip(lengths, prefixes, strict=True)):
            part, first = slice(start, start + length), 0 if before is None else lengths[before]
            block[part], prefix[part] = index, -1 if before is None else before
            position[part] = np.arange(first, first + length)
            start += length
        self._tokens = [torch.from_numpy(x).to(device) for x in (block, prefix, position)]
        self._masks: dict[int | None, BlockMask] = {}

    def block_mask(self, window: int | None) -> BlockMask:
        """Return a mask, built once for all layers with this window."""
        if window not in self._masks:
            block_L, prefix_L, position_L = self._tokens
            reach = self.num if window is None else window

            def visible(b: Any, h: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
                near = (block_L[query] == block_L[key]) | (prefix_L[query] == block_L[key])
                return near & (key <= query)

            def visible_in_window(b: Any, h: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
                return visible(b, h, query, key) & (position_L[query] - position_L[key] < reach)

            some, every = visible_tiles(self.lengths, self.prefixes, windowed=window is not None)
            self._masks[window] = BlockMask.from_kv_blocks(
                *_listed(some & ~every, block_L.device),
                *_listed(every, block_L.device),
                BLOCK_SIZE=TILE,
                mask_mod=visible if window is None else visible_in_window,
                seq_lengths=(self.num, self.num),
            )
        return self._masks[window]

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
        padding = (0, 0, 0, 0, 0, self._padding)
        query, key, value = (
            torch.nn.functional.pad(x, padding).transpose(0, 1)[None] for x in (query_NHD, key_NKD, value_NKD)
        )
        out_1HLD = self._kernel(
            query,
            key,
            value,
            score_mod=None if softcap is None else _capped(softcap),
            block_mask=self.block_mask(window),
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out_1HLD[0].transpose(0, 1)[: len(query_NHD)]


@functools.cache
def _capped(softcap: float) -> Callable[..., torch.Tensor]:
    def cap(score: torch.Tensor, b: Any, h: Any, query: Any, key: Any) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


@functools.cache
def _compiled() -> Callable[..., Any]:
    """Compile for each dtype, shape of heads, window, soft cap, and with or without a gradient.

    A process may need more versions than the compiler allows by default (8), beyond which it raises.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 128)
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


# A row for the check below: prompts and answers of all sizes, several tiles, and a tail of padding.
_CHECKED = ([150, 70, 300, 1, 130, 9], [None, 0, 0, 0, None, 4])
# Largest difference allowed, as a share of the largest number.
_TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}


@functools.cache
def unusable_reason(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    window: int | None,
    softcap: float | None,
    kernel: Callable[..., Any],
) -> str:
    """Return why `kernel` cannot be used for heads of `shape` (H, K, D) on this device; "" if it can.

    Tests one small row, forward and backward, against PackedAttention in float32: this finds a missing compiler, an old
    card or a wrong kernel. Warns of a failure.
    """
    heads, kv_heads, size = shape
    lengths, prefixes = _CHECKED
    window = None if window is None else min(window, 100)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(sum(lengths), n, size, generator=generator) for n in (heads, kv_heads, kv_heads, heads)]
    options: Any = {"scale": size**-0.5, "window": window, "softcap": softcap}
    results = []
    reason = ""
    try:
        for kind in (torch.float32, dtype):
            exact = kind is torch.float32 and not results
            attention = (
                PackedAttention(lengths, prefixes) if exact else FlexAttention(lengths, prefixes, device, kernel)
            )
            *inputs, upstream = (x.to(device, dtype).to(kind) for x in rows)
            with torch.enable_grad():
                inputs = [x.requires_grad_() for x in inputs]
                out = attention.attend(0, *inputs, **options)
                results.append([out, *torch.autograd.grad(out, inputs, upstream)])
        for expected, got in zip(*results, strict=True):
            error = float((got.detach().float() - expected.detach()).abs().max() / expected.detach().abs().max())
            if not error <= _TOLERANCE[dtype]:
                reason = f"it is off by {error:.2g} of the largest number"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler may raise anything
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    if reason:
        warnings.warn(
            f"attention of packed rows is slower than it could be on {device}, without FlexAttention: {reason}",
            stacklevel=2,
        )
    return reason


class FusedOrPadded:
    """FlexAttention if its test succeeds, else PackedAttention, which is exact everywhere."""

    def __init__(
        self, lengths: list[int], prefixes: list[int | None], device: torch.device, kernel: Callable[..., Any]
    ) -> None:
        self._kernel = kernel
        self._fused = FlexAttention(lengths, prefixes, device, kernel)
        self._padded = PackedAttention(lengths, prefixes)

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
        shape = (query_NHD.shape[1], key_NKD.shape[1], query_NHD.shape[2])
        reason = unusable_reason(query_NHD.device, query_NHD.dtype, shape, window, softcap, self._kernel)
        attention: Attention = self._padded if reason else self._fused
        return attention.attend(layer, query_NHD, key_NKD, value_NKD, scale=scale, window=window, softcap=softcap)


def packed_attention(
    lengths: list[int],
    prefixes: list[int | None],
    device: torch.device,
    bidirectional: Mapping[int, Spans] = MappingProxyType({}),
) -> Attention:
    """Return the best attention of a packed row for the device. `bidirectional`: see PackedAttention."""
    if device.type != "cuda" or bidirectional:
        return PackedAttention(lengths, prefixes, bidirectional=bidirectional)
    return FusedOrPadded(lengths, prefixes, device, _compiled())
