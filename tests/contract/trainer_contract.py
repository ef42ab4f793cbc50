"""Checks that any TrainerBackend must pass. Run them on your own:

    from contract import trainer_contract

    SUBJECT = trainer_contract.Subject(make_backend=MyBackend, samples=samples)

    @pytest.mark.parametrize("check", trainer_contract.CHECKS, ids=lambda check: check.__name__)
    def test_my_backend(check):
        asyncio.run(check(SUBJECT))

They assume the algorithm's defaults (a token-mean of PPO's clip, no value head) and a learning rate that changes the
weights in one step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from rollover.engine.protocol import ExtendRequest
from rollover.trainer.backend import TEACHER, Stream, TrainerBackend
from rollover.trainer.objective import Counts
from rollover.trainer.streams import with_stream
from rollover.types import Prompt, Sample, SamplingParams

UPDATE = {"grad_norm", "learning_rate", "train/skipped_steps"}


@dataclass(frozen=True)
class Subject:
    """The backend under test.

    `make_backend` returns a fresh one, every time with the same weights. `samples`: of two groups or more, with
    advantages that differ from 0. `atol`: how far log-probs may be apart that two ways of computing give; `exact`: the
    same way gives the same bits. `samples_with_an_engine`: `sample` works. `weights_stay`: they are elsewhere, and
    `publish` names them.
    """

    make_backend: Callable[[], TrainerBackend]
    samples: list[Sample]
    atol: float = 1e-4
    exact: bool = True
    samples_with_an_engine: bool = True
    weights_stay: bool = False

    @property
    def counts(self) -> Counts:
        return Counts.from_samples(self.samples)

    def halves(self) -> tuple[list[Sample], list[Sample]]:
        """The first group and the others."""
        first = self.samples[0].group_id
        return [s for s in self.samples if s.group_id == first], [s for s in self.samples if s.group_id != first]

    def assert_same(self, ours: Stream, theirs: Stream) -> None:
        assert ours.keys() == theirs.keys()
        for rollout_id, values in ours.items():
            np.testing.assert_allclose(values, theirs[rollout_id], atol=0 if self.exact else self.atol, rtol=0)


def trained(backend: TrainerBackend, subject: Subject) -> dict[str, float]:
    """One training step of all samples."""
    backend.forward_backward(subject.samples, subject.counts)
    return backend.optim_step()


async def check_logprobs_are_those_of_the_loss_tokens(subject: Subject) -> None:
    backend = subject.make_backend()
    found = backend.compute_logprobs(subject.samples)
    assert found.keys() == {s.rollout_id for s in subject.samples if s.mask.any()}
    for s in subject.samples:
        if s.mask.any():
            values = found[s.rollout_id]
            assert values.dtype == np.float32 and values.shape == (s.mask.sum(),)
            assert np.isfinite(values).all() and (values <= 0).all()
    subject.assert_same(backend.compute_logprobs(subject.samples), found)
    assert backend.policy_version == 0 and backend.flops > 0


async def check_statistics_are_of_the_distributions_of_the_loss_tokens(subject: Subject) -> None:
    backend = subject.make_backend()
    try:
        found = backend.compute_statistics(subject.samples)
    except ValueError:
        return  # a backend need not know them
    logprobs = backend.compute_logprobs(subject.samples)
    subject.assert_same({rollout_id: values[:, 0] for rollout_id, values in found.items()}, logprobs)
    for values in found.values():
        _, entropy_M, squares_M = values.T
        assert values.dtype == np.float32 and (entropy_M >= 0).all() and (squares_M > 0).all()
        # Jensen's inequality: -log sum p^2 <= -sum p log p.
        assert (squares_M <= 1 + 1e-6).all() and (-np.log(squares_M) <= entropy_M + 1e-3).all()


async def check_a_forward_pass_leaves_no_gradient(subject: Subject) -> None:
    backend = subject.make_backend()
    before = backend.compute_logprobs(subject.samples)
    assert backend.optim_step()["grad_norm"] == 0.0
    subject.assert_same(backend.compute_logprobs(subject.samples), before)


async def check_without_proximal_logprobs_the_ratio_is_one(subject: Subject) -> None:
    backend = subject.make_backend()
    sums = backend.forward_backward(subject.samples, subject.counts).totals()
    assert sums["count/tokens"] == subject.counts.tokens
    assert sums["sum/ratio"] == subject.counts.tokens and sums["max/ratio"] == 1.0
    lower = {k: v - 0.1 for k, v in backend.compute_logprobs(subject.samples).items()}
    sums = backend.forward_backward(with_stream(subject.samples, "proximal_logprobs", lower), subject.counts).totals()
    assert sums["sum/ratio"] / subject.counts.tokens == pytest.approx(math.exp(0.1), rel=1e-3)


async def check_gradients_add_up(subject: Subject) -> None:
    whole, parts = subject.make_backend(), subject.make_backend()
    expected = whole.forward_backward(subject.samples, subject.counts).totals()["sum/loss"]
    losses = [parts.forward_backward(half, subject.counts).totals()["sum/loss"] for half in subject.halves()]
    assert sum(losses) == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert parts.optim_step()["grad_norm"] == pytest.approx(whole.optim_step()["grad_norm"], rel=1e-3)


async def check_a_minibatch_may_be_divided_at_its_end(subject: Subject) -> None:
    known, later = subject.make_backend(), subject.make_backend()
    for half in subject.halves():
        later.forward_backward(half, replace(Counts.from_samples(half), divided=False))
    expected = trained(known, subject)
    # A gradient of bfloat16 is rounded to 8 bits, here before it is divided and there after.
    assert later.optim_step(divisor=subject.counts.tokens)["grad_norm"] == pytest.approx(
        expected["grad_norm"], rel=4e-3
    )


async def check_an_update_changes_the_weights_once(subject: Subject) -> None:
    backend = subject.make_backend()
    before = backend.compute_logprobs(subject.samples)
    update = trained(backend, subject)
    assert update.keys() >= UPDATE and update["grad_norm"] > 0 and update["train/skipped_steps"] == 0.0
    after = backend.compute_logprobs(subject.samples)
    assert any(np.abs(after[k] - before[k]).max() > 1e-6 for k in before)
    assert backend.optim_step()["grad_norm"] == 0.0, "a gradient is used once"


async def check_the_version_counts_training_steps(subject: Subject) -> None:
    backend = subject.make_backend()
    for ends_step, version in ((False, 0), (True, 1), (False, 1), (True, 2)):
        backend.forward_backward(subject.samples, subject.counts)
        backend.optim_step(ends_step=ends_step)
        assert backend.policy_version == version


async def check_the_rate_is_scaled(subject: Subject) -> None:
    plain, half = subject.make_backend(), subject.make_backend()
    half.forward_backward(subject.samples, subject.counts)
    assert half.optim_step(0.5)["learning_rate"] == pytest.approx(0.5 * trained(plain, subject)["learning_rate"])


async def check_gradients_can_be_forgotten(subject: Subject) -> None:
    plain, other = subject.make_backend(), subject.make_backend()
    other.forward_backward(subject.halves()[0], subject.counts)
    other.forget_gradients()
    assert trained(other, subject)["grad_norm"] == pytest.approx(trained(plain, subject)["grad_norm"], rel=1e-6)


async def check_a_gradient_of_zero_is_one(subject: Subject) -> None:
    """All of a minibatch was left out, since its advantages are 0: no failure, and nothing that is not a number."""
    backend = subject.make_backend()
    assert backend.forward_backward([], subject.counts).totals() == {}
    update = backend.optim_step()
    assert update["grad_norm"] == 0.0 and update["train/skipped_steps"] == 0.0 and backend.policy_version == 1


async def check_published_weights_are_the_current_ones(subject: Subject) -> None:
    backend = subject.make_backend()
    first = {name: tensor.clone() for name, tensor in await backend.publish()}
    assert first and all(isinstance(tensor, torch.Tensor) for tensor in first.values())
    trained(backend, subject)
    second = dict(await backend.publish())
    if subject.weights_stay:
        assert not second.keys() & first.keys()
        return
    assert second.keys() <= first.keys() and any(not torch.equal(first[k], second[k]) for k in second)


async def check_a_state_goes_on_exactly(subject: Subject) -> None:
    backend, other = subject.make_backend(), subject.make_backend()
    trained(backend, subject)
    tensors, meta = backend.save_state()
    assert all("/" in name for name in tensors), "the first part of a name is its file"
    other.load_state({name: tensor.clone() for name, tensor in tensors.items()}, meta)
    assert other.policy_version == backend.policy_version == 1
    for _ in range(2):
        subject.assert_same(other.compute_logprobs(subject.samples), backend.compute_logprobs(subject.samples))
        ours, theirs = trained(other, subject), trained(backend, subject)
        assert ours["learning_rate"] == theirs["learning_rate"]
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0 if subject.exact else 1e-3)


async def check_what_is_not_there_is_said(subject: Subject) -> None:
    backend = subject.make_backend()
    trained(backend, subject)
    for version in (0, 7):
        with pytest.raises(ValueError, match=f"version {version}"):
            backend.compute_logprobs(subject.samples, version)
    with pytest.raises(ValueError, match="teacher"):
        backend.compute_logprobs(subject.samples, TEACHER)
    with pytest.raises(ValueError, match="value head"):
        backend.compute_values(subject.samples)


async def check_samples_are_of_the_current_weights(subject: Subject) -> None:
    backend = subject.make_backend()
    prompt = tuple(int(t) for t in subject.samples[0].prompt_ids)
    requests = [ExtendRequest(f"{i}-0", Prompt(prompt), (), 12, i, SamplingParams()) for i in range(3)]
    if not subject.samples_with_an_engine:
        with pytest.raises(ValueError, match="engine"):
            await backend.sample(requests)
        return
    for version in range(2):
        answers = await backend.sample(requests)
        for request, segments in zip(requests, answers, strict=True):
            ids = np.concatenate([s.token_ids for s in segments])
            logprobs = np.concatenate([s.logprobs for s in segments])
            assert {s.policy_version for s in segments} == {version} and 0 < len(ids) <= 12
            zeros = np.zeros(len(ids), np.int32)
            arrays = np.array(prompt, np.int32), ids, np.ones(len(ids), bool)
            streams = {"behavior_logprobs": logprobs, "versions": zeros, "advantages": zeros.astype(np.float32)}
            again = backend.compute_logprobs([Sample(request.rollout_id, 0, *arrays, streams, temperature=1.0)])
            np.testing.assert_allclose(again[request.rollout_id], logprobs, atol=subject.atol)
        trained(backend, subject)


CHECKS = [
    check_logprobs_are_those_of_the_loss_tokens,
    check_statistics_are_of_the_distributions_of_the_loss_tokens,
    check_a_forward_pass_leaves_no_gradient,
    check_without_proximal_logprobs_the_ratio_is_one,
    check_gradients_add_up,
    check_a_minibatch_may_be_divided_at_its_end,
    check_an_update_changes_the_weights_once,
    check_the_version_counts_training_steps,
    check_the_rate_is_scaled,
    check_gradients_can_be_forgotten,
    check_a_gradient_of_zero_is_one,
    check_published_weights_are_the_current_ones,
    check_a_state_goes_on_exactly,
    check_what_is_not_there_is_said,
    check_samples_are_of_the_current_weights,
]
