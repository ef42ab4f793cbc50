"""The tokens of one request to a server (engine/remote/generation.py)."""

from __future__ import annotations

import pytest

from rollover.engine.protocol import ExtendRequest, StopCriteria
from rollover.engine.remote.extend_state import ExtendState
from rollover.types import Prompt, SamplingParams, StopReason

EOS = 9


def generation(max_new_tokens: int = 8) -> ExtendState:
    stop = StopCriteria(frozenset([EOS]), ("ab",))
    request = ExtendRequest("0-0", Prompt((1,)), (), max_new_tokens, 5, SamplingParams(), stop)
    return ExtendState(request, lambda ids: "".join(chr(ord("a") + token) for token in ids))


@pytest.mark.parametrize("tokens", [[3, 4, EOS], [4, 0, 1], [2] * 8])
def test_progress_after_the_end_lacks_the_last_token(tokens: list[int]) -> None:
    """A run that is killed before the stream ends continues from these tokens."""
    told = generation()
    told.add(tokens, [-1.0] * len(tokens), 3)
    assert told.reason in (StopReason.EOS, StopReason.STOP_STRING, StopReason.LENGTH)
    (so_far,) = told.progress()
    assert so_far.token_ids.tolist() == tokens[:-1] and so_far.stop_reason is StopReason.PAUSED
    (whole,) = told.segments(told.reason)
    assert whole.token_ids.tolist() == tokens and whole.stop_reason is told.reason


def test_progress_before_the_end_has_every_token() -> None:
    told = generation()
    told.add([3], [-1.0], 3)
    told.add([4, 5], [-1.0, -2.0], 4)
    assert [segment.token_ids.tolist() for segment in told.progress()] == [[3], [4, 5]]


def test_progress_of_a_first_token_that_ends_it_is_empty() -> None:
    told = generation()
    told.add([EOS], [-1.0], 3)
    assert [len(segment) for segment in told.progress()] == [0]
