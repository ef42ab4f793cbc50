"""Packing: budget, order, and that every loss token finds its way to the row and back."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollover.models.load import ModelLimits
from rollover.trainer.passes import micro_batches, pack
from rollover.trainer.trainer import split_groups
from rollover.types import Sample
from samples import VOCAB, random_samples

CPU = torch.device("cpu")
LIMITS = ModelLimits(VOCAB, 64)


@given(st.integers(0, 1000), st.integers(1, 60), st.integers(1, 4), st.integers(1, 2))
def test_micro_batches_keep_order_and_budget(seed: int, budget: int, num_groups: int, num_prompts: int) -> None:
    samples = random_samples(seed, num_groups, num_prompts=num_prompts)
    samples[1] = dataclasses.replace(samples[1], mask=np.zeros_like(samples[1].mask))
    parts = list(micro_batches(samples, budget))
    assert [s.rollout_id for p in parts for s in p] == [s.rollout_id for s in samples if s.mask.any()]

    def row_tokens(part: list[Sample]) -> int:
        prompts = {(s.group_id, tuple(s.prompt_ids)): len(s.prompt_ids) for s in part}
        return sum(prompts.values()) + sum(len(s.token_ids) for s in part)

    assert all(row_tokens(p) <= budget or len(p) == 1 for p in parts)
    # Greedy: the next sample would not have fitted.
    assert all(row_tokens([*a, b[0]]) > budget for a, b in zip(parts, parts[1:], strict=False))


@given(st.integers(0, 1000), st.integers(1, 4), st.integers(1, 4), st.integers(1, 2))
def test_packed_row_and_its_maps(seed: int, num_groups: int, size: int, num_prompts: int) -> None:
    """Following a block's prefix gives the sample back; every loss token is predicted from the position before it."""
    samples = random_samples(seed, num_groups, size, num_prompts)
    packed = pack(samples, CPU, LIMITS)
    assert sum(packed.lengths) == len(packed.input_ids_N) == len(packed.position_ids)
    distinct = {(s.group_id, tuple(s.prompt_ids)) for s in samples}
    assert packed.prefixes.count(None) == len(distinct), "one copy of each prompt of a group"
    starts = np.cumsum([0, *packed.lengths])
    block_of = np.repeat(np.arange(len(packed.lengths)), packed.lengths)
    at = iter(range(len(packed.loss_positions_M)))
    for b, sample in enumerate(samples):
        full = np.concatenate([sample.prompt_ids, sample.token_ids])
        for column in np.flatnonzero(sample.mask):
            m = next(at)
            row = int(packed.loss_positions_M[m])
            block = int(block_of[row])
            prefix = packed.prefixes[block]
            seen = packed.input_ids_N[starts[block] : row + 1].tolist()
            if prefix is not None:
                seen = packed.input_ids_N[starts[prefix] : starts[prefix + 1]].tolist() + seen
            position = len(sample.prompt_ids) + int(column) - 1
            assert seen == full[: position + 1].tolist()
            assert int(packed.position_ids[row]) == position
            assert int(packed.targets_M[m]) == full[position + 1] == sample.token_ids[column]
            assert (int(packed.rows_M[m]), int(packed.columns_M[m])) == (b, column)
            assert float(packed.temperature_M[m]) == pytest.approx(sample.temperature)
            assert float(packed.behavior_logprobs_BT[b, column]) == sample.behavior_logprobs[column]
            assert float(packed.advantages_BT[b, column]) == sample.advantages[column]
    assert next(at, None) is None
    assert int(packed.mask_BT.sum()) == sum(int(s.mask.sum()) for s in samples)
    assert not packed.behavior_logprobs_BT[~packed.mask_BT].any(), "outside of the loss there is no log-prob"


def test_unpack_inverts_gathering_with_gradients() -> None:
    packed = pack(random_samples(4), CPU, LIMITS)
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


def changed(field: str, values: list[int]) -> Sample:
    sample = random_samples(0)[0]
    ids = getattr(sample, field)
    return dataclasses.replace(sample, **{field: np.concatenate([ids[:-1], np.array(values)])})


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (changed("token_ids", [VOCAB]), rf"rollout 0-0: token \d+ of its answer is {VOCAB}, .*{VOCAB} ids"),
        (changed("token_ids", [-1]), r"rollout 0-0: token \d+ of its answer is -1"),
        (changed("prompt_ids", [10**12]), r"rollout 0-0: token \d+ of its prompt is 10{12}"),
        (dataclasses.replace(random_samples(0)[0], prompt_ids=np.zeros(0, dtype=np.int32)), "0-0 has an empty prompt"),
        (dataclasses.replace(random_samples(0)[0], prompt_ids=np.array([1.0])), "0-0: .*prompt are float64"),
        (dataclasses.replace(random_samples(0)[0], prompt_ids=np.ones(65, dtype=np.int32)), "0-0 has .* 64 positions"),
    ],
    ids=["beyond the vocabulary", "negative", "far beyond", "no prompt", "no integers", "too long"],
)
def test_what_the_model_cannot_be_given_is_refused(sample: Sample, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack([sample], CPU, LIMITS)
