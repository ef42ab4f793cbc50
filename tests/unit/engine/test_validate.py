"""Which answers of an engine, or of a service behind one, are refused."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rollover.engine.validate import continuation_error, resumable_segments, valid_logprobs
from rollover.rollout.cache import RolloutCache
from rollover.types import Prompt, Segment, StopReason
from unit.rollout.world import make_segment, make_task


@pytest.mark.parametrize(
    ("logprob", "taken", "why"),
    [
        (-1.0, -1.0, ""),
        (1e-3, 0.0, ""),
        (2e-3, None, "gave token 6 the invalid log-prob 0.002 (they are finite, and at most 0)"),
        (3.0, None, "gave token 6 the invalid log-prob 3 (they are finite, and at most 0)"),
        (-9999.0, None, "gave token 6 the invalid log-prob -9999 (they are finite, and at most 0)"),
        (float("nan"), None, "gave token 6 the invalid log-prob nan (they are finite, and at most 0)"),
        (float("-inf"), None, "gave token 6 the invalid log-prob -inf (they are finite, and at most 0)"),
    ],
)
def test_an_invalid_log_prob_ends_what_is_usable(logprob: float, taken: float | None, why: str) -> None:
    """A logit, or a probability, must not become the log-prob 0, which importance weights are made of."""
    assert valid_logprobs([5, 6, 7], [-2.0, logprob, -3.0], None) == (
        [-2.0] if taken is None else [-2.0, taken, -3.0],
        why,
    )


def test_a_token_that_the_model_does_not_have_ends_what_is_usable() -> None:
    assert valid_logprobs([5, 6, 7], [-2.0] * 3, 7) == ([-2.0] * 2, "gave token 7, and the model has 7")
    assert valid_logprobs([5, 6, 7], [-2.0] * 3, 8) == ([-2.0] * 3, "") == valid_logprobs([5, 6, 7], [-2.0] * 3, None)


def segment(num: int, start: int | None, version: int = 0, stop: StopReason = StopReason.PAUSED) -> Segment:
    return dataclasses.replace(make_segment(num, version, stop), start=start)


@pytest.mark.parametrize(
    ("segments", "why"),
    [
        ([segment(3, 5), segment(1, 8)], None),
        ([segment(2, None), segment(2, None)], None),
        ([segment(0, 5)], None),
        ([], "it has no segment"),
        ([segment(5, 5, stop=StopReason.LENGTH)], None),
        ([segment(4, 0)], "it begins with token 0, and token 5 comes next"),
        ([segment(2, 6)], "it begins with token 6, and token 5 comes next"),
        ([segment(2, 5), segment(2, 5)], "it begins with token 5, and token 7 comes next"),
        ([segment(0, 3)], "it begins with token 3, and token 5 comes next"),
        ([segment(6, 5, stop=StopReason.LENGTH)], "it has 6 tokens, and the rollout may get 5"),
        ([segment(5, 5)], "it is paused, with nothing left to generate"),
        ([segment(1, 5, stop=StopReason.EOS), segment(1, 6)], "it continues after the rollout has stopped"),
        ([segment(1, 5, version=3), segment(1, 6, version=2)], "its policy versions go back: [3, 2]"),
    ],
)
def test_why_segments_cannot_come_next(segments: list[Segment], why: str | None) -> None:
    assert continuation_error(segments, num_tokens=5, remaining=5) == why
    if why is None and any(map(len, segments)):
        cache = RolloutCache(10)
        cache.admit(make_task(0), Prompt.of([1]), 1)
        cache.start("0-0")
        cache.append("0-0", [segment(5, 0)])
        cache.append("0-0", segments)
        assert cache.rollout("0-0").num_tokens == 5 + sum(map(len, segments))


def with_logprobs(*values: float, start: int | None = 5, trainable: bool = True) -> Segment:
    made = dataclasses.replace(make_segment(len(values), 0, StopReason.PAUSED), start=start, trainable=trainable)
    return dataclasses.replace(made, logprobs=np.array(values, dtype=np.float32))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf"), 0.3, 7.5])
def test_what_is_no_log_prob_is_refused(wrong: float) -> None:
    segments = [with_logprobs(-1.0), with_logprobs(-0.5, wrong, -2.0, start=None)]
    why = continuation_error(segments, num_tokens=5, remaining=9)
    assert why == f"its token 1 has the log-prob {wrong:g}, which is none: they are finite, and at most 0"
    assert continuation_error([with_logprobs(wrong, trainable=False)], 5, 9) is None, "written by an environment"


def test_rounding_above_0_is_a_log_prob() -> None:
    """Of a log-softmax in float32, also over logits that a low temperature made large."""
    logits = np.float32(3e4) + np.array([0.0, -60.0], dtype=np.float32)
    rounded = logits - (logits.max() + np.float32(2e-3))
    assert continuation_error([with_logprobs(0.0, 1e-6, 2e-3, *rounded)], 5, 9) is None


def test_resumable_segments_are_paused_and_valid() -> None:
    parts = [make_segment(2, 1), make_segment(3, 2, first=2), make_segment(0, 3)]
    assert resumable_segments(parts, 0, 10) == parts[:2]
    for unusable in (
        [],
        [make_segment(0, 3)],
        [make_segment(10, 3)],  # all of its budget: it would have stopped
        [make_segment(2, 3), make_segment(2, 2)],
        [make_segment(2, 3, StopReason.EOS)],
        [dataclasses.replace(make_segment(2, 3), start=1)],
    ):
        assert resumable_segments(unusable, 0, 10) == []
