"""The output layer's copy for log-probs is made when the weights have changed, and not at every micro-batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_trainer import restored, trainer

from rollover.models import logprobs
from rollover.models.logprobs import Head, chunked_logprobs
from rollover.models.packed import ShiftedHead, float32_product
from rollover.trainer import passes
from rollover.trainer.batch import Batch
from samples import random_samples

STEPS = 3


def train(**algorithm: Any) -> list[dict[str, float]]:
    """Metrics of a few steps of many micro-batches, two updates each."""
    made = trainer(algorithm, micro_batch_tokens=1, minibatches_per_step=2, dtype=torch.bfloat16, max_staleness=1)
    samples = random_samples(3)
    rows = []
    for _ in range(STEPS):
        rows.append(made.train_step(Batch(samples)))
        restored(made, made)
        for sample in samples:
            sample.versions[:] = made.policy_version
    return rows


class Counted(ShiftedHead):
    num = 0

    def __init__(self, *args: Any) -> None:
        Counted.num += 1
        super().__init__(*args)


class Fresh:
    """A head that is made anew for every micro-batch."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def now(self) -> Head:
        return Head.from_model(self.model)


# What swaps weights within a step: a reference policy, and the weights that sampled.
ALGORITHMS = {"plain": {}, "reference": {"kl_coef": 0.1}, "kept weights": {"proximal": "snapshot", "kl_coef": 0.1}}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_is_copied_once_an_update_and_never_old(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit what comes of a copy for every micro-batch, also where other weights are computed with in between."""
    monkeypatch.setattr(logprobs, "ShiftedHead", Counted)
    Counted.num = 0
    got = train(**ALGORITHMS[name])
    copies = Counted.num
    monkeypatch.setattr(passes, "TrainedHead", Fresh)
    Counted.num = 0
    assert got == train(**ALGORITHMS[name])
    # The start of the step, and after the first of two updates; to other weights, and back again.
    assert copies <= STEPS * {"plain": 2, "reference": 4, "kept weights": 6}[name] < Counted.num / 2


def test_forward_and_backward_share_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "ShiftedHead", Counted)
    Counted.num = 0
    hidden, weight = torch.randn(9, 64, requires_grad=True), torch.randn(40, 64).bfloat16().requires_grad_()
    out, _ = chunked_logprobs(hidden, Head(weight, None, None, 1.0), torch.arange(9), torch.ones(9))
    out.sum().backward()
    assert Counted.num == 1 and weight.grad is not None


@pytest.mark.parametrize("batched", [False, True])
def test_a_product_in_float32_is_not_rounded(batched: bool) -> None:
    """On a CPU by converting; for other devices torch is asked for float32, whose shape and type "meta" can tell."""
    shapes = ((3, 5, 7), (3, 7, 4)) if batched else ((5, 7), (7, 4))
    left, right = (torch.randn(shape).bfloat16() for shape in shapes)
    product = float32_product(left, right)
    assert product.dtype == torch.float32
    torch.testing.assert_close(product.double(), left.double() @ right.double(), atol=1e-5, rtol=1e-5)
    assert (product.bfloat16() != product).any(), "or nothing would have been rounded"
    far = float32_product(left.to("meta"), right.to("meta"))
    assert far.dtype == torch.float32 and far.shape == product.shape
    wide = float32_product(left.float(), right.float())
    assert torch.equal(wide, left.float() @ right.float())
