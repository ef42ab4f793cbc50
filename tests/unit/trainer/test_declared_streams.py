"""A policy loss declares the streams that it reads, and the step gives it these: those of STREAMS, or a new one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_trainer import trainer

from rollover.algorithms.loss import LossAndClipped, TokenBatch
from rollover.trainer.batch import Batch
from rollover.trainer.streams import STREAMS, Minibatches, TokenStream
from samples import random_samples

SAMPLES = random_samples(1)
HERE = "test_declared_streams"
SEEN: list[tuple[TokenBatch, torch.Tensor]] = []


def plain(t: TokenBatch) -> LossAndClipped:
    return -t.ratio_BT * t.advantages_BT, t.mask_BT & False


def with_start(t: TokenBatch, start_logprobs_BT: torch.Tensor) -> LossAndClipped:
    SEEN.append((t, start_logprobs_BT))
    return plain(t)


def with_reference(t: TokenBatch, *, reference_logprobs_BT: torch.Tensor) -> LossAndClipped:
    SEEN.append((t, reference_logprobs_BT))
    return plain(t)


def with_places(t: TokenBatch, *, places_BT: torch.Tensor) -> LossAndClipped:
    SEEN.append((t, places_BT))
    return plain(t)


def seen(loss: str, algorithm: dict[str, Any], **train: Any) -> dict[str, list[np.ndarray]]:
    """rollout_id -> what the loss got of its loss tokens, in each update of a step."""
    SEEN.clear()
    options = {"loss": f"{HERE}:{loss}", "correction": "none", "allow_uncorrected": True, **algorithm}
    trainer(options, **train).train_step(Batch(SAMPLES))
    found: dict[str, list[np.ndarray]] = {}
    for batch, stream_BT in SEEN:
        for rollout_id, row, mask in zip(batch.sequences, stream_BT, batch.mask_BT, strict=True):
            found.setdefault(rollout_id, []).append(row[mask].numpy())
    return found


def with_default(t: TokenBatch, start_logprobs_BT: torch.Tensor | None = None, foo_BT: float = 1) -> LossAndClipped:
    assert foo_BT == 1
    return plain(t) if start_logprobs_BT is None else with_start(t, start_logprobs_BT)


@pytest.mark.parametrize("loss", ["with_start", "with_default"])
def test_start_logprobs_are_given_in_a_single_update(loss: str) -> None:
    start = trainer({}).backend.compute_logprobs(SAMPLES)
    found = seen(loss, {"proximal": "step_start"})
    for s in SAMPLES:
        np.testing.assert_allclose(found[s.rollout_id][0], start[s.rollout_id], atol=1e-5)


@pytest.mark.parametrize("proximal", ["step_start", "behavior"])
def test_a_stream_that_is_current_at_first_is_there_in_every_update(proximal: str) -> None:
    start = trainer({}).backend.compute_logprobs(SAMPLES)
    train = {"minibatches_per_step": 3, "epochs_per_step": 2, "learning_rate": 0.01}
    found = seen("with_start", {"proximal": proximal}, **train)
    for s in SAMPLES:
        assert len(found[s.rollout_id]) == 2
        for values in found[s.rollout_id]:
            np.testing.assert_allclose(values, start[s.rollout_id], atol=1e-5)


def test_the_reference_is_the_losss_own_where_its_kl_is_not_in_the_loss() -> None:
    start = trainer({}).backend.compute_logprobs(SAMPLES)
    found = seen("with_reference", {"kl_coef": 0.1, "kl_in": "reward"})
    for s in SAMPLES:
        np.testing.assert_allclose(found[s.rollout_id][0], start[s.rollout_id], atol=1e-5)


def test_a_new_stream_is_one_entry_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def places(_: object, minibatches: Minibatches) -> dict[str, np.ndarray]:
        return {s.rollout_id: np.flatnonzero(s.mask).astype(np.float32) for part in minibatches for s in part}

    monkeypatch.setitem(STREAMS, "places", TokenStream(places))
    found = seen("with_places", {})
    for s in SAMPLES:
        np.testing.assert_array_equal(found[s.rollout_id][0], np.flatnonzero(s.mask))


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (
            "with_places",
            "its parameter places_BT names no stream of tokens. There are advantages, .*start_log",
        ),
        (
            "with_reference",
            "its parameter reference_logprobs_BT cannot be given, as no reference is kept: set alg",
        ),
    ],
)
def test_a_stream_that_a_run_does_not_have_is_refused_when_it_is_built(loss: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"algorithm.loss = '{HERE}:{loss}': {why}"):
        trainer({"loss": f"{HERE}:{loss}", "correction": "none"})
