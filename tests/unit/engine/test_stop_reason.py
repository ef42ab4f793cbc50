"""Why a rollout stops, over earlier and new tokens: the same as one that was never cut."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.engine.protocol import (
    MIN_REPEATS,
    ExtendRequest,
    StopCriteria,
    last_of,
    repeats_itself,
    smallest_period,
    stop_reason,
)
from rollover.types import Prompt, SamplingParams, StopReason

REQUEST = ExtendRequest("0-0", Prompt((1, 2)), (), 40, 0, SamplingParams())


def text(ids: list[int]) -> str:
    return "".join("abcd"[i % 4] for i in ids)


def reason_of(request: ExtendRequest, new_tokens: list[int], decode_text: Any = text) -> StopReason | None:
    return stop_reason(request, len(new_tokens), last_of(request, new_tokens), decode_text)


def end_of(request: ExtendRequest, tokens: list[int]) -> tuple[int, StopReason | None]:
    """After how many of all its tokens it stops, and why."""
    before = len(request.generated_ids)
    for num in range(before + 1, len(tokens) + 1):
        if (reason := reason_of(request, tokens[before:num])) is not None:
            return num, reason
    return len(tokens), None


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.integers(0, 39),
    st.integers(0, 20),
    st.sampled_from([(), ("ab",), ("abca", "dd")]),
    st.sampled_from([0, 8]),
    st.sampled_from([frozenset(), frozenset({3})]),
)
def test_where_it_is_cut_changes_nothing(tokens, cut, text_start, stops, window, ends) -> None:
    request = dataclasses.replace(
        REQUEST,
        stop=StopCriteria(ends, stops, window),
        text_start=text_start,
        generated_ids=tuple(tokens[:text_start]),
        max_new_tokens=41 - min(text_start, len(tokens)),
    )
    if len(tokens) <= text_start:
        return
    num, reason = end_of(request, tokens)
    if not text_start <= cut < num:
        return
    rest = dataclasses.replace(request, generated_ids=tuple(tokens[:cut]), max_new_tokens=41 - cut)
    assert end_of(rest, tokens) == (num, reason)


def test_each_reason() -> None:
    assert reason_of(dataclasses.replace(REQUEST, stop=StopCriteria(frozenset({5}))), [1, 5]) is StopReason.EOS
    assert reason_of(dataclasses.replace(REQUEST, max_new_tokens=2), [1, 2]) is StopReason.LENGTH
    assert reason_of(dataclasses.replace(REQUEST, pause_after=2), [1, 2]) is StopReason.PAUSED
    assert (
        reason_of(dataclasses.replace(REQUEST, stop=StopCriteria(repetition_tokens=16)), [7] * 16)
        is StopReason.REPETITION
    )
    assert reason_of(REQUEST, [1, 2]) is None
    asked = dataclasses.replace(REQUEST, stop=StopCriteria(strings=("bc",)), generated_ids=(1,))
    assert reason_of(asked, [2]) is StopReason.STOP_STRING
    assert reason_of(dataclasses.replace(asked, text_start=1), [2]) is None
    with pytest.raises(ValueError, match="decode_text"):
        reason_of(asked, [2], None)


# Repetition


@given(st.lists(st.integers(0, 2), max_size=40))
def test_the_period_is_the_smallest_that_fits(tokens: list[int]) -> None:
    def fits(p: int) -> bool:
        return all(tokens[i] == tokens[i - p] for i in range(p, len(tokens)))

    period = smallest_period(tokens)
    assert fits(period) and not any(fits(p) for p in range(1, period))


@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_a_pattern_that_comes_four_times_stops(before: list[int], pattern: list[int]) -> None:
    asked = dataclasses.replace(REQUEST, stop=StopCriteria(repetition_tokens=32), max_new_tokens=10_000)
    stopped, reason = end_of(asked, [*before, *pattern * 100])
    assert reason is StopReason.REPETITION and stopped % 16 == 0
    assert stopped <= len(before) + 32 + 16, "later than the window and the interval of the checks"


def test_three_times_is_not_enough_and_sound_text_goes_on() -> None:
    assert not repeats_itself([*range(11)] * 3) and repeats_itself([1] * 64) and MIN_REPEATS == 4
    for tokens, window in (([*range(11)] * 3, 33), (list(range(200)), 64), ([1] * 64, 0)):
        asked = dataclasses.replace(REQUEST, stop=StopCriteria(repetition_tokens=window), max_new_tokens=1000)
        assert end_of(asked, tokens) == (len(tokens), None)


@pytest.mark.parametrize(("text_start", "num_new"), [(0, 12), (4, 16), (20, 16), (13, 9)])
def test_repetition_is_counted_from_the_turn(text_start: int, num_new: int) -> None:
    """16 tokens of one turn at a multiple of 16 in it, of which an interruption may have had some."""
    asked = dataclasses.replace(
        REQUEST,
        stop=StopCriteria(repetition_tokens=16),
        generated_ids=(7,) * 20,
        text_start=text_start,
        max_new_tokens=100,
    )
    stopped, reason = end_of(asked, [7] * 100)
    assert (stopped - 20, reason) == (num_new, StopReason.REPETITION)
