"""When a rollout stops, as its caller decides it over earlier and new tokens: the same as one that was never cut."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollover.engine.protocol import ExtendRequest
from rollover.engine.stopping import stop_reason
from rollover.types import SamplingParams, StopReason

REQUEST = ExtendRequest("0-0", (1, 2), (), 40, 0, SamplingParams())


def text(ids: list[int]) -> str:
    return "".join("abcd"[i % 4] for i in ids)


def end_of(request: ExtendRequest, tokens: list[int]) -> tuple[int, StopReason | None]:
    """After how many of all its tokens it stops, and why."""
    before = len(request.generated_ids)
    for num in range(before + 1, len(tokens) + 1):
        if (reason := stop_reason(request, tokens[before:num], text)) is not None:
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
        stop_strings=stops,
        stop_repetition_tokens=window,
        stop_token_ids=ends,
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
    assert stop_reason(dataclasses.replace(REQUEST, stop_token_ids=frozenset({5})), [1, 5], text) is StopReason.EOS
    assert stop_reason(dataclasses.replace(REQUEST, max_new_tokens=2), [1, 2], text) is StopReason.LENGTH
    assert stop_reason(dataclasses.replace(REQUEST, pause_after=2), [1, 2], text) is StopReason.PAUSED
    assert stop_reason(dataclasses.replace(REQUEST, stop_repetition_tokens=16), [7] * 16, text) is StopReason.REPETITION
    assert stop_reason(REQUEST, [1, 2], text) is None
    asked = dataclasses.replace(REQUEST, stop_strings=("bc",), generated_ids=(1,))
    assert stop_reason(asked, [2], text) is StopReason.STOP_STRING
    assert stop_reason(dataclasses.replace(asked, text_start=1), [2], text) is None
    with pytest.raises(ValueError, match="decode_text"):
        stop_reason(asked, [2], None)
