"""Packing: budget, order, and that every loss token finds its way to the row and back."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import random_samples

from rollover.train.packing import micro_batches, pack, split_groups

CPU = torch.device("cpu")


@given(st.integers(0, 1000), st.integers(1, 60), st.integers(1, 4))
def test_micro_batches_keep_order_and_budget(seed: int, budget: int, num_groups: int) -> None:
    samples = random_samples(seed, num_groups)
    samples[1] = dataclasses.replace(samples[1], mask=np.zeros_like(samples[1].mask))
    parts = list(micro_batches(samples, budget))
    assert [s.rollout_id for p in parts for s in p] == [s.rollout_id for s in samples if s.mask.any()]
    sizes = [[len(s.prompt_ids) + len(s.token_ids) for s in p] for p in parts]
    assert all(sum(p) <= budget or len(p) == 1 for p in sizes)
    # Greedy: the next sample would not have fitted.
    assert all(sum(a) + b[0] > budget for a, b in zip(sizes, sizes[1:], strict=False))


@given(st.integers(0, 1000), st.integers(1, 5))
def test_packed_row_and_its_maps(seed: int, num: int) -> None:
    samples = random_samples(seed, num, 1)
    packed = pack(samples, CPU)
    assert sum(packed.lengths) == len(packed.input_ids_N) == len(packed.position_ids_N)
    at = iter(range(len(packed.loss_positions_M)))
    starts = np.cumsum([0, *packed.lengths])
    for b, sample in enumerate(samples):
        full = np.concatenate([sample.prompt_ids, sample.token_ids])
        for column in np.flatnonzero(sample.mask):
            m = next(at)
            position = int(packed.loss_positions_M[m]) - int(starts[b])
            assert full[position + 1] == int(packed.targets_M[m]) == sample.token_ids[column]
            assert int(packed.input_ids_N[starts[b] + position]) == full[position]
            assert int(packed.position_ids_N[starts[b] + position]) == position
            assert (int(packed.rows_M[m]), int(packed.columns_M[m])) == (b, column)
            assert float(packed.temperature_M[m]) == pytest.approx(sample.temperature)
            assert float(packed.behavior_logprobs_BT[b, column]) == sample.behavior_logprobs[column]
            assert float(packed.advantages_BT[b, column]) == sample.advantages[column]
    assert next(at, None) is None
    assert int(packed.mask_BT.sum()) == sum(int(s.mask.sum()) for s in samples)


def test_unpack_is_the_inverse_of_gathering_and_carries_gradients() -> None:
    packed = pack(random_samples(4), CPU)
    values = torch.randn(len(packed.rows_M), requires_grad=True)
    out = packed.unpack(values)
    assert out.shape == packed.mask_BT.shape
    assert torch.equal(out[packed.rows_M, packed.columns_M], values)
    assert torch.equal(out[packed.mask_BT], values), "row-major order of the mask is the order of the loss tokens"
    assert not out[~packed.mask_BT].any()
    weights = torch.randn_like(out)
    (gradient,) = torch.autograd.grad((out * weights).sum(), values)
    assert torch.equal(gradient, weights[packed.mask_BT])


@given(st.integers(1, 7), st.integers(1, 9))
def test_minibatches_hold_whole_groups_evenly_in_order(num_groups: int, parts: int) -> None:
    samples = random_samples(0, num_groups, 2)
    minibatches = split_groups(samples, parts)
    assert [s for m in minibatches for s in m] == samples
    counts = [len({s.group_id for s in m}) for m in minibatches]
    assert len(counts) == min(parts, num_groups) and max(counts) - min(counts) <= 1
    assert sum(counts) == num_groups


def test_an_empty_prompt_is_refused() -> None:
    sample = dataclasses.replace(random_samples(0)[0], prompt_ids=np.zeros(0, dtype=np.int32))
    with pytest.raises(AssertionError, match="empty prompt"):
        pack([sample], CPU)
