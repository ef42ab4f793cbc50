"""What reaches a kernel is checked: another shape, dtype or layout, or an index outside, is a ValueError."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tiny
from rollover.models import kernels
from rollover.models.kernels import CachedRows
from rollover.models.operations import Norm
from rollover.types import SamplingParams

V, C, N, H, K, D, T, ROWS, E = 50, 4, 3, 4, 2, 8, 16, 5, 6
LONG = torch.long


class _Module:
    def __init__(self, size: int) -> None:
        self.weight = torch.ones(size)
        self.variance_epsilon = 1e-5


def logprobs(compiled: kernels.Kernels, **changes: Any) -> None:
    values = dict(logits_CV=torch.randn(C, V), targets_C=torch.tensor([0, 1, 2, V - 1]), scales_C=torch.ones(C))
    compiled.logprobs(**values | changes)


def logprobs_backward(compiled: kernels.Kernels, **changes: Any) -> None:
    values = dict(
        logits_CV=torch.randn(C, V), targets_C=torch.tensor([0, 1, 2, V - 1]), scales_C=torch.ones(C),
        log_z_C=torch.zeros(C), grads_C=torch.ones(C),
    )  # fmt: skip
    compiled.logprobs_backward(**values | changes)


def draw(compiled: kernels.Kernels, **changes: Any) -> None:
    values = dict(logits_NV=torch.randn(N, V), params=[SamplingParams()] * N, uniforms_N=torch.rand(N).double())
    compiled.draw(**values | changes)


def add_norm(compiled: kernels.Kernels, **changes: Any) -> None:
    values = dict(x_NE=torch.randn(N, E), y_NE=torch.randn(N, E), norm=Norm(_Module(E)), dtype=torch.float32)
    compiled.add_norm(**values | changes)


def norm(compiled: kernels.Kernels, **changes: Any) -> None:
    compiled.norm(**dict(x_NE=torch.randn(N, E), weight_E=torch.ones(E), eps=1e-5, dtype=torch.bfloat16) | changes)


def norm_backward(compiled: kernels.Kernels, **changes: Any) -> None:
    x = torch.randn(N, E)
    compiled.norm_backward(**dict(grad_NE=x, x_NE=x, weight_E=torch.ones(E), scales_N=torch.ones(N)) | changes)


def rotate(compiled: kernels.Kernels, **changes: Any) -> None:
    values = dict(
        query_key_value=torch.randn(N, (H + 2 * K) * D), cos_ND=torch.ones(N, D), sin_ND=torch.zeros(N, D),
        norms=(Norm(_Module(D)), Norm(_Module(D))), heads=H, kv_heads=K,
    )  # fmt: skip
    compiled.rotate(**values | changes)


def silu_gate(compiled: kernels.Kernels, **changes: Any) -> None:
    compiled.silu_gate(**dict(gate_up=torch.randn(N, 2 * E)) | changes)


def attention(compiled: kernels.Kernels, **changes: Any) -> None:
    """Two buckets of one layer; `keys` replaces the first one's. The last token is at the last place there is."""
    keys = changes.pop("keys", torch.zeros(ROWS, K, T, D))
    buckets = [([keys], [torch.zeros(ROWS, K, T, D)]), ([torch.zeros(1, K, 4 * T, D)], [torch.zeros(1, K, 4 * T, D)])]
    places = dict(
        bucket_N=torch.tensor([0, 0, 1]), rows_N=torch.tensor([0, ROWS - 1, 0]),
        positions_N=torch.tensor([0, T - 1, 4 * T - 1]),
    )  # fmt: skip
    cached = CachedRows(buckets, **places | {k: changes.pop(k) for k in places if k in changes})
    values = dict(
        query_NHD=torch.randn(N, H, D), key_NKD=torch.randn(N, K, D), value_NKD=torch.randn(N, K, D), cached=cached,
        layer=0, scale=0.3, window=None,
    )  # fmt: skip
    compiled.cached_attention(**values | changes)


