"""What attention of packed rows may take of a GPU's memory: shown on the CPU by what torch is asked for.

On a GPU torch has no fused kernel for fewer key than query heads under a mask: asked for one (enable_gqa) it writes the
scores of all heads in float32, which in an ordinary case are 18 GB a layer.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from rollover.models import attention
from rollover.models.attention import PackedAttention, causal_mask, grouped_attention

OPTIONS: Any = {"scale": 0.25, "softcap": None}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Of scaled_dot_product_attention: shapes and options."""
    seen: list[dict[str, Any]] = []
    plain = F.scaled_dot_product_attention

    def spy(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        mask = options.get("attn_mask")
        seen.append({"query": query.shape, "key": key.shape, "gqa": options.get("enable_gqa", False), "mask": mask})
        return plain(query, key, value, **options)

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", spy)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_accelerator_is_asked_to_share_heads_where_it_has_no_kernel(
    calls: list[dict[str, Any]], dtype: torch.dtype
) -> None:
    """A prompt shared by two answers: tensors on "meta", a device that is no CPU and computes nothing."""
    row = [torch.zeros(90, heads, 16, dtype=dtype, device="meta") for heads in (8, 2, 2)]
    out = PackedAttention([30, 20, 40], [None, 0, 0]).attend(0, *row, window=None, **OPTIONS)
    assert out.shape == (90, 8, 16) and out.dtype == dtype and len(calls) == 3
    for call in calls:
        assert not call["gqa"] or (call["mask"] is None and dtype == torch.bfloat16)
        assert call["key"][1] in (2, 8), "keys are not copied for every head of a group where there is a mask"
        assert call["mask"] is None or call["key"][1] == 2


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("masked", [True, False])
def test_grouped_attention_is_attention_that_shares_heads(groups: int, masked: bool) -> None:
    """Forward and backward."""
    generator = torch.Generator().manual_seed(0)
    num_keys = 9 if masked else 5
    shapes = [(3, 2 * groups, 5, 16), (3, 2, num_keys, 16), (3, 2, num_keys, 16)]
    inputs = [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]
    mask = causal_mask(5, 9, 3, torch.device("cpu")) if masked else None
    of_each = None if mask is None else torch.stack([mask, mask.roll(1, 1), mask])[:, None]
    for some in (mask, of_each):
        got = grouped_attention(*inputs, some, scale=0.3)
        expected = F.scaled_dot_product_attention(
            *inputs, attn_mask=some, is_causal=some is None, scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
        weights = torch.linspace(-1, 1, got.numel()).view(got.shape)
        gradients = [torch.autograd.grad((out * weights).sum(), inputs) for out in (got, expected)]
        for mine, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, None), (None, 3.0), (7, 3.0)])
def test_a_long_row_is_computed_in_parts_whose_masks_are_small(
    calls: list[dict[str, Any]], window: int | None, softcap: float | None
) -> None:
    """No mask is larger than allowed, and the result is that of whole masks, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    lengths, prefixes, limit = [30, 50, 41, 12], [None, 0, 0, None], 600
    inputs = [torch.randn(sum(lengths), heads, 16, generator=generator, requires_grad=True) for heads in (4, 2, 2)]
    options: Any = {"scale": 0.25, "window": window, "softcap": softcap}
    whole = PackedAttention(lengths, prefixes).attend(0, *inputs, **options)
    sizes = [call["mask"].numel() for call in calls if call["mask"] is not None]
    calls.clear()
    parts = PackedAttention(lengths, prefixes, mask_pairs=limit).attend(0, *inputs, **options)
    if softcap is None:
        assert max(sizes) > 5 * limit, "or this test could not see a large one"
        assert max(call["mask"].numel() for call in calls if call["mask"] is not None) <= limit
    torch.testing.assert_close(parts, whole, atol=1e-6, rtol=1e-5)
    weights = torch.linspace(-1, 1, whole.numel()).view(whole.shape)
    gradients = [torch.autograd.grad((out * weights).sum(), inputs) for out in (parts, whole)]
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)
