"""FlexAttention over a packed row is PackedAttention, pair by pair; and what it takes to be chosen.

On the CPU flex_attention refuses a backward pass, though what it would call has one: that check is taken out here, and
the kernel runs uncompiled, as torch has it for looking at masks.
"""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention as flex_module

from rollover.models.attention import PackedAttention
from rollover.models.flex import TILE, FlexAttention, FusedOrPadded, packed_attention, unusable_reason, visible_tiles

CPU = torch.device("cpu")
Row = tuple[list[int], list[int | None]]
ROWS: list[Row] = [
    ([5], [None]),
    ([TILE], [None]),
    ([11, 7, 1, 20, 1, 3, 12, 30, 5], [None, 0, 0, 0, None, 4, 4, None, 7]),  # as in test_attention.py
    ([300, 200, 130, 128, 1, 40, 90], [None, 0, 0, None, 3, 3, None]),
]


def random_row(seed: int) -> Row:
    """Groups of a prompt and up to 4 answers."""
    rng = random.Random(seed)
    lengths: list[int] = []
    prefixes: list[int | None] = []
    for _ in range(rng.randint(1, 4)):
        prompt = len(lengths)
        lengths.append(rng.randint(1, 2 * TILE))
        prefixes.append(None)
        for _ in range(rng.randint(0, 4)):
            lengths.append(rng.randint(1, 200))
            prefixes.append(prompt)
    return lengths, prefixes


def plain_mask(lengths: list[int], prefixes: list[int | None], window: int | None) -> np.ndarray:
    """Bool [N, N], token by token."""
    of = [(block, i) for block, length in enumerate(lengths) for i in range(length)]
    out = np.zeros((len(of), len(of)), dtype=bool)
    for q, (block, i) in enumerate(of):
        prefix = prefixes[block]
        before = 0 if prefix is None else lengths[prefix]
        for k, (other, j) in enumerate(of):
            if other == block:
                out[q, k] = j <= i and (window is None or i - j < window)
            elif other == prefix:
                out[q, k] = window is None or before + i - j < window
    return out


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(flex_module, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex_module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    return flex_module.flex_attention


@pytest.mark.parametrize("window", [None, 3, 150])
@pytest.mark.parametrize("row", [*ROWS, random_row(0), random_row(1)])
def test_the_mask_and_its_tiles_are_those_of_the_row(row: Row, window: int | None) -> None:
    """Pair by pair; no visible pair is in a tile left out, no hidden one in a tile said to be visible as a whole."""
    lengths, prefixes = row
    num = sum(lengths)
    mask = FlexAttention(lengths, prefixes, CPU, flex_module.flex_attention).block_mask(window)
    places = torch.arange(mask.shape[-1])
    got = mask.mask_mod(torch.tensor(0), torch.tensor(0), places[:, None], places[None]).numpy()
    expected = np.eye(len(places), dtype=bool)
    expected[:num, :num] = plain_mask(lengths, prefixes, window)
    np.testing.assert_array_equal(got, expected)
    tiles = expected.reshape(len(places) // TILE, TILE, -1, TILE)
    some, every = visible_tiles(lengths, prefixes, windowed=window is not None)
    assert (some >= tiles.any((1, 3))).all() and (every <= tiles.all((1, 3))).all()
    if window is None:
        # Tiles that are looked at for nothing: only where blocks begin and end within one.
        assert (some > tiles.any((1, 3))).sum() <= len(lengths)
    np.testing.assert_array_equal(mask.to_dense()[0, 0].bool().numpy(), some)


def run(attention: Any, row: Row, *, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype, **options: Any) -> Any:
    """Output and the gradients of queries, keys and values."""
    generator = torch.Generator().manual_seed(3)
    shape = (sum(row[0]), heads, 16)
    sizes = (shape, shape, *[(shape[0], kv_heads, 16)] * 2)
    query, upstream, key, value = (torch.randn(size, generator=generator).to(dtype) * 2 for size in sizes)
    inputs = [x.requires_grad_() for x in (query, key, value)]
    out = attention.attend(0, *inputs, scale=0.25, **options)
    return [out, *torch.autograd.grad(out, inputs, upstream)]


@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (2, 2)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (None, 3.0), (150, 3.0)])
@pytest.mark.parametrize("row", ROWS)
def test_it_is_packed_attention(
    kernel: Any, row: Row, window: int | None, softcap: float | None, heads: tuple[int, int]
) -> None:
    """Forward and backward, in float64, so that nothing but a wrong pair could make a difference."""
    options: Any = dict(heads=heads[0], kv_heads=heads[1], window=window, softcap=softcap)
    got = run(FlexAttention(*row, CPU, kernel), row, dtype=torch.float64, **options)
    # PackedAttention computes in float32 on a CPU.
    expected = run(PackedAttention(*row), row, dtype=torch.float32, **options)
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine.float(), theirs, atol=2e-5, rtol=1e-4)


def test_a_row_on_a_cpu_is_padded_attention() -> None:
    assert isinstance(packed_attention([3, 4], [None, 0], CPU), PackedAttention)


ANY: Any = dict(window=None, softcap=None, dtype=torch.float32)


def test_it_is_used_where_it_works(kernel: Any) -> None:
    calls = []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(args[0].shape)
        return kernel(*args, **options)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = run(FusedOrPadded(*ROWS[2], CPU, counted), ROWS[2], **ANY)
    assert len(calls) == 2, "tried out once, then used"
    for mine, theirs in zip(got, run(PackedAttention(*ROWS[2]), ROWS[2], **ANY), strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4)
    run(FusedOrPadded(*ROWS[1], CPU, counted), ROWS[1], **ANY)
    assert len(calls) == 3


@pytest.mark.parametrize("fault", ["fails", "is wrong", "is wrong backward", "is not a number"])
def test_a_kernel_that_does_not_work_is_not_used(kernel: Any, fault: str) -> None:
    """The compiler is not there, or what it made is wrong: said once, and the padded way gives the result."""

    def broken(query: Any, key: Any, value: Any, **options: Any) -> Any:
        if fault == "fails":
            raise RuntimeError("no compiler\non this machine")
        out = kernel(query, key, value, **options)
        if fault == "is wrong backward":
            return out + (query - query.detach()) * 0.1
        return out * (1.1 if fault == "is wrong" else float("nan"))

    said = "no compiler" if fault == "fails" else "off by"
    with pytest.warns(UserWarning, match=f"slower than it could be.*{said}"):
        got = run(FusedOrPadded(*ROWS[2], CPU, broken), ROWS[2], **ANY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(FusedOrPadded(*ROWS[2], CPU, broken), ROWS[2], **ANY)
    for mine, theirs in zip(got, run(PackedAttention(*ROWS[2]), ROWS[2], **ANY), strict=True):
        assert torch.equal(mine, theirs)


def test_memory_that_runs_out_is_no_reason_to_do_without(kernel: Any) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        unusable_reason(CPU, torch.float32, (4, 2, 16), None, None, full)