CALLS = [logprobs, logprobs_backward, draw, add_norm, norm, norm_backward, rotate, silu_gate, attention]
WRONG: list[tuple[Callable[..., None], dict[str, Any]]] = [
    (logprobs, {"targets_C": torch.tensor([0, 1, 2, V])}),
    (logprobs, {"targets_C": torch.tensor([0, 1, 2, -1])}),
    (logprobs, {"targets_C": torch.zeros(C, dtype=torch.int32)}),
    (logprobs, {"targets_C": torch.zeros(C - 1, dtype=LONG)}),
    (logprobs, {"logits_CV": torch.randn(V, C).T}),
    (logprobs, {"logits_CV": torch.randn(C, V).half()}),
    (logprobs, {"logits_CV": torch.randn(C, V, device="meta")}),
    (logprobs, {"scales_C": torch.ones(C).double()}),
    (logprobs, {"scales_C": torch.ones(1)}),
    (logprobs_backward, {"targets_C": torch.tensor([0, 1, 2, V])}),
    (logprobs_backward, {"targets_C": torch.tensor([-1, 1, 2, 3])}),
    (logprobs_backward, {"log_z_C": torch.zeros(C - 1)}),
    (logprobs_backward, {"grads_C": torch.ones(1).expand(C)}),
    (logprobs_backward, {"scales_C": torch.ones(1)}),
    (draw, {"uniforms_N": torch.rand(N)}),
    (draw, {"uniforms_N": torch.rand(N - 1).double()}),
    (draw, {"params": [SamplingParams()] * (N - 1)}),
    (draw, {"logits_NV": torch.randn(N, 0)}),
    (draw, {"logits_NV": torch.randn(N, 2 * V)[:, ::2]}),
    (add_norm, {"y_NE": torch.randn(N - 1, E)}),
    (add_norm, {"norm": Norm(_Module(E - 1))}),
    (add_norm, {"x_NE": torch.randn(N, E).bfloat16()}),
    (add_norm, {"y_NE": torch.randn(N, E), "dtype": torch.bfloat16}),
    (norm, {"weight_E": torch.ones(E - 1)}),
    (norm, {"weight_E": torch.ones(E).bfloat16()}),
    (norm, {"x_NE": torch.randn(E, N).T}),
    (norm_backward, {"scales_N": torch.ones(N - 1)}),
    (norm_backward, {"grad_NE": torch.randn(N - 1, E)}),
    (norm_backward, {"weight_E": torch.ones(E + 1)[:-2]}),
    (rotate, {"heads": H + 1}),
    (rotate, {"sin_ND": torch.zeros(N - 1, D)}),
    (rotate, {"cos_ND": torch.ones(N, D).double()}),
    (rotate, {"norms": (Norm(_Module(D)), Norm(_Module(D // 2)))}),
    (rotate, {"cos_ND": torch.ones(N, 3), "sin_ND": torch.ones(N, 3), "query_key_value": torch.randn(N, 8 * 3)}),
    (silu_gate, {"gate_up": torch.randn(N, 2 * E + 1)}),
    (silu_gate, {"gate_up": torch.randn(2 * E, N).T}),
    (attention, {"positions_N": torch.tensor([0, T, 0])}),
    (attention, {"positions_N": torch.tensor([0, -1, 0])}),
    (attention, {"positions_N": torch.zeros(N, dtype=torch.int32)}),
    (attention, {"rows_N": torch.tensor([0, ROWS, 0])}),
    (attention, {"rows_N": torch.tensor([0, 0, 1])}),
    (attention, {"bucket_N": torch.tensor([0, 0, 2])}),
    (attention, {"keys": torch.zeros(ROWS, K, T, D).bfloat16()}),
    (attention, {"keys": torch.zeros(ROWS, T, K, D).transpose(1, 2)}),
    (attention, {"keys": torch.zeros(ROWS, K, T // 2, D)}),
    (attention, {"query_NHD": torch.randn(N, H + 1, D)}),
    (attention, {"query_NHD": torch.randn(N + 1, H, D)}),
    (attention, {"query_NHD": torch.randn(N, H, D).bfloat16()}),
    (attention, {"key_NKD": torch.randn(N, K - 1, D)}),
    (attention, {"value_NKD": torch.randn(N, K + 1, D)}),
    (attention, {"value_NKD": torch.randn(N, K, D).double()}),
    (attention, {"window": 0}),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_what_fits_passes(call: Callable[..., None]) -> None:
    call(tiny.compiled_kernels())


@pytest.mark.parametrize(("call", "changes"), WRONG, ids=lambda x: getattr(x, "__name__", None) or next(iter(x)))
def test_what_does_not_fit_is_refused(call: Callable[..., None], changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        call(tiny.compiled_kernels(), **changes)
