"""The packed forward pass against transformers' modules, weight updates in it, and the shifted output layer."""

from __future__ import annotations

import copy

import pytest
import torch

import tiny
from rollover.models.attention import PackedAttention, hidden_states
from rollover.models.inference import InferenceDecoder
from rollover.models.load import cast_parameters
from rollover.models.logprobs import Head
from rollover.models.operations import TorchOperations
from rollover.models.packed import ShiftedHead

LLAMA_SHAPED = ("llama", "qwen2", "qwen3", "mistral")
LENGTHS = [5, 1, 17]


def inputs() -> tuple[torch.Tensor, torch.Tensor, PackedAttention]:
    ids = torch.randint(2, 100, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3))
    return ids, torch.cat([torch.arange(n) for n in LENGTHS]), PackedAttention(LENGTHS)


def in_dtype(model, dtype: torch.dtype):
    model = copy.deepcopy(model).requires_grad_(False)
    cast_parameters(model, dtype)
    return model


@torch.no_grad()
@pytest.mark.parametrize("family", LLAMA_SHAPED)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("compiled", [False, True])
def test_equals_the_modules(family: str, dtype: torch.dtype, tolerance: float, compiled: bool) -> None:
    operations = tiny.compiled_kernels() if compiled else TorchOperations()
    model = in_dtype(tiny.model(family), dtype)
    expected = hidden_states(model, *inputs())
    assert InferenceDecoder.supported(model)
    got = InferenceDecoder(model, 8, operations).hidden_states(*inputs())
    assert got.dtype == torch.float32
    error = (got - expected).abs().max() / expected.abs().max()
    assert error < tolerance


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_weights_are_seen(dtype: torch.dtype) -> None:
    old, new = in_dtype(tiny.model("qwen3"), dtype), in_dtype(tiny.model("qwen3", seed=1), dtype)
    decoder = InferenceDecoder(old, 8, TorchOperations())
    parameters = dict(old.named_parameters())
    for name, tensor in new.named_parameters():
        if decoder.load(name, tensor) is None:
            parameters[name].copy_(tensor)
    decoder.refresh()
    assert torch.equal(
        decoder.hidden_states(*inputs()), InferenceDecoder(new, 8, TorchOperations()).hidden_states(*inputs())
    )


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_other_shapes_are_left_to_the_modules(family: str) -> None:
    assert not InferenceDecoder.supported(tiny.model(family))


@torch.no_grad()
@pytest.mark.parametrize("rows", [8, None])
def test_shifted_head_is_exact_where_probability_is(rows: int | None) -> None:
    """Against float32 logits of the same rounded hidden states; a plain bfloat16 matmul is far worse."""
    torch.manual_seed(0)
    weight = torch.randn(5000, 64).bfloat16()
    hidden = (0.5 * torch.randn(20, 64)).bfloat16()
    hidden += 0.3 * weight[torch.arange(20)]  # a likely token among the common ones
    exact = torch.log_softmax(hidden.float() @ weight.float().T, -1)
    packed = torch.log_softmax(ShiftedHead(weight, None, rows)(hidden.float()).float(), -1)
    plain = torch.log_softmax((hidden @ weight.T).float(), -1)
    likely = exact > -5
    assert likely.sum() >= 20
    errors = [(x - exact)[likely].abs().mean() for x in (packed, plain)]
    assert errors[0] < 0.01 and errors[0] < errors[1] / 3


@torch.no_grad()
def test_precise_head_agrees_with_float32() -> None:
    model = in_dtype(tiny.model("qwen2"), torch.bfloat16)
    hidden = torch.randn(9, 64)
    exact = torch.log_softmax(hidden @ Head.from_model(model).weight_VE.float().T, -1)
    got = torch.log_softmax(Head.from_model(model).precise(8).logits(hidden), -1)
    torch.testing.assert_close(got, exact, atol=0.02, rtol=0)
