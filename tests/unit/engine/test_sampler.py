"""The sampler draws from the distribution it reports."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rollover.engine.embedded.sampling import sample, uniforms
from rollover.types import SamplingParams

VOCAB = 600


def logits(rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(3)) * 2.5


def expected(params: SamplingParams) -> np.ndarray:
    """The distribution by definition: temperature, then top-k, then top-p and min-p on what is left."""
    probs = torch.softmax(logits()[0].double() / params.temperature, -1).numpy()
    order = np.argsort(-probs, kind="stable")
    keep = np.ones(VOCAB, dtype=bool)
    if params.top_k:
        keep[order[params.top_k :]] = False
    left = np.where(keep, probs, 0) / probs[keep].sum()
    before = np.cumsum(left[order]) - left[order]
    allowed = (before < params.top_p) & (left[order] >= params.min_p * left.max())
    allowed[0] = True
    final = np.zeros(VOCAB)
    final[order[allowed]] = left[order[allowed]]
    return final / final.sum()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.8),
        SamplingParams(temperature=1.3, min_p=0.05),
        SamplingParams(temperature=0.9, top_k=40, top_p=0.9, min_p=0.01),
    ],
)
def test_frequencies_and_logprobs(params: SamplingParams) -> None:
    draws = 20_000
    wanted = expected(params)
    tokens, logprobs = [], []
    for start in range(0, draws, 1000):
        u = uniforms([7] * 1000, list(range(start, start + 1000)))
        t, lp = sample(logits().expand(1000, -1).clone(), [params] * 1000, u)
        tokens += t
        logprobs += lp
    np.testing.assert_allclose(logprobs, np.log(wanted[tokens]), atol=1e-4)
    counts = np.bincount(tokens, minlength=VOCAB) / draws
    # Five standard deviations of a binomial share, for every token.
    assert (np.abs(counts - wanted) <= 5 * np.sqrt(wanted * (1 - wanted) / draws) + 4 / draws).all()


def test_greedy_is_the_argmax_with_logprob_zero() -> None:
    tokens, logprobs = sample(logits(4), [SamplingParams(temperature=0)] * 4, uniforms([1, 2, 3, 4], [0] * 4))
    assert tokens == logits(4).argmax(-1).tolist() and logprobs == [0.0] * 4


def test_mixed_parameters_equal_separate_calls() -> None:
    params = [SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_k=3), SamplingParams()]
    u = uniforms([1, 2, 3, 4], [9, 9, 9, 9])
    tokens, logprobs = sample(logits(4), params, u)
    for i in range(4):
        t, lp = sample(logits(4)[i : i + 1], params[i : i + 1], u[i : i + 1])
        assert tokens[i] == t[0] and logprobs[i] == pytest.approx(lp[0], abs=1e-6)


def test_uniforms_are_counter_based() -> None:
    u = uniforms([5] * 10_000, list(range(10_000)))
    assert ((u >= 0) & (u < 1)).all() and abs(u.mean() - 0.5) < 0.02 and len(set(u)) == 10_000
    assert uniforms([5], [77])[0] == u[77]
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.05
    other = uniforms([6] * 10_000, list(range(10_000)))
    assert abs(np.corrcoef(u, other)[0, 1]) < 0.05


def test_extreme_uniforms_stay_inside() -> None:
    for u in (0.0, 1.0 - 2.0**-53):
        tokens, logprobs = sample(logits(), [SamplingParams(top_k=4)], np.asarray([u]))
        assert 0 <= tokens[0] < VOCAB and np.isfinite(logprobs[0])
